"""Schedule: the handle of a rule that makes jobs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from typing_extensions import Unpack

from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection
from genba.client.job import Job, get_job
from genba.domain.duration import Micros, to_datetime
from genba.domain.schedule import (
    ScheduleRule,
    after_run,
    first_moment,
    rule_to_json,
    upcoming,
)
from genba.errors import BadOption
from genba.options.parse import parse_reason
from genba.options.schedule_rule import RuleOptions, changed_rule
from genba.storage.schedules.rows import NewSchedule, ScheduleRecord

_UNSTARTED = ("scheduled", "blocked", "waiting")


@dataclass(frozen=True, slots=True)
class Tick:
    """One due moment and the job it made, or why it was skipped; several skipped ones are one tick.

    Then `count` says how many, and `last` is the last of them.
    """

    moment: datetime
    job_id: int | None
    skipped: str | None
    last: datetime
    count: int | None
    at: datetime


class Schedule:
    """A rule that makes jobs.  Its attributes are as last seen; `refresh()` reads them again."""

    def __init__(
        self, connection: ClientConnection, name: str, record: ScheduleRecord | None = None
    ) -> None:
        self._connection = connection
        self.name = name
        self._record = record

    def __repr__(self) -> str:
        return f"<Schedule {self.name}>"

    @property
    def record(self) -> ScheduleRecord:
        if self._record is None:
            self.refresh()
        assert self._record is not None
        return self._record

    @property
    def rule(self) -> ScheduleRule:
        return self.record.rule

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def queue(self) -> str:
        return self.record.job.queue

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of its jobs by name, as plain JSON values."""
        return self._connection.by_name(self.record.task, self.record.args)

    @property
    def fault(self) -> str | None:
        """Why its stored rule or job cannot be read; None if both can."""
        return self.record.fault()

    @property
    def paused(self) -> bool:
        return bool(self.record.paused)

    @property
    def reason(self) -> str | None:
        """Why it is paused."""
        return self.record.reason

    @property
    def runs(self) -> int:
        """How many jobs it has made."""
        return self.record.runs

    @property
    def failures(self) -> int:
        """How many of its runs have failed in a row."""
        return self.record.failures

    @property
    def by_hand(self) -> bool:
        """False if code declares it, and may change it."""
        return self.record.owner is None

    def refresh(self) -> Schedule:
        """Read it again; ScheduleNotFound if it was deleted."""
        store = self._connection.store
        store.install()
        self._record = store.schedules.named(self.name)
        return self

    arefresh = async_method(refresh)

    def next(self, n: int = 1) -> list[datetime]:
        """Return its next moments, in its zone; for an interval, as if every run ended at once."""
        if type(n) is not int or n < 0:
            raise BadOption(f"next takes the number of moments, not {n!r}")
        row = self.refresh().record
        begin = self._next_moment(row)
        if begin is None:
            return []
        rule = row.rule
        zone = UTC if rule.is_interval else ZoneInfo(rule.tz)
        # The open run of an interval is counted in `runs`, and `begin` is its moment.
        open_runs = 1 if rule.is_interval and row.next_at is None else 0
        moments = islice(upcoming(rule, begin, row.runs - open_runs), n)
        return [to_datetime(moment).astimezone(zone) for moment in moments]

    anext = async_method(next)

    def _next_moment(self, row: ScheduleRecord) -> Micros | None:
        store = self._connection.store
        rule, now = row.rule, store.now()
        if not rule.is_interval:
            if row.next_at is not None and row.next_at > now and not row.paused:
                return row.next_at
            return first_moment(rule, now, row.runs)
        if row.next_at is not None:
            return max(row.next_at, now)
        runs = [run for run in store.schedules.open_runs(row.id) if run.state != "held"]
        unstarted = [run.moment for run in runs if run.state in _UNSTARTED]
        if unstarted:
            return unstarted[0]
        if runs:  # it is running: the next moment as if it ended now
            return after_run(
                rule, moment=runs[0].moment, started=None, ended=now, runs=row.runs - 1, failures=0
            )
        return None

    def pause(self, reason: str | None = None) -> bool:
        """Start no run until `resume`; a running one continues.  False if it was paused already."""
        return self._connection.store.schedules.pause(self.name, parse_reason(reason))

    apause = async_method(pause)

    def resume(self) -> bool:
        """Go on with the next moment; False if it was not paused."""
        resumed = self._connection.store.schedules.resume(self.name)
        self._connection.wake()
        return resumed

    aresume = async_method(resume)

    def trigger(self) -> Job[Any] | None:
        """Run it once now, even if it is paused; its moments stay.  None if `overlap` forbids it.

        TaskDisabled if an operator has disabled its task.
        """
        job_id = self._connection.store.schedules.trigger(self.name)
        self._connection.wake()
        return None if job_id is None else get_job(self._connection, job_id)

    atrigger = async_method(trigger)

    def set(self, **changes: Unpack[RuleOptions]) -> Schedule:
        """Change options of its rule; None resets one.

        From then on it counts as changed by hand: code that declares it does not change it back.
        """
        connection = self._connection
        store = connection.store
        row = self.refresh().record
        rule = changed_rule(row.rule, changes, store.now(), connection.settings.zone)
        said = "set " + msgspec.json.encode(rule_to_json(rule), order="deterministic").decode()
        store.schedules.put(NewSchedule(name=self.name, rule=rule, job=row.job, said=said))
        connection.wake()
        return self.refresh()

    aset = async_method(set)

    def delete(self) -> None:
        """Delete it; a running job continues.

        If code declares it, the next node that starts adds it again.
        """
        self._connection.store.schedules.delete(self.name)

    adelete = async_method(delete)

    def ticks(self, limit: int = 20) -> list[Tick]:
        """Return its ticks, the latest first."""
        rows = self._connection.store.schedules.ticks(self.record.id, limit)
        return [
            Tick(
                to_datetime(row.moment),
                row.job_id,
                row.skipped,
                to_datetime(row.moment if row.last_moment is None else row.last_moment),
                1 if row.last_moment is None else row.count,
                to_datetime(row.at),
            )
            for row in rows
        ]

    aticks = async_method(ticks)
