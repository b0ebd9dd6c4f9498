"""The async method of a blocking one: a coroutine that runs it in a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Threaded(Protocol):
    """Runs a blocking call in a thread."""

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


class Connected(Protocol):
    """A client or a handle: it has the connection, and the connection has the threads."""

    @property
    def _connection(self) -> Threaded: ...


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Connected)


def async_method(
    method: Callable[Concatenate[C, P], R],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, R]]:
    """Make the async method: `acancel = async_method(cancel)`."""

    @wraps(method)
    async def in_thread(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._connection.threads(method, self, *args, **kwargs)
        return result

    return in_thread
