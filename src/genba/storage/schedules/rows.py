"""The row, the runs and the ticks of a schedule, read and written inside a caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from genba.domain.cron import cron
from genba.domain.duration import Micros, to_datetime
from genba.domain.schedule import ScheduleRule, SkippedTicks, after_run, jitter_of, latest_start
from genba.domain.untrusted_json import DECODE_ERRORS
from genba.errors import BadOption, KeyTaken, ScheduleNotFound, StoreError, TaskDisabled, TaskFull
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Edge, Enqueued, JobId, NewJob

Insert = Callable[[Transaction, Sequence[NewJob]], list[Enqueued]]
CancelOrHold = Callable[[Transaction, str, JobId, str], bool]

_LARGEST = 2**31 - 1  # that the columns hold
_TRIES = 10

T = TypeVar("T")

_json = msgspec.json.Encoder(order="deterministic")


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule to create or change.

    `said` is how it was written, to tell whether it has changed.
    """

    name: str
    rule: ScheduleRule
    job: NewJob
    said: str = ""
    own: dict[str, Any] | None = None  # of a task's own schedule: what its decorator says

    def definition(self) -> str:
        template = msgspec.structs.replace(self.job, args=b"")
        return _json.encode({"rule": self.rule, "job": template, "said": self.said}).decode()


def declared_schedules(hello: Mapping[str, Any]) -> list[NewSchedule]:
    """Read the schedules that an app declares in its hello."""
    return msgspec.convert(hello.get("schedules", []), list[NewSchedule])


class _Definition(msgspec.Struct, frozen=True):
    rule: ScheduleRule
    job: NewJob
    said: str


_decode = msgspec.json.Decoder(_Definition).decode


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule as last seen (in the order of the query)."""

    id: int
    name: str
    task: str
    definition: str
    args: bytes
    owner: str | None
    next_at: Micros | None
    paused: bool
    reason: str | None
    runs: int
    failures: int
    version: int
    seen_at: Micros | None
    deleted: bool

    @property
    def rule(self) -> ScheduleRule:
        return self._read().rule

    @property
    def job(self) -> NewJob:
        return msgspec.structs.replace(self._read().job, args=self.args)

    def _read(self) -> _Definition:
        """Read the definition.

        StoreError if it has a fault, which the callers that make jobs check first.
        """
        fault = self.fault()
        if fault is not None:
            raise StoreError(f"schedule {self.name!r}: {fault}; declare it again, or delete it")
        return _decode(self.definition)

    def fault(self) -> str | None:
        """Say why its definition cannot be used.

        It was damaged, or its time zone is no longer known here.
        """
        try:
            rule = _decode(self.definition).rule
            if rule.cron is not None:
                cron(rule.cron, rule.tz)
            elif rule.every is None:
                return "it cannot be read: it has neither cron nor every"
        except (*DECODE_ERRORS, BadOption, LookupError, OSError) as error:
            return f"it cannot be read: {error}"
        return None

    def matches(self, schedule: NewSchedule) -> bool:
        """Tell whether this is the same schedule, as it was written."""
        if self.fault() is not None:
            return False
        own = self._read()
        same = own.said == schedule.said and self.args == schedule.job.args
        return same and _json.encode(own.job) == _json.encode(
            msgspec.structs.replace(schedule.job, args=b"")
        )


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One due moment and its result; with `last_moment`, several that were skipped together."""

    moment: Micros
    job_id: JobId | None
    skipped: str | None
    last_moment: Micros | None
    count: int | None
    at: Micros


class RunEnd(NamedTuple):
    """A job of a schedule that has ended, or is held."""

    schedule_id: int
    job_id: JobId
    state: str


class ScheduledRun(NamedTuple):
    """An open job of a schedule (in the order of the query)."""

    id: JobId
    state: str
    due_at: Micros
    moment: Micros


class PastRun(NamedTuple):
    """A run that is over, as the arguments of `after_run`."""

    moment: Micros
    started: Micros | None
    ended: Micros


class RowsChanged(Exception):
    """A run was written while the locks were taken: begin again."""


class ScheduleRows:
    def __init__(self, namespace: str, insert: Insert, put_down: CancelOrHold) -> None:
        self._namespace = namespace
        self._insert = insert
        self._put_down = put_down

    def write_run(
        self, tx: Transaction, row: ScheduleRecord, moment: Micros | None
    ) -> ScheduleRecord:
        """Write the next run of an interval as a job that waits for `moment`.

        A paused schedule keeps the moment only.
        """
        if moment is None or row.paused:
            return replace(row, next_at=moment)
        row, job = self.make(tx, row, moment)
        if job is not None:
            return replace(row, next_at=None)
        late = max(moment, tx.now())  # refused, or the moment has had its tick
        next_moment = after_run(
            row.rule, moment=late, started=late, ended=late, runs=row.runs, failures=row.failures
        )
        return replace(row, next_at=next_moment)

    def make(
        self, tx: Transaction, row: ScheduleRecord, moment: Micros, after: tuple[Edge, ...] = ()
    ) -> tuple[ScheduleRecord, JobId | None]:
        """Make the job of this tick.

        None if the tick has been, or the job is refused (an event says why).
        """
        tick = {"schedule_id": row.id, "moment": moment}
        if tx.one("add_tick", skipped=None, last_moment=None, count=None, **tick) is None:
            return row, None
        rule = row.rule
        job = msgspec.structs.replace(row.job, after=after, **self._due(tx, row, moment))
        if (
            rule.is_interval
            and (latest := latest_start(rule, moment)) is not None
            and job.expires_at is None
        ):
            job = msgspec.structs.replace(job, expires_at=latest, expires_in=None)
        id, refused = self._try_insert(tx, job)
        if refused is not None:
            tx.run("set_tick", job_id=None, skipped=refused, **tick)
            self.add_event(
                tx, "schedule_skipped", row.id, row.name, moment=moment, reason=refused, count=1
            )
            return row, None
        tx.run("attach_run", id=id, **tick)
        tx.run("set_tick", job_id=id, skipped=None, **tick)
        return replace(row, runs=row.runs + 1), id

    def free_moment(self, tx: Transaction, row: ScheduleRecord, moment: Micros) -> Micros:
        """Give the last moment up to `moment` that has no tick: the clock may stand still."""
        while tx.one("tick_at", schedule_id=row.id, moment=moment):
            moment -= 1
        return moment

    def _due(self, tx: Transaction, row: ScheduleRecord, moment: Micros) -> dict[str, Any]:
        """Compute when its job starts.

        The jitter of a tick counts from now, so that a clock that is set back does not put it off.
        """
        due = moment + jitter_of(row.rule, row.name, moment)
        if row.rule.is_interval or due == moment:
            return {"due_at": due, "delay": 0}
        return {"due_at": None, "delay": max(0, due - tx.now())}

    def _try_insert(self, tx: Transaction, job: NewJob) -> tuple[JobId, str | None]:
        """Insert the job; gives its id, or why it was refused."""
        try:
            (made,) = self._insert(tx, [job])
        except (TaskFull, TaskDisabled, KeyTaken) as why:
            return 0, str(why)
        return made.id, None if made.created else f"job {made.id} is in its place"

    def withdraw(
        self, tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun], what: str
    ) -> ScheduleRecord:
        """Cancel the waiting run, as if it had never been written."""
        for run in unstarted:
            tx.one("detach_run", id=run.id)
            self._put_down(tx, "cancel", run.id, f"schedule {row.name} was {what}")
            tx.run("delete_tick", schedule_id=row.id, moment=run.moment, job_id=run.id)
        return replace(row, runs=max(0, row.runs - len(unstarted)))

    def busy(self, tx: Transaction, id: int, but: JobId | None = None) -> bool:
        """Tell whether a run is open and not held: a held one must not stop the series."""
        return any(run.id != but for run in self.unheld(tx, id))

    def unheld(self, tx: Transaction, id: int) -> list[ScheduledRun]:
        return [run for run in self.runs(tx, id) if run.state != "held"]

    def runs(self, tx: Transaction, id: int) -> list[ScheduledRun]:
        return [ScheduledRun(*row) for row in tx.all("open_runs", id=id)]

    def all(self, tx: Transaction) -> list[ScheduleRecord]:
        rows = [ScheduleRecord(*row) for row in tx.all("schedules", namespace=self._namespace)]
        return [row for row in rows if not row.deleted]

    def named(self, tx: Transaction, name: str) -> ScheduleRecord:
        row = tx.one("schedule_named", namespace=self._namespace, name=name)
        if row is None or row[-1]:
            raise ScheduleNotFound(f"there is no schedule {name!r}")
        return ScheduleRecord(*row)

    def locked(self, tx: Transaction, id: int) -> ScheduleRecord | None:
        row = tx.one("lock_schedule", id=id)
        return ScheduleRecord(*row) if row else None

    def with_unstarted(self, tx: Transaction, id: int) -> tuple[ScheduleRecord, list[ScheduledRun]]:
        """Lock a schedule and its runs that have not started."""
        locked = {row[0] for row in tx.all("lock_unstarted_runs", id=id)}
        row = self.locked(tx, id)
        if row is None:
            raise RowsChanged
        unstarted = [
            run for run in self.runs(tx, id) if run.state in ("blocked", "scheduled", "waiting")
        ]
        if any(run.id not in locked for run in unstarted):
            raise RowsChanged
        return row, unstarted

    def write(self, tx: Transaction, row: ScheduleRecord) -> None:
        tx.run(
            "write_schedule",
            id=row.id,
            task=row.task,
            definition=row.definition,
            args=row.args,
            owner=row.owner,
            next_at=row.next_at,
            paused=bool(row.paused),
            reason=row.reason,
            runs=min(row.runs, _LARGEST),
            failures=min(row.failures, _LARGEST),
            seen_at=row.seen_at,
            deleted=bool(row.deleted),
        )

    def add_skip_event(
        self, tx: Transaction, row: ScheduleRecord, skip: SkippedTicks | None
    ) -> None:
        if skip is None:
            return
        several = skip.count != 1
        added = tx.one(
            "add_tick",
            schedule_id=row.id,
            moment=skip.moment,
            skipped=skip.reason,
            last_moment=skip.last if several else None,
            count=skip.count,
        )
        if added:
            self.add_event(
                tx,
                "schedule_skipped",
                row.id,
                row.name,
                moment=skip.moment,
                last=skip.last,
                count=skip.count,
                reason=skip.reason,
                at=to_datetime(skip.moment),
            )

    def add_event(self, tx: Transaction, kind: str, id: int, name: str, **data: Any) -> None:
        """Write an event of a schedule."""
        written = _json.encode({"schedule": name, "schedule_id": id, **data})
        tx.run(
            "insert_client_event", namespace=self._namespace, kind=kind, job_id=None, data=written
        )


def past_run(
    tx: Transaction, rule: ScheduleRule, job: JobId, now: Micros | None = None
) -> PastRun | None:
    """Read a run that is over, or that ends `now`; None if its job is gone, or has not ended."""
    row = tx.one("run_of", id=job)
    if row is None or (now is None and row[3] is None):
        return None
    moment, started, attempt, ended = row
    if attempt > 1 and rule.reference == "start":
        claim = tx.one("first_claim", id=job)
        started = claim[0] if claim and claim[0] is not None else started
    return PastRun(moment, started, ended if now is None else now)


def change_schedule(
    database: Database,
    rows: ScheduleRows,
    name: str,
    act: Callable[[Transaction, ScheduleRecord, Sequence[ScheduledRun]], T],
) -> T:
    """Call `act` in a transaction that holds the schedule and its runs that have not started."""
    for _ in range(_TRIES):
        with suppress(RowsChanged), database.transaction() as tx:
            row, unstarted = rows.with_unstarted(tx, rows.named(tx, name).id)
            if row.deleted:
                raise RowsChanged
            return act(tx, row, unstarted)
    raise changes_too_fast(name)


def changes_too_fast(name: str) -> StoreError:
    return StoreError(
        f"schedule {name!r} was changed by others {_TRIES} times while it was written: try again"
    )
