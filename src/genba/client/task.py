"""Task: a registered function, its policy, and the ways to enqueue a run of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from typing_extensions import TypeVar as DefaultTypeVar

from genba.client.job import Job
from genba.domain.fairness import names_in
from genba.enqueue.arguments import Arguments
from genba.enqueue.call import Call
from genba.errors import BadOption, BadTask
from genba.options.limits import rules_of, rules_to_json
from genba.options.merge import storable, task_schedule
from genba.options.names import module_of
from genba.options.schedule_rule import RuleOptions
from genba.options.table import SCHEDULE_OPTIONS, Options, Policy

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
V = DefaultTypeVar("V", default=Any)

ON_FINAL_SUFFIX = "#final"  # after the name of a task: the task that calls its `on_final` function


class RunClass(Protocol[P, R_co]):
    """A class whose `run` is the task."""

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class TaskApp(Protocol):
    """What a task needs of its app."""

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    async def asubmit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]: ...

    def job(self, id: int) -> Job[Any]: ...

    def make(self, owner: type) -> Any: ...


def listed(calls: Iterable[Call[R]]) -> list[Call[R]]:
    """Return the argument of `enqueue_many` as a list; BadOption for what is not a call."""
    argument: Any = calls
    items = list(argument) if isinstance(argument, Iterable) else [argument]
    for item in items:
        if not isinstance(item, Call):
            example = f"{item.__name__}.call(…)" if isinstance(item, Task) else "add.call(1)"
            raise BadOption(f"enqueue_many takes calls, like {example}, not {item!r:.80}")
    return items


class TaskWithOptions(Generic[P, R]):
    """A task with other options for the calls made from it."""

    __slots__ = ("_base", "_levels", "_options", "_said", "_task")

    def __init__(self, task: Task[P, R, Any], levels: tuple[Mapping[str, Any], ...]) -> None:
        self._task = task
        self._levels = levels  # one for each `using`, later ones win
        self._said = frozenset().union(*levels)
        self._build()

    def _build(self) -> Options:
        self._base = options = self._task.options
        for level in self._levels:
            options = Options.build(level, options)
        self._options = options
        return options

    def using(self, **options: Any) -> TaskWithOptions[P, R]:
        """Return the same with these options on top."""
        return TaskWithOptions(self._task, (*self._levels, options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Make a call to be enqueued later, with others."""
        task = self._task
        encoded = task.arguments.encode(args, kwargs)
        # Build again if the defaults of the app have changed.
        options = self._options if self._base is task.options else self._build()
        return Call(task.name, encoded, options, task.policy, task.arguments, self._said)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one run; it is durable when this returns."""
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
        """Raise BadTask for a policy that the function cannot have."""
        if policy.concurrency > 1 and not self.is_async:
            raise BadTask(
                f"{self.name}: concurrency is for tasks that are `async def`; "
                "others run one at a time"
            )
        # Only the names of its parameters: annotations may name what the module defines later.
        known = self.arguments.signature.parameters
        fair_by = policy.fair_by
        named = [] if fair_by is None else names_in(fair_by)
        unknown = [name for name in named if name not in known]
        if unknown:
            raise BadTask(
                f"{self.name}: fair_by names {unknown[0]!r}, which is none of its arguments "
                f"({', '.join(known)})"
            )

    def __set_name__(self, owner: type, name: str) -> None:
        """Make it the task of a method: the app's resolver makes the instance, in the worker."""
        self.owner, self._method = owner, name
        self.arguments = Arguments.of(self.fn, skip_first=True, name=self.name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.fn.__get__(instance, owner)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return self.fn(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def using(self, **options: Any) -> TaskWithOptions[P, R]:
        """Return this task with other options."""
        return TaskWithOptions(self, (options,))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Make a call to be enqueued later, with others."""
        return Call(
            self.name,
            self.arguments.encode(args, kwargs),
            self.options,
            self.policy,
            self.arguments,
        )

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one run; it is durable when this returns."""
        return self.app.submit([self.call(*args, **kwargs)])[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        return (await self.app.asubmit([self.call(*args, **kwargs)]))[0]

    def call_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it in this process; for a class or a method, on a new instance."""
        if self.owner is None:
            return self.fn(*args, **kwargs)
        assert self._method is not None
        return self._body.__get__(self.app.make(self.owner))(*args, **kwargs)

    def schedule(self) -> RuleOptions | None:
        """Return the rule of the schedule that its decorator declares, if it does."""
        return cast("RuleOptions | None", task_schedule(self.schedule_options(), {}))

    def schedule_options(self) -> dict[str, Any]:
        """Return `cron`, `every` and `tz` of its decorator."""
        return {name: getattr(self.policy, name) for name in SCHEDULE_OPTIONS}

    def describe(self) -> dict[str, Any]:
        """Return the definition that nodes persist, for clients without the code.

        Times are micros; `every` -1 means again at once.
        """
        options, policy = self.options, self.policy
        return {
            "name": self.name,
            "title": policy.title,
            "doc": (inspect.getdoc(self.fn) or "").partition("\n")[0] or None,
            "function": f"{module_of(self.fn)}:{getattr(self.fn, '__qualname__', self.__name__)}",
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


def final_hook(app: TaskApp, hook: Callable[[Job[Any]], Any]) -> Callable[..., Any]:
    """Make the function of the task behind `on_final=`: it calls `hook` with the ended job."""
    if inspect.iscoroutinefunction(hook):

        async def call_async_hook(job: int) -> None:
            await hook(app.job(job))

        return call_async_hook

    def call_hook(job: int) -> None:
        hook(app.job(job))

    return call_hook
