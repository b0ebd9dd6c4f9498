"""How a worker forks for each of its jobs, and gets the result from the child.

Most of the cost of such a process are the pages that it writes to: the kernel copies each (4 µs),
and Python writes to an object even when it only reads it.  So the child does as little as possible.
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
    """A file in memory in which the process of a job leaves its result for the worker."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("genba-result", os.MFD_CLOEXEC)

    def put(self, result: tuple[Any, ...]) -> None:
        os.pwrite(self._fd, wire.frame(result), 0)

    def take(self) -> list[Any] | None:
        """Return the result, and empty the file; None if the child died before it wrote one."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if not size:
            return None
        data = os.pread(self._fd, size, 0)
        os.ftruncate(self._fd, 0)
        return wire.unframe(data)

    def close(self) -> None:
        os.close(self._fd)


def chosen_fork() -> Callable[[], int]:
    """Return how to fork from a process with one thread: bare, unless the app has fork hooks.

    Around the fork, os.fork frees locks that other threads may hold.  Here are no other threads,
    and it is costly: it writes to some hundred pages, which the child must then copy.
    """
    return os.fork if _fork_hooks_of_app() else _bare_fork


def _fork_hooks_of_app() -> list[object]:
    """Return the hooks of os.fork that belong neither to the standard library nor to genba."""

    def mark() -> None:
        """Do nothing: it is registered to find the lists that hold the hooks."""

    os.register_at_fork(before=mark, after_in_parent=mark, after_in_child=mark)
    hook_lists = [holder for holder in gc.get_referrers(mark) if type(holder) is list]
    assert len(hook_lists) == 3, hook_lists
    return [hook for hooks in hook_lists for hook in hooks if _package(hook) not in _KNOWN_PACKAGES]


_KNOWN_PACKAGES = {"_thread", "asyncio", "concurrent", "genba", "logging", "random", "threading"}


def _package(hook: object) -> str:
    """Return the package of a hook, or of the object it is a method of."""
    owner = hook if getattr(hook, "__module__", None) else type(getattr(hook, "__self__", hook))
    return str(owner.__module__).partition(".")[0]


_fork = ctypes.PyDLL(None, use_errno=True).fork  # PyDLL keeps the interpreter's lock


def _bare_fork() -> int:
    pid: int = _fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork")
    return pid


def reseed_random() -> None:
    """Seed `random` anew, so that the next child draws other numbers.

    Call it after the child has died: pages are not shared with it any more.
    """
    random.seed(int.from_bytes(os.urandom(16)))
