"""`genba schedule`, and schedules in `app.testing()`."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from typing import Any

from tests.support import genba_command, sqlite_url

from genba import Genba


def test_the_command_line_lists_and_steers_schedules(tmp_path):
    url = sqlite_url(tmp_path)
    with closing(Genba(url)) as app:
        app.recur("nightly", app.call("report"), cron="0 3 * * *", tz="Europe/Zurich")

    def genba(*words: str, code: int = 0) -> Any:
        command = genba_command("schedule", *words, "--json", "--url", url)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == code, ran.stderr
        return json.loads(ran.stdout or ran.stderr)

    (listed,) = genba("ls")
    assert (listed["name"], listed["task"], listed["paused"], listed["by_hand"]) == ("nightly", "report", False, True)
    assert all("T03:00:00" in moment for moment in genba("next", "nightly", "-n", "2")["next"])
    genba("pause", "nightly", "--reason", "why not")
    assert genba("pause", "nightly", code=1) == {"name": "nightly", "paused": False}
    genba("resume", "nightly")
    assert genba("trigger", "nightly")["job"] > 0
    genba("delete", "nightly")
    assert genba("pause", "nightly", code=4)["error"]["type"] == "ScheduleNotFound"


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
