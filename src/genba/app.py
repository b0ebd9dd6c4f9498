"""Genba: the front door; register, enqueue, query, steer."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import msgspec
from typing_extensions import ParamSpec, Unpack

from genba import limiting
from genba import settings as settings_module
from genba.arguments import Arguments, encode_plain, identity, key_identity
from genba.context import RunningJob, find_job
from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import Duration, duration, moment
from genba.domain.states import FINAL, State
from genba.errors import (
    BadOption,
    BadTask,
    GenbaError,
    JobNotFound,
    UnknownTask,
    WaitTimeout,
)
from genba.events import Event
from genba.explain import Explanation, explain
from genba.find import Several, Which, read_filter
from genba.job import Group, Job, copy_of
from genba.launch import NodeHandle
from genba.locks import Keyring, Lock, LockState, checked_name, lock_states
from genba.messages import Inbox, Subscription, encode
from genba.options import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy, declare, snapshot, updated
from genba.ready import Conditions
from genba.schedule import Schedule, When, check_schedule, wanted
from genba.steer import Queues, Tasks, fair, obey, prune
from genba.storage.bulk import merged
from genba.storage.create import create_database
from genba.storage.events import Position, operator
from genba.storage.policy import Rules
from genba.storage.postgres import masked
from genba.storage.records import Edge, NewJob, NodeRecord
from genba.storage.schedules import Wanted
from genba.storage.search import Filter
from genba.storage.store import Store, open_store
from genba.stream import Callback, Handlers, Names, Reader, atell_until_true, importing, tell_until_true
from genba.tasks import HOOK, Call, Runs, Task, final_hook, parents_first, task_name
from genba.values import Dep
from genba.waiting import Wait, Waiter, arest, check_buckets, rest

if TYPE_CHECKING:
    from genba.testing import Testing

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Genba:
    """One queue of jobs: what can be run, and everything that was asked for.

    Making one connects to nothing.  The first call that needs the database opens it, and installs the schema if
    it is not there.  After a fork the child opens connections of its own.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        lease: Duration | None = None,
        tz: str | None = None,
        keep_events: Duration | None = None,
        max_events: int | None = None,
    ) -> None:
        given = {"url": url, "namespace": namespace, "lease": lease, "tz": tz}
        self.settings = settings_module.read({**given, "keep_events": keep_events, "max_events": max_events})
        self.resolver: Callable[[type], Any] = lambda owner: owner()
        self.lifespans: list[Callable[[], Any]] = []
        self.middlewares: list[Callable[..., Any]] = []
        self.conditions = Conditions()
        self._options, self._policy = DEFAULT_OPTIONS, DEFAULT_POLICY
        self._tasks: dict[str, Task[..., Any, Any]] = {}
        self._schedules: dict[str, tuple[Call[Any], When]] = {}
        self._templates = limiting.Templates()
        self._store: Store | None = None
        self._clock: Clock = SystemClock()
        self.keyring = Keyring()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._waiter = Waiter(lambda: self.store)
        self.handlers = Handlers(self)
        self._test: Testing | None = None
        if defaults:
            self.set_defaults(**defaults)

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def namespace(self) -> str:
        return self.settings.namespace

    @property
    def store(self) -> Store:
        if self._store is None:
            settings = self.settings
            self._store = open_store(settings.url, namespace=settings.namespace, lease=settings.lease)
            self._store.by = _who
            if os.environ.get("GENBA_WORKER") and os.environ.get("GENBA_INCARNATION"):
                self._store.events.node = int(os.environ["GENBA_INCARNATION"])  # what our jobs do, our node does
        return self._store

    def set_defaults(self, **given: Any) -> None:
        """What tasks registered from now on start from; jobs that are enqueued do not change."""
        self._options, self._policy = declare(given, self._options, self._policy)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self.handlers.close()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._threads is not None and self._threads[0] == os.getpid():
            self._threads[1].shutdown(wait=False, cancel_futures=True)
        self._threads = None

    # the database

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return self.url if self.url.startswith("sqlite:") else masked(self.url)

    def install(self, create: bool = False) -> list[str]:
        """Make the schema current, with `create` the database itself too; gives the names of what was applied."""
        if create:
            create_database(self.url)
        return self.store.upgrade()

    def installed(self) -> list[str]:
        """Our tables and sequences in the database: what `uninstall` removes."""
        return self.store.objects()

    def uninstall(self) -> list[str]:
        """Remove our objects, with all jobs, and nothing else; gives their names."""
        removed = self.store.uninstall()
        self.close()
        return removed

    # tasks

    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(self, fn: type[Runs[P, R]], /) -> Task[P, R, Any]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...
    @overload
    def task(self, fn: None = None, /, **given: Any) -> TaskDecorator: ...

    def task(self, fn: Any = None, /, **given: Any) -> Any:
        """Register a function, or a class with `run`; the job options and the policy are its defaults."""
        if fn is None:
            return TaskDecorator(self, given)
        return self._register(fn, given)

    def _register(self, fn: Any, given: Mapping[str, Any]) -> Task[..., Any, Any]:
        options, policy = declare(given, self._options, self._policy)
        if not callable(fn):
            raise BadTask(f"a task is a function, or a class with a method `run`, not {fn!r}")
        name = task_name(fn, policy.name)
        if name in self._tasks:
            other = self._tasks[name].fn
            raise BadTask(
                f"task {name!r} is registered already, by {other.__module__}.{other.__qualname__}: "
                "give one of them another name="
            )
        if callable(policy.on_final):
            hook = self._register(final_hook(self, policy.on_final), {"name": f"{name}{HOOK}"})
            policy = replace(policy, on_final=hook.name)
        options = self.conditions.of_task(options, name, fn, self.make)
        task: Task[..., Any, Any] = Task(self, fn, name, options, policy)
        rules = limiting.rules_of(name, options, policy)
        limiting.check_arguments(name, rules, task.arguments.signature)
        self._templates.add(name, rules)
        self._tasks[name] = task
        return task

    @property
    def tasks(self) -> Tasks:
        """The tasks as operators see them: `app.tasks["render"].disable()`."""
        return Tasks(self)

    @property
    def queues(self) -> Queues:
        """The queues as operators see them: `app.queues["render"].pause()`."""
        return Queues(self)

    @overload
    def condition(self, fn: F, /) -> F: ...
    @overload
    def condition(self, fn: None = None, /, *, name: str | None = None) -> Callable[[F], F]: ...

    def condition(self, fn: Any = None, /, *, name: str | None = None) -> Any:
        """Register a question that `ready=` may name: `def disk_ok(job)`, which answers True, False, Wait, or a chain.

        It is asked in a worker, before a job starts, and has a second for its answer.
        """
        if fn is None:
            return lambda given: self.condition(given) if name is None else self.conditions.add(given, name)
        return self.conditions.add(fn, name)

    def lifespan(self, fn: F, /) -> F:
        """Surround the life of every worker: entered before its first job, left when it ends by itself.

        A generator function, or anything that gives a context manager; plain or async.  It takes no arguments.
        """
        _check_surround("lifespan", fn, 0)
        self.lifespans.append(fn)
        return fn

    def middleware(self, fn: F, /) -> F:
        """Surround every run: `def timed(job, call_next)`; what it returns is the result.

        The first one registered is outermost, except that plain functions are outside of `async def` ones.
        """
        _check_surround("middleware", fn, 2)
        self.middlewares.append(fn)
        return fn

    def make(self, owner: type) -> Any:
        """An instance of a class that has a task."""
        return self.resolver(owner)

    def task_table(self) -> dict[str, Task[..., Any, Any]]:
        return self._tasks

    def arguments_of(self, task: str) -> Arguments | None:
        return self._tasks[task].arguments if task in self._tasks else None

    def hello(self) -> dict[str, Any]:
        """What a node must know of this app."""
        self._check_middleware()
        for task in self._tasks.values():
            self.conditions.check(task.options.ready, f"task {task.name!r}: ")
        return {
            "url": self.settings.url,
            "namespace": self.settings.namespace,
            "lease": self.settings.lease,
            "keep_events": self.settings.keep_events,
            "max_events": self.settings.max_events,
            "handlers": bool(self.handlers),
            "tasks": [task.describe() for task in self._tasks.values()],
            "schedules": self._declared_schedules(),
            "conditions": sorted(self.conditions.named),
        }

    def _check_middleware(self) -> None:
        plain = [one for one in self.middlewares if not inspect.iscoroutinefunction(one)]
        shared = [name for name, task in self._tasks.items() if task.policy.concurrency > 1]
        if plain and shared:
            raise BadTask(
                f"task {shared[0]!r} runs several at a time: the middleware "
                f"{getattr(plain[0], '__qualname__', plain[0])} must be `async def`, or it would stop them all"
            )

    def results_of_parents(self, job_id: int) -> dict[int, Any]:
        return {
            parent: msgspec.json.decode(result) if result is not None else None
            for parent, result in self.store.dependencies.results_of_parents(job_id)
        }

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes:
        """A copy of a job of ours, as the store can read it when that one has succeeded."""
        record = self.job(job_id).record
        (made,) = self._rows([copy_of(self._tasks[record.task], record, changes)], self.store.policy.rules())
        return msgspec.msgpack.encode(msgspec.structs.replace(made, max_waiting=None))

    def moment(self, value: Any) -> int:
        """A moment by this machine's clock, in micros."""
        return moment(value, self._clock.now(), self.settings.zone)

    def later(self, value: Any) -> int:
        """A moment, or the time from now until then, by the store's clock."""
        try:
            return self.store.now() + duration(value)
        except BadOption:
            return moment(value, self.store.now(), self.settings.zone)

    # jobs come in

    def enqueue(self, task: str, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """By name.  A task that this app does not have is not checked, and waits for a node that knows it."""
        return self.submit([self.call(task, args, kwargs)])[0]

    async def aenqueue(self, task: str, /, *args: Any, **kwargs: Any) -> Job[Any]:
        return (await self.asubmit([self.call(task, args, kwargs)]))[0]

    def call(
        self,
        task: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Call[Any]:
        """A call by name, to be enqueued later."""
        known = self._tasks.get(task)
        if known is not None:
            return known.using(**(options or {})).call(*args, **(kwargs or {}))
        if not _is_name(task):
            raise BadTask(f"{task!r} is no name of a task")
        return Call(
            task, encode_plain(args, kwargs or {}), Options.build(options or {}, self._options), self._policy
        )

    def enqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        """All or nothing, in one round trip; a call may run `after` another one of the same list."""
        return Group(self, cast("list[Job[R]]", self.submit(list(calls), conn)))

    async def aenqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        return Group(self, cast("list[Job[R]]", await self.asubmit(list(calls), conn)))

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]:
        """Enqueue these calls; what `enqueue` and `enqueue_many` have in common."""
        if not calls:
            return []
        calls, order = parents_first(calls)
        done = obey(self.store, calls, self._rows, conn)
        handles: list[Job[Any]] = [
            Job(self, made.id, created=made.created, arguments=call.arguments)
            for made, call in zip(done, calls, strict=True)
        ]
        return handles if order is None else [handles[place] for place in order]

    def _rows(self, calls: Sequence[Call[Any]], rules: Rules) -> list[NewJob]:
        places = {id(call): i for i, call in enumerate(calls)}
        prepared: dict[tuple[int, int, str], dict[str, Any]] = {}
        unknown = {call.task for call in calls if call.arguments is None}
        told = self.store.definitions(unknown) if unknown else {}
        jobs = [self._new_job(call, places, prepared, told) for call in calls]
        return fair(calls, jobs, rules)

    async def asubmit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]:
        return await self.threads(self.submit, calls, conn)

    def _new_job(
        self,
        call: Call[Any],
        places: Mapping[int, int],
        prepared: dict[tuple[int, int, str], dict[str, Any]],
        told: Mapping[str, Mapping[str, Any]],
    ) -> NewJob:
        options, policy = call.options, call.policy
        same = (id(options), id(policy), call.task)  # most calls of a batch share all
        if same not in prepared:
            options = self.conditions.of_call(options, known=call.task in self._tasks)
            prepared[same] = self._row_of(options, policy) | self._limits_of(call, told.get(call.task))
        row = prepared[same]
        if row["rules"]:
            parameters = told[call.task]["parameters"] if call.task in told else ()
            row = {**row, "needs": limiting.needs(row["rules"], call.args, parameters)}
        if not options.after and options.key is None and not options.once:
            return NewJob(task=call.task, args=call.args, **row)
        return NewJob(
            task=call.task,
            args=call.args,
            after=tuple(self._edge(dep, call, places) for dep in options.after),
            identity=_identity(call),
            **row,
        )

    def _limits_of(self, call: Call[Any], told: Mapping[str, Any] | None) -> dict[str, Any]:
        """`told` is the definition of a task that this app does not have: its limits hold here too."""
        rules, most = limiting.rules_of(call.task, call.options, call.policy), call.policy.max_waiting
        if told is not None:
            own = {rule.template for rule in rules}
            rules = (*rules, *(rule for rule in limiting.read(told) if rule.template not in own))
            most = told.get("max_waiting") if most is None else most
        self._templates.check(rules)
        return {"rules": rules, "capped": most is not None, "max_waiting": most}

    def _row_of(self, options: Options, policy: Policy) -> dict[str, Any]:
        zone = self.settings.zone
        due, later = options.due_at(0, zone), options.due_at(1, zone)
        relative = due is not None and later == due + 1
        expires, expires_later = options.expires_at(0, zone), options.expires_at(1, zone)
        expires_relative = expires is not None and expires_later == expires + 1
        written = snapshot(options, policy)
        parent = options.parent
        return {
            "namespace": self.settings.namespace,
            "queue": options.queue,
            "priority": options.priority,
            "due_at": None if relative else due,
            "delay": max(0, due) if relative and due is not None else 0,
            "expires_at": None if expires_relative else expires,
            "expires_in": expires if expires_relative else None,
            "key": options.key,
            "once_waiting": options.once == "waiting",
            "unique_for": options.unique_for,
            "on_conflict": options.on_conflict,
            "parent_id": getattr(parent, "id", parent),
            "tags": options.tags,
            "options": written.decode() if written else None,
            "ready": options.ready,
        }

    def _edge(self, dep: Dep, call: Call[Any], places: Mapping[int, int]) -> Edge:
        target = dep.job
        if isinstance(target, Call):
            if id(target) not in places:
                raise BadOption(f"after: {target!r} is not in this enqueue_many; enqueue it first, or together")
            return Edge(places[id(target)], dep.on, inside=True)
        if isinstance(target, Job):
            return Edge(target.id, dep.on)
        if isinstance(target, int):
            return Edge(target, dep.on)
        raise BadOption(f"after: {target!r} is neither a job, nor a job's id, nor a call of this enqueue_many")

    def wake(self) -> None:
        """Tell idle nodes to look; after the commit of a transaction that `conn=` enqueued in."""
        self.store.presence.ring(self.settings.namespace, None)

    async def awake(self) -> None:
        await self.threads(self.wake)

    # schedules

    def recur(self, name: str, call: Call[Any], **when: Unpack[When]) -> Schedule:
        """Let `call` run by cron=, or every= so often; the same again changes nothing.

        While a module is imported this declares: nodes write what their app declares.  Anywhere else it acts at once,
        by hand, and code that declares the name no longer changes it.
        """
        if importing():
            if name in self._schedules:
                raise BadOption(f"schedule {name!r} is declared twice: give one of them another name")
            self._wanted(name, call, when)  # for its errors
            self._schedules[name] = (call, when)
        else:
            self.store.install()
            self.store.schedules.put(self._wanted(name, call, when))
            self.wake()
        return Schedule(self, name)

    async def arecur(self, name: str, call: Call[Any], **when: Unpack[When]) -> Schedule:
        return await self.threads(self.recur, name, call, **when)

    def schedules(self) -> list[Schedule]:
        """All of them, by name."""
        self.store.install()
        return [Schedule(self, row.name, row) for row in self.store.schedules.all()]

    async def aschedules(self) -> list[Schedule]:
        return await self.threads(self.schedules)

    def schedule(self, name: str) -> Schedule:
        """The handle of a schedule that is there; ScheduleNotFound otherwise."""
        return Schedule(self, name).refresh()

    async def aschedule(self, name: str) -> Schedule:
        return await self.threads(self.schedule, name)

    def _wanted(self, name: str, call: Call[Any], when: When) -> Wanted:
        if not isinstance(call, Call):
            raise BadOption(f"schedule {name!r}: recur takes a call, like add.call(1), not {call!r}")
        check_schedule(name, call.options)
        return wanted(name, self._rows([call], Rules(0))[0], when, self._clock.now(), self.settings.zone)

    def _declared_schedules(self) -> list[Wanted]:
        declared = dict(self._schedules)
        for name, task in self._tasks.items():
            if (when := task.when()) is not None:
                if name in declared:
                    raise BadTask(f"schedule {name!r} is declared twice: by recur, and by its task")
                declared[name] = (task.call(), when)
        return [self._wanted(name, call, when) for name, (call, when) in declared.items()]

    # look

    def job(self, id: int | None = None, *, key: str | None = None) -> Job[Any]:
        """The handle of a job that is there; JobNotFound otherwise."""
        if (id is None) == (key is None):
            raise BadOption("job() takes an id, or key=…")
        record = self.store.job(id, key=key)
        if record is None:
            raise JobNotFound(f"there is no job {id if key is None else f'with key {key!r}'}")
        return Job(self, record.id, record=record)

    async def ajob(self, id: int | None = None, *, key: str | None = None) -> Job[Any]:
        return await self.threads(self.job, id, key=key)

    def jobs(
        self, *, limit: int = 50, before: int | None = None, order: str = "newest", **wanted: Unpack[Which]
    ) -> list[Job[Any]]:
        """Those that fit, open ones by default, the newest first (or the "oldest").

        `before` is the id where the last page ended: pages neither repeat nor miss a job that was there at first.
        """
        if type(limit) is not int or limit < 1:
            raise BadOption(f"limit must be a whole number of at least 1, not {limit!r}")
        found = read_filter(self, wanted, before, order)
        self.store.install()
        return [Job(self, record.id, record=record) for record in self.store.search.jobs(found, limit)]

    async def ajobs(
        self, *, limit: int = 50, before: int | None = None, order: str = "newest", **wanted: Unpack[Which]
    ) -> list[Job[Any]]:
        return await self.threads(self.jobs, limit=limit, before=before, order=order, **wanted)

    def count(self, **wanted: Unpack[Which]) -> int:
        found = read_filter(self, wanted)
        self.store.install()
        return self.store.search.count(found)

    async def acount(self, **wanted: Unpack[Which]) -> int:
        return await self.threads(self.count, **wanted)

    def explain(self, job: Job[Any]) -> Explanation:
        return explain(self.store, job.record)

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive."""
        self.store.install()
        return self.store.nodes.live()

    async def anodes(self) -> list[NodeRecord]:
        return await self.threads(self.nodes)

    def tell_node(self, name: str, verb: str, changes: Mapping[str, Any] | None = None) -> None:
        """Let the living node `name` "drain", "stop" (a drain without its grace), or "set" pool, min or max."""
        if verb not in ("drain", "stop", "set"):
            raise BadOption(f"a node is told to drain, stop or set, not {verb!r}")
        living = {node.name: node.id for node in self.nodes()}
        if name not in living:
            there = f"there are {', '.join(sorted(living))}" if living else "none is alive"
            raise GenbaError(f"no living node is called {name!r}: {there}")
        told = msgspec.json.encode(changes).decode() if changes else None
        self.store.nodes.command(living[name], verb, told)

    async def atell_node(self, name: str, verb: str, changes: Mapping[str, Any] | None = None) -> None:
        return await self.threads(self.tell_node, name, verb, changes)

    # locks

    def mutex(self, name: str, wait: Duration | None = None) -> Lock:
        """A lock that one at a time has: `with app.mutex("stock/7") as lock:`.

        `wait`: None for ever, 0 only tries (`if not lock:`), otherwise LockTimeout when it is over.
        """
        return Lock(self, name, 1, wait)

    def semaphore(self, name: str, n: int, wait: Duration | None = None) -> Lock:
        """As a mutex, for `n` at a time."""
        return Lock(self, name, n, wait)

    def locks(self) -> list[LockState]:
        """All locks that are held or waited for, by name."""
        self.store.install()
        return lock_states(self.store.locks.holders(), self.store.locks.waiters())

    async def alocks(self) -> list[LockState]:
        return await self.threads(self.locks)

    def break_lock(self, name: str, *, token: int | None = None, by: str = "a person") -> list[int]:
        """Take a lock from whoever holds it, who is not stopped; gives the tokens that are worth nothing any more."""
        self.store.install()
        return self.store.locks.break_(name, token, by)

    async def abreak_lock(self, name: str, *, token: int | None = None, by: str = "a person") -> list[int]:
        return await self.threads(self.break_lock, name, token=token, by=by)

    # messages

    def publish(self, topic: str, data: Any) -> int:
        """To all who are subscribed to `topic` at this moment, in order; how many they are.  For nobody it is gone."""
        checked_name("topic", topic)
        self.store.install()
        return self.store.messages.publish(topic, encode(data))

    async def apublish(self, topic: str, data: Any) -> int:
        return await self.threads(self.publish, topic, data)

    def subscribe(self, topic: str) -> Subscription:
        """What is published to `topic` from now on: `with app.subscribe("t") as messages: for message in messages:`."""
        return Subscription(self, checked_name("topic", topic))

    async def asubscribe(self, topic: str) -> Subscription:
        return await self.threads(self.subscribe, topic)

    def inbox(self, job: RunningJob) -> Inbox:
        """For the worker: the messages to the job that it runs."""
        self.store.install()
        return Inbox(self, job)

    def update(self, id: int, changes: Mapping[str, Any]) -> bool:
        """What `job.update` does."""
        options, stored = updated(changes)
        columns = {name: getattr(options, name) for name in ("queue", "priority") if name in changes}
        if "nice" in changes:
            columns["priority"] = options.priority
        now = self.store.now()
        if "at" in changes or "delay" in changes:
            columns["due_at"] = max(now, options.due_at(now, self.settings.zone) or now)
        if "expires" in changes:
            columns["expires_at"] = options.expires_at(now, self.settings.zone)
        return self.store.bulk.change(id, columns, lambda old: merged(old, stored))

    # many at once

    def cancel_many(self, *, reason: str | None = None, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        """Cancel all that fit, or ask them to stop; how many.  With `dry_run`: how many it would be."""
        found = read_filter(self, wanted)
        return self._each(found, lambda ids: self.store.cancel_all(ids, reason), dry_run)

    async def acancel_many(
        self, *, reason: str | None = None, dry_run: bool = False, **wanted: Unpack[Which]
    ) -> int:
        return await self.threads(self.cancel_many, reason=reason, dry_run=dry_run, **wanted)

    def hold_many(self, *, reason: str, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        """Hold all that fit and have not started; how many."""
        found = read_filter(self, {"state": ("blocked", "scheduled", "waiting"), **wanted})
        return self._each(found, lambda ids: self.store.bulk.hold(ids, reason), dry_run)

    async def ahold_many(self, *, reason: str, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        return await self.threads(self.hold_many, reason=reason, dry_run=dry_run, **wanted)

    def resume_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        """Let all that fit and are held go on; how many."""
        return self._each(read_filter(self, {"state": "held", **wanted}), self.store.bulk.resume, dry_run)

    async def aresume_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        return await self.threads(self.resume_many, dry_run=dry_run, **wanted)

    def requeue_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        """Run again all that fit and are final, by default those that have not succeeded; how many."""
        found = read_filter(self, {"state": ("failed", "timed_out", "cancelled"), **wanted})
        return self._each(found, self.store.bulk.requeue, dry_run)

    async def arequeue_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        return await self.threads(self.requeue_many, dry_run=dry_run, **wanted)

    def delete_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        """Delete all that fit, by default the final ones, with their history; never one that runs.  How many."""
        found = read_filter(self, {"state": "final", **wanted})
        found = replace(found, states=found.wanted_states() - {State.RUNNING})
        return self._each(found, self.store.bulk.delete, dry_run)

    async def adelete_many(self, *, dry_run: bool = False, **wanted: Unpack[Which]) -> int:
        return await self.threads(self.delete_many, dry_run=dry_run, **wanted)

    def flush(self, *, running: bool = False, schedules: bool = False, queue: Several = None) -> int:
        """Delete every job that is open and does not run, of all queues or some; how many.

        With `running` those that run are killed too, and end cancelled.  With `schedules` nothing makes new ones.
        """
        if schedules:
            for schedule in self.schedules():
                schedule.delete()
        gone = self.delete_many(state=("blocked", "scheduled", "waiting", "held"), queue=queue)
        if running:
            found = read_filter(self, {"state": "running", "queue": queue})
            gone += self._each(found, lambda ids: self.store.bulk.kill(ids, "flushed"), False)
        return gone

    async def aflush(self, *, running: bool = False, schedules: bool = False, queue: Several = None) -> int:
        return await self.threads(self.flush, running=running, schedules=schedules, queue=queue)

    def prune(self, older_than: Duration | None = None) -> int:
        """Delete final jobs older than this, or than their task wants them kept (as nodes do anyway); how many."""
        return prune(self.store, None if older_than is None else duration(older_than))

    async def aprune(self, older_than: Duration | None = None) -> int:
        return await self.threads(self.prune, older_than)

    def _each(self, found: Filter, act: Callable[[Sequence[int]], int], dry_run: bool) -> int:
        self.store.install()
        return self.store.search.count(found) if dry_run else self.store.bulk.each(found, act)

    # wait

    def wait(
        self, jobs: Iterable[Job[Any]], *, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        """Until all (or "any") of these are final; gives those that are.  `throw` raises for the first that failed."""
        listed = list(jobs)
        if self._test is not None:
            self._test.wait(listed, until)
            return self._ended(listed, throw)
        done = threading.Event()
        wait = self._wait(listed, until, throw, done.set)
        within = None if timeout is None else duration(timeout) / 1_000_000
        if wait is not None:
            self._waiter.add(wait)
            try:
                job = find_job()
                rest(done, within, job, lambda: check_buckets(self.store, job, wait))
            finally:
                self._waiter.drop(wait)
            self._check_wait(wait, len(listed), timeout)
        return self._ended(listed, throw)

    async def await_(
        self, jobs: Iterable[Job[Any]], *, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        listed = list(jobs)
        if self._test is not None:
            return await self.threads(self.wait, listed, until=until, throw=throw)
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        wait = self._wait(listed, until, throw, lambda: loop.call_soon_threadsafe(done.set))
        within = None if timeout is None else duration(timeout) / 1_000_000
        if wait is not None:
            self._waiter.add(wait)
            try:
                job = find_job()
                await arest(done, within, job, lambda: self.threads(check_buckets, self.store, job, wait))
            finally:
                self._waiter.drop(wait)
            self._check_wait(wait, len(listed), timeout)
        return await self.threads(self._ended, listed, throw)

    def _wait(self, jobs: Sequence[Job[Any]], until: str, throw: bool, wake: Callable[[], object]) -> Wait | None:
        if until not in ("all", "any"):
            raise BadOption(f'until is "all" or "any", not {until!r}')
        return Wait([job.id for job in jobs], until, throw, wake) if jobs else None

    def _check_wait(self, wait: Wait, of: int, timeout: Duration | None) -> None:
        if wait.error is not None:
            raise wait.error
        if not wait.done:
            raise WaitTimeout(f"{len(wait.open)} of {of} jobs were not final after {timeout}")

    def _ended(self, jobs: Sequence[Job[Any]], throw: bool) -> list[Job[Any]]:
        states = self.store.states([job.id for job in jobs]) if jobs else {}
        ended = [job for job in jobs if states.get(job.id) in FINAL]
        if throw:
            for job in ended:
                if states[job.id] != "succeeded":
                    raise job.refresh().failure()
        return ended

    # what happens

    def events(
        self, *, after: str | None = None, kinds: Names = None, job: Any = None, task: Names = None, block: bool = False
    ) -> Iterator[Event]:
        """What has happened, in order for each job; nothing that commits late is skipped.

        From the oldest event that is kept, or behind the one whose `cursor` is given; CursorExpired if what follows
        it is gone.  With `block` it goes on for ever.
        """
        return self._reader(after, kinds, job, task).follow(block)

    def aevents(
        self, *, after: str | None = None, kinds: Names = None, job: Any = None, task: Names = None, block: bool = False
    ) -> AsyncIterator[Event]:
        return self._reader(after, kinds, job, task).afollow(block)

    def _reader(self, after: str | None, kinds: Names, job: Any, task: Names) -> Reader:
        self.store.install()
        return Reader(self, Position() if after is None else Position.of(after), kinds, job, task)

    @overload
    def on(self, name: Names, callback: Callback, /) -> Genba: ...
    @overload
    def on(self, name: Names, /) -> Callable[[F], F]: ...

    def on(self, name: Names, callback: Callback | None = None, /) -> Any:
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

    def listen(
        self, callback: Callback, *, after: str | None = None, kinds: Names = None, job: Any = None, task: Names = None
    ) -> None:
        """Call back for what happens from now on (of a `job`: from its beginning), until it returns something true."""
        tell_until_true(self._from_now(after, kinds, job, task).follow(True), callback)

    async def alisten(
        self, callback: Callback, *, after: str | None = None, kinds: Names = None, job: Any = None, task: Names = None
    ) -> None:
        reader = await self.threads(self._from_now, after, kinds, job, task)
        await atell_until_true(reader.afollow(True), callback)

    def _from_now(self, after: str | None, kinds: Names, job: Any, task: Names) -> Reader:
        if after is not None or job is not None:
            return self._reader(after, kinds, job, task)
        self.store.install()
        return Reader(self, self.store.events.end(), kinds, job, task)

    # run

    def node(self, target: str | None = None, **given: Any) -> NodeHandle:
        """A node for this app; `run()` starts it as a child and waits for it."""
        return NodeHandle.of(self, target, given)

    def testing(self) -> Testing:
        """`with app.testing() as q:` an empty queue, a clock of its own, and jobs that run here, when `q` says so."""
        made: Testing = import_module("genba.testing").Testing(self)
        return made

    def another_store(self, url: str, clock: Clock) -> Store:
        """For a test: of the same namespace."""
        store = open_store(url, namespace=self.settings.namespace, clock=clock)
        store.by = _who
        return store

    def swap(self, store: Store | None, clock: Clock, test: Testing | None) -> tuple[Store | None, Clock]:
        """For a test: another store and another clock; gives those that were here."""
        before = self._store, self._clock
        self._store, self._clock, self._test = store, clock, test
        return before

    async def threads(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The a-twins: the call, in one of a few threads of our own."""
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads = (os.getpid(), ThreadPoolExecutor(8, thread_name_prefix="genba"))
        return await asyncio.get_running_loop().run_in_executor(self._threads[1], partial(call, *args, **kwargs))


class TaskDecorator:
    """`@app.task(…)`, waiting for its function."""

    def __init__(self, app: Genba, given: Mapping[str, Any]) -> None:
        self._app = app
        self._given = given
        declare({name: value for name, value in given.items() if name not in ("after", "conn")})

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, fn: type[Runs[P, R]], /) -> Task[P, R, Any]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...

    def __call__(self, fn: Any, /) -> Any:
        return self._app._register(fn, self._given)


def _identity(call: Call[Any]) -> str | None:
    options = call.options
    if options.key is not None:
        return key_identity(options.key).hex()
    if not options.once:
        return None
    return identity(call.task, None if options.once == "task" else call.args).hex()


def _who() -> str:
    """For the history: the job that runs here, or whoever this is."""
    job = find_job()
    return operator() if job is None else f"job {job.id}"


def _check_surround(what: str, fn: Any, takes: int) -> None:
    if not callable(fn):
        raise BadTask(f"@app.{what} is for a function, not {fn!r}")
    try:
        inspect.signature(fn).bind(*range(takes))
    except TypeError as error:
        wanted = "(job, call_next)" if takes else "no arguments"
        raise BadTask(f"{getattr(fn, '__qualname__', fn)}: a {what} takes {wanted}: {error}") from error


def _is_name(name: str) -> bool:
    try:
        return bool(task_name(_is_name, name))
    except BadTask:
        return False


__all__ = ["Genba", "UnknownTask"]
