"""`genba schedule`, and schedules in `app.testing()`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support import sqlite_url

from genba import Genba
from genba.cli import main


class Command:
    """`genba schedule … --json` in this process; what it prints."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url, capsys

    def __call__(self, *words: str, code: int = 0) -> Any:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["schedule", *words, "--json", "--url", self._url])
        out, err = self._capsys.readouterr()
        assert int(left.value.code or 0) == code, out + err
        return json.loads(out or err)


@pytest.fixture
def genba(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(sqlite_url(tmp_path), capsys)


def test_the_command_line_lists_and_steers_schedules(genba, tmp_path):
    with closing(Genba(sqlite_url(tmp_path))) as app:
        app.recur("nightly", app.call("report"), cron="0 3 * * *", tz="Europe/Zurich")

    (listed,) = genba("ls")
    assert (listed["name"], listed["task"], listed["paused"], listed["by_hand"]) == (
        "nightly",
        "report",
        False,
        True,
    )
    assert all("T03:00:00" in moment for moment in genba("next", "nightly", "-n", "2")["next"])
    genba("pause", "nightly", "--reason", "why not")
    assert genba("pause", "nightly", code=1) == {"name": "nightly", "paused": False}
    genba("resume", "nightly")
    job = genba("trigger", "nightly")["job"]
    assert [(tick["job_id"], tick["skipped"]) for tick in genba("ticks", "nightly")] == [
        (job, None)
    ]
    genba("delete", "nightly")
    assert genba("pause", "nightly", code=4)["error"]["type"] == "ScheduleNotFound"


def test_the_command_line_makes_and_changes_schedules(genba):
    made = genba("add", "sweep", "tasks.sweep", "ops", "deep=true", "--every", "12h", "--base", "2026-01-01T03:00",
                 "--until", "2036-01-01T00:00")  # fmt: skip
    assert (made["task"], made["by_hand"], made["rule"]["every"]) == (
        "tasks.sweep",
        True,
        12 * 3600 * 1_000_000,
    )
    assert made["next"][0][11:16] in ("03:00", "15:00")
    other = ("--cron", "30 4 * * *", "--tz", "Asia/Tokyo", "--jitter", "5m", "--without", "until")
    changed = genba("set", "sweep", *other)
    assert changed["rule"] == {"cron": "30 4 * * *", "tz": "Asia/Tokyo", "jitter": 300_000_000}
    assert (changed["args"], "T04:30:00+09:00" in changed["next"][0]) == (made["args"], True)
    assert genba("set", "sweep", "--cron", "61 * * * *", code=2)["error"]["type"] == "BadOption"
    assert genba("set", "nothing", "--every", "5m", code=4)["error"]["type"] == "ScheduleNotFound"
    assert genba("ls")[0]["rule"] == changed["rule"]


def test_in_testing_a_moved_clock_makes_ticks():
    app, ran = Genba("sqlite:///:memory:"), []

    @app.task(name="tick")
    def tick() -> None:
        ran.append(1)

    with app.testing() as q:
        app.recur("hourly", tick.call(), cron="0 * * * *")
        q.run()
        assert ran == []
        q.advance("1h")
        q.run()
        assert ran == [1]
