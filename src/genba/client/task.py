"""Task: one registered function, its policy, and the ways to ask for a run of it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast

from typing_extensions import TypeVar as DefaultTypeVar

from genba.domain import graph
from genba.domain.fairness import names_in
from genba.enqueue.arguments import Arguments
from genba.errors import BadOption, BadTask
from genba.options.limits import rules_of, rules_to_json
from genba.options.merge import storable, task_schedule
from genba.options.parse import NAME_PATTERN
from genba.options.table import SCHEDULE_OPTIONS, Options, Policy

if TYPE_CHECKING:
    from genba.client.job import Job
    from genba.client.schedule import When

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
V = DefaultTypeVar("V", default=Any)


ON_FINAL_SUFFIX = "#final"  # behind the name of a task: what tells of its jobs' ends


class RunClass(Protocol[P, R_co]):
    """A class whose `run` is the task."""

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class TaskApp(Protocol):
    """What a task needs of its app."""

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    async def asubmit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    def make(self, owner: type) -> Any: ...


class Call(Generic[R]):
    """A wish for one run: the task, its arguments, its options; enqueued by `enqueue_many`."""

    __slots__ = ("args", "arguments", "options", "policy", "said", "task")

    def __init__(
        self,
        task: str,
        args: bytes,
        options: Options,
        policy: Policy,
        arguments: Arguments | None = None,
        said: frozenset[str] = frozenset(),
    ) -> None:
        self.task = task
        self.args = args
        self.options = options
        self.policy = policy
        self.arguments = arguments
        self.said = (
            said  # the options that the call itself has given: over these an operator has no say
        )

    def __repr__(self) -> str:
        return f"<Call {self.task} {self.args[:60].decode(errors='replace')}>"


def listed(calls: Iterable[Call[R]]) -> list[Call[R]]:
    """What `enqueue_many` was given, or one call alone; BadOption for what is no call."""
    given: Any = calls
    found = list(given) if isinstance(given, Iterable) else [given]
    for one in found:
        if not isinstance(one, Call):
            meant = f"{one.__name__}.call(…)" if isinstance(one, Task) else "add.call(1)"
            raise BadOption(f"enqueue_many takes calls, like {meant}, not {one!r:.80}")
    return found


def parents_first(calls: Sequence[Call[Any]]) -> tuple[Sequence[Call[Any]], Sequence[int] | None]:
    """Each call after those of the list that it waits for, and where each one went; None: they stay as they are."""
    if not any(call.options.after for call in calls):
        return calls, None
    places = {id(call): i for i, call in enumerate(calls)}
    order = graph.parents_first([_waits_for(call, places) for call in calls])
    where = dict(zip(order, range(len(order)), strict=True))
    return [calls[i] for i in order], [where[i] for i in range(len(order))]


def _waits_for(call: Call[Any], places: Mapping[int, int]) -> list[int]:
    return [places[id(dep.job)] for dep in call.options.after if id(dep.job) in places]


class TaskWithOptions(Generic[P, R]):
    """A task with options of its own for the next calls."""

    __slots__ = ("_base", "_given", "_options", "_said", "_task")

    def __init__(self, task: Task[P, R, Any], given: tuple[Mapping[str, Any], ...]) -> None:
        self._task = task
        self._given = given
        self._said = frozenset().union(*given)
        self._build()

    def _build(self) -> Options:
        self._base = options = self._task.options
        for level in self._given:
            options = Options.build(level, options)
        self._options = options
        return options

    def using(self, **options: Any) -> TaskWithOptions[P, R]:
        """The same, with these options on top."""
        return TaskWithOptions(self._task, (*self._given, options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later, with others."""
        task = self._task
        encoded = task.arguments.encode(args, kwargs)
        options = (
            self._options if self._base is task.options else self._build()
        )  # the app's defaults have changed
        return Call(task.name, encoded, options, task.policy, task.arguments, self._said)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Durable when it returns."""
        return self._task.app.submit([self.call(*args, **kwargs)])[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        return (await self._task.app.asubmit([self.call(*args, **kwargs)]))[0]


class Task(Generic[P, R, V]):
    """A registered function; calling it just calls the function."""

    def __init__(
        self, app: TaskApp, fn: Callable[..., Any], name: str, options: Options, policy: Policy
    ) -> None:
        self.app = app
        self.fn = fn
        self.name = name
        self.options = options
        self.policy = policy
        self.owner: type | None = fn if inspect.isclass(fn) else None
        self._method = "run" if self.owner else None
        body = getattr(fn, "run", None) if self.owner else fn
        if not callable(body):
            raise BadTask(
                f"{name}: a task is a function, or a class with a method `run`, not {fn!r}"
            )
        self.is_async = inspect.iscoroutinefunction(body)
        self._body = body
        self.arguments = Arguments.of(body, skip_first=self.owner is not None, name=name)
        self.check(policy)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", name)
        self.__wrapped__ = fn

    def check(self, policy: Policy) -> None:
        """BadTask for a policy that its function cannot have."""
        if policy.concurrency > 1 and not self.is_async:
            raise BadTask(
                f"{self.name}: concurrency is for tasks that are `async def`; others run one at a time"
            )
        fair_by = policy.fair_by
        known = (
            self.arguments.signature.parameters
        )  # not their annotations, which may name what comes later
        strange = (
            [name for name in names_in(fair_by) if name not in known] if fair_by is not None else []
        )
        if strange:
            listed = ", ".join(known)
            raise BadTask(
                f"{self.name}: fair_by names {strange[0]!r}, which is none of its arguments ({listed})"
            )

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

    def using(self, **options: Any) -> TaskWithOptions[P, R]:
        """This task, with other options for the calls that follow."""
        return TaskWithOptions(self, (options,))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call to be enqueued later, with others."""
        return Call(
            self.name,
            self.arguments.encode(args, kwargs),
            self.options,
            self.policy,
            self.arguments,
        )

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

    def when(self) -> When | None:
        """The schedule that its decorator declares."""
        return cast("When | None", task_schedule(self.own_words(), {}))

    def own_words(self) -> dict[str, Any]:
        """What its decorator says of that schedule."""
        return {name: getattr(self.policy, name) for name in SCHEDULE_OPTIONS}

    def describe(self) -> dict[str, Any]:
        """The definition that nodes persist, for clients without the code; times are micros, `every` -1 is "again"."""
        options, policy = self.options, self.policy
        return {
            "name": self.name,
            "title": policy.title,
            "doc": (inspect.getdoc(self.fn) or "").partition("\n")[0] or None,
            "function": f"{_module(self.fn)}:{getattr(self.fn, '__qualname__', self.__name__)}",
            "async": self.is_async,
            "queue": options.queue,
            "priority": options.priority,
            "expires": storable(options.expires),
            "timeout": options.timeout,
            "grace": options.grace,
            "stall_timeout": options.stall_timeout,
            "memory": options.memory,
            "cpu": options.cpu,
            "retry": options.retry.to_json(),
            "dedicated": options.dedicated,
            "on_dependency_failure": options.on_dependency_failure,
            "ready": options.ready,
            "tags": options.tags,
            "once": options.once,
            "unique_for": options.unique_for,
            "on_conflict": options.on_conflict,
            "cron": policy.cron,
            "every": policy.every,
            "tz": policy.tz,
            "max_running": policy.max_running,
            "exclusive": policy.exclusive,
            "max_waiting": policy.max_waiting,
            "rate": storable(policy.rate),
            "limits": rules_to_json(rules_of(self.name, options, policy)),
            "fair_by": policy.fair_by,
            "on_exception": policy.on_exception,
            "explicit_outcome": policy.explicit_outcome,
            "at_most_once": policy.at_most_once,
            "max_crashes": policy.max_crashes,
            "concurrency": policy.concurrency,
            "keep": policy.keep,
            "on_final": policy.on_final,
            "history": policy.history,
            "progress_every": policy.progress_every,
            **self.arguments.describe(),
        }


def final_hook(app: Any, hook: Callable[[Job[Any]], Any]) -> Callable[..., Any]:
    """The task behind `on_final=`: it gets the id of a job that has ended, and gives `hook` its handle."""
    if inspect.iscoroutinefunction(hook):

        async def tell_later(job: int) -> None:
            await hook(app.job(job))

        return tell_later

    def tell(job: int) -> None:
        hook(app.job(job))

    return tell


def task_name(fn: Callable[..., Any], given: str | None) -> str:
    """What it is called: the given name, else "module.function"."""
    name = given or f"{_module(fn)}.{getattr(fn, '__qualname__', '').rpartition('<locals>.')[2]}"
    if not NAME_PATTERN.fullmatch(name):
        raise BadTask(
            f"{name!r} is no name for a task: a letter or _, then letters, digits, _ . : # - (up to 200)"
        )
    return name


def is_task_name(name: str) -> bool:
    return NAME_PATTERN.fullmatch(name) is not None


def _module(fn: Callable[..., Any]) -> str:
    """A script's own module is called like its file, so that a node can import it by that name."""
    if fn.__module__ != "__main__":
        return fn.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name)
    stem = Path(file).stem if file else ""
    return stem if NAME_PATTERN.fullmatch(stem) else "__main__"


AsyncFunction = Callable[P, Coroutine[Any, Any, R]]
