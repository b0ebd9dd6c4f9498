"""Make the jobs of due ticks, and the next run of an interval when a run has ended.

A cron rule has its next moment in `next_at`.  The first node that sees it due makes the job of the
tick and moves `next_at` on, in one transaction.  An interval has its next run as a job that waits
for its moment, written in the transaction that ends the run before.  Only if that was refused does
`next_at` say when to try again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genba.domain.duration import DAY, Micros
from genba.domain.schedule import (
    ON_TIME,
    SkippedTicks,
    after_run,
    first_moment,
    latest_wait,
    plan_due_ticks,
    waits_too_long,
)
from genba.errors import ScheduleNotFound
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Edge
from genba.storage.schedules.rows import (
    CancelOrHold,
    Insert,
    RunEnd,
    ScheduledRun,
    ScheduleRecord,
    ScheduleRows,
    change_schedule,
    past_run,
)

KEEP_TICKS_US = 30 * DAY


class Ticks:
    def __init__(
        self, database: Database, namespace: str, insert: Insert, cancel_or_hold: CancelOrHold
    ) -> None:
        self._db = database
        self._namespace = namespace
        self._rows = ScheduleRows(namespace, insert, cancel_or_hold)

    def fire(self) -> int:
        """Make the jobs of due ticks; how many schedules were due.

        Any number of nodes may do it.
        """
        with self._db.transaction() as tx:
            rows = [
                ScheduleRecord(*row) for row in tx.all("due_schedules", namespace=self._namespace)
            ]
            for row in rows:
                self._rows.write(tx, self._fire(tx, row))
            return len(rows)

    def _fire(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        fault = row.fault()
        if fault is not None:  # the other schedules must not wait for this one
            return self._pause_faulty(tx, row, fault)
        return self._fire_interval(tx, row) if row.rule.is_interval else self._fire_cron(tx, row)

    def _pause_faulty(self, tx: Transaction, row: ScheduleRecord, fault: str) -> ScheduleRecord:
        if row.paused or row.deleted:
            return row
        self._rows.add_event(tx, "schedule_paused", row.id, row.name, reason=fault)
        return replace(row, paused=True, reason=fault)

    def _fire_interval(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        """Write the run of an interval that could not be written before."""
        if self._rows.busy(tx, row.id):
            return replace(row, next_at=None)
        assert row.next_at is not None
        return self._rows.write_run(tx, row, row.next_at)

    def _fire_cron(self, tx: Transaction, row: ScheduleRecord) -> ScheduleRecord:
        rule, now = row.rule, tx.now()
        assert row.next_at is not None
        plan = plan_due_ticks(rule, row.next_at, now, row.runs)
        for skip in plan.skips:
            self._rows.add_skip_event(tx, row, skip)
        enabled = (
            tx.one("task_enabled", namespace=self._namespace, name=row.task) if plan.runs else None
        )
        for moment in plan.runs:
            if enabled is not None and not enabled[0]:
                self._rows.add_skip_event(
                    tx, row, SkippedTicks(moment, moment, 1, f"task {row.task} is disabled")
                )
                continue
            busy = [] if rule.overlap == "allow" else self._rows.unheld(tx, row.id)
            if busy and rule.overlap == "skip":
                why = f"job {busy[-1].id} of the tick before is {busy[-1].state}"
                self._rows.add_skip_event(tx, row, SkippedTicks(moment, moment, 1, why))
                continue
            row, _ = self._rows.make(
                tx, row, moment, (Edge(busy[-1].id, "finished"),) if busy else ()
            )
        return replace(row, next_at=plan.next_at)

    def replan(self, set_back: bool = False) -> int:
        """Look at all schedules again, so that none waits for a moment that has been.

        How many have moved.

        `set_back`: the clock was set back a moment ago.  Ticks that were due since then count; a
        moment that has had its run has its tick.
        """
        moved = 0
        with self._db.statement() as tx:
            schedules = self._rows.all(tx)
        for row in schedules:
            if row.paused:
                continue
            if row.fault() is not None:
                self._pause_faulty_alone(row.id)
                continue
            with self._db.statement() as tx:
                now = tx.now()
            if not row.rule.is_interval:
                moved += self._replan_cron(row, now - ON_TIME if set_back else now)
            elif row.next_at is None:
                moved += self._replan_interval(row, now)
        return moved

    def _pause_faulty_alone(self, id: int) -> None:
        with self._db.transaction() as tx:
            row = self._rows.locked(tx, id)
            fault = row.fault() if row is not None else None
            if row is not None and fault is not None:
                self._rows.write(tx, self._pause_faulty(tx, row, fault))

    def _replan_cron(self, row: ScheduleRecord, now: Micros) -> int:
        moment = first_moment(row.rule, now, row.runs)
        if moment is None or (row.next_at is not None and row.next_at <= moment):
            return 0
        with self._db.transaction() as tx:
            return tx.run("replan_schedule", id=row.id, version=row.version, next_at=moment)

    def _replan_interval(self, row: ScheduleRecord, now: Micros) -> int:
        with self._db.statement() as tx:
            runs = self._rows.unheld(tx, row.id)
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
                row = self._rows.withdraw(
                    tx, row, unstarted, "planned again: the clock was set back"
                )
                moment = row.rule.more(row.runs, latest_wait(row.rule, now) - row.rule.jitter)
            else:
                moment = first_moment(row.rule, tx.now(), row.runs)  # its run was deleted
            if moment is None or self._rows.busy(tx, row.id):
                return 0
            self._rows.write(tx, self._rows.write_run(tx, row, moment))
            return 1

        try:
            return change_schedule(self._db, self._rows, row.name, act)
        except ScheduleNotFound:
            return 0

    def prune_ticks(self) -> int:
        """Delete old ticks, up to 500 of each schedule in one call; how many.

        They are kept much longer than any clock is set back.
        """
        with self._db.transaction() as tx:
            before = tx.now() - KEEP_TICKS_US
            rows = tx.all("schedules", namespace=self._namespace)
            return sum(tx.run("prune_ticks", schedule_id=row[0], before=before) for row in rows)

    def runs_ended(self, tx: Transaction, ends: Sequence[RunEnd]) -> bool:
        """Count ended runs, and write the next run of an interval; True if one was written.

        In the transaction that ends them.
        """
        wrote = False
        for id in sorted(
            {end.schedule_id for end in ends}
        ):  # in one order, so that two transactions never deadlock
            row = self._rows.locked(tx, id)
            if row is None:
                continue
            before = row
            for end in ends:
                if end.schedule_id == id:
                    row = self._after_run(tx, row, end)
            if row != before:
                self._rows.write(tx, row)
                wrote = wrote or row.runs != before.runs
        return wrote

    def _after_run(self, tx: Transaction, row: ScheduleRecord, end: RunEnd) -> ScheduleRecord:
        fault = row.fault()
        if fault is not None:  # its job ends all the same
            return self._pause_faulty(tx, row, fault)
        rule = row.rule
        if end.state in ("failed", "timed_out", "held"):
            row = replace(row, failures=row.failures + 1)
        elif end.state == "succeeded":
            row = replace(row, failures=0)
        most = rule.pause_after_failures
        if most is not None and row.failures >= most and not row.paused and not row.deleted:
            reason = f"{row.failures} failures in a row, the last is job {end.job_id}"
            row = replace(row, paused=True, reason=reason)
            self._rows.add_event(tx, "schedule_paused", row.id, row.name, reason=reason)
        if not rule.is_interval or row.deleted or self._rows.busy(tx, row.id, but=end.job_id):
            return row
        past = past_run(tx, rule, end.job_id, tx.now())
        assert past is not None
        moment = after_run(rule, **past._asdict(), runs=row.runs, failures=row.failures)
        return self._rows.write_run(tx, row, moment)
