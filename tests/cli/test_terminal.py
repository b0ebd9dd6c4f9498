"""What people see in a real terminal of 80 columns and 24 lines: top, job ls and doctor."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
from rich.cells import cell_len
from tests.support import eventually, genba_command, without_settings

_STEER = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEAVE = "\x1b[?1049l"  # back to the screen that was there before


class Terminal:
    """A terminal, with what was written to it so far."""

    def __init__(self, child: pexpect.spawn) -> None:
        self.child = child
        self.text = ""

    def read(self) -> str:
        """All that has come until now."""
        try:
            while True:
                self.text += self.child.read_nonblocking(65536, timeout=0.05)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return self.text

    def frames(self) -> list[list[str]]:
        """The screens that were drawn completely, as lines without colours."""
        drawn = self.read().split("\x1b[H")[2:-1]
        return [_STEER.sub("", one).rstrip("\r\n").split("\r\n") for one in drawn]

    def shows(self, *words: str) -> Callable[[], bool]:
        return lambda: any(
            all(word in "\n".join(frame) for word in words) for frame in self.frames()[-2:]
        )

    def ended(self) -> bool:
        self.read()
        return not self.child.isalive()


@contextmanager
def terminal(
    url: str, *args: str, lines: int = 24, columns: int = 80, shell: str = ""
) -> Iterator[Terminal]:
    env = {**without_settings(os.environ), "GENBA_URL": url, "TERM": "xterm-256color"}
    env = {
        name: value for name, value in env.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    words = ["sh", "-c", shell, "sh", *genba_command(*args)] if shell else genba_command(*args)
    child = pexpect.spawn(
        words[0], words[1:], env=env, dimensions=(lines, columns), encoding="utf-8", timeout=30
    )
    try:
        yield Terminal(child)
    finally:
        child.close(force=True)


@pytest.fixture
def counting(shop: Any, tmp_path: Path) -> Iterator[Any]:
    """A job that runs until the test is over, and says how far it is."""
    job = shop.jobs.stop_when_asked.enqueue(str(tmp_path / "began"))
    eventually((tmp_path / "began.started").exists, within=20)
    yield job
    job.kill()
    job.wait(timeout=30)


_AROUND = 'trap : INT; stty -g; "$@"; echo "code $?"; stty -g'


def left_as_it_was(screen: Terminal) -> bool:
    """Whether the settings of the terminal are those of before, and the screen too."""
    eventually(screen.ended, within=20)
    before, after = re.findall(
        r"^[0-9a-f]+(?::[0-9a-f]+)+$", screen.text.replace("\r", ""), re.MULTILINE
    )
    return before == after and _LEAVE in screen.text


def children(pid: int | None) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_top_shows_what_is_under_way_obeys_keys_and_leaves_no_trace(shop, counting):
    shop.jobs.fail.enqueue("no paper").wait(timeout=30)
    with terminal(shop.url, "top", "--every", "200ms", shell=_AROUND) as screen:
        shown = screen.shows(
            "QUEUE",
            "default",
            "NODE",
            "shop",
            f"{counting.id} ",
            "jobs.stop_when_asked",
            "no paper",
        )
        eventually(shown, within=30)
        for frame in screen.frames():
            assert len(frame) == 24, frame
            assert max(map(cell_len, frame)) <= 80, frame

        screen.child.send("c")
        eventually(screen.shows(f"cancel job {counting.id}?"), within=20)
        screen.child.send("n")
        eventually(screen.shows("nothing done"), within=20)
        assert counting.refresh().state == "running"
        screen.child.send("cy")
        assert counting.wait(timeout=30).state == "cancelled"
        assert counting.reason == "genba top"
        eventually(lambda: not screen.shows("jobs.stop_when_asked")(), within=20)

        screen.child.send("q")
        assert left_as_it_was(screen)
        assert "code 0" in screen.text


def test_top_pauses_a_queue_and_is_interrupted(shop, home):
    if not home[0].startswith("sqlite"):
        pytest.skip("one engine is enough: this is about the terminal")
    with terminal(shop.url, "top", "--every", "200ms", shell=_AROUND) as screen:
        eventually(screen.shows("NODE", "shop"), within=30)
        screen.child.send("\x1b[A" * 20)  # up to the first queue, and no further
        eventually(screen.shows("p pause"), within=20)
        screen.child.send("p")
        eventually(lambda: shop.app.queues["default"].paused, within=20)
        eventually(screen.shows("PAUSED"), within=20)
        screen.child.send("r")
        eventually(lambda: not shop.app.queues["default"].paused, within=20)

        screen.child.send("\x03")
        assert left_as_it_was(screen)
        assert "code 130" in screen.text


def test_top_follows_the_size_of_the_terminal_and_ends_by_a_signal(shop, home):
    if not home[0].startswith("sqlite"):
        pytest.skip("one engine is enough: this is about the terminal")
    with terminal(shop.url, "top", "--every", "200ms", shell=_AROUND) as screen:
        eventually(screen.shows("NODE"), within=30)
        screen.child.setwinsize(40, 120)
        eventually(lambda: len(screen.frames()[-1]) == 40, within=20)
        assert max(map(cell_len, screen.frames()[-1])) <= 120

        (top,) = children(screen.child.pid)
        os.kill(top, signal.SIGTERM)
        assert left_as_it_was(screen)
        assert "code 143" in screen.text


def test_job_ls_has_colours_in_a_terminal_only_and_is_cut_at_its_edge(shop, home):
    if not home[0].startswith("sqlite"):
        pytest.skip("one engine is enough: this is about the terminal")
    shop.jobs.fail.enqueue("a long reason " * 20).wait(timeout=30)
    with terminal(shop.url, "job", "ls", "--state", "failed") as screen:
        eventually(screen.ended, within=30)
        rows = screen.text.rstrip("\r\n").split("\r\n")
        assert "\x1b[31mfailed" in screen.text
        assert max(cell_len(_STEER.sub("", row)) for row in rows) <= 80

    for shell in ('"$@" | cat', 'NO_COLOR=1 "$@"'):
        with terminal(shop.url, "job", "ls", "--state", "failed", shell=shell) as screen:
            eventually(screen.ended, within=30)
            assert "failed" in screen.text
            assert "\x1b" not in screen.text


def test_doctor_tells_in_a_terminal_what_is_wrong(shop):
    with terminal(shop.url, "doctor", shell='"$@"; echo "code $?"') as screen:
        eventually(screen.ended, within=30)
        assert "\x1b[32mok" in screen.text
        assert "nothing is wrong" in screen.text, screen.text
        assert "code 0" in screen.text

    shop.app.queues["nobody"].resume()
    lost = shop.app.submit([shop.app.call("jobs.add", (1,), options={"queue": "nobody"})])[0]
    try:
        with terminal(shop.url, "doctor", shell='"$@"; echo "code $?"') as screen:
            eventually(screen.ended, within=30)
            assert "\x1b[31mWRONG" in screen.text
            assert "no live node serves queue nobody" in screen.text
            assert "code 1" in screen.text
    finally:
        lost.cancel()


def test_a_wait_shows_a_bar_and_takes_it_away(shop, home, tmp_path):
    if not home[0].startswith("sqlite"):
        pytest.skip("one engine is enough: this is about the terminal")
    job = shop.jobs.count_to.enqueue(str(tmp_path / "go"), 10)
    with terminal(shop.url, "job", "wait", str(job.id)) as screen:
        eventually(lambda: "waiting" in screen.read() and "50%" in screen.text, within=30)
        (tmp_path / "go").touch()
        eventually(screen.ended, within=30)
        assert f"\x1b[2K{job.id} succeeded" in screen.text  # in the place of the bar
