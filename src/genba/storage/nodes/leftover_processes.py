"""Processes that a dead node left running on this machine.

They are found by the node's incarnation in the environment of each process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

INCARNATION = "GENBA_INCARNATION"

_EXIT_SECONDS = 5.0  # for the killed processes to be gone
_RESCAN_SECONDS = 0.002


def end_leftovers(incarnations: Iterable[int | str]) -> int:
    """Kill the processes that these nodes left, and wait for their end; return how many.

    For the case that a node and its guard were killed at once. Skips this process, and processes of
    other users.
    """
    entries = {f"{INCARNATION}={incarnation}".encode() for incarnation in incarnations}
    if not entries:
        return 0
    deadline = time.monotonic() + _EXIT_SECONDS
    killed: set[int] = set()
    while True:
        pids = list(_kill_matching(entries))
        killed.update(pids)
        if not pids or time.monotonic() >= deadline:
            return len(killed)
        time.sleep(_RESCAN_SECONDS)


def _kill_matching(entries: set[bytes]) -> Iterator[int]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid() or not _matches(pid, entries):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # Test again: the pid may have been reused before we had its descriptor.
            if _matches(pid, entries):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                yield pid
        except (ProcessLookupError, PermissionError):
            continue
        finally:
            os.close(pidfd)


def _matches(pid: int, entries: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return not entries.isdisjoint(environ.read().split(b"\0"))
    except OSError:
        return False
