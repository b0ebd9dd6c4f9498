"""Registry: what the code of an app declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from typing_extensions import ParamSpec

from genba.client.task import ON_FINAL_SUFFIX, RunClass, Task, TaskApp, final_hook
from genba.enqueue.arguments import Arguments, encode_plain
from genba.enqueue.call import Call
from genba.errors import BadOption, BadTask
from genba.options import limits
from genba.options.conditions import Conditions
from genba.options.merge import build_options
from genba.options.names import is_task_name, task_name
from genba.options.schedule_rule import RuleOptions
from genba.options.table import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
AnyTask = str | Task[..., Any, Any]  # the name of a task, or the task


class Registry:
    """Tasks and conditions by name, schedules, lifespans, middleware, and the defaults."""

    def __init__(self, app: TaskApp) -> None:
        self._app = app
        self.tasks: dict[str, Task[..., Any, Any]] = {}
        # What each decorator was given: the options are built again when the defaults change.
        self._given: dict[str, Mapping[str, Any]] = {}
        self._hooks: set[str] = set()
        self.schedules: dict[str, tuple[Call[Any], RuleOptions]] = {}
        self.conditions = Conditions()
        self.lifespans: list[Callable[[], Any]] = []
        self.middlewares: list[Callable[..., Any]] = []
        self.options, self.policy = DEFAULT_OPTIONS, DEFAULT_POLICY
        self.templates = limits.BucketTemplates()

    def options_of(self, task: str) -> Options | None:
        known = self.tasks.get(task)
        return known.options if known is not None else None

    def arguments_of(self, task: str) -> Arguments | None:
        known = self.tasks.get(task)
        return known.arguments if known is not None else None

    def set_defaults(self, given: Mapping[str, Any]) -> None:
        """Change the defaults of all tasks, or nothing if one task cannot have them."""
        options, policy = build_options(given, self.options, self.policy)
        templates = limits.BucketTemplates()
        changed: list[tuple[Task[..., Any, Any], Options, Policy]] = []
        for name, task in self.tasks.items():
            task_options, task_policy = build_options(self._given[name], options, policy)
            task_options = self.conditions.of_task(task_options, name, task.fn, self._app.make)
            task.check(task_policy)
            self._limit(task, task_options, task_policy, templates)
            changed.append((task, task_options, task_policy))
        self.options, self.policy, self.templates = options, policy, templates
        for task, task_options, task_policy in changed:
            task.options, task.policy = task_options, self._with_hook(task.name, task_policy)

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
        policy = self._with_hook(name, policy)
        options = self.conditions.of_task(options, name, fn, self._app.make)
        task: Task[..., Any, Any] = Task(self._app, fn, name, options, policy)
        self._limit(task, options, policy, self.templates)
        self.tasks[name], self._given[name] = task, given
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

    def _with_hook(self, name: str, policy: Policy) -> Policy:
        """Register a function in `on_final` as a task, and replace it by that task's name."""
        if not callable(policy.on_final):
            return policy
        hook = f"{name}{ON_FINAL_SUFFIX}"
        if hook in self._hooks:
            del self.tasks[hook]  # made with the defaults before
        self._hooks.add(hook)
        self.add_task(final_hook(self._app, policy.on_final), {"name": hook, "on_final": None})
        return replace(policy, on_final=hook)

    def add_lifespan(self, fn: F) -> F:
        _check_parameters("lifespan", fn, 0)
        self.lifespans.append(fn)
        return fn

    def add_middleware(self, fn: F) -> F:
        _check_parameters("middleware", fn, 2)
        self.middlewares.append(fn)
        return fn

    def add_schedule(self, name: str, call: Call[Any], rule_options: RuleOptions) -> None:
        if name in self.schedules:
            raise BadOption(f"schedule {name!r} is declared twice: give one of them another name")
        self.schedules[name] = (call, rule_options)

    def all_schedules(self) -> dict[str, tuple[Call[Any], RuleOptions]]:
        """Return the schedules of `recur`, and those that decorators of tasks declare."""
        declared = dict(self.schedules)
        for name, task in self.tasks.items():
            if (rule_options := task.schedule()) is not None:
                if name in declared:
                    raise BadTask(f"schedule {name!r} is declared twice: by recur, and by its task")
                declared[name] = (task.call(), rule_options)
        return declared

    def check(self) -> None:
        """Raise BadTask or BadOption for a task that a node could not run."""
        for name, task in self.tasks.items():
            self.check_concurrency(name, task.policy.concurrency)
        for task in self.tasks.values():
            self.conditions.check(task.options.ready, f"task {task.name!r}: ")

    def plain_middleware(self) -> Any:
        """Return the first middleware that is not `async def`; None if all are."""
        return next((fn for fn in self.middlewares if not inspect.iscoroutinefunction(fn)), None)

    def check_concurrency(self, name: str, concurrency: int) -> None:
        """Raise BadTask if plain middleware forbids that several jobs of a task share a worker."""
        plain = self.plain_middleware() if concurrency > 1 else None
        if plain is not None:
            raise BadTask(
                f"task {name!r} runs several at a time: the middleware "
                f"{getattr(plain, '__qualname__', plain)} must be `async def`, "
                "or it would stop them all"
            )

    def call(
        self,
        task: AnyTask,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Call[Any]:
        """Make a call by name; arguments are checked only if the code of the task is here."""
        task = self._name_of(task)
        if task in self.tasks:
            return self.tasks[task].using(**options).call(*args, **kwargs)
        if not is_task_name(task):
            raise BadTask(f"{task!r} is not a valid name of a task")
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
                f"task {task.name!r} belongs to another app; to enqueue it here, give its name"
            )
        return task.name


class TaskDecorator:
    """`@app.task(…)`: registers the function that it decorates."""

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


def _check_parameters(what: str, fn: Any, count: int) -> None:
    if not callable(fn):
        raise BadTask(f"@app.{what} is for a function, not {fn!r}")
    try:
        inspect.signature(fn).bind(*range(count))
    except TypeError as error:
        expected = "(job, call_next)" if count else "no arguments"
        raise BadTask(
            f"{getattr(fn, '__qualname__', fn)}: a {what} takes {expected}: {error}"
        ) from error
