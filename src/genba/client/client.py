"""Client: enqueue, query, steer, wait and listen; it needs no code of the tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import ParamSpec, Unpack

from genba.client import operators
from genba.client import settings as settings_module
from genba.client.async_methods import twin
from genba.client.connection import ClientConnection
from genba.client.current_job import RunningJob
from genba.client.event import Event
from genba.client.event_reader import (
    Callback,
    EventHandlers,
    EventNames,
    EventReader,
    acall_until_true,
    call_until_true,
)
from genba.client.filters import JobFilters, OneOrMany, read_filter
from genba.client.job import Group, Job, Jobs, each_job
from genba.client.lock import HeldLocks, Lock, LockState, checked_name, lock_states
from genba.client.message import JobInbox, Subscription, encode
from genba.client.operators import Queues, Tasks, who
from genba.client.registry import AnyTask, Registry
from genba.client.schedule import Schedule, When
from genba.client.task import Call, Task, listed
from genba.client.waiting import WaitThread
from genba.domain.duration import Duration, duration
from genba.domain.states import FINAL, State
from genba.domain.untrusted_json import DECODE_ERRORS, UNREADABLE
from genba.enqueue.arguments import POSITIONAL_KEY, Arguments, arguments_by_name
from genba.enqueue.new_job import NewJobs
from genba.errors import (
    BadOption,
    JobNotFound,
)
from genba.options.parse import parse_job_id, parse_reason, parse_text
from genba.reports.doctor import Finding, examine
from genba.reports.explain import Explanation, explain
from genba.reports.overview import Overview, read_overview
from genba.storage.events import EventPosition
from genba.storage.jobs.search import Filter
from genba.storage.records import NodeRecord
from genba.storage.schedules.rows import NewSchedule

if TYPE_CHECKING:
    pass

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Tell = Callable[[int], None] | None  # who wants to know how far it is


class Client(ClientConnection):
    """Everything that acts on the store.  An app is one, with code of its own."""

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        lease: Duration | None = None,
        tz: str | None = None,
        age_step: Duration | None = None,
        keep_events: Duration | None = None,
        max_events: int | None = None,
    ) -> None:
        given = {"url": url, "namespace": namespace, "lease": lease, "tz": tz, "age_step": age_step}
        super().__init__(
            settings_module.read({**given, "keep_events": keep_events, "max_events": max_events})
        )
        self.resolver: Callable[[type], Any] = lambda owner: owner()
        self.registry = Registry(self)
        self.conditions, self.lifespans = self.registry.conditions, self.registry.lifespans
        self.middlewares = self.registry.middlewares
        self._intake = NewJobs(self, self.registry)
        self.held_locks = HeldLocks()
        self._waiter = WaitThread(lambda: self.store)
        self.handlers = EventHandlers(self)
        if defaults:
            self.registry.set_defaults(defaults)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self.handlers.close()
        with self._waiter.at_rest():
            super().close()

    aclose = twin(close)

    # tasks and queues

    @property
    def tasks(self) -> Tasks:
        """The tasks as operators see them: `app.tasks["render"].disable()`."""
        return Tasks(self)

    @property
    def queues(self) -> Queues:
        """The queues as operators see them: `app.queues["render"].pause()`."""
        return Queues(self)

    def make(self, owner: type) -> Any:
        """An instance of a class that has a task."""
        return self.resolver(owner)

    def task_table(self) -> dict[str, Task[..., Any, Any]]:
        return self.registry.tasks

    def arguments_of(self, task: str) -> Arguments | None:
        known = self.registry.tasks.get(task)
        return known.arguments if known is not None else None

    def by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        """Stored arguments by name, as the code of the task says, or as a node has told if that is elsewhere."""
        try:
            return self._by_name(task, payload)
        except (
            *DECODE_ERRORS,
            LookupError,
        ):  # somebody else has written them, or what is told of the task
            return {UNREADABLE: None}

    def _by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        known = self.arguments_of(task)
        if known is not None:
            return known.by_name(payload)
        plain = arguments_by_name(payload, ())
        told = self.store.definitions([task]) if POSITIONAL_KEY in plain else {}
        parameters = told[task].get("parameters", ()) if task in told else ()
        return (
            arguments_by_name(payload, ((one["name"], one["kind"]) for one in parameters))
            if parameters
            else plain
        )

    # jobs come in

    def enqueue(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """A task of this app, or any by name; one that is not here is unchecked, and waits for a node that knows it."""
        return self.submit([self.call(task, args, kwargs)])[0]

    async def aenqueue(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> Job[Any]:
        return (await self.asubmit([self.call(task, args, kwargs)]))[0]

    def call(
        self,
        task: AnyTask,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Call[Any]:
        """A call by name, to be enqueued later."""
        return self.registry.call(task, args, kwargs or {}, options or {})

    def enqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        """All or nothing, in one round trip; a call may run `after` another one of the same list."""
        return Group(self, cast("list[Job[R]]", self.submit(listed(calls), conn)))

    async def aenqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        return Group(self, cast("list[Job[R]]", await self.asubmit(listed(calls), conn)))

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]:
        """Enqueue these calls; what `enqueue` and `enqueue_many` have in common."""
        return self._intake.submit(calls, conn) if calls else []

    asubmit = twin(submit)

    def wake(self) -> None:
        """Tell idle nodes to look; after the commit of a transaction that `conn=` enqueued in."""
        self.store.node_wakeups.ring(self.settings.namespace, None)

    awake = twin(wake)

    # look

    def job(self, id: int | None = None, *, key: str | None = None) -> Job[Any]:
        """The handle of a job that is there; JobNotFound otherwise."""
        if (id is None) == (key is None):
            raise BadOption("job() takes an id, or key=…")
        record = (
            self.store.job(parse_job_id("id", id))
            if key is None
            else self.store.job(key=parse_text("key", key))
        )
        if record is None:
            raise JobNotFound(f"there is no job {id if key is None else f'with key {key!r}'}")
        return Job(self, record.id, record=record)

    ajob = twin(job)

    def jobs(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        order: str = "newest",
        **wanted: Unpack[JobFilters],
    ) -> list[Job[Any]]:
        """Those that fit, open ones by default, the newest first (or the "oldest").

        `before` is the id where the last page ended: pages neither repeat nor miss a job that was there at first.
        """
        if type(limit) is not int or limit < 1:
            raise BadOption(f"limit must be a whole number of at least 1, not {limit!r}")
        found = read_filter(self, wanted, before, order)
        self.store.install()
        return [
            Job(self, record.id, record=record) for record in self.store.search.jobs(found, limit)
        ]

    ajobs = twin(jobs)

    def count(self, **wanted: Unpack[JobFilters]) -> int:
        found = read_filter(self, wanted)
        self.store.install()
        return self.store.search.count(found)

    acount = twin(count)

    def overview(self, limit: int = 20) -> Overview:
        """Queues, nodes, and the newest `limit` of the jobs that run and that have failed, at one look."""
        return read_overview(self, limit)

    aoverview = twin(overview)

    def doctor(self) -> list[Finding]:
        """What is wrong with database and nodes, first; then what else there is to know."""
        return examine(self.store)

    adoctor = twin(doctor)

    def explain(self, job: Job[Any]) -> Explanation:
        return explain(self.store, job.record, None if self._test is None else self.task_table())

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive."""
        self.store.install()
        return self.store.nodes.live()

    anodes = twin(nodes)

    def node_names(self) -> dict[int, str]:
        """The names of the nodes that are alive, and of those that ended lately, by the ids that attempts have."""
        self.store.install()
        return self.store.nodes.names()

    anode_names = twin(node_names)

    def tell_node(self, name: str, verb: str, changes: Mapping[str, Any] | None = None) -> None:
        """Let the living node `name` "drain", "stop" (a drain without its grace), or "set" pool, min or max."""
        self.store.install()
        operators.tell_node(self.store, name, verb, changes)

    atell_node = twin(tell_node)

    def wanted(self, name: str, call: Call[Any], when: When) -> NewSchedule:
        """The schedule `name` for `call`; BadOption for what makes no sense."""
        return self._intake.wanted(name, call, when, self._clock.now())

    def schedules(self) -> list[Schedule]:
        """All of them, by name."""
        self.store.install()
        return [Schedule(self, row.name, row) for row in self.store.schedules.all()]

    aschedules = twin(schedules)

    def schedule(self, name: str) -> Schedule:
        """The handle of a schedule that is there; ScheduleNotFound otherwise."""
        return Schedule(self, name).refresh()

    aschedule = twin(schedule)

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

    alocks = twin(locks)

    def break_lock(
        self, name: str, *, token: int | None = None, by: str | None = None
    ) -> list[int]:
        """Take a lock from whoever holds it, who is not stopped; gives the tokens that are worth nothing any more."""
        self.store.install()
        return self.store.locks.break_(name, token, by or who())

    abreak_lock = twin(break_lock)

    def set_limit(self, template: str, n: int | None) -> None:
        """Let `n` jobs of each bucket of `Limit(template, …)` run at a time, whatever the code says; None: as it says.

        A smaller n stops nobody, but starts nobody either until there is room.  BadOption, if there is no such limit.
        """
        self.store.policy.set_limit(template, n, who())

    aset_limit = twin(set_limit)

    # messages

    def publish(self, topic: str, data: Any) -> int:
        """To all who are subscribed to `topic` at this moment, in order; how many they are.  For nobody it is gone."""
        checked_name("topic", topic)
        self.store.install()
        return self.store.messages.publish(topic, encode(data))

    apublish = twin(publish)

    def subscribe(self, topic: str) -> Subscription:
        """What is published to `topic` from now on: `with app.subscribe("t") as messages: for message in messages:`."""
        return Subscription(self, checked_name("topic", topic))

    asubscribe = twin(subscribe)

    def inbox(self, job: RunningJob) -> JobInbox:
        """For the worker: the messages to the job that it runs."""
        self.store.install()
        return JobInbox(self, job)

    def update(self, id: int, changes: Mapping[str, Any]) -> bool:
        """What `job.update` does."""
        return operators.update(self.store, id, changes, self.settings.zone)

    # many at once

    def cancel_many(
        self,
        *,
        reason: str | None = None,
        dry_run: bool = False,
        tell: Tell = None,
        **wanted: Unpack[JobFilters],
    ) -> int:
        """Cancel all that fit, or ask them to stop; how many.  With `dry_run`: how many it would be.

        `tell` is called after every few hundred, with how many there were.
        """
        found, why = read_filter(self, wanted), parse_reason(reason)
        return self._each(found, lambda ids: self.store.cancel_all(ids, why), dry_run, tell)

    acancel_many = twin(cancel_many)

    def hold_many(
        self, *, reason: str, dry_run: bool = False, tell: Tell = None, **wanted: Unpack[JobFilters]
    ) -> int:
        """Hold all that fit and have not started; how many."""
        found = read_filter(self, {"state": ("blocked", "scheduled", "waiting"), **wanted})
        why = parse_text("reason", reason)
        return self._each(found, lambda ids: self.store.bulk.hold(ids, why), dry_run, tell)

    ahold_many = twin(hold_many)

    def resume_many(
        self, *, dry_run: bool = False, tell: Tell = None, **wanted: Unpack[JobFilters]
    ) -> int:
        """Let all that fit and are held go on; how many."""
        return self._each(
            read_filter(self, {"state": "held", **wanted}), self.store.bulk.resume, dry_run, tell
        )

    aresume_many = twin(resume_many)

    def requeue_many(
        self, *, dry_run: bool = False, tell: Tell = None, **wanted: Unpack[JobFilters]
    ) -> int:
        """Run again all that fit and are final, by default those that have not succeeded; how many."""
        found = read_filter(self, {"state": ("failed", "timed_out", "cancelled"), **wanted})
        return self._each(found, self.store.bulk.requeue, dry_run, tell)

    arequeue_many = twin(requeue_many)

    def delete_many(
        self, *, dry_run: bool = False, tell: Tell = None, **wanted: Unpack[JobFilters]
    ) -> int:
        """Delete all that fit, by default the final ones, with their history; never one that runs.  How many."""
        found = read_filter(self, {"state": "final", **wanted})
        found = replace(found, states=found.wanted_states() - {State.RUNNING})
        # Whoever waits for another is younger: he must go first, or he would learn that the other was deleted.
        return self._each(found, self.store.bulk.delete, dry_run, tell, down=True)

    adelete_many = twin(delete_many)

    def flush(
        self, *, running: bool = False, schedules: bool = False, queue: OneOrMany = None
    ) -> int:
        """Delete every job that is open and does not run, of all queues or some; how many.

        With `running` those that run are killed too, and end cancelled.  With `schedules` nothing makes new ones.
        """
        if schedules:
            for schedule in self.schedules():
                schedule.delete()
        gone = self.delete_many(state=("blocked", "scheduled", "waiting", "held"), queue=queue)
        if running:
            found = read_filter(self, {"state": "running", "queue": queue})
            gone += self._each(found, lambda ids: self.store.bulk.kill(ids, "flushed"), False, None)
        return gone

    aflush = twin(flush)

    def prune(self, older_than: Duration | None = None) -> int:
        """Delete final jobs older than this, or than their task wants them kept (as nodes do anyway); how many."""
        code = {name: task.policy.keep for name, task in self.task_table().items()}
        return operators.prune(
            self.store, None if older_than is None else duration(older_than), code
        )

    aprune = twin(prune)

    def _each(
        self,
        found: Filter,
        act: Callable[[Sequence[int]], int],
        dry_run: bool,
        tell: Tell,
        down: bool = False,
    ) -> int:
        self.store.install()
        return (
            self.store.search.count(found)
            if dry_run
            else self.store.bulk.each(found, act, tell, down=down)
        )

    # wait

    def wait(
        self, *jobs: Jobs, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        """Until all (or "any") of these are final; gives those that are.  `throw` raises for the first that failed.

        Takes jobs, groups, and iterables of such.
        """
        listed = list(each_job(jobs))
        if self._test is not None:
            self._test.wait(listed, until)
        else:
            self._waiter.wait([job.id for job in listed], until, throw, timeout)
        return self._ended(listed, throw)

    async def await_(
        self, *jobs: Jobs, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        listed = list(each_job(jobs))
        if self._test is not None:
            return await self.threads(self.wait, listed, until=until, throw=throw)
        await self._waiter.await_([job.id for job in listed], until, throw, timeout)
        return await self.threads(self._ended, listed, throw)

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
        self,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
        block: bool = False,
    ) -> Iterator[Event]:
        """What has happened, in order for each job; nothing that commits late is skipped.

        From the oldest event that is kept, or behind the one whose `cursor` is given; CursorExpired if what follows
        it is gone.  With `block` it goes on for ever.
        """
        return self._reader(after, kinds, job, task).follow(block)

    def aevents(
        self,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
        block: bool = False,
    ) -> AsyncIterator[Event]:
        return self._reader(after, kinds, job, task).afollow(block)

    def _reader(
        self, after: str | None, kinds: EventNames, job: Any, task: EventNames
    ) -> EventReader:
        self.store.install()
        return EventReader(
            self, EventPosition() if after is None else EventPosition.of(after), kinds, job, task
        )

    def listen(
        self,
        callback: Callback,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
    ) -> None:
        """Call back for what happens from now on (of a `job`: from its beginning), until it returns something true."""
        call_until_true(self._from_now(after, kinds, job, task).follow(True), callback)

    async def alisten(
        self,
        callback: Callback,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
    ) -> None:
        reader = await self.threads(self._from_now, after, kinds, job, task)
        await acall_until_true(reader.afollow(True), callback)

    def _from_now(
        self, after: str | None, kinds: EventNames, job: Any, task: EventNames
    ) -> EventReader:
        if after is not None or job is not None:
            return self._reader(after, kinds, job, task)
        self.store.install()
        return EventReader(self, self.store.events.end(), kinds, job, task)
