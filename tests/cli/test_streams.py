"""A command whose output cannot be written says so in one sentence; one whose streams are closed does its work."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.support import genba_command, sqlite_url, without_settings


def sh(folder: Path, ending: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**without_settings(os.environ), "GENBA_URL": sqlite_url(folder)}
    line = f"{shlex.join(genba_command(*words))} {ending}"
    return subprocess.run(
        ["sh", "-c", line], env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("words", [("node", "ls"), ("job", "enqueue", "x"), ("--version",)])
def test_a_disk_that_is_full_is_one_sentence(tmp_path, words):
    ran = sh(tmp_path, "> /dev/full", *words)

    assert (ran.returncode, ran.stderr) == (
        1,
        "genba: cannot read or write: No space left on device\n",
    )


def test_a_disk_that_is_full_is_reported_as_json_too(tmp_path):
    ran = sh(tmp_path, "> /dev/full", "node", "ls", "--json")

    assert ran.returncode == 1
    assert json.loads(ran.stderr)["error"] == {
        "type": "OSError",
        "message": "cannot read or write: No space left on device",
    }


@pytest.mark.parametrize(
    ("code", "words", "unbuffered"),
    [
        (1, ("node", "ls"), ""),
        (1, ("node", "ls"), "1"),
        (2, ("job", "show", "nonsense"), ""),
        (4, ("job", "show", "77"), ""),
        (3, ("job", "ls", "--url", "sqlite:////proc/no.db"), "1"),
    ],
)
def test_the_exit_code_is_right_where_neither_stream_can_be_written(
    tmp_path, monkeypatch, code, words, unbuffered
):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)

    assert sh(tmp_path, "> /dev/full 2> /dev/full", *words).returncode == code


@pytest.mark.parametrize("ending", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_what_is_said_into_a_closed_stream_is_gone_and_the_work_is_done(tmp_path, ending):
    ran = sh(tmp_path, ending, "job", "enqueue", "x")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "x" in sh(tmp_path, "", "job", "ls").stdout
    assert sh(tmp_path, ending, "node", "ls").returncode == 0
    assert sh(tmp_path, ending, "job", "show", "nonsense").returncode == 2
