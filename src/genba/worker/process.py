"""What a process with user code does to itself: adopt orphans, tune its memory, exit."""

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
_IN_USE = 0.9  # share of a mapping; a huge page makes the unused rest count as used

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def adopt_orphans() -> None:
    """Make processes below this one its children when they lose their parent."""
    if _prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def give_back_memory() -> None:
    """Return freed memory to the kernel: each fork would copy its page tables."""
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)


def use_huge_pages(within: float) -> int:
    """Move large pieces of memory to huge pages; return how many pages were made.

    A fork copies one entry for each page: 200 MB take 10 ms, and 2 ms with huge pages.  What a
    child writes to is still copied in small pages.  All of it is copied once here, which takes
    4 ms for a small app, and stops after `within` seconds.
    """
    deadline = time.monotonic() + within
    made = 0
    for start, end in _large_mappings():
        for at in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            if time.monotonic() >= deadline or _madvise(at, _HUGE, _COLLAPSE):
                return made  # the kernel is older, or has no huge page left
            made += 1
    return made


def _large_mappings() -> list[tuple[int, int]]:
    """Return (start, end) of private mappings that are nearly all in use."""
    mappings = []
    start = end = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            words = line.split()
            if (
                words[0] == "Rss:"
                and end - start >= _HUGE
                and int(words[1]) * 1024 >= _IN_USE * (end - start)
            ):
                mappings.append((start, end))
            elif not words[0].endswith(":"):
                private = words[1] == "rw-p" and words[4] == "0"
                start, end = (int(word, 16) for word in words[0].split("-")) if private else (0, 0)
    return mappings


def die_like(status: int) -> NoReturn:
    """End as a child has ended, so that the parent of this process sees the same status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    leave(os.WEXITSTATUS(status))


def leave(code: int) -> NoReturn:
    """Flush the streams and exit, without the cleanup of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or its reader is gone
    os._exit(code)
