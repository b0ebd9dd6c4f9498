"""Task: one registered function, its policy, and the ways to ask for a run of it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from typing_extensions import TypeVar as DefaultTypeVar

from genba.arguments import Arguments
from genba.errors import BadTask
from genba.options import NAME, Options, Policy

if TYPE_CHECKING:
    from genba.job import Job

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
V = DefaultTypeVar("V", default=Any)


class Runs(Protocol[P, R_co]):
    """A class whose `run` is the task."""

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Front(Protocol):
    """What a task needs of its app."""

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    async def asubmit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    def make(self, owner: type) -> Any: ...


class Call(Generic[R]):
    """A wish for one run: the task, its arguments, its options; enqueued by `enqueue_many`."""

    __slots__ = ("args", "arguments", "options", "policy", "task")

    def __init__(
        self, task: str, args: bytes, options: Options, policy: Policy, arguments: Arguments | None = None
    ) -> None:
        self.task = task
        self.args = args
        self.options = options
        self.policy = policy
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"<Call {self.task} {self.args[:60].decode(errors='replace')}>"


class Bound(Generic[P, R]):
    """A task with options of its own for the next calls."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: Task[P, R, Any], options: Options) -> None:
        self._task = task
        self._options = options

    def using(self, **options: Any) -> Bound[P, R]:
        """The same, with these options on top."""
        return Bound(self._task, Options.build(options, self._options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later, with others."""
        task = self._task
        return Call(task.name, task.arguments.encode(args, kwargs), self._options, task.policy, task.arguments)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Durable when it returns."""
        return self._task.app.submit([self.call(*args, **kwargs)], self._options.conn)[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        return (await self._task.app.asubmit([self.call(*args, **kwargs)], self._options.conn))[0]


class Task(Generic[P, R, V]):
    """A registered function; calling it just calls the function."""

    def __init__(self, app: Front, fn: Callable[..., Any], name: str, options: Options, policy: Policy) -> None:
        self.app = app
        self.fn = fn
        self.name = name
        self.options = options
        self.policy = policy
        self.owner: type | None = fn if inspect.isclass(fn) else None
        self._method = "run" if self.owner else None
        body = getattr(fn, "run", None) if self.owner else fn
        if not callable(body):
            raise BadTask(f"{name}: a task is a function, or a class with a method `run`, not {fn!r}")
        self.is_async = inspect.iscoroutinefunction(body)
        if policy.concurrency > 1 and not self.is_async:
            raise BadTask(f"{name}: concurrency is for tasks that are `async def`; others run one at a time")
        self._body = body
        self.arguments = Arguments.of(body, skip_first=self.owner is not None, name=name)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", name)
        self.__wrapped__ = fn

    def __set_name__(self, owner: type, name: str) -> None:
        """A decorated method: its instance is made in the worker, by the app's resolver."""
        self.owner, self._method = owner, name
        self.arguments = Arguments.of(self.fn, skip_first=True, name=self.name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.fn.__get__(instance, owner)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return self.fn(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def using(self, **options: Any) -> Bound[P, R]:
        """This task, with other options for the calls that follow."""
        return Bound(self, Options.build(options, self.options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later, with others."""
        return Call(self.name, self.arguments.encode(args, kwargs), self.options, self.policy, self.arguments)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Ask for one run; durable when it returns."""
        return self.app.submit([self.call(*args, **kwargs)])[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        return (await self.app.asubmit([self.call(*args, **kwargs)]))[0]

    def call_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it in this process; for a class or a method, on an instance made now."""
        if self.owner is None:
            return self.fn(*args, **kwargs)
        assert self._method is not None
        return self._body.__get__(self.app.make(self.owner))(*args, **kwargs)

    def describe(self) -> dict[str, Any]:
        """The definition that nodes persist, for clients without the code."""
        policy = self.policy
        return {
            "name": self.name,
            "title": policy.title,
            "doc": (inspect.getdoc(self.fn) or "").partition("\n")[0] or None,
            "async": self.is_async,
            "queue": self.options.queue,
            "priority": self.options.priority,
            "timeout": self.options.timeout,
            "retry": self.options.retry.to_json(),
            "on_exception": policy.on_exception,
            "explicit_outcome": policy.explicit_outcome,
            "at_most_once": policy.at_most_once,
            "max_crashes": policy.max_crashes,
            "concurrency": policy.concurrency,
            "keep": policy.keep,
            **self.arguments.describe(),
        }


def task_name(fn: Callable[..., Any], given: str | None) -> str:
    """What it is called: the given name, else "module.function"."""
    name = given or f"{_module(fn)}.{getattr(fn, '__qualname__', '').rpartition('<locals>.')[2]}"
    if not NAME.fullmatch(name):
        raise BadTask(f"{name!r} is no name for a task: a letter or _, then letters, digits, _ . : # - (up to 200)")
    return name


def _module(fn: Callable[..., Any]) -> str:
    """A script's own module is called like its file, so that a node can import it by that name."""
    if fn.__module__ != "__main__":
        return fn.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name)
    stem = Path(file).stem if file else ""
    return stem if NAME.fullmatch(stem) else "__main__"


AsyncFunction = Callable[P, Coroutine[Any, Any, R]]
