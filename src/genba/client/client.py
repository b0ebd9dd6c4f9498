"""Client: enqueue, query, change and wait for jobs, and read events, without code of tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from typing_extensions import Unpack

from genba.client import settings as settings_module
from genba.client.admin import AdminClient, prune
from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection
from genba.client.current_job import RunningJob, find_job
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
from genba.client.group import Group, Jobs, each_job
from genba.client.job import Job, await_for, explain_record, get_job, wait_for
from genba.client.lock import HeldLocks, Lock, checked_name
from genba.client.message import JobInbox, Subscription, encode
from genba.client.operators import Queues, Tasks
from genba.client.registry import AnyTask, Registry
from genba.client.schedule import Schedule
from genba.client.settings import Settings
from genba.client.task import Task, listed
from genba.domain.duration import Duration, duration
from genba.domain.states import State
from genba.enqueue.arguments import Arguments
from genba.enqueue.call import Call
from genba.enqueue.new_job import NewJobs
from genba.enqueue.trace import current_traceparent
from genba.errors import BadOption
from genba.options.parse import parse_reason, parse_text
from genba.options.schedule_rule import RuleOptions
from genba.reports.explain import Explanation
from genba.storage.events import EventPosition
from genba.storage.jobs.search import Filter
from genba.storage.schedules.rows import NewSchedule

R = TypeVar("R")

Tell = Callable[[int], None] | None  # called with the number of jobs done so far


class Client(AdminClient):
    """Everything that acts on the store.  An app is a client with code of its own."""

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
        settings = settings_module.read(
            {
                "url": url,
                "namespace": namespace,
                "lease": lease,
                "tz": tz,
                "age_step": age_step,
                "keep_events": keep_events,
                "max_events": max_events,
            }
        )
        self.resolver: Callable[[type], Any] = lambda owner: owner()
        self.registry = Registry(self)
        self.conditions, self.lifespans = self.registry.conditions, self.registry.lifespans
        self.middlewares = self.registry.middlewares
        super().__init__(ClientConnection(settings, self.registry.arguments_of))
        self._new_jobs = NewJobs(self.registry, settings.namespace, settings.zone)
        self._held_locks = HeldLocks()
        self.handlers = EventHandlers(self._connection)
        if defaults:
            self.registry.set_defaults(defaults)

    @property
    def settings(self) -> Settings:
        return self._connection.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        """Use another database, namespace or time zone from now on."""
        self._connection.settings = settings
        self._new_jobs = NewJobs(self.registry, settings.namespace, settings.zone)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self.handlers.close()
        super().close()

    aclose = async_method(close)

    # tasks and queues

    @property
    def tasks(self) -> Tasks:
        """The tasks as an operator sees them: `app.tasks["render"].disable()`."""
        return Tasks(self._connection, self.registry, self._new_jobs)

    @property
    def queues(self) -> Queues:
        """The queues as an operator sees them: `app.queues["render"].pause()`."""
        return Queues(self._connection)

    def make(self, owner: type) -> Any:
        """Make an instance of a class that has a task."""
        return self.resolver(owner)

    def task_table(self) -> dict[str, Task[..., Any, Any]]:
        return self.registry.tasks

    def arguments_of(self, task: str) -> Arguments | None:
        return self.registry.arguments_of(task)

    def by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        """Decode stored arguments by name, with the code or the definition of the task."""
        return self._connection.by_name(task, payload)

    # enqueue

    def enqueue(self, task: AnyTask, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """Enqueue a task of this app, or any task by name.

        The arguments of a task that is not here are not checked; its job waits for a node that
        knows the task.
        """
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
        """Make a call by name, to be enqueued later."""
        return self.registry.call(task, args, kwargs or {}, options or {})

    def enqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        """Enqueue all or nothing, in one round trip; a call may run `after` another in the list."""
        jobs = cast("list[Job[R]]", self.submit(listed(calls), conn))
        return Group(self._connection, jobs)

    async def aenqueue_many(self, calls: Iterable[Call[R]], *, conn: Any = None) -> Group[R]:
        jobs = cast("list[Job[R]]", await self.asubmit(listed(calls), conn))
        return Group(self._connection, jobs)

    def submit(self, calls: Sequence[Call[Any]], conn: Any = None) -> list[Job[Any]]:
        """Enqueue these calls: the common part of `enqueue` and `enqueue_many`."""
        if not calls:
            return []
        connection = self._connection
        trace = current_traceparent(find_job())
        enqueued = self._new_jobs.enqueue(connection.store, calls, conn, trace)
        return [
            Job(connection, made.id, created=made.created, arguments=call.arguments)
            for made, call in zip(enqueued, calls, strict=True)
        ]

    asubmit = async_method(submit)

    # look

    def job(self, id: int | None = None, *, key: str | None = None) -> Job[Any]:
        """Return the handle of an existing job; JobNotFound if there is none."""
        return get_job(self._connection, id, key)

    ajob = async_method(job)

    def jobs(
        self,
        *,
        limit: int = 50,
        before: int | None = None,
        order: str = "newest",
        **filters: Unpack[JobFilters],
    ) -> list[Job[Any]]:
        """Return the jobs that fit, open ones by default, the newest first (or the "oldest").

        `before` is the id where the last page ended: pages neither repeat nor miss a job that was
        there at first.
        """
        if type(limit) is not int or limit < 1:
            raise BadOption(f"limit must be a whole number of at least 1, not {limit!r}")
        connection = self._connection
        jobs = read_filter(connection, filters, before, order)
        self.store.install()
        records = self.store.search.jobs(jobs, limit)
        return [Job(connection, record.id, record=record) for record in records]

    ajobs = async_method(jobs)

    def count(self, **filters: Unpack[JobFilters]) -> int:
        """Count the jobs that fit, open ones by default."""
        jobs = self._filter(filters)
        self.store.install()
        return self.store.search.count(jobs)

    acount = async_method(count)

    def explain(self, job: Job[Any]) -> Explanation:
        """Explain why a job, as it was last seen, is not running."""
        return explain_record(self._connection, job.record)

    def _filter(self, filters: Mapping[str, Any]) -> Filter:
        return read_filter(self._connection, filters)

    # schedules

    def new_schedule(self, name: str, call: Call[Any], rule_options: RuleOptions) -> NewSchedule:
        """Build the schedule `name` for `call`; BadOption for options that make no sense."""
        connection = self._connection
        return self._new_jobs.schedule(connection.store, name, call, rule_options, connection.now())

    def schedules(self) -> list[Schedule]:
        """Return all schedules, by name."""
        self.store.install()
        return [Schedule(self._connection, row.name, row) for row in self.store.schedules.all()]

    aschedules = async_method(schedules)

    def schedule(self, name: str) -> Schedule:
        """Return the handle of an existing schedule; ScheduleNotFound if there is none."""
        return Schedule(self._connection, name).refresh()

    aschedule = async_method(schedule)

    # locks

    def mutex(self, name: str, wait: Duration | None = None) -> Lock:
        """Make the handle of a lock with one holder: `with app.mutex("stock/7") as lock:`.

        `wait`: None for ever, 0 only tries (`if not lock:`), otherwise LockTimeout when it is over.
        """
        return self.semaphore(name, 1, wait)

    def semaphore(self, name: str, n: int, wait: Duration | None = None) -> Lock:
        """Make the handle of a lock with up to `n` holders at a time; `wait` as in `mutex`."""
        return Lock(self._connection, self._held_locks, name, n, wait)

    # messages

    def publish(self, topic: str, data: Any) -> int:
        """Send to all current subscribers of `topic`, in order; returns their number.

        Without a subscriber the message is lost.
        """
        checked_name("topic", topic)
        self.store.install()
        return self.store.messages.publish(topic, encode(data))

    apublish = async_method(publish)

    def subscribe(self, topic: str) -> Subscription:
        """Receive what is published to `topic` from now on: `with app.subscribe(…) as topic:`."""
        return Subscription(self._connection, checked_name("topic", topic))

    asubscribe = async_method(subscribe)

    def inbox(self, job: RunningJob) -> JobInbox:
        """Open the inbox of the job that this worker runs."""
        self.store.install()
        return JobInbox(self._connection, job)

    # many jobs

    def cancel_many(
        self,
        *,
        reason: str | None = None,
        dry_run: bool = False,
        tell: Tell = None,
        **filters: Unpack[JobFilters],
    ) -> int:
        """Cancel all that fit, and ask running ones to stop; returns how many there are.

        With `dry_run` it only counts.  `tell` is called with the number so far after every few
        hundred.
        """
        jobs, why = self._filter(filters), parse_reason(reason)
        return self._each(jobs, lambda ids: self.store.cancel_all(ids, why), dry_run, tell)

    acancel_many = async_method(cancel_many)

    def hold_many(
        self,
        *,
        reason: str,
        dry_run: bool = False,
        tell: Tell = None,
        **filters: Unpack[JobFilters],
    ) -> int:
        """Hold all that fit and have not started; returns how many."""
        jobs = self._filter({"state": ("blocked", "scheduled", "waiting"), **filters})
        why = parse_text("reason", reason)
        return self._each(jobs, lambda ids: self.store.bulk.hold(ids, why), dry_run, tell)

    ahold_many = async_method(hold_many)

    def resume_many(
        self, *, dry_run: bool = False, tell: Tell = None, **filters: Unpack[JobFilters]
    ) -> int:
        """Let all that fit and are held go on; returns how many."""
        jobs = self._filter({"state": "held", **filters})
        return self._each(jobs, self.store.bulk.resume, dry_run, tell)

    aresume_many = async_method(resume_many)

    def requeue_many(
        self, *, dry_run: bool = False, tell: Tell = None, **filters: Unpack[JobFilters]
    ) -> int:
        """Run all final jobs that fit again, by default the unsuccessful ones; returns how many."""
        jobs = self._filter({"state": ("failed", "timed_out", "cancelled"), **filters})
        return self._each(jobs, self.store.bulk.requeue, dry_run, tell)

    arequeue_many = async_method(requeue_many)

    def delete_many(
        self, *, dry_run: bool = False, tell: Tell = None, **filters: Unpack[JobFilters]
    ) -> int:
        """Delete all that fit with their history, by default the final ones; returns how many.

        Running jobs are never deleted.
        """
        jobs = self._filter({"state": "final", **filters})
        jobs = replace(jobs, states=jobs.allowed_states() - {State.RUNNING})
        # A job that waits for another is the younger one.  It goes first, or the end of the other
        # would end it too.
        return self._each(jobs, self.store.bulk.delete, dry_run, tell, newest_first=True)

    adelete_many = async_method(delete_many)

    def group(self, jobs: Sequence[Job[R]]) -> Group[R]:
        """Return these jobs as one group, for its progress."""
        return Group(self._connection, jobs)

    def delete_job(self, id: int) -> bool:
        """Delete one job with its history, unless it runs; whether it was deleted."""
        return self.store.bulk.delete([id]) > 0

    def flush(
        self, *, running: bool = False, schedules: bool = False, queue: OneOrMany = None
    ) -> int:
        """Delete every open job that does not run, of all queues or some; returns how many.

        With `running` the running ones are killed and end cancelled; with `schedules` all schedules
        are deleted first.
        """
        if schedules:
            for schedule in self.schedules():
                schedule.delete()
        deleted = self.delete_many(state=("blocked", "scheduled", "waiting", "held"), queue=queue)
        if not running:
            return deleted
        jobs = self._filter({"state": "running", "queue": queue})
        kill = self.store.steering.kill
        return deleted + self._each(jobs, lambda ids: kill(ids, "flushed"), False, None)

    aflush = async_method(flush)

    def prune(self, older_than: Duration | None = None) -> int:
        """Delete final jobs older than this, or than their task keeps them; returns how many.

        Nodes do the latter anyway.
        """
        keep_in_code = {name: task.policy.keep for name, task in self.registry.tasks.items()}
        age = None if older_than is None else duration(older_than)
        return prune(self.store, age, keep_in_code)

    aprune = async_method(prune)

    def _each(
        self,
        jobs: Filter,
        act: Callable[[Sequence[int]], int],
        dry_run: bool,
        tell: Tell,
        newest_first: bool = False,
    ) -> int:
        self.store.install()
        if dry_run:
            return self.store.search.count(jobs)
        return self.store.bulk.each(jobs, act, tell, newest_first=newest_first)

    # wait

    def wait(
        self, *jobs: Jobs, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        """Wait until all (or "any") of these are final, and return those that are.

        Takes jobs, groups, and iterables of such.  With `throw` it raises for the first that
        failed.
        """
        return wait_for(self._connection, list(each_job(jobs)), timeout, until, throw)

    async def await_(
        self, *jobs: Jobs, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> list[Job[Any]]:
        return await await_for(self._connection, list(each_job(jobs)), timeout, until, throw)

    # events

    def newest_event(self) -> str:
        """Return the cursor of the newest event, for `events(after=…)`."""
        self.store.install()
        return self.store.events.end().cursor

    def events(
        self,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
        block: bool = False,
    ) -> Iterator[Event]:
        """Yield what has happened, in order for each job; events that commit late are not skipped.

        It starts at the oldest kept event, or after the one with this `cursor`; CursorExpired if
        the events after it are gone.  With `block` it goes on for ever.
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

    def listen(
        self,
        callback: Callback,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
    ) -> None:
        """Call back for new events (of a `job`: from its first on), until that returns true."""
        call_until_true(self._reader_from_now(after, kinds, job, task).follow(True), callback)

    async def alisten(
        self,
        callback: Callback,
        *,
        after: str | None = None,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
    ) -> None:
        reader = await self.threads(self._reader_from_now, after, kinds, job, task)
        await acall_until_true(reader.afollow(True), callback)

    def _reader(
        self, after: str | None, kinds: EventNames, job: Any, task: EventNames
    ) -> EventReader:
        self.store.install()
        position = EventPosition() if after is None else EventPosition.of(after)
        return EventReader(self._connection, position, kinds, job, task)

    def _reader_from_now(
        self, after: str | None, kinds: EventNames, job: Any, task: EventNames
    ) -> EventReader:
        if after is not None or job is not None:
            return self._reader(after, kinds, job, task)
        self.store.install()
        return EventReader(self._connection, self.store.events.end(), kinds, job, task)
