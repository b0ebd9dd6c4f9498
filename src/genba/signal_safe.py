"""Defer a stop signal to the end of a block, so that it cannot leave a transaction open.

A plain job is stopped by an exception that a signal handler raises at any point of its code, also
between two steps of genba: a transaction is open, but the code that closes it has not yet entered
its `try`.  The transaction would stay open until the worker ends, and on SQLite it would block all
other writers.  So a stop that arrives in such a block waits for the end of the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _ThreadState(threading.local):
    depth = 0
    deferred_stop: Callable[[], None] | None = None


# Signals arrive in the main thread; the state of other threads is not read.
_state = _ThreadState()


class _DeferStop:
    """`with defer_stop:` or a decorator; blocks may be nested.

    Use it only for blocks that are short or have a deadline.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _state.depth += 1

    def __exit__(self, *_: object) -> None:
        _state.depth -= 1
        if _state.deferred_stop is not None and not _state.depth:
            stop, _state.deferred_stop = _state.deferred_stop, None
            stop()

    def __call__(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(call)
        def deferred(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return call(*args, **kwargs)

        return deferred


defer_stop = _DeferStop()


def stop_when_safe(stop: Callable[[], None]) -> None:
    """Call `stop` now, or at the end of the block that this thread is in; for signal handlers."""
    if _state.depth:
        _state.deferred_stop = stop
    else:
        stop()
