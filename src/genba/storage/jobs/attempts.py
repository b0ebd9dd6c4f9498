"""Write what happens to attempts.

Started, progress, ended, and everything that follows from an end.

The locks of one transaction are taken in this order, so that two that end jobs never wait for each
other in a circle: the jobs' own rows, in the order of the batch; their schedules, by id; the locks
(`app.lock`) that the attempts held; rows of new jobs; and last the buckets of their limits, by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from genba.domain.duration import Micros
from genba.domain.rank import rank
from genba.domain.states import FINAL, Cause, State
from genba.storage.clients.locks import Locks
from genba.storage.engines.database import Transaction
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.on_final import on_final_jobs
from genba.storage.limits.queueing import LimitedJob
from genba.storage.namespace import Namespace
from genba.storage.records import EXACT_MOMENT, Ending, JobId, NewJob, Success, is_quiet
from genba.storage.schedules.rows import RunEnd

# Of a job that is tried for ever, the last hundred attempts are kept; every twentieth attempt
# deletes older ones.
KEPT_ATTEMPTS, ATTEMPTS_PER_CLEANUP = 100, 20
REMEMBERED_STARTS = 10_000
_UNHAPPY = FINAL - {State.SUCCEEDED}
# For a schedule, a held run is over too: it does not stop the series.
_OVER = (*FINAL, "held")

Fence = tuple[JobId, int, int]


class _EndRow(NamedTuple):
    """What the query `end` returns for a job that was still ours."""

    id: JobId
    attempt: int
    claimed_at: Micros | None
    state: str
    schedule_id: int | None
    buckets: str | None
    granted_at: Micros | None
    claim: int


class Attempts:
    """`insert` inserts jobs with their conditions.

    `runs_ended` tells the schedules, True if one wrote its next run.
    """

    def __init__(
        self,
        namespace: Namespace,
        dependencies: Dependencies,
        locks: Locks,
        insert: Callable[[Transaction, Sequence[NewJob]], object],
        runs_ended: Callable[[Transaction, Sequence[RunEnd]], bool],
    ) -> None:
        self._namespace = namespace
        self._db = namespace.database
        self._events = namespace.events
        self._limits = namespace.limits
        self._dependencies = dependencies
        self._locks = locks
        self._insert = insert
        self._runs_ended = runs_ended
        # Attempts whose start is in the history already, by job.
        self._recorded_starts: dict[JobId, int] = {}

    # attempts that returned

    def finish(self, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Record attempts that returned.

        Gives the ids that were still ours, and not asked to stop.
        """
        with self._db.transaction() as tx:
            matched = self.succeed(tx, node, ended)
        self.forget_starts(ended)
        return matched

    def succeed(self, tx: Transaction, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Record attempts that returned, within a transaction.

        It works on columns: thousands of jobs a second pass here, and one attribute looked up in
        each of them is a tenth of the whole cost.
        """
        if not ended:
            return set()
        columns = _columns(ended)
        quiet = True in columns["quiet"]
        written = [e.without_run() if e.quiet else e for e in ended] if quiet else ended
        matched = tx.matched("succeed", written, node=node)
        scheduled: set[JobId] = set()
        if matched is not None and len(matched) < len(ended):
            ours = set(matched)
            scheduled = self._succeed_runs(tx, node, [e for e in ended if e[:2] not in ours])
            ended = list({e[:2]: e for e in ended if e[:2] in ours}.values())
            if not ended:
                return scheduled
            columns = _columns(ended)
        ids, attempts, started = columns["id"], columns["attempt"], columns["started"]
        self._dependencies.jobs_ended(tx, "succeeded", ids)
        if quiet or self._recorded_starts:
            started = self._new_starts(ended)
        each: dict[str, Sequence[Any]] = {"started": started} if any(started) else {}
        if attempts.count(1) < len(attempts):
            each["attempt"] = attempts
        self._events.add(tx, "succeeded", ids, node=node, each=each)
        if any(columns["limited"]):
            self._limits.after_move(tx, [e.id for e in ended if e.limited])
        return {*ids, *scheduled}

    def _new_starts(self, ended: Sequence[Success]) -> tuple[Micros | None, ...]:
        recorded = self._recorded_starts
        return tuple(
            None if e.quiet or recorded.get(e.id) == e.attempt else e.started for e in ended
        )

    def _succeed_runs(self, tx: Transaction, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Record those that a schedule has made.

        More follows from their end than from that of a plain job.
        """
        rows = tx.batch("scheduled_among", [(e.id, e.attempt, e.claim) for e in ended])
        counts = {
            id: dict(zip(("retries", "crashes", "losses"), values, strict=True))
            for id, *values in rows
        }
        endings = [replace(e.as_ending(), **counts[e.id]) for e in ended if e.id in counts]
        return self.end(tx, node, endings) if endings else set()

    # attempts that ended in another way

    def end_attempts(self, node: int, ended: Sequence[Ending]) -> set[JobId]:
        """Record attempts that ended in another way; gives the ids that were still ours to end."""
        with self._db.transaction() as tx:
            ours = self.end(tx, node, ended)
        self.forget_starts(ended)
        self._locks.wake_called()
        return ours

    def end(self, tx: Transaction, node: int | None, ended: Sequence[Ending]) -> set[JobId]:
        """Record these ends within a transaction, with everything that follows.

        Gives the ids that were ours.

        The order of the steps is the order of the locks (see the top of this module).
        """
        now = tx.now()
        age_step = self._namespace.age_step
        rows = [
            _EndRow(*row)
            for row in tx.batch("end_attempts", [_end_values(e, now, age_step) for e in ended])
        ]
        if not rows:
            return set()
        self.runs_ended(tx, [(row.id, row.state, row.schedule_id) for row in rows])
        by_fence = {(row.id, row.attempt, row.claim): row for row in rows}
        # Match by the whole fence: an attempt that was given back before it began has the same
        # number in the next claim.  If the answer was lost, giving it back may be reported again,
        # beside how it then ended.
        unique = {_fence(e): e for e in ended}
        ours = [(e, by_fence[fence]) for fence, e in unique.items() if fence in by_fence]
        self._write_history(tx, node, ours, now)
        self._free_locks(tx, ours)
        self._shorten_histories(tx, ours)
        self._enqueue_clones(tx, ours)
        self._record_ends(tx, node, ours, now)
        self._enqueue_on_final(
            tx, [e.id for e, row in ours if e.has_on_final and row.state in FINAL]
        )
        self._free_slots(tx, ours, rows)
        return {e.id for e, _ in ours}

    def _write_history(
        self,
        tx: Transaction,
        node: int | None,
        ours: Sequence[tuple[Ending, _EndRow]],
        now: Micros,
    ) -> None:
        tx.batch(
            "insert_attempts",
            [
                (
                    e.id,
                    e.attempt,
                    row.claimed_at,
                    e.started,
                    e.ended or now,
                    e.cause,
                    node,
                    e.pid,
                    e.cpu,
                    e.peak,
                    e.error,
                    e.log,
                )
                for e, row in ours
                # Of a quiet success, the job's own row says everything.
                if e.happened and (not e.quiet or e.state in _UNHAPPY)
            ],
        )

    def _free_locks(self, tx: Transaction, ours: Sequence[tuple[Ending, _EndRow]]) -> None:
        holders = [(e.id, e.attempt) for e, _ in ours if e.locks]
        if holders:
            self._locks.free_attempts(tx, holders)

    def _shorten_histories(self, tx: Transaction, ours: Sequence[tuple[Ending, _EndRow]]) -> None:
        for e, _ in ours:
            if e.attempt % ATTEMPTS_PER_CLEANUP == 0:
                tx.run("shorten_history", job_id=e.id, before=e.attempt - KEPT_ATTEMPTS)

    def _enqueue_clones(self, tx: Transaction, ours: Sequence[tuple[Ending, _EndRow]]) -> None:
        """Insert the clones after the rows of their originals: only then is a key free."""
        clones = [
            msgspec.msgpack.decode(clone, type=NewJob)
            for e, row in ours
            if e.clones and row.state == "succeeded"
            for clone in e.clones
        ]
        if clones:
            self._insert(tx, clones)

    def _record_ends(
        self,
        tx: Transaction,
        node: int | None,
        ours: Sequence[tuple[Ending, _EndRow]],
        now: Micros,
    ) -> None:
        """Add one event per kind of end."""
        by_kind: dict[str, list[Ending]] = {}
        for e, row in ours:
            if not e.quiet or row.state in FINAL:
                by_kind.setdefault(_kind(e, row.state), []).append(e)
        for kind, endings in by_kind.items():
            ids = [e.id for e in endings]
            if kind in FINAL:
                self._dependencies.jobs_ended(tx, kind, ids)
            each: dict[str, list[Any]] = {
                "attempt": [e.attempt for e in endings],
                "cause": [e.cause for e in endings],
                "reason": [e.reason for e in endings],
                "due": [e.due(now) for e in endings],
                "started": [self._unrecorded_start(e) for e in endings],
            }
            each = {
                name: values
                for name, values in each.items()
                if any(value is not None for value in values)
            }
            self._events.add(tx, kind, ids, node=node, each=each)

    def _unrecorded_start(self, e: Ending) -> Micros | None:
        recorded = e.start_recorded or self._recorded_starts.get(e.id) == e.attempt
        return e.started if e.happened and not recorded and not e.quiet else None

    def _free_slots(
        self,
        tx: Transaction,
        ours: Sequence[tuple[Ending, _EndRow]],
        rows: Sequence[_EndRow],
    ) -> None:
        """Free the slots of limits.  This locks buckets, so it comes last."""
        # A job whose conditions said no frees its slots, and does not queue for them again: as if
        # it were held.
        not_ready = {e.id for e, _ in ours if e.cause == Cause.NOT_READY}
        limited = [
            LimitedJob(
                row.id,
                row.buckets,
                row.granted_at,
                "held" if row.id in not_ready and row.state == "waiting" else row.state,
            )
            for row in rows
            if row.buckets is not None
        ]
        if limited:
            self._limits.free_slots(tx, limited)

    # what follows from the end of any job

    def after_end(self, tx: Transaction, kind: str, ids: Sequence[JobId], **data: Any) -> None:
        """Write what follows from the end of jobs that were not running."""
        if ids:
            self._dependencies.jobs_ended(tx, kind, ids)
            self._events.add(tx, kind, ids, **data)
            self._enqueue_on_final(tx, ids)

    def runs_ended(self, tx: Transaction, ended: Sequence[tuple[JobId, str, int | None]]) -> None:
        """Tell the schedules of their runs among these (job, state, schedule)."""
        runs = [
            RunEnd(schedule, id, state)
            for id, state, schedule in ended
            if schedule and state in _OVER
        ]
        if runs and self._runs_ended(tx, runs):
            self._dependencies.unsettled = True  # the next run may be due before the next look

    def _enqueue_on_final(self, tx: Transaction, ids: Sequence[JobId]) -> None:
        jobs = on_final_jobs(tx, self._namespace.name, ids) if ids else []
        if jobs:
            self._insert(tx, jobs)
            self._dependencies.unsettled = True

    def requeue(self, tx: Transaction, id: JobId) -> bool:
        """Let a final job run again; False if it is not final.

        The attempt that its row describes is moved to the other attempts first.
        """
        if not tx.one(
            "requeue", id=id, namespace=self._namespace.name, age_step=self._namespace.age_step
        ):
            return False
        tx.run("archive_last_run", id=id)
        tx.run("clear_last_run", id=id)
        return True

    # while an attempt runs

    def mark_started(
        self, started: Sequence[tuple[JobId, int, int, Micros]], *, late: bool = False
    ) -> set[JobId]:
        """Note that these attempts (id, attempt, claim, moment) have started.

        `late` skips rows that another transaction holds.
        """
        attempts = {start[0]: start[1] for start in started}
        with self._db.transaction() as tx:
            rows = tx.batch("mark_started_late" if late else "mark_started", started)
            ids = [id for id, options in rows if not is_quiet(options)]
            if ids:
                self._events.add(tx, "running", ids, each={"attempt": [attempts[id] for id in ids]})
        self._recorded_starts.update((id, attempts[id]) for id in ids)
        # Jobs that ended themselves are never forgotten otherwise.
        while len(self._recorded_starts) > REMEMBERED_STARTS:
            self._recorded_starts.pop(next(iter(self._recorded_starts)))
        return {id for id, _ in rows}

    def forget_starts(self, ended: Sequence[Success] | Sequence[Ending]) -> None:
        """Forget the recorded starts of ended attempts.

        Call it after the commit: if the end has to be written again, the writer must know which
        starts are recorded.
        """
        if self._recorded_starts:
            for end in ended:
                self._recorded_starts.pop(end.id, None)

    def record_progress(self, notes: Sequence[tuple[JobId, int, int, str]]) -> set[JobId]:
        """Write the progress of attempts (id, attempt, claim, progress).

        Gives the ids that were still ours.
        """
        written = {note[0]: note[3] for note in notes}
        with self._db.transaction() as tx:
            rows = tx.batch("set_progress", notes)
            ids = [id for id, options in rows if not is_quiet(options)]
            if ids:
                progress = [msgspec.json.decode(written[id]) for id in ids]
                each = {"done": [p[0] for p in progress], "total": [p[1] for p in progress]}
                each["note"] = [p[2] or None for p in progress]
                self._events.add(tx, "progress", ids, each=each)
        return {id for id, _ in rows}


def _fence(ending: Ending) -> Fence:
    return ending.id, ending.attempt, ending.claim


def _columns(ended: Sequence[Success]) -> dict[str, tuple[Any, ...]]:
    return dict(zip(Success._fields, zip(*ended, strict=True), strict=True))


def _end_values(e: Ending, now: Micros, age_step: Micros) -> tuple[Any, ...]:
    """Give the values of the query `end`, in its order."""
    return (
        e.id,
        e.attempt,
        e.claim,
        e.state,
        e.attempt if e.happened else e.attempt - 1,
        *_next_moment(e, now, age_step),
        e.retries,
        e.crashes,
        e.losses,
        e.reason,
        e.error,
        e.result,
        e.progress,
    )


def _next_moment(
    ending: Ending, now: Micros, age_step: Micros
) -> tuple[Micros | None, Micros | None, int | None]:
    """Compute when the job is due again, from which moment that counts, and its rank then.

    By the store's clock at this moment: the node's own idea of it is as old as its last heartbeat.
    """
    due = ending.due(now)
    if due is None:
        return None, None, None
    since = EXACT_MOMENT if ending.wait is None else now
    return due, since, rank(due, ending.rank_priority, age_step)


def _kind(ending: Ending, state: str) -> str:
    """Choose the event for this end; `state` is the job's state after it."""
    if state in (*FINAL, "held"):
        return state
    if not ending.happened or ending.cause in ("drain", "collateral"):
        return "released"
    return (
        "retrying" if ending.cause in ("exception", "timeout", "stall", "returned") else "crashed"
    )
