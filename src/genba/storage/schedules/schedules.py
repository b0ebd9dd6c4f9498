"""Schedules: rules that make jobs.

A cron rule has its next moment in `next_at`; whichever keeper comes first makes the job of a tick, and moves it on, in
one transaction.  An interval has its next run as a job that waits for its moment, written in the transaction that ends
the run before; only if that was refused does `next_at` say when to try again.

Who needs both locks a schedule's jobs before the schedule: those who end a job cannot do it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from genba.domain.duration import DAY, Micros
from genba.domain.schedule import (
    ON_TIME,
    ScheduleRule,
    SkippedTicks,
    after_run,
    first_moment,
    latest_wait,
    plan_due_ticks,
    skip_ticks,
    waits_too_long,
)
from genba.errors import ScheduleNotFound, StoreError, TaskDisabled
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Edge, JobId
from genba.storage.schedules.rows import (
    CancelOrHold,
    Insert,
    NewSchedule,
    RowsChanged,
    RunEnd,
    ScheduledRun,
    ScheduleRecord,
    ScheduleRows,
    TickRecord,
)

BY_CODE = "code"  # the owner of what nodes declare; what was made by hand has none
UNDECLARED_REASON = "no live node has declared it for an hour"
KEEP_TICKS = 30 * DAY
RECENT = 20  # ticks among which the last run is, unless so many were skipped or triggered since

T = TypeVar("T")


class PastRun(NamedTuple):
    """A run that is over, as `after_run` wants to know it."""

    moment: Micros
    started: Micros | None
    ended: Micros


class Schedules:
    def __init__(
        self, database: Database, namespace: str, insert: Insert, put_down: CancelOrHold
    ) -> None:
        self._db = database
        self._namespace = namespace
        self._series = ScheduleRows(namespace, insert, put_down)

    # look

    def all(self) -> list[ScheduleRecord]:
        with self._db.statement() as tx:
            found = [ScheduleRecord(*row) for row in tx.all("schedules", namespace=self._namespace)]
        return [one for one in found if not one.deleted]

    def named(self, name: str) -> ScheduleRecord:
        """ScheduleNotFound if there is none."""
        with self._db.statement() as tx:
            return self._series.named(tx, name)

    def open_runs(self, id: int) -> list[ScheduledRun]:
        with self._db.statement() as tx:
            return self._series.runs(tx, id)

    def ticks(self, id: int, limit: int) -> list[TickRecord]:
        """The latest first."""
        with self._db.statement() as tx:
            return [TickRecord(*row) for row in tx.all("ticks", schedule_id=id, limit=limit)]

    # make and change

    def put(self, wanted: NewSchedule, owner: str | None = None) -> None:
        """Make it so; the same again changes nothing.  `owner` None: by hand, which code does not overwrite."""
        for _ in range(10):
            with self._db.transaction() as tx:
                created = tx.one(
                    "add_schedule",
                    namespace=self._namespace,
                    name=wanted.name,
                    task=wanted.job.task,
                    definition=wanted.definition(),
                    args=wanted.job.args,
                    owner=owner,
                )
                if created:
                    row = self._series.locked(tx, created[0])
                    assert row is not None
                    self._begin(tx, row)
                    self._series.tell(tx, "schedule_created", row.id, row.name)
                    return
            with suppress(RowsChanged):
                self._put_again(wanted, owner)
                return
        raise StoreError(f"schedule {wanted.name!r} changes too fast to be written")

    def _put_again(self, wanted: NewSchedule, owner: str | None) -> None:
        with self._db.statement() as tx:
            seen = tx.one("schedule_named", namespace=self._namespace, name=wanted.name)
        if seen is None:
            raise RowsChanged
        there = ScheduleRecord(*seen)
        if owner is not None and there.owner is None and not there.deleted:
            return  # made by hand: the code does not own it
        if not there.deleted and there.owner == owner and there.says(wanted):
            return
        with self._db.transaction() as tx:
            row, unstarted = self._series.with_unstarted(tx, there.id)
            if row.deleted:
                row = replace(
                    row, deleted=False, paused=False, reason=None, runs=0, failures=0, next_at=None
                )
            self._redefine(tx, row, wanted, owner, unstarted)

    def _redefine(
        self,
        tx: Transaction,
        row: ScheduleRecord,
        wanted: NewSchedule,
        owner: str | None,
        unstarted: Sequence[ScheduledRun],
    ) -> None:
        now, before = (
            tx.now(),
            row.rule if row.fault() is None else None,
        )  # what is damaged is made anew
        rule = wanted.rule
        moment = self._moment_after_change(tx, row, before, rule, unstarted)
        if before is not None and not before.is_interval and row.next_at is not None:
            self._series.tell_skip(
                tx, row, skip_ticks(before, row.next_at, now, "the schedule was changed")
            )
        if before is None and row.paused and row.reason == row.fault():
            row = replace(row, paused=False, reason=None)
        if before is None or before.is_interval:
            row = self._series.withdraw(tx, row, unstarted, "changed")
        row = replace(
            row, task=wanted.job.task, definition=wanted.definition(), args=wanted.job.args, owner=owner,
            next_at=moment, seen_at=now,
        )  # fmt: skip
        if rule.is_interval and not row.paused and not self._series.busy(tx, row.id):
            row = self._series.write_run(tx, row, moment)
        elif rule.is_interval and not row.paused:
            row = replace(row, next_at=None)  # the run that is under way will write the next one
        self._series.write(tx, row)
        self._series.tell(tx, "schedule_changed", row.id, row.name)

    def _moment_after_change(
        self,
        tx: Transaction,
        row: ScheduleRecord,
        before: ScheduleRule | None,
        rule: ScheduleRule,
        unstarted: Sequence[ScheduledRun],
    ) -> Micros | None:
        now, was_interval = tx.now(), before is not None and before.is_interval
        pending = unstarted[0].moment if unstarted else row.next_at
        pending = pending if was_interval else None
        if rule == before and pending is not None:
            return pending  # only what is run has changed
        runs = row.runs - len(unstarted) if was_interval else row.runs  # what waits is withdrawn
        begin = first_moment(rule, now, runs)
        if (
            begin is None
            or pending is None
            or not rule.is_interval
            or rule.base is not None
            or rule.every is None
        ):
            return begin
        past = self._counted_from(tx, row, rule, unstarted)
        if past is None:  # nothing: it is the first one
            return rule.more(runs, max(begin, min(pending, now + max(0, rule.every))))
        moment = after_run(rule, **past._asdict(), runs=runs, failures=row.failures)
        return None if moment is None else max(begin, moment)

    def _counted_from(
        self,
        tx: Transaction,
        row: ScheduleRecord,
        rule: ScheduleRule,
        unstarted: Sequence[ScheduledRun],
    ) -> PastRun | None:
        """The run that the one that waits was counted from."""
        waiting = {run.id for run in unstarted}
        ticks = [TickRecord(*each) for each in tx.all("ticks", schedule_id=row.id, limit=RECENT)]
        # Written when the one before it had ended; what was written later was triggered, and is not of the rhythm.
        written = min((tick.at for tick in ticks if tick.job_id in waiting), default=None)
        for tick in ticks:
            if (
                tick.job_id is None
                or tick.job_id in waiting
                or (written is not None and tick.at > written)
            ):
                continue
            past = self._past(tx, rule, tick.job_id)
            if past is None and written is not None:  # deleted, or held since then
                past = PastRun(written, None, written)
            return past
        return None

    def _past(
        self, tx: Transaction, rule: ScheduleRule, job: JobId, now: Micros | None = None
    ) -> PastRun | None:
        """A run that is over, `now` if given; None if its job is gone, or has no end."""
        found = tx.one("run_of", id=job)
        if found is None or (now is None and found[3] is None):
            return None
        moment, started, attempt, ended = found
        if attempt > 1 and rule.reference == "start":
            tried = tx.one("first_claim", id=job)
            started = tried[0] if tried and tried[0] is not None else started
        return PastRun(moment, started, ended if now is None else now)

    def declare(self, wanted: Sequence[NewSchedule]) -> None:
        """What a node's app has; by as many nodes as like to."""
        for one in sorted(wanted, key=lambda each: each.name):
            self.put(one, BY_CODE)
        self.still_declared([one.name for one in wanted])

    def undeclare(self, name: str) -> None:
        """It makes no more jobs, unless it was made by hand."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> None:
            if row.owner == BY_CODE:
                self._delete(tx, row, unstarted)

        with suppress(ScheduleNotFound):
            self._change(name, act)

    def still_declared(self, names: Sequence[str]) -> None:
        """They live: what was paused because nobody declared it goes on."""
        if names:
            with self._db.transaction() as tx:
                for name in sorted(names):
                    tx.run(
                        "declared_again",
                        namespace=self._namespace,
                        name=name,
                        undeclared=UNDECLARED_REASON,
                    )

    def abandoned(self) -> list[str]:
        """Those in code that no live node has declared for an hour, by the clock: it may just have been set."""
        with self._db.statement() as tx:
            return [name for (name,) in tx.all("abandoned_schedules", namespace=self._namespace)]

    def pause_abandoned(self, names: Sequence[str]) -> list[str]:
        """Those of them that nobody has declared meanwhile; their names."""
        paused = []
        with self._db.transaction() as tx:
            for name in sorted(names):
                row = tx.one(
                    "pause_abandoned_schedule",
                    namespace=self._namespace,
                    name=name,
                    undeclared=UNDECLARED_REASON,
                )
                if row is not None:
                    paused.append(name)
                    self._series.tell(tx, "schedule_paused", row[0], name, reason=UNDECLARED_REASON)
        return paused

    def pause(self, name: str, reason: str | None = None) -> bool:
        """False if it was paused already."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> bool:
            if row.paused:
                return False
            if row.fault() is None and row.rule.is_interval:
                moment = unstarted[0].moment if unstarted else row.next_at
                row = self._series.withdraw(tx, row, unstarted, "paused")
                row = replace(row, next_at=moment)
            self._series.write(tx, replace(row, paused=True, reason=reason or "paused by hand"))
            self._series.tell(tx, "schedule_paused", row.id, row.name, reason=reason)
            return True

        return self._change(name, act)

    def resume(self, name: str) -> bool:
        """It goes on with its next moment; False if it was not paused."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> bool:
            if not row.paused:
                return False
            now, rule = tx.now(), row.rule
            row = replace(row, paused=False, reason=None, failures=0, seen_at=now)
            if not rule.is_interval:
                if row.next_at is not None:
                    self._series.tell_skip(
                        tx, row, skip_ticks(rule, row.next_at, now, "the schedule was paused")
                    )
                row = replace(row, next_at=first_moment(rule, now, row.runs))
            elif not self._series.busy(tx, row.id):
                planned = row.next_at if row.next_at is not None and row.next_at > now else None
                row = self._series.write_run(tx, row, planned or first_moment(rule, now, row.runs))
            self._series.write(tx, row)
            self._series.tell(tx, "schedule_resumed", row.id, row.name)
            return True

        return self._change(name, act)

    def delete(self, name: str) -> None:
        """It makes no more jobs; one that runs, runs on."""

        self._change(name, self._delete)

    def _delete(
        self, tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]
    ) -> None:
        if row.fault() is None and row.rule.is_interval:
            row = self._series.withdraw(tx, row, unstarted, "deleted")
        self._series.write(tx, replace(row, deleted=True, next_at=None, owner=None))
        self._series.tell(tx, "schedule_deleted", row.id, row.name)

    def end_series(self, id: int, job: JobId) -> None:
        """The schedule that made this job makes no more: deleted, or paused if code would declare it again."""
        with self._db.statement() as tx:
            found = tx.one("schedule_by_id", id=id)
        if found is not None and not found[-1]:
            row = ScheduleRecord(*found)
            if row.owner == BY_CODE:
                self.pause(row.name, f"the series was cancelled with job {job}")
            else:
                self.delete(row.name)

    def trigger(self, name: str) -> JobId | None:
        """One run now, beside the rhythm; None if `overlap` does not allow it, TaskDisabled if its task is."""

        def act(
            tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]
        ) -> JobId | None:
            enabled = tx.one("task_enabled", namespace=self._namespace, name=row.task)
            if enabled is not None and not enabled[0]:
                raise TaskDisabled(
                    f"task {row.task!r} is disabled; to enable it: app.tasks[{row.task!r}].enable()"
                )
            rule, now = row.rule, self._series.free_moment(tx, row, tx.now())
            series = self._series.unheld(tx, row.id)
            waits = [run for run in unstarted if run.state == "scheduled" and rule.is_interval]
            busy = [run for run in series if run not in waits]
            if busy and rule.overlap == "skip":
                self._series.tell_skip(
                    tx,
                    row,
                    SkippedTicks(now, now, 1, f"triggered while job {busy[-1].id} was open"),
                )
                return None
            queued = busy and (rule.is_interval or rule.overlap == "queue")
            after = (Edge(busy[-1].id, "finished"),) if queued else ()
            row, job = self._series.make(tx, row, now, after)
            if job is not None:
                for run in waits:
                    if tx.one("block_run", id=run.id):
                        tx.batch("add_edges", [(run.id, job, "finished")])
                        tx.batch("insert_unsettled", [(job,)], namespace=self._namespace)
                        tx.run(
                            "insert_client_event",
                            namespace=self._namespace,
                            kind="blocked",
                            job_id=run.id,
                            data=None,
                        )
            self._series.write(tx, row)
            if job is not None:
                self._series.tell(tx, "schedule_triggered", row.id, row.name, job=job)
            return job

        return self._change(name, act)

    # keepers

    def fire(self) -> int:
        """Make the jobs of ticks that are due; how many schedules were looked at.  Any number of nodes may do it."""
        with self._db.transaction() as tx:
            rows = [
                ScheduleRecord(*row) for row in tx.all("due_schedules", namespace=self._namespace)
            ]
            for row in rows:
                self._series.write(tx, self._fire(tx, row))
            return len(rows)

    def _fire(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        fault = row.fault()
        if fault is not None:  # the others must not wait for it
            return self._put_aside(tx, row, fault)
        return self._fire_interval(tx, row) if row.rule.is_interval else self._fire_cron(tx, row)

    def _put_aside(self, tx: Transaction, row: ScheduleRecord, fault: str) -> ScheduleRecord:
        if row.paused or row.deleted:
            return row
        self._series.tell(tx, "schedule_paused", row.id, row.name, reason=fault)
        return replace(row, paused=True, reason=fault)

    def _fire_interval(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        """Only if its run could not be written before."""
        if self._series.busy(tx, row.id):
            return replace(row, next_at=None)
        assert row.next_at is not None
        return self._series.write_run(tx, row, row.next_at)

    def _fire_cron(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        rule, now = row.rule, tx.now()
        assert row.next_at is not None
        plan = plan_due_ticks(rule, row.next_at, now, row.runs)
        for skip in plan.skips:
            self._series.tell_skip(tx, row, skip)
        enabled = (
            tx.one("task_enabled", namespace=self._namespace, name=row.task) if plan.runs else None
        )
        for moment in plan.runs:
            if enabled is not None and not enabled[0]:
                self._series.tell_skip(
                    tx, row, SkippedTicks(moment, moment, 1, f"task {row.task} is disabled")
                )
                continue
            busy = [] if rule.overlap == "allow" else self._series.unheld(tx, row.id)
            if busy and rule.overlap == "skip":
                why = f"job {busy[-1].id} of the tick before is {busy[-1].state}"
                self._series.tell_skip(tx, row, SkippedTicks(moment, moment, 1, why))
                continue
            row, _ = self._series.make(
                tx, row, moment, (Edge(busy[-1].id, "finished"),) if busy else ()
            )
        return replace(row, next_at=plan.next_at)

    def replan(self, set_back: bool = False) -> int:
        """Look at all: after a clock was set back nothing must wait for a moment it has had; how many have moved.

        `set_back`: it was, a moment ago.  What was due since then counts; a moment that has had its run has its tick.
        """
        moved = 0
        for row in self.all():
            if row.paused:
                continue
            if row.fault() is not None:
                self._put_aside_alone(row.id)
                continue
            with self._db.statement() as tx:
                now = tx.now()
            if not row.rule.is_interval:
                moved += self._replan_cron(row, now - ON_TIME if set_back else now)
            elif row.next_at is None:
                moved += self._replan_interval(row, now)
        return moved

    def _put_aside_alone(self, id: int) -> None:
        with self._db.transaction() as tx:
            row = self._series.locked(tx, id)
            fault = row.fault() if row is not None else None
            if row is not None and fault is not None:
                self._series.write(tx, self._put_aside(tx, row, fault))

    def _replan_cron(self, row: ScheduleRecord, now: Micros) -> int:
        wanted = first_moment(row.rule, now, row.runs)
        if wanted is None or (row.next_at is not None and row.next_at <= wanted):
            return 0
        with self._db.transaction() as tx:
            return tx.run("replan_schedule", id=row.id, version=row.version, next_at=wanted)

    def _replan_interval(self, row: ScheduleRecord, now: Micros) -> int:
        with self._db.statement() as tx:
            runs = self._series.unheld(tx, row.id)
        if runs and not (
            len(runs) == 1
            and runs[0].state == "scheduled"
            and waits_too_long(row.rule, runs[0].moment, now)
        ):
            return 0

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> int:
            if row.paused or row.next_at is not None:
                return 0
            if unstarted and waits_too_long(row.rule, unstarted[0].moment, now):
                row = self._series.withdraw(
                    tx, row, unstarted, "planned anew: the clock was set back"
                )
                moment = row.rule.more(row.runs, latest_wait(row.rule, now) - row.rule.jitter)
            else:
                moment = first_moment(row.rule, tx.now(), row.runs)  # somebody has deleted its run
            if moment is None or self._series.busy(tx, row.id):
                return 0
            self._series.write(tx, self._series.write_run(tx, row, moment))
            return 1

        try:
            return self._change(row.name, act)
        except ScheduleNotFound:
            return 0

    def prune_ticks(self) -> int:
        """Ticks are kept much longer than any clock is set back; up to 500 of each schedule a call."""
        with self._db.transaction() as tx:
            before = tx.now() - KEEP_TICKS
            rows = tx.all("schedules", namespace=self._namespace)
            return sum(tx.run("prune_ticks", schedule_id=row[0], before=before) for row in rows)

    # jobs end

    def ended(self, tx: Transaction, ends: Sequence[RunEnd]) -> bool:
        """In the transaction that ends them: count, and write the next run of an interval; True if one was written."""
        wrote = False
        for id in sorted({end.schedule_id for end in ends}):  # two that end jobs must not cross
            row = self._series.locked(tx, id)
            if row is None:
                continue
            before = row
            for end in ends:
                if end.schedule_id == id:
                    row = self._after(tx, row, end)
            if row != before:
                self._series.write(tx, row)
                wrote = wrote or row.runs != before.runs
        return wrote

    def _after(self, tx: Transaction, row: ScheduleRecord, end: RunEnd) -> ScheduleRecord:
        fault = row.fault()
        if fault is not None:  # the job ends all the same
            return self._put_aside(tx, row, fault)
        rule = row.rule
        if end.state in ("failed", "timed_out", "held"):
            row = replace(row, failures=row.failures + 1)
        elif end.state == "succeeded":
            row = replace(row, failures=0)
        most = rule.pause_after_failures
        if most is not None and row.failures >= most and not row.paused and not row.deleted:
            reason = f"{row.failures} failures in a row, the last is job {end.job_id}"
            row = replace(row, paused=True, reason=reason)
            self._series.tell(tx, "schedule_paused", row.id, row.name, reason=reason)
        if not rule.is_interval or row.deleted or self._series.busy(tx, row.id, but=end.job_id):
            return row
        past = self._past(tx, rule, end.job_id, tx.now())
        assert past is not None
        moment = after_run(rule, **past._asdict(), runs=row.runs, failures=row.failures)
        return self._series.write_run(tx, row, moment)

    # parts

    def _begin(self, tx: Transaction, row: ScheduleRecord) -> None:
        moment = first_moment(row.rule, tx.now(), row.runs)
        begun = (
            self._series.write_run(tx, row, moment)
            if row.rule.is_interval
            else replace(row, next_at=moment)
        )
        self._series.write(tx, begun)

    def _change(
        self, name: str, act: Callable[[Transaction, ScheduleRecord, Sequence[ScheduledRun]], T]
    ) -> T:
        for _ in range(10):
            with suppress(RowsChanged), self._db.transaction() as tx:
                row, unstarted = self._series.with_unstarted(tx, self._series.named(tx, name).id)
                if row.deleted:
                    raise RowsChanged
                return act(tx, row, unstarted)
        raise StoreError(f"schedule {name!r} changes too fast to be written")
