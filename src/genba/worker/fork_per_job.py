"""For a worker that forks for each of its jobs: how it forks, and how it learns what came of it.

Most of what such a process costs are the pages that it writes to, each of which the kernel must copy (4 µs), and
Python writes to an object when it only looks at it.  So as little as possible is done there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable
from typing import Any

from genba import wire


class ResultFile:
    """What the process of a job leaves to its worker."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("genba-box", os.MFD_CLOEXEC)

    def leave(self, told: tuple[Any, ...]) -> None:
        os.pwrite(self._fd, wire.frame(told), 0)

    def take(self) -> list[Any] | None:
        """None if there is nothing: whoever should have left it was dead before."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if not size:
            return None
        data = os.pread(self._fd, size, 0)
        os.ftruncate(self._fd, 0)
        return wire.unframe(data)

    def close(self) -> None:
        os.close(self._fd)


def chosen_fork() -> Callable[[], int]:
    """How to fork from a process with one thread: bare, unless somebody wants to be told of forks.

    What os.fork does around the fork itself frees locks that other threads may have held.  Here are none, and it is
    dear: it writes to some hundred pages, each of which the child must then copy.
    """
    return os.fork if _strangers() else _bare_fork


def _strangers() -> list[object]:
    """Those that os.fork would call, but for the standard library's and our own."""

    def mark() -> None:
        """To know by what they are kept in."""

    os.register_at_fork(before=mark, after_in_parent=mark, after_in_child=mark)
    kept = [found for found in gc.get_referrers(mark) if type(found) is list]
    assert len(kept) == 3, kept
    return [called for each in kept for called in each if _home(called) not in _HOMES]


_HOMES = {"_thread", "asyncio", "concurrent", "genba", "logging", "random", "threading"}


def _home(called: object) -> str:
    """The package that it belongs to."""
    owner = (
        called if getattr(called, "__module__", None) else type(getattr(called, "__self__", called))
    )
    return str(owner.__module__).partition(".")[0]


_fork = ctypes.PyDLL(None, use_errno=True).fork  # it keeps the interpreter's lock


def _bare_fork() -> int:
    pid: int = _fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork")
    return pid


def draw_others() -> None:
    """Other random numbers than the child has drawn; when it is dead, and pages are not shared with it any more."""
    random.seed(int.from_bytes(os.urandom(16)))
