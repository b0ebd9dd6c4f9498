"""What is written of a schedule: its row, its runs and its ticks, inside a transaction that somebody else has begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from genba.domain.cron import cron
from genba.domain.duration import Micros, to_datetime
from genba.domain.schedule import ScheduleRule, SkippedTicks, after_run, jitter_of, latest_start
from genba.domain.untrusted_json import DECODE_ERRORS
from genba.errors import BadOption, KeyTaken, ScheduleNotFound, StoreError, TaskDisabled, TaskFull
from genba.storage.engines.database import Transaction
from genba.storage.records import Edge, Enqueued, JobId, NewJob

Insert = Callable[[Transaction, Sequence[NewJob]], list[Enqueued]]
CancelOrHold = Callable[[Transaction, str, JobId, str], bool]

_MOST = 2**31 - 1  # what the columns hold

_json = msgspec.json.Encoder(order="deterministic")


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as somebody asks for it; `said` is what he wrote, to tell whether it has changed."""

    name: str
    rule: ScheduleRule
    job: NewJob
    said: str = ""
    own: dict[str, Any] | None = None  # of a task's own schedule: what its decorator says of it

    def definition(self) -> str:
        template = msgspec.structs.replace(self.job, args=b"")
        return _json.encode({"rule": self.rule, "job": template, "said": self.said}).decode()


def declared_schedules(hello: Mapping[str, Any]) -> list[NewSchedule]:
    """Those that an app has told of."""
    return msgspec.convert(hello.get("schedules", []), list[NewSchedule])


class _Definition(msgspec.Struct, frozen=True):
    rule: ScheduleRule
    job: NewJob
    said: str


_decode = msgspec.json.Decoder(_Definition).decode


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule as last seen (the order is that of the query)."""

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
        """StoreError if it has a fault; those who keep schedules ask for that before."""
        fault = self.fault()
        if fault is not None:
            raise StoreError(f"schedule {self.name!r}: {fault}; declare it again, or delete it")
        return _decode(self.definition)

    def fault(self) -> str | None:
        """Why nobody can tell when it runs, or what: it was damaged, or its time zone is not known here any more."""
        try:
            rule = _decode(self.definition).rule
            if rule.cron is not None:
                cron(rule.cron, rule.tz)
            elif rule.every is None:
                return "it cannot be read: it has neither cron nor every"
        except (*DECODE_ERRORS, BadOption, LookupError, OSError) as error:
            return f"it cannot be read: {error}"
        return None

    def says(self, wanted: NewSchedule) -> bool:
        """Whether this is what is wanted, as it was written."""
        if self.fault() is not None:
            return False
        mine = self._read()
        same = mine.said == wanted.said and self.args == wanted.job.args
        return same and _json.encode(mine.job) == _json.encode(
            msgspec.structs.replace(wanted.job, args=b"")
        )


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One due moment and what came of it; with `last_moment`, several that were skipped together."""

    moment: Micros
    job_id: JobId | None
    skipped: str | None
    last_moment: Micros | None
    count: int | None
    at: Micros


class RunEnd(NamedTuple):
    """A job of a schedule that has come to an end, or is held."""

    schedule_id: int
    job_id: JobId
    state: str


class ScheduledRun(NamedTuple):
    """An open job of a schedule (the order is that of the query)."""

    id: JobId
    state: str
    due_at: Micros
    moment: Micros


class RowsChanged(Exception):
    """A run was written while we took our locks."""


class ScheduleRows:
    def __init__(self, namespace: str, insert: Insert, put_down: CancelOrHold) -> None:
        self._namespace = namespace
        self._insert = insert
        self._put_down = put_down

    def write_run(
        self, tx: Transaction, row: ScheduleRecord, moment: Micros | None
    ) -> ScheduleRecord:
        """The next run of an interval, as a job that waits for `moment`; a paused one keeps the moment only."""
        if moment is None or row.paused:
            return replace(row, next_at=moment)
        row, job = self.make(tx, row, moment)
        if job is not None:
            return replace(row, next_at=None)
        late = max(moment, tx.now())  # refused, or that moment has been: then the one after it
        again = after_run(
            row.rule, moment=late, started=late, ended=late, runs=row.runs, failures=row.failures
        )
        return replace(row, next_at=again)

    def make(
        self, tx: Transaction, row: ScheduleRecord, moment: Micros, after: tuple[Edge, ...] = ()
    ) -> tuple[ScheduleRecord, JobId | None]:
        """The job of this tick; None if the tick has been, or the job is refused (then it is told why)."""
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
            self.tell(
                tx, "schedule_skipped", row.id, row.name, moment=moment, reason=refused, count=1
            )
            return row, None
        tx.run("attach_run", id=id, **tick)
        tx.run("set_tick", job_id=id, skipped=None, **tick)
        return replace(row, runs=row.runs + 1), id

    def free_moment(self, tx: Transaction, row: ScheduleRecord, moment: Micros) -> Micros:
        """The last up to `moment` that no tick has: a clock may stand still, or look twice at the same one."""
        while tx.one("tick_at", schedule_id=row.id, moment=moment):
            moment -= 1
        return moment

    def _due(self, tx: Transaction, row: ScheduleRecord, moment: Micros) -> dict[str, Any]:
        """When its job starts; the jitter of a tick counts from now: a clock that is set back must not put it off."""
        due = moment + jitter_of(row.rule, row.name, moment)
        if row.rule.is_interval or due == moment:
            return {"due_at": due, "delay": 0}
        return {"due_at": None, "delay": max(0, due - tx.now())}

    def _try_insert(self, tx: Transaction, job: NewJob) -> tuple[JobId, str | None]:
        """Its id, or why it must not be."""
        try:
            (made,) = self._insert(tx, [job])
        except (TaskFull, TaskDisabled, KeyTaken) as why:
            return 0, str(why)
        return made.id, None if made.created else f"job {made.id} is in its place"

    def withdraw(
        self, tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun], what: str
    ) -> ScheduleRecord:
        """The run that waits for its moment never was, and does not count."""
        for run in unstarted:
            tx.one("detach_run", id=run.id)
            self._put_down(tx, "cancel", run.id, f"schedule {row.name} was {what}")
            tx.run("delete_tick", schedule_id=row.id, moment=run.moment, job_id=run.id)
        return replace(row, runs=max(0, row.runs - len(unstarted)))

    def busy(self, tx: Transaction, id: int, but: JobId | None = None) -> bool:
        """Whether it has a run that is open, and not held: a held one must not stop the series."""
        return any(run.id != but for run in self.unheld(tx, id))

    def unheld(self, tx: Transaction, id: int) -> list[ScheduledRun]:
        return [run for run in self.runs(tx, id) if run.state != "held"]

    def runs(self, tx: Transaction, id: int) -> list[ScheduledRun]:
        return [ScheduledRun(*row) for row in tx.all("open_runs", id=id)]

    def named(self, tx: Transaction, name: str) -> ScheduleRecord:
        row = tx.one("schedule_named", namespace=self._namespace, name=name)
        if row is None or row[-1]:
            raise ScheduleNotFound(f"there is no schedule {name!r}")
        return ScheduleRecord(*row)

    def locked(self, tx: Transaction, id: int) -> ScheduleRecord | None:
        row = tx.one("lock_schedule", id=id)
        return ScheduleRecord(*row) if row else None

    def with_unstarted(self, tx: Transaction, id: int) -> tuple[ScheduleRecord, list[ScheduledRun]]:
        """The schedule and its runs that have not started, all ours."""
        ours = {row[0] for row in tx.all("lock_unstarted_runs", id=id)}
        row = self.locked(tx, id)
        if row is None:
            raise RowsChanged
        unstarted = [
            run for run in self.runs(tx, id) if run.state in ("blocked", "scheduled", "waiting")
        ]
        if any(run.id not in ours for run in unstarted):
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
            runs=min(row.runs, _MOST),
            failures=min(row.failures, _MOST),
            seen_at=row.seen_at,
            deleted=bool(row.deleted),
        )

    def tell_skip(self, tx: Transaction, row: ScheduleRecord, skip: SkippedTicks | None) -> None:
        if skip is None:
            return
        several = skip.count != 1
        told = tx.one(
            "add_tick",
            schedule_id=row.id,
            moment=skip.moment,
            skipped=skip.reason,
            last_moment=skip.last if several else None,
            count=skip.count,
        )
        if told:
            self.tell(
                tx, "schedule_skipped", row.id, row.name, moment=skip.moment, last=skip.last, count=skip.count,
                reason=skip.reason, at=to_datetime(skip.moment),
            )  # fmt: skip

    def tell(self, tx: Transaction, kind: str, id: int, name: str, **more: Any) -> None:
        data = _json.encode({"schedule": name, "schedule_id": id, **more})
        tx.run("insert_client_event", namespace=self._namespace, kind=kind, job_id=None, data=data)
