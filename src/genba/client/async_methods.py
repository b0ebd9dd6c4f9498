"""The a-twins: what blocks, as a coroutine that leaves it to a thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Threaded(Protocol):
    """The app: it has the threads."""

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


class Handle(Protocol):
    """What belongs to an app."""

    @property
    def _app(self) -> Threaded: ...


P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=Threaded)
H = TypeVar("H", bound=Handle)


def twin(
    call: Callable[Concatenate[A, P], R],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, R]]:
    """The twin of a method of the app."""

    @wraps(call)
    async def later(self: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.threads(call, self, *args, **kwargs)  # type: ignore[no-any-return]

    return later


def handle_twin(
    call: Callable[Concatenate[H, P], R],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, R]]:
    """The twin of a method of a handle."""

    @wraps(call)
    async def later(self: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._app.threads(call, self, *args, **kwargs)  # type: ignore[no-any-return]

    return later
