"""The shipped node, seen from outside: started, looked at, and ended."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from genba.errors import GenbaError
from measure.tasks import TARGET, app

READY_WITHIN = 30.0
END_WITHIN = 15.0

_PR_SET_PDEATHSIG = 1


class Node:
    """`genba node start` on the benchmark's tasks, in a process of its own."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen = popen
        self._log = log
        self._family: list[psutil.Process] = []
        self.joined_at = 0
        self.code = 0
        self.left_behind = 0
        self.words = ""

    def join(self) -> None:
        """Until it is in the database; its workers start from that moment on."""
        deadline = time.monotonic() + READY_WITHIN
        while not self.joined_at:
            self.joined_at = next(
                (one.started_at for one in app.nodes() if one.pid == self._popen.pid), 0
            )
            self.must_live()
            if time.monotonic() > deadline:
                raise GenbaError(
                    f"the node was not there within {READY_WITHIN:g} s: {self.last_words()}"
                )
            time.sleep(0.005)

    def must_live(self) -> None:
        if self._popen.poll() is not None:
            raise GenbaError(
                f"the node has ended with code {self._popen.returncode}: {self.last_words()}"
            )

    def last_words(self) -> str:
        return (
            " | ".join(self._log.read_text(errors="replace").splitlines()[-8:]) or "it said nothing"
        )

    def tree(self) -> list[psutil.Process]:
        supervisor = psutil.Process(self._popen.pid)
        self._family = supervisor.children(recursive=True)
        return [supervisor, *self._family]

    def workers(self) -> set[int]:
        return {one.pid for one in self.tree() if "/worker[" in _title(one)}

    def memory(self) -> float:
        """The supervisor's, in MB."""
        return float(psutil.Process(self._popen.pid).memory_info().rss) / 1e6

    def busy(self, seconds: float) -> float:
        """Percent of a core that all its processes use."""
        pids = [one.pid for one in self.tree()]
        before, began = sum(map(_cpu, pids)), time.perf_counter()
        time.sleep(seconds)
        return 100 * (sum(map(_cpu, pids)) - before) / (time.perf_counter() - began)

    def end(self) -> None:
        """Drain it; what does not end by itself is killed, and counted."""
        if self._popen.poll() is None:
            self.tree()
            self._popen.terminate()
        try:
            self.code = self._popen.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self.code = self._popen.wait()
        _, alive = psutil.wait_procs(self._family, timeout=1)
        self.left_behind = len(alive)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=1)
        self.words = self.last_words()


@contextmanager
def started(workers: int) -> Iterator[Node]:
    """With the options that a node has by default, but for the number of its workers."""
    handle = app.node(TARGET, min=workers, max=workers)
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
    prctl = ctypes.CDLL(None).prctl
    home = Path(tempfile.mkdtemp(prefix="genba-bench-"))
    try:
        with (home / "log").open("wb") as log:
            popen = subprocess.Popen(
                handle.command,
                cwd=home,
                env={**os.environ, **handle.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; we end it
                preexec_fn=lambda: prctl(
                    _PR_SET_PDEATHSIG, signal.SIGKILL
                ),  # and if we are killed, its guard the rest
            )
        node = Node(popen, home / "log")
        try:
            yield node
        finally:
            node.end()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _cpu(pid: int) -> float:
    """Seconds of CPU time, all threads.

    By the clock that Linux keeps for every process (clock_getcpuclockid(3)): /proc counts in hundredths of a
    second, and a handful of processes would lose as much by rounding as an idle node may use.
    """
    return time.clock_gettime((~pid << 3) | 2)
