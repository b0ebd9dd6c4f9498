"""What a dead node has left running on this machine, found by the incarnation in the environment of each process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

INCARNATION = "GENBA_INCARNATION"

_WITHIN = 5.0  # seconds for what was killed to be gone
_RESCAN = 0.002


def end_leftovers(incarnations: Iterable[int | str]) -> int:
    """Kill what these have left, and wait until it is gone; gives how many processes.

    For the case that a node and its guard were killed at once.  Never this process.  Processes of other users are
    passed over.
    """
    entries = {f"{INCARNATION}={one}".encode() for one in incarnations}
    if not entries:
        return 0
    deadline = time.monotonic() + _WITHIN
    killed: set[int] = set()
    while True:
        found = list(_kill_carriers(entries))
        killed.update(found)
        if not found or time.monotonic() >= deadline:
            return len(killed)
        time.sleep(_RESCAN)


def _kill_carriers(entries: set[bytes]) -> Iterator[int]:
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
