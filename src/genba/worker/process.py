"""What a process that runs user code does to itself: adopt orphans, follow a child, leave."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl


def adopt_orphans() -> None:
    """Whatever below us loses its parent becomes our child, and can be found."""
    if _prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def give_back_memory() -> None:
    """What was freed and kept: each fork would have to copy its page tables, and each end to take them down."""
    if hasattr(_libc, "malloc_trim"):  # glibc
        _libc.malloc_trim(0)


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
