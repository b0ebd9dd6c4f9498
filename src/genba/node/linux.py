"""What the node asks of Linux about processes: adopt, watch, kill.  Standard library only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterator

from genba.node.guard import children, kill_trees

_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD = -1
_KEPT = 32 << 20  # bytes
_RESCAN = 0.002


def adopt_orphans(wanted: bool = True) -> None:
    """Make this process the parent of every orphan below it (or not any more)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def keep_memory() -> None:
    """Let malloc keep what the arguments of one claim had, for the next.

    By default it goes back to the kernel each time and comes as empty pages, which takes as long as to copy them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc; elsewhere it is as it is
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def boot_micros() -> int:
    """CLOCK_BOOTTIME, the same in every process of this machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def ended(pidfd: int, within: float = 0) -> bool:
    """Whether the process behind `pidfd` has ended, waiting up to `within` seconds."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within * 1000))


def kill_children(spare: Collection[int], within: float) -> int:
    """Kill and reap every child but those in `spare`, and all below them; gives how many are left."""
    deadline = time.monotonic() + within
    while True:
        below = [pid for pid in children(os.getpid()) if pid not in spare]
        _, refused = kill_trees(below)
        left = sum(not _reaped(pid) for pid in below)
        if refused.issuperset(below) or (left and time.monotonic() >= deadline):
            return left
        if left:
            time.sleep(_RESCAN)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def kill_carriers(variable: str, values: Collection[str], within: float) -> int:
    """Kill whoever was started with `variable` set to one of `values`; gives how many got the signal.

    Never this process.  Processes of other users are passed over.
    """
    entries = {f"{variable}={value}".encode() for value in values}
    deadline = time.monotonic() + within
    killed: set[int] = set()
    while True:
        found = list(_kill_matching(entries))
        killed.update(found)
        if not found or time.monotonic() >= deadline:
            return len(killed)
        time.sleep(_RESCAN)


def _kill_matching(entries: set[bytes]) -> Iterator[int]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid() or not _carries(pid, entries):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # Looked at again: the pid may have been reused before we held it.
            if _carries(pid, entries):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                yield pid
        except (ProcessLookupError, PermissionError):
            continue
        finally:
            os.close(pidfd)


def _carries(pid: int, entries: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return not entries.isdisjoint(environ.read().split(b"\0"))
    except OSError:
        return False
