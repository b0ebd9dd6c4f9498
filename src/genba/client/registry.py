"""Registry: what the code of an app declares, before anything is asked of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from typing_extensions import ParamSpec

from genba.client.schedule import When
from genba.client.task import (
    ON_FINAL_SUFFIX,
    Call,
    RunClass,
    Task,
    final_hook,
    is_task_name,
    task_name,
)
from genba.enqueue.arguments import encode_plain
from genba.errors import BadOption, BadTask
from genba.options import limits
from genba.options.conditions import Conditions
from genba.options.merge import build_options
from genba.options.table import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy

if TYPE_CHECKING:
    from genba.client.client import Client

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
AnyTask = str | Task[..., Any, Any]  # its name, or the task itself


class Registry:
    """Tasks and conditions by name, schedules, what surrounds the runs, and the defaults of all of them."""

    def __init__(self, app: Client) -> None:
        self._app = app
        self.tasks: dict[str, Task[..., Any, Any]] = {}
        self._said: dict[str, Mapping[str, Any]] = {}  # by their decorators
        self._hooks: set[str] = set()
        self.schedules: dict[str, tuple[Call[Any], When]] = {}
        self.conditions = Conditions()
        self.lifespans: list[Callable[[], Any]] = []
        self.middlewares: list[Callable[..., Any]] = []
        self.options, self.policy = DEFAULT_OPTIONS, DEFAULT_POLICY
        self.templates = limits.BucketTemplates()

    def set_defaults(self, given: Mapping[str, Any]) -> None:
        """For all tasks, what they have not said themselves; nothing is changed if one of them cannot have it."""
        options, policy = build_options(given, self.options, self.policy)
        templates = limits.BucketTemplates()
        changed: list[tuple[Task[..., Any, Any], Options, Policy]] = []
        for name, task in self.tasks.items():
            own, its_policy = build_options(self._said[name], options, policy)
            own = self.conditions.of_task(own, name, task.fn, self._app.make)
            task.check(its_policy)
            self._limit(task, own, its_policy, templates)
            changed.append((task, own, its_policy))
        self.options, self.policy, self.templates = options, policy, templates
        for task, own, its_policy in changed:
            task.options, task.policy = own, self._hooked(task.name, its_policy)

    def add_task(self, fn: Any, given: Mapping[str, Any]) -> Task[..., Any, Any]:
        options, policy = build_options(given, self.options, self.policy)
        if not callable(fn):
            raise BadTask(f"a task is a function, or a class with a method `run`, not {fn!r}")
        name = task_name(fn, policy.name)
        if name in self.tasks:
            other = self.tasks[name].fn
            raise BadTask(
                f"task {name!r} is registered already, by {other.__module__}.{other.__qualname__}: "
                "give one of them another name="
            )
        policy = self._hooked(name, policy)
        options = self.conditions.of_task(options, name, fn, self._app.make)
        task: Task[..., Any, Any] = Task(self._app, fn, name, options, policy)
        self._limit(task, options, policy, self.templates)
        self.tasks[name], self._said[name] = task, given
        return task

    def _limit(
        self,
        task: Task[..., Any, Any],
        options: Options,
        policy: Policy,
        templates: limits.BucketTemplates,
    ) -> None:
        rules = limits.rules_of(task.name, options, policy)
        limits.check_arguments(task.name, rules, task.arguments.signature)
        templates.add(task.name, rules)

    def _hooked(self, name: str, policy: Policy) -> Policy:
        """With the name of a task, where a function is to be told of the ends of its jobs."""
        if not callable(policy.on_final):
            return policy
        hook = f"{name}{ON_FINAL_SUFFIX}"
        if hook in self._hooks:
            del self.tasks[hook]  # of other defaults
        self._hooks.add(hook)
        self.add_task(final_hook(self._app, policy.on_final), {"name": hook, "on_final": None})
        return replace(policy, on_final=hook)

    def add_lifespan(self, fn: F) -> F:
        _check_surround("lifespan", fn, 0)
        self.lifespans.append(fn)
        return fn

    def add_middleware(self, fn: F) -> F:
        _check_surround("middleware", fn, 2)
        self.middlewares.append(fn)
        return fn

    def add_schedule(self, name: str, call: Call[Any], when: When) -> None:
        if name in self.schedules:
            raise BadOption(f"schedule {name!r} is declared twice: give one of them another name")
        self.schedules[name] = (call, when)

    def all_schedules(self) -> dict[str, tuple[Call[Any], When]]:
        """Those of `recur`, and those that decorators of tasks declare."""
        declared = dict(self.schedules)
        for name, task in self.tasks.items():
            if (when := task.when()) is not None:
                if name in declared:
                    raise BadTask(f"schedule {name!r} is declared twice: by recur, and by its task")
                declared[name] = (task.call(), when)
        return declared

    def check(self) -> None:
        """BadTask for what a node could not run."""
        for name, task in self.tasks.items():
            self.check_concurrency(name, task.policy.concurrency)
        for task in self.tasks.values():
            self.conditions.check(task.options.ready, f"task {task.name!r}: ")

    def plain_middleware(self) -> Any:
        """The first that is not `async def`; None: all are."""
        return next((one for one in self.middlewares if not inspect.iscoroutinefunction(one)), None)

    def check_concurrency(self, name: str, concurrency: int) -> None:
        """BadTask if so many jobs of a task cannot run in one worker."""
        plain = self.plain_middleware() if concurrency > 1 else None
        if plain is not None:
            raise BadTask(
                f"task {name!r} runs several at a time: the middleware "
                f"{getattr(plain, '__qualname__', plain)} must be `async def`, or it would stop them all"
            )

    def call(
        self,
        task: AnyTask,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Call[Any]:
        """A call by name; one of a task that is not here is not checked."""
        task = self._name_of(task)
        if task in self.tasks:
            return self.tasks[task].using(**options).call(*args, **kwargs)
        if not is_task_name(task):
            raise BadTask(f"{task!r} is no name of a task")
        built = Options.build(options, self.options)
        return Call(task, encode_plain(args, kwargs), built, self.policy, None, frozenset(options))

    def _name_of(self, task: object) -> str:
        if isinstance(task, str):
            return task
        if not isinstance(task, Task):
            raise BadOption(
                f"enqueue takes a task of this app or the name of a task, not {task!r:.80}"
            )
        if task.app is not self._app:
            raise BadOption(
                f"task {task.name!r} is one of another app; to enqueue it here, give its name"
            )
        return task.name


class TaskDecorator:
    """`@app.task(…)`, waiting for its function."""

    def __init__(self, registry: Registry, given: Mapping[str, Any]) -> None:
        self._registry = registry
        self._given = given
        build_options(
            {name: value for name, value in given.items() if name not in ("after", "conn")}
        )

    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: type[RunClass[P, R]], /) -> Task[P, R, Any]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...

    def __call__(self, fn: Any, /) -> Any:
        return self._registry.add_task(fn, self._given)


def _check_surround(what: str, fn: Any, takes: int) -> None:
    if not callable(fn):
        raise BadTask(f"@app.{what} is for a function, not {fn!r}")
    try:
        inspect.signature(fn).bind(*range(takes))
    except TypeError as error:
        wanted = "(job, call_next)" if takes else "no arguments"
        raise BadTask(
            f"{getattr(fn, '__qualname__', fn)}: a {what} takes {wanted}: {error}"
        ) from error
