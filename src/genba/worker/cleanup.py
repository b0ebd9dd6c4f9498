"""What a job leaves behind: processes, also such as take themselves for the worker, and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

_LAST_STEPS = 0.05  # seconds: a thread that was joined may still be on its way out


def children() -> frozenset[int] | None:
    """The children of this process; None, at the price of one system call, if there are none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return frozenset(map(int, file.read().split()))


def end_strays(before: frozenset[int]) -> int:
    """Kill and reap what a job left behind, with all its descendants (we are their reaper)."""
    killed = 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        strays = (children() or frozenset()) - before
        if not strays:
            break
        for pid in strays:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                    os.waitpid(pid, 0)
            except (ChildProcessError, ProcessLookupError):
                continue
    return killed


_forks = [0]


def forks() -> int:
    """In a child one more than in its parent.  The pid would tell as well, by a system call, and each job is asked."""
    return _forks[0]


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


def end_forked(error: BaseException | None = None) -> NoReturn:
    """In a process that the job has forked, and that comes out of the call as the job itself would: end here.

    It has our lines and our memory, but it is not for it to say how the job has ended.
    """
    code = error.code if isinstance(error, SystemExit) else error
    with contextlib.suppress(Exception):  # whatever it has done to its streams
        if isinstance(code, BaseException):
            traceback.print_exception(code)
        elif code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def threads() -> frozenset[int]:
    """The threads of this process, those of C libraries too."""
    return frozenset(map(int, os.listdir("/proc/self/task")))


def threads_left(before: frozenset[int]) -> str:
    """The names of those that are new and stay, but for ours, who wait for the next a-twin; empty if there are none."""
    deadline = time.monotonic() + _LAST_STEPS
    before = before | {os.getpid()}  # the main thread, of a process that was forked since, too
    while True:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        left = {each for each in threads() - before if not names.get(each, "").startswith("genba")}
        if not left:
            return ""
        if time.monotonic() >= deadline:
            return ", ".join(sorted(names.get(each, str(each)) for each in left))
        time.sleep(0.002)
