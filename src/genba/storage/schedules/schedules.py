"""Schedules: rules that make jobs.

Declare, change, pause and trigger them; ticks.py makes the jobs of due ticks.

The order of the locks: the schedule's jobs before the schedule, because a transaction that ends a
job has the job's row already when it needs the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from genba.domain.duration import Micros
from genba.domain.schedule import (
    ScheduleRule,
    SkippedTicks,
    after_run,
    first_moment,
    skip_ticks,
)
from genba.errors import ScheduleNotFound, TaskDisabled
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Edge, JobId
from genba.storage.schedules.rows import (
    CancelOrHold,
    Insert,
    NewSchedule,
    PastRun,
    RowsChanged,
    ScheduledRun,
    ScheduleRecord,
    ScheduleRows,
    TickRecord,
    change_schedule,
    changes_too_fast,
    past_run,
)

# The owner of schedules that nodes declare; a schedule made by hand has none.
BY_CODE = "code"
UNDECLARED_REASON = "no live node has declared it for an hour"
# Ticks among which the last run is looked for: so many may have been skipped or triggered since.
RECENT_TICKS = 20
_TRIES = 10


class Schedules:
    def __init__(
        self, database: Database, namespace: str, insert: Insert, put_down: CancelOrHold
    ) -> None:
        self._db = database
        self._namespace = namespace
        self._rows = ScheduleRows(namespace, insert, put_down)

    # read

    def all(self) -> list[ScheduleRecord]:
        with self._db.statement() as tx:
            return self._rows.all(tx)

    def named(self, name: str) -> ScheduleRecord:
        """Read one schedule; ScheduleNotFound if it does not exist."""
        with self._db.statement() as tx:
            return self._rows.named(tx, name)

    def open_runs(self, id: int) -> list[ScheduledRun]:
        """Read the open jobs of a schedule."""
        with self._db.statement() as tx:
            return self._rows.runs(tx, id)

    def ticks(self, id: int, limit: int) -> list[TickRecord]:
        """Read the ticks of a schedule, the latest first."""
        with self._db.statement() as tx:
            return [TickRecord(*row) for row in tx.all("ticks", schedule_id=id, limit=limit)]

    # make and change

    def put(self, schedule: NewSchedule, owner: str | None = None) -> None:
        """Create or change a schedule; the same definition again changes nothing.

        `owner` None means by hand, which code does not overwrite.
        """
        for _ in range(_TRIES):
            with self._db.transaction() as tx:
                created = tx.one(
                    "add_schedule",
                    namespace=self._namespace,
                    name=schedule.name,
                    task=schedule.job.task,
                    definition=schedule.definition(),
                    args=schedule.job.args,
                    owner=owner,
                )
                if created:
                    row = self._rows.locked(tx, created[0])
                    assert row is not None
                    self._start(tx, row)
                    self._rows.add_event(tx, "schedule_created", row.id, row.name)
                    return
            with suppress(RowsChanged):
                self._put_again(schedule, owner)
                return
        raise changes_too_fast(schedule.name)

    def _put_again(self, schedule: NewSchedule, owner: str | None) -> None:
        with self._db.statement() as tx:
            seen = tx.one("schedule_named", namespace=self._namespace, name=schedule.name)
        if seen is None:
            raise RowsChanged
        existing = ScheduleRecord(*seen)
        if owner is not None and existing.owner is None and not existing.deleted:
            return  # made by hand: the code does not own it
        if not existing.deleted and existing.owner == owner and existing.matches(schedule):
            return
        with self._db.transaction() as tx:
            row, unstarted = self._rows.with_unstarted(tx, existing.id)
            if row.deleted:
                row = replace(
                    row, deleted=False, paused=False, reason=None, runs=0, failures=0, next_at=None
                )
            self._redefine(tx, row, schedule, owner, unstarted)

    def _redefine(
        self,
        tx: Transaction,
        row: ScheduleRecord,
        schedule: NewSchedule,
        owner: str | None,
        unstarted: Sequence[ScheduledRun],
    ) -> None:
        now = tx.now()
        before = row.rule if row.fault() is None else None  # a damaged one is made anew
        rule = schedule.rule
        moment = self._moment_after_change(tx, row, before, rule, unstarted)
        if before is not None and not before.is_interval and row.next_at is not None:
            self._rows.add_skip_event(
                tx, row, skip_ticks(before, row.next_at, now, "the schedule was changed")
            )
        if before is None and row.paused and row.reason == row.fault():
            row = replace(row, paused=False, reason=None)
        if before is None or before.is_interval:
            row = self._rows.withdraw(tx, row, unstarted, "changed")
        row = replace(
            row,
            task=schedule.job.task,
            definition=schedule.definition(),
            args=schedule.job.args,
            owner=owner,
            next_at=moment,
            seen_at=now,
        )
        if rule.is_interval and not row.paused and not self._rows.busy(tx, row.id):
            row = self._rows.write_run(tx, row, moment)
        elif rule.is_interval and not row.paused:
            row = replace(row, next_at=None)  # the run that is open writes the next one
        self._rows.write(tx, row)
        self._rows.add_event(tx, "schedule_changed", row.id, row.name)

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
            return pending  # only the job has changed, not the rule
        runs = (
            row.runs - len(unstarted) if was_interval else row.runs
        )  # the waiting run is withdrawn
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
        """Find the run that the waiting one was counted from."""
        waiting = {run.id for run in unstarted}
        ticks = [
            TickRecord(*tick) for tick in tx.all("ticks", schedule_id=row.id, limit=RECENT_TICKS)
        ]
        # Its tick was written when the run before it had ended.  Ticks written later were triggered
        # by hand.
        written = min((tick.at for tick in ticks if tick.job_id in waiting), default=None)
        for tick in ticks:
            if (
                tick.job_id is None
                or tick.job_id in waiting
                or (written is not None and tick.at > written)
            ):
                continue
            past = past_run(tx, rule, tick.job_id)
            if past is None and written is not None:  # deleted, or held since then
                past = PastRun(written, None, written)
            return past
        return None

    def declare(self, schedules: Sequence[NewSchedule]) -> None:
        """Create or change the schedules of a node's app; any number of nodes may do it."""
        for schedule in sorted(schedules, key=lambda schedule: schedule.name):
            self.put(schedule, BY_CODE)
        self.still_declared([schedule.name for schedule in schedules])

    def undeclare(self, name: str) -> None:
        """Delete a schedule that code no longer declares, unless it was made by hand."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> None:
            if row.owner == BY_CODE:
                self._delete(tx, row, unstarted)

        with suppress(ScheduleNotFound):
            change_schedule(self._db, self._rows, name, act)

    def still_declared(self, names: Sequence[str]) -> None:
        """Resume those of these schedules that were paused because no node declared them."""
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
        """Give the schedules of code that no live node has declared for an hour.

        By the clock, which may just have been set.
        """
        with self._db.statement() as tx:
            return [name for (name,) in tx.all("abandoned_schedules", namespace=self._namespace)]

    def pause_abandoned(self, names: Sequence[str]) -> list[str]:
        """Pause those of these that no node has declared in the meantime; gives their names."""
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
                    self._rows.add_event(
                        tx, "schedule_paused", row[0], name, reason=UNDECLARED_REASON
                    )
        return paused

    def pause(self, name: str, reason: str | None = None) -> bool:
        """Pause a schedule; False if it was paused already."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> bool:
            if row.paused:
                return False
            if row.fault() is None and row.rule.is_interval:
                moment = unstarted[0].moment if unstarted else row.next_at
                row = self._rows.withdraw(tx, row, unstarted, "paused")
                row = replace(row, next_at=moment)
            self._rows.write(tx, replace(row, paused=True, reason=reason or "paused by hand"))
            self._rows.add_event(tx, "schedule_paused", row.id, row.name, reason=reason)
            return True

        return change_schedule(self._db, self._rows, name, act)

    def resume(self, name: str) -> bool:
        """Let a schedule go on with its next moment; False if it was not paused."""

        def act(tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]) -> bool:
            if not row.paused:
                return False
            now, rule = tx.now(), row.rule
            row = replace(row, paused=False, reason=None, failures=0, seen_at=now)
            if not rule.is_interval:
                if row.next_at is not None:
                    self._rows.add_skip_event(
                        tx, row, skip_ticks(rule, row.next_at, now, "the schedule was paused")
                    )
                row = replace(row, next_at=first_moment(rule, now, row.runs))
            elif not self._rows.busy(tx, row.id):
                planned = row.next_at if row.next_at is not None and row.next_at > now else None
                row = self._rows.write_run(tx, row, planned or first_moment(rule, now, row.runs))
            self._rows.write(tx, row)
            self._rows.add_event(tx, "schedule_resumed", row.id, row.name)
            return True

        return change_schedule(self._db, self._rows, name, act)

    def delete(self, name: str) -> None:
        """Delete a schedule; a job of it that runs is not stopped."""
        change_schedule(self._db, self._rows, name, self._delete)

    def _delete(
        self, tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]
    ) -> None:
        if row.fault() is None and row.rule.is_interval:
            row = self._rows.withdraw(tx, row, unstarted, "deleted")
        self._rows.write(tx, replace(row, deleted=True, next_at=None, owner=None))
        self._rows.add_event(tx, "schedule_deleted", row.id, row.name)

    def end_series(self, id: int, job: JobId) -> None:
        """End the schedule that made this job.

        Delete it, or pause it if code would declare it again.
        """
        with self._db.statement() as tx:
            values = tx.one("schedule_by_id", id=id)
        if values is not None and not values[-1]:
            row = ScheduleRecord(*values)
            if row.owner == BY_CODE:
                self.pause(row.name, f"the series was cancelled with job {job}")
            else:
                self.delete(row.name)

    def trigger(self, name: str) -> JobId | None:
        """Run a schedule now, beside its rule.

        None if `overlap` does not allow it, TaskDisabled if its task is disabled.
        """

        def act(
            tx: Transaction, row: ScheduleRecord, unstarted: Sequence[ScheduledRun]
        ) -> JobId | None:
            enabled = tx.one("task_enabled", namespace=self._namespace, name=row.task)
            if enabled is not None and not enabled[0]:
                raise TaskDisabled(
                    f"task {row.task!r} is disabled; to enable it: app.tasks[{row.task!r}].enable()"
                )
            rule, now = row.rule, self._rows.free_moment(tx, row, tx.now())
            series = self._rows.unheld(tx, row.id)
            waits = [run for run in unstarted if run.state == "scheduled" and rule.is_interval]
            busy = [run for run in series if run not in waits]
            if busy and rule.overlap == "skip":
                self._rows.add_skip_event(
                    tx,
                    row,
                    SkippedTicks(now, now, 1, f"triggered while job {busy[-1].id} was open"),
                )
                return None
            queued = busy and (rule.is_interval or rule.overlap == "queue")
            after = (Edge(busy[-1].id, "finished"),) if queued else ()
            row, job = self._rows.make(tx, row, now, after)
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
            self._rows.write(tx, row)
            if job is not None:
                self._rows.add_event(tx, "schedule_triggered", row.id, row.name, job=job)
            return job

        return change_schedule(self._db, self._rows, name, act)

    # parts

    def _start(self, tx: Transaction, row: ScheduleRecord) -> None:
        moment = first_moment(row.rule, tx.now(), row.runs)
        begun = (
            self._rows.write_run(tx, row, moment)
            if row.rule.is_interval
            else replace(row, next_at=moment)
        )
        self._rows.write(tx, begun)
