"""Genba: the app, with what its code declares, and all that a client can do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, TypeVar, overload

import msgspec
from typing_extensions import ParamSpec, Unpack

from genba.client.async_methods import async_method
from genba.client.client import Client
from genba.client.clone import copy_of
from genba.client.current_job import find_job
from genba.client.event_reader import Callback, EventNames, importing
from genba.client.job_options import options_of
from genba.client.job_services import OwnJobWrites
from genba.client.node_handle import NodeHandle
from genba.client.registry import TaskDecorator
from genba.client.schedule import Schedule
from genba.client.task import RunClass, Task
from genba.client.under_test import Testing
from genba.enqueue.call import Call
from genba.enqueue.trace import current_traceparent
from genba.options.schedule_rule import RuleOptions
from genba.storage.schedules.rows import NewSchedule

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Genba(Client):
    """An app: the tasks that it can run, and the jobs that were enqueued.

    Making one connects to nothing.  The first call that needs the database opens it, and installs
    the schema if it is not there.  After a fork the child opens connections of its own.
    """

    def set_defaults(self, **options: Any) -> None:
        """Set the defaults of all tasks, from the next call on; enqueued jobs do not change."""
        self.registry.set_defaults(options)

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
    def task(self, fn: None = None, /, **options: Any) -> TaskDecorator: ...

    def task(self, fn: Any = None, /, **options: Any) -> Any:
        """Register a function, or a class with `run`, as a task with these options and policy."""
        if fn is None:
            return TaskDecorator(self.registry, options)
        return self.registry.add_task(fn, options)

    @overload
    def condition(self, fn: F, /) -> F: ...
    @overload
    def condition(self, fn: None = None, /, *, name: str | None = None) -> Callable[[F], F]: ...

    def condition(self, fn: Any = None, /, *, name: str | None = None) -> Any:
        """Register a condition for `ready=`: `def disk_ok(job)` returns a bool, Wait, or a chain.

        A worker calls it before a job starts; it has a second to return.
        """
        if fn is not None:
            return self.registry.conditions.add(fn, name)

        def decorate(function: F) -> F:
            return self.registry.conditions.add(function, name)

        return decorate

    def lifespan(self, fn: F, /) -> F:
        """Surround every worker: entered before its first job, left when it ends by itself.

        A generator function, or anything that gives a context manager; plain or async.  It takes no
        arguments.
        """
        return self.registry.add_lifespan(fn)

    def middleware(self, fn: F, /) -> F:
        """Surround every run: `def timed(job, call_next)`; what it returns is the result.

        The first one registered is outermost, except that plain functions are outside of `async
        def` ones.
        """
        return self.registry.add_middleware(fn)

    def recur(self, name: str, call: Call[Any], **options: Unpack[RuleOptions]) -> Schedule:
        """Enqueue `call` again and again, by cron= or every=; the same again changes nothing.

        While a module is imported this declares a schedule, which nodes write.  Anywhere else it is
        written at once and counts as changed by hand: code that declares the name no longer changes
        it.
        """
        if importing():
            self.new_schedule(name, call, options)  # to raise its errors here
            self.registry.add_schedule(name, call, options)
        else:
            store = self.store
            store.install()
            store.schedules.put(self.new_schedule(name, call, options))
            self.wake()
        return Schedule(self._connection, name)

    arecur = async_method(recur)

    @overload
    def on(self, name: EventNames, callback: Callback, /) -> Genba: ...
    @overload
    def on(self, name: EventNames, /) -> Callable[[F], F]: ...

    def on(self, name: EventNames, callback: Callback | None = None, /) -> Any:
        """Call back for each event of this name ("*": all) from now on, in a thread.

        Registered while a module of the app is imported, it runs with each node instead, for the
        node's own events.
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

    def node(self, target: str | None = None, **options: Any) -> NodeHandle:
        """Make a node for this app; `run()` or `await …arun()` starts it as a child and waits."""
        return NodeHandle.of(self, self.settings, target, options)

    def testing(self) -> Testing:
        """Make an empty queue with its own clock for a test: `with app.testing() as q:`.

        It runs jobs when the test calls `q.run()`.  It has the schedules that the code declares, as
        a node would have written them.
        """
        testing: Testing = import_module("genba.testing").InProcessTesting(self)
        return testing

    # for nodes and workers

    def hello(self) -> dict[str, Any]:
        """Return what a node must know of this app."""
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
        """Return the schedules in code, which nodes write."""
        registry = self.registry
        declared = [
            self.new_schedule(name, *schedule)
            for name, schedule in registry.all_schedules().items()
        ]
        own = {
            name: task.schedule_options()
            for name, task in registry.tasks.items()
            if name not in registry.schedules
        }
        return [msgspec.structs.replace(one, own=own.get(one.name)) for one in declared]

    def results_of_parents(self, job_id: int) -> dict[int, Any]:
        return {
            parent: msgspec.json.decode(result) if result is not None else None
            for parent, result in self.store.dependencies.results_of_parents(job_id)
        }

    def own_job_writes(self) -> OwnJobWrites:
        """Return the store as far as a running job may write about itself."""
        store = self.store
        store.install()  # once; not while a transaction is open
        return store.own_writes

    def options_of(self, job_id: int) -> dict[str, Any]:
        """Return the options of the job that this worker runs, for `current_job().options`."""
        record = self.job(job_id).record
        options = self.registry.options_of(record.task)
        return options_of(record, options.limits if options else ())

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes:
        """Encode a copy of the job that this worker runs; the store inserts it with the success."""
        record = self.job(job_id).record
        call = copy_of(self.registry.tasks[record.task], record, changes)
        return self._new_jobs.encode_clone(self.store, call, current_traceparent(find_job()))
