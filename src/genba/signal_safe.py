"""What a stop must not break in two.

A plain job is stopped by an exception that a signal raises in it, wherever it just is; so also between two steps of
ours: a transaction is open, and whoever would have closed it has not begun to watch.  It would stay open for as long
as the worker lives, and on SQLite nobody else could write.  So a stop that comes in such a block waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Here(threading.local):
    depth = 0
    late: Callable[[], None] | None = None


_here = _Here()  # signals come to the main thread; the others have a depth that nobody looks at


class _Unbroken:
    """`with unbroken:`, or a decorator; blocks may be nested.  For what is short, or has a deadline."""

    __slots__ = ()

    def __enter__(self) -> None:
        _here.depth += 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
        if _here.late is not None and not _here.depth:
            late, _here.late = _here.late, None
            late()

    def __call__(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(call)
        def whole(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return call(*args, **kwargs)

        return whole


defer_stop = _Unbroken()


def stop_when_safe(stop: Callable[[], None]) -> None:
    """For a signal's handler: call it now, or when the block is left that this thread is in."""
    if _here.depth:
        _here.late = stop
    else:
        stop()
