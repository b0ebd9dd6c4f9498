"""System calls about processes: adopt, watch, kill.  Standard library only."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Collection

from genba.node.processes.guard import children, kill_trees

_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD = -1
_KEPT_BYTES = 32 << 20
_RESCAN_SECONDS = 0.002


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of every orphan below it (or not any more)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def keep_memory() -> None:
    """Let malloc keep the memory of one claim's arguments for the next claim.

    By default it goes back to the kernel each time and comes as empty pages, which takes as long as
    to copy them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def boot_micros() -> int:
    """Read CLOCK_BOOTTIME, which is the same in every process of this machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def ended(pidfd: int, within: float = 0) -> bool:
    """Whether the process behind `pidfd` has ended, waiting up to `within` seconds."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within * 1000))


def kill_children(spare: Collection[int], within: float) -> int:
    """Kill and reap every child but those in `spare`, and all below; gives how many are left."""
    deadline = time.monotonic() + within
    while True:
        below = [pid for pid in children(os.getpid()) if pid not in spare]
        _, refused = kill_trees(below)
        left = sum(not _reaped(pid) for pid in below)
        if refused.issuperset(below) or (left and time.monotonic() >= deadline):
            return left
        if left:
            time.sleep(_RESCAN_SECONDS)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
