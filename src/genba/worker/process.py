"""What a process that runs user code does to itself: adopt orphans, follow a child, leave."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_HUGE = 2 << 20  # bytes of a huge page
_FULL = 0.9  # of a mapping: what was not in use is, afterwards

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def adopt_orphans() -> None:
    """Whatever below us loses its parent becomes our child, and can be found."""
    if _prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def give_back_memory() -> None:
    """What was freed and kept: each fork would have to copy its page tables, and each end to take them down."""
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)


def use_huge_pages(within: float) -> int:
    """Let large pieces of memory consist of huge pages; gives how many were made.

    A fork copies one entry for each page: 200 MB take 10 ms, and 2 with huge ones.  What a child writes to is still
    copied in small pages.  `within` so many seconds, since all of it is copied once; a small app takes 4 ms.
    """
    deadline = time.monotonic() + within
    made = 0
    for start, end in _large_mappings():
        for at in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            if time.monotonic() >= deadline or _madvise(at, _HUGE, _COLLAPSE):
                return made  # an older kernel, or no huge page is left
            made += 1
    return made


def _large_mappings() -> list[tuple[int, int]]:
    """(start, end) of memory of our own that is nearly all in use."""
    found = []
    start = end = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if (
                words[0] == "Rss:"
                and end - start >= _HUGE
                and int(words[1]) * 1024 >= _FULL * (end - start)
            ):
                found.append((start, end))
            elif not words[0].endswith(":"):
                own = words[1] == "rw-p" and words[4] == "0"
                start, end = (int(each, 16) for each in words[0].split("-")) if own else (0, 0)
    return found


def die_like(status: int) -> NoReturn:
    """End as a child of ours has ended, so that whoever waits for us learns how."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    leave(os.WEXITSTATUS(status))


def leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or nobody reads it
    os._exit(code)
