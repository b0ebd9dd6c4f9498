"""What the app runs around jobs: lifespans around all jobs of a worker, middleware around each."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Protocol

from genba.client.current_job import current_job


class Callee(Protocol):
    """A task, or a task with middleware around it."""

    @property
    def is_async(self) -> bool: ...

    def call_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


Run = Callable[[Callee, tuple[Any, ...], dict[str, Any]], Any]


class LifespanFailed(Exception):
    """A lifespan could not be entered, so the worker must end."""


def enter_lifespans(
    lifespans: Sequence[Callable[[], Any]], loop: Callable[[], asyncio.AbstractEventLoop]
) -> ExitStack:
    """Enter all lifespans in order; the stack leaves them in the opposite order."""
    stack = ExitStack()
    for lifespan in lifespans:
        try:
            stack.enter_context(_manager(lifespan, loop))
        except BaseException as error:
            name = f"{lifespan.__module__}.{getattr(lifespan, '__qualname__', lifespan)}"
            stack.close()
            raise LifespanFailed(
                f"the lifespan {name} could not be entered: {type(error).__name__}"
            ) from error
    return stack


def _manager(
    lifespan: Callable[[], Any], loop: Callable[[], asyncio.AbstractEventLoop]
) -> AbstractContextManager[Any]:
    if inspect.isgeneratorfunction(lifespan):
        return contextmanager(lifespan)()
    manager: Any = (
        asynccontextmanager(lifespan)() if inspect.isasyncgenfunction(lifespan) else lifespan()
    )
    if hasattr(manager, "__aenter__"):
        return _OnLoop(manager, loop())
    if hasattr(manager, "__enter__"):
        return manager  # type: ignore[no-any-return]
    raise TypeError(f"it gave {manager!r}, which is neither a context manager nor a generator")


class _OnLoop:
    """Enters and leaves an async context manager from outside its loop, in one task.

    Some managers fail if another task leaves them.
    """

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._manager = manager
        self._loop = loop
        self._entered = loop.create_future()
        self._leave = loop.create_future()

    def __enter__(self) -> None:
        self._task = self._loop.create_task(self._live(), name="genba-lifespan")
        self._task.add_done_callback(self._ended)
        self._loop.run_until_complete(self._entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._leave.done():
            self._leave.set_result(None)
        self._loop.run_until_complete(self._task)

    async def _live(self) -> None:
        async with self._manager:
            self._entered.set_result(None)
            await self._leave

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._entered.done():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._entered.set_exception(error or RuntimeError("it ended before it was entered"))


class Middleware:
    """Puts the middleware of an app around calls.

    Plain middleware blocks until the call is over, so it must be outside of async middleware.
    """

    def __init__(
        self, registered: Sequence[Callable[..., Any]], run_plain: Run, run_async: Run
    ) -> None:
        self._plain = [layer for layer in registered if not _is_async(layer)]
        self._async = [layer for layer in registered if _is_async(layer)]
        self._run_plain = run_plain
        self._run_async = run_async

    def around(self, task: Callee) -> Callee:
        if self._async:
            task = _Awaiting(task, self._async, self._run_plain)
        return _Calling(task, self._plain, self._run_async) if self._plain else task


class _Calling:
    """Plain middleware around a call."""

    is_async = False

    def __init__(self, task: Callee, layers: Sequence[Callable[..., Any]], run_async: Run) -> None:
        self._task = task
        self._layers = layers
        self._run_async = run_async

    def call_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(depth: int) -> Any:
            if depth < len(self._layers):
                return self._layers[depth](current_job(), lambda: call(depth + 1))
            if self._task.is_async:
                return self._run_async(self._task, args, kwargs)
            return self._task.call_here(args, kwargs)

        return call(0)


class _Awaiting:
    """Async middleware around a call, which may be plain."""

    is_async = True

    def __init__(self, task: Callee, layers: Sequence[Callable[..., Any]], run_plain: Run) -> None:
        self._task = task
        self._layers = layers
        self._run_plain = run_plain

    async def call_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        async def call(depth: int) -> Any:
            if depth < len(self._layers):
                return await self._layers[depth](current_job(), lambda: call(depth + 1))
            if self._task.is_async:
                return await self._task.call_here(args, kwargs)
            with _outside_the_loop():
                return self._run_plain(self._task, args, kwargs)

        return await call(0)


@contextmanager
def _outside_the_loop() -> Iterator[None]:
    """Hide the running loop from a plain task: beside it, asyncio.run() would fail."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


def _is_async(layer: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(layer) or inspect.iscoroutinefunction(type(layer).__call__)
