"""Genba: the front door."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
from typing_extensions import ParamSpec, Unpack

from genba.client.async_methods import twin
from genba.client.client import Client
from genba.client.event_reader import Callback, EventNames, importing
from genba.client.job import options_of
from genba.client.node_handle import NodeHandle
from genba.client.registry import TaskDecorator
from genba.client.schedule import Schedule, When
from genba.client.task import Call, RunClass, Task

if TYPE_CHECKING:
    from genba.storage.schedules.rows import NewSchedule
    from genba.testing import Testing

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Genba(Client):
    """One queue of jobs: what can be run, and everything that was asked for.

    Making one connects to nothing.  The first call that needs the database opens it, and installs the schema if
    it is not there.  After a fork the child opens connections of its own.
    """

    def set_defaults(self, **given: Any) -> None:
        """What tasks have for what they do not say, from the next call on; jobs that are enqueued do not change."""
        self.registry.set_defaults(given)

    # what the code declares

    @overload
    def task(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(self, fn: type[RunClass[P, R]], /) -> Task[P, R, Any]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...
    @overload
    def task(self, fn: None = None, /, **given: Any) -> TaskDecorator: ...

    def task(self, fn: Any = None, /, **given: Any) -> Any:
        """Register a function, or a class with `run`; the job options and the policy are its defaults."""
        if fn is None:
            return TaskDecorator(self.registry, given)
        return self.registry.add_task(fn, given)

    @overload
    def condition(self, fn: F, /) -> F: ...
    @overload
    def condition(self, fn: None = None, /, *, name: str | None = None) -> Callable[[F], F]: ...

    def condition(self, fn: Any = None, /, *, name: str | None = None) -> Any:
        """Register a question that `ready=` may name: `def disk_ok(job)`, which answers True, False, Wait, or a chain.

        It is asked in a worker, before a job starts, and has a second for its answer.
        """
        if fn is None:
            return lambda given: (
                self.condition(given) if name is None else self.registry.conditions.add(given, name)
            )
        return self.registry.conditions.add(fn, name)

    def lifespan(self, fn: F, /) -> F:
        """Surround the life of every worker: entered before its first job, left when it ends by itself.

        A generator function, or anything that gives a context manager; plain or async.  It takes no arguments.
        """
        return self.registry.add_lifespan(fn)

    def middleware(self, fn: F, /) -> F:
        """Surround every run: `def timed(job, call_next)`; what it returns is the result.

        The first one registered is outermost, except that plain functions are outside of `async def` ones.
        """
        return self.registry.add_middleware(fn)

    def recur(self, name: str, call: Call[Any], **when: Unpack[When]) -> Schedule:
        """Let `call` run by cron=, or every= so often; the same again changes nothing.

        While a module is imported this declares: nodes write what their app declares.  Anywhere else it acts at once,
        by hand, and code that declares the name no longer changes it.
        """
        if importing():
            self.wanted(name, call, when)  # for its errors
            self.registry.add_schedule(name, call, when)
        else:
            self.store.install()
            self.store.schedules.put(self.wanted(name, call, when))
            self.wake()
        return Schedule(self, name)

    arecur = twin(recur)

    @overload
    def on(self, name: EventNames, callback: Callback, /) -> Genba: ...
    @overload
    def on(self, name: EventNames, /) -> Callable[[F], F]: ...

    def on(self, name: EventNames, callback: Callback | None = None, /) -> Any:
        """Call back for each event of this name ("*": all) that happens from now on, in a thread of this process.

        Registered while a module of the app is imported, it runs with the nodes instead, for what each node does.
        """
        at_import = importing()
        if callback is not None:
            self.handlers.add(name, callback, importing=at_import)
            return self

        def decorate(fn: F) -> F:
            self.handlers.add(name, fn, importing=at_import)
            return fn

        return decorate

    # run

    def node(self, target: str | None = None, **given: Any) -> NodeHandle:
        """A node for this app; `run()` (or `await …arun()`) starts it as a child and waits for it."""
        return NodeHandle.of(self, target, given)

    def testing(self) -> Testing:
        """`with app.testing() as q:` an empty queue, a clock of its own, and jobs that run here, when `q` says so.

        Schedules that the code declares are there, as a node would have written them.
        """
        made: Testing = import_module("genba.testing").Testing(self)
        return made

    # what nodes and workers ask

    def hello(self) -> dict[str, Any]:
        """What a node must know of this app."""
        registry = self.registry
        registry.check()
        return {
            "url": self.settings.url,
            "namespace": self.settings.namespace,
            "lease": self.settings.lease,
            "age_step": self.settings.age_step,
            "keep_events": self.settings.keep_events,
            "max_events": self.settings.max_events,
            "handlers": bool(self.handlers),
            "shareable": registry.plain_middleware() is None,
            "lifespans": bool(self.lifespans),
            "tasks": [task.describe() for task in registry.tasks.values()],
            "schedules": self.declared_schedules(),
            "conditions": sorted(registry.conditions.named),
        }

    def declared_schedules(self) -> list[NewSchedule]:
        """Those in code, which nodes write."""
        registry = self.registry
        found = [
            self.wanted(name, *declared) for name, declared in registry.all_schedules().items()
        ]
        own = {
            name: task.own_words()
            for name, task in registry.tasks.items()
            if name not in registry.schedules
        }
        return [msgspec.structs.replace(one, own=own.get(one.name)) for one in found]

    def results_of_parents(self, job_id: int) -> dict[int, Any]:
        return {
            parent: msgspec.json.decode(result) if result is not None else None
            for parent, result in self.store.dependencies.results_of_parents(job_id)
        }

    def options_of(self, job_id: int) -> dict[str, Any]:
        """The options of a job of ours, as its code may ask for them."""
        record = self.job(job_id).record
        task = self.registry.tasks.get(record.task)
        return options_of(record, task.options.limits if task else ())

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes:
        """A copy of a job of ours, as the store can read it when that one has succeeded."""
        return self._intake.clone(self.job(job_id).record, changes)
