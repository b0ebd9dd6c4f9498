"""Finds and ends what a job leaves behind: child processes, forks of the worker, and threads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

_THREAD_EXIT_SECONDS = 0.05  # a thread that was joined may still be exiting
_END_STRAYS_SECONDS = 5.0


def children() -> frozenset[int] | None:
    """Return the children of this process; None, after a single system call, if it has none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return frozenset(map(int, file.read().split()))


def end_strays(before: frozenset[int]) -> int:
    """Kill and reap all children but those in `before`; return how many were killed.

    Their descendants become children of this process, their reaper, and end alike.
    """
    killed = 0
    deadline = time.monotonic() + _END_STRAYS_SECONDS
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
    """Return the number of forks above this process.

    The pid would show a fork too, but costs a system call, and every job checks.
    """
    return _forks[0]


def _count_fork() -> None:
    _forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)


def end_forked(error: BaseException | None = None) -> NoReturn:
    """Exit, in a process that the job has forked and that returns from the job's function.

    It has the worker's socket and memory, but must not report an end of the job.
    """
    code = error.code if isinstance(error, SystemExit) else error
    with contextlib.suppress(Exception):  # the job may have broken its streams
        if isinstance(code, BaseException):
            traceback.print_exception(code)
        elif code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def threads() -> frozenset[int]:
    """Return the thread ids of this process, those of C libraries too."""
    return frozenset(map(int, os.listdir("/proc/self/task")))


def threads_left(before: frozenset[int]) -> str:
    """Return the names of threads that are new and stay; "" if there are none.

    Threads of genba do not count: they wait for the next async method.
    """
    deadline = time.monotonic() + _THREAD_EXIT_SECONDS
    before = before | {os.getpid()}  # the main thread, also in a process that was forked since
    while True:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        left = {id for id in threads() - before if not names.get(id, "").startswith("genba")}
        if not left:
            return ""
        if time.monotonic() >= deadline:
            return ", ".join(sorted(names.get(id, str(id)) for id in left))
        time.sleep(0.002)
