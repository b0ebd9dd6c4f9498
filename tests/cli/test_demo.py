"""`genba demo`: every job ends as it should, and nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import PATIENCE, eventually, genba_command, without_settings

from genba.cli.demo_app import cases

SHOWN = {
    "quick",
    "slow, with progress",
    "async",
    "fails for good",
    "runs out of time",
    "scheduled in two seconds",
}


class Demo:
    """`genba demo` with its own folder for temporary files, and a mark on all its processes."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._folder = folder
        self.began = time.monotonic()

    def start(self, *words: str, out: int) -> subprocess.Popen[bytes]:
        settings = {
            "TMPDIR": str(self.temporary),
            "GENBA_TEST_DEMO": self._mark,
            "TERM": "xterm-256color",
        }
        return subprocess.Popen(
            genba_command("demo", *words),
            cwd=self._folder,
            env={**without_settings(os.environ), **settings},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # pytest may run with it ignored
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return (
                process.environ().get("GENBA_TEST_DEMO") == self._mark
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (psutil.Error, OSError):
            return False

    def end(self) -> None:
        for process in self.processes():
            process.kill()

    def has_left_nothing(self) -> bool:
        return not self.processes() and not list(self.temporary.iterdir())


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    demo.end()


def test_the_demo_ends_by_itself_with_every_job_as_it_should(demo: Demo) -> None:
    running = demo.start(out=subprocess.PIPE)
    out = running.communicate(timeout=60)[0].decode()

    assert running.returncode == 0, out
    assert demo.seconds < PATIENCE * 30
    assert f"{len(cases())} jobs have ended as expected" in out
    for title in SHOWN:
        assert title in out
    for word in (
        "exit 3, returned",
        "signal 9, signal 9",
        "exception, exception, returned",
        "timed_out",
        "cancelled",
    ):
        assert word in out
    assert "\x1b" not in out
    assert demo.has_left_nothing()


def test_on_a_terminal_the_demo_shows_a_table_with_progress_bars(demo: Demo) -> None:
    ours, theirs = pty.openpty()
    running = demo.start(out=theirs)
    os.close(theirs)
    shown = _read_all(ours)

    assert running.wait(10) == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"slow, with progress +running +[━╸╺-]+", plain)
    assert re.search(r"fails twice, then works +scheduled +exception", plain)
    assert re.search(r"crashes always: SIGKILL +held +signal 9", plain)
    assert "jobs have ended as expected" in plain
    assert demo.has_left_nothing()


def _read_all(terminal: int) -> str:
    parts = []
    try:
        while part := os.read(terminal, 1 << 16):
            parts.append(part)
    except OSError:  # how a terminal says that the other side has closed it
        pass
    os.close(terminal)
    return b"".join(parts).decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_behind(
    demo: Demo, number: signal.Signals, code: int
) -> None:
    running = demo.start(out=subprocess.PIPE)
    assert running.stdout is not None
    while b"slow, with progress         running" not in (line := running.stdout.readline()):
        assert line, "it ended before it was interrupted"
    running.send_signal(number)
    running.send_signal(number)  # an impatient user
    out = running.communicate(timeout=20)[0].decode()

    assert running.returncode == code, out
    assert "Traceback" not in out
    assert eventually(demo.has_left_nothing)


def test_a_killed_demo_leaves_no_process_behind(demo: Demo) -> None:
    running = demo.start(out=subprocess.PIPE)
    assert running.stdout is not None
    while b"running" not in running.stdout.readline():
        pass
    running.kill()
    running.communicate()

    assert eventually(lambda: not demo.processes())


def test_the_demo_tells_in_json_how_every_job_ended(demo: Demo) -> None:
    running = demo.start("--json", out=subprocess.PIPE)
    report = json.loads(running.communicate(timeout=60)[0])

    assert (running.returncode, report["ok"]) == (0, True)
    assert [(job["title"], job["state"], job["fault"]) for job in report["jobs"]] == [
        (case.title, case.state, None) for case in cases()
    ]
