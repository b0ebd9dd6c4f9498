"""Genba: the front door; register, enqueue, query, steer."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar, cast, overload

import msgspec
from typing_extensions import ParamSpec

from genba import settings as settings_module
from genba.arguments import Arguments, encode_plain, identity, key_identity
from genba.domain.clock import SystemClock
from genba.domain.duration import Duration, duration, moment
from genba.domain.states import FINAL, parse_states
from genba.errors import (
    BadOption,
    BadTask,
    GenbaError,
    JobGone,
    JobNotFound,
    UnknownTask,
    WaitTimeout,
)
from genba.explain import Explanation, explain
from genba.job import Group, Job
from genba.launch import NodeHandle
from genba.options import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy, declare, snapshot
from genba.storage.create import create_database
from genba.storage.postgres import masked
from genba.storage.records import Edge, NewJob, NodeRecord
from genba.storage.search import Filter
from genba.storage.store import Store, open_store
from genba.tasks import Call, Runs, Task, task_name
from genba.values import Dep

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Several = str | Iterable[str] | None

_PATIENCE = (0.001, 0.05)  # seconds between two looks of one who waits: from, to


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
    ) -> None:
        self.settings = settings_module.read({"url": url, "namespace": namespace, "lease": lease, "tz": tz})
        self.resolver: Callable[[type], Any] = lambda owner: owner()
        self.lifespans: list[Callable[[], Any]] = []
        self.middlewares: list[Callable[..., Any]] = []
        self._options, self._policy = DEFAULT_OPTIONS, DEFAULT_POLICY
        self._tasks: dict[str, Task[..., Any, Any]] = {}
        self._store: Store | None = None
        self._clock = SystemClock()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
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
            self._store = open_store(self.settings.url, namespace=self.settings.namespace)
        return self._store

    def set_defaults(self, **given: Any) -> None:
        """What tasks registered from now on start from; jobs that are enqueued do not change."""
        self._options, self._policy = declare(given, self._options, self._policy)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
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
        task: Task[..., Any, Any] = Task(self, fn, name, options, policy)
        self._tasks[name] = task
        return task

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
        return {
            "url": self.settings.url,
            "namespace": self.settings.namespace,
            "lease": self.settings.lease,
            "tasks": [task.describe() for task in self._tasks.values()],
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
            for parent, result in self.store.results_of_parents(job_id)
        }

    def moment(self, value: Any) -> int:
        """A moment by this machine's clock, in micros."""
        return moment(value, self._clock.now(), self.settings.zone)

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
        places = {id(call): i for i, call in enumerate(calls)}
        prepared: dict[tuple[int, int], dict[str, Any]] = {}
        jobs = [self._new_job(call, places, prepared) for call in calls]
        done = self.store.enqueue(jobs, conn)
        return [
            Job(self, made.id, created=made.created, arguments=call.arguments)
            for made, call in zip(done, calls, strict=True)
        ]

    async def asubmit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]:
        return await self.threads(self.submit, calls, conn)

    def _new_job(
        self, call: Call[Any], places: Mapping[int, int], prepared: dict[tuple[int, int], dict[str, Any]]
    ) -> NewJob:
        options, policy = call.options, call.policy
        same = (id(options), id(policy))  # most calls of a batch share both
        if same not in prepared:
            prepared[same] = self._row_of(options, policy)
        row = prepared[same]
        if not options.after and options.key is None and not options.once:
            return NewJob(task=call.task, args=call.args, **row)
        return NewJob(
            task=call.task,
            args=call.args,
            after=tuple(self._edge(dep, call, places) for dep in options.after),
            identity=_identity(call),
            **row,
        )

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
        }

    def _edge(self, dep: Dep, call: Call[Any], places: Mapping[int, int]) -> Edge:
        target = dep.job
        if isinstance(target, Call):
            if id(target) not in places:
                raise BadOption(f"after: {target!r} is not in this enqueue_many; enqueue it first, or together")
            if places[id(target)] >= places[id(call)]:
                raise BadOption(f"after: {target!r} must stand before the call that waits for it")
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
        self,
        *,
        state: str | Iterable[str] = "open",
        task: Several = None,
        queue: Several = None,
        tag: Several = None,
        key: Several = None,
        since: Duration | datetime | None = None,
        limit: int = 50,
        before: int | None = None,
    ) -> list[Job[Any]]:
        """Newest first; one value of a kind, or several.  `before` is the id where the last page ended."""
        if type(limit) is not int or limit < 1:
            raise BadOption(f"limit must be a whole number of at least 1, not {limit!r}")
        found = self._filter(state, task, queue, tag, key, since, before)
        self.store.install()
        return [Job(self, record.id, record=record) for record in self.store.search.jobs(found, limit)]

    async def ajobs(
        self,
        *,
        state: str | Iterable[str] = "open",
        task: Several = None,
        queue: Several = None,
        tag: Several = None,
        key: Several = None,
        since: Duration | datetime | None = None,
        limit: int = 50,
        before: int | None = None,
    ) -> list[Job[Any]]:
        return await self.threads(
            self.jobs, state=state, task=task, queue=queue, tag=tag, key=key, since=since, limit=limit, before=before
        )

    def count(
        self,
        *,
        state: str | Iterable[str] = "open",
        task: Several = None,
        queue: Several = None,
        tag: Several = None,
        key: Several = None,
        since: Duration | datetime | None = None,
    ) -> int:
        found = self._filter(state, task, queue, tag, key, since, None)
        self.store.install()
        return self.store.search.count(found)

    async def acount(
        self,
        *,
        state: str | Iterable[str] = "open",
        task: Several = None,
        queue: Several = None,
        tag: Several = None,
        key: Several = None,
        since: Duration | datetime | None = None,
    ) -> int:
        return await self.threads(self.count, state=state, task=task, queue=queue, tag=tag, key=key, since=since)

    def _filter(
        self,
        state: str | Iterable[str],
        task: Several,
        queue: Several,
        tag: Several,
        key: Several,
        since: Duration | datetime | None,
        before: int | None,
    ) -> Filter:
        states = parse_states(state)
        return Filter(
            states=None if states == parse_states("any") else frozenset(states),
            tasks=_several(task),
            queues=_several(queue),
            tags=_several(tag),
            keys=_several(key),
            since=self._since(since),
            before_id=before,
        )

    def _since(self, since: Duration | datetime | None) -> int | None:
        if since is None:
            return None
        if isinstance(since, datetime):
            zoned = since if since.tzinfo else since.replace(tzinfo=self.settings.zone)
            return int(zoned.astimezone(UTC).timestamp() * 1_000_000)
        return self.store.now() - duration(since)

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

    # wait

    def wait(
        self, jobs: Iterable[Job[Any]], *, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        """Until all (or "any") of these are final; gives those that are.  `throw` raises for the first that failed."""
        listed = list(jobs)
        for pause in self._patience(listed, timeout, until):
            if pause:
                time.sleep(pause)
        return self._ended(listed, throw)

    async def await_(
        self, jobs: Iterable[Job[Any]], *, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        listed = list(jobs)
        looks = self._patience(listed, timeout, until)
        while (pause := await self.threads(next, looks, None)) is not None:
            await asyncio.sleep(pause)
        return await self.threads(self._ended, listed, throw)

    def _patience(self, jobs: Sequence[Job[Any]], timeout: Duration | None, until: str) -> Iterator[float]:
        """Pauses between looks, until it is so; WaitTimeout when the time is over."""
        if until not in ("all", "any"):
            raise BadOption(f'until is "all" or "any", not {until!r}')
        deadline = None if timeout is None else time.monotonic() + duration(timeout) / 1_000_000
        open_ids = {job.id for job in jobs}
        pause, longest = _PATIENCE
        before = None
        while open_ids:
            mark = self.store.mark_of_writes()
            if mark != before:
                before = mark
                seen = self.store.states(sorted(open_ids))
                gone = open_ids - seen.keys()
                if gone:
                    raise JobGone(f"job {min(gone)} is not there any more: it was pruned, deleted, or never committed")
                ended = {id for id, state in seen.items() if state in FINAL}
                open_ids -= ended
                if not open_ids or (until == "any" and ended):
                    return
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{len(open_ids)} of {len(jobs)} jobs were not final after {timeout}")
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            yield max(0.0, left * random.uniform(0.8, 1.2))  # noqa: S311  spreads those who wait together
            pause = min(longest, pause * 1.5)

    def _ended(self, jobs: Sequence[Job[Any]], throw: bool) -> list[Job[Any]]:
        states = self.store.states([job.id for job in jobs]) if jobs else {}
        ended = [job for job in jobs if states.get(job.id) in FINAL]
        if throw:
            for job in ended:
                if states[job.id] != "succeeded":
                    raise job.refresh().failure()
        return ended

    # run

    def node(self, target: str | None = None, **given: Any) -> NodeHandle:
        """A node for this app; `run()` starts it as a child and waits for it."""
        return NodeHandle.of(self, target, given)

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


def _check_surround(what: str, fn: Any, takes: int) -> None:
    if not callable(fn):
        raise BadTask(f"@app.{what} is for a function, not {fn!r}")
    try:
        inspect.signature(fn).bind(*range(takes))
    except TypeError as error:
        wanted = "(job, call_next)" if takes else "no arguments"
        raise BadTask(f"{getattr(fn, '__qualname__', fn)}: a {what} takes {wanted}: {error}") from error


def _several(value: Several) -> list[str] | None:
    if value is None:
        return None
    return [value] if isinstance(value, str) else list(value)


def _is_name(name: str) -> bool:
    try:
        return bool(task_name(_is_name, name))
    except BadTask:
        return False


__all__ = ["Genba", "UnknownTask"]
