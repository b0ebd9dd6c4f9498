"""What is written of jobs that run: that they have started, how far they are, how they ended, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from genba.domain.rank import rank
from genba.domain.states import FINAL, Cause, State
from genba.storage.engines.database import Database, Transaction
from genba.storage.jobs.on_final import on_final_jobs
from genba.storage.limits.queueing import LimitedJob
from genba.storage.records import EXACT_MOMENT, Ending, JobId, Micros, NewJob, Success, is_quiet
from genba.storage.schedules.rows import RunEnd

if TYPE_CHECKING:
    from genba.storage.store import Store

ATTEMPTS, SHORTEN = (
    100,
    20,
)  # of a job that is tried for ever the last hundred are kept, looked at now and then
REMEMBERED = 10_000
_UNHAPPY = FINAL - {State.SUCCEEDED}
_OVER = (*FINAL, "held")  # for the schedule of a job: a held one does not stop the series


def _fence(ending: Ending) -> tuple[JobId, int, int]:
    return ending.id, ending.attempt, ending.claim


def _columns(ended: Sequence[Success]) -> dict[str, tuple[Any, ...]]:
    return dict(zip(Success._fields, zip(*ended, strict=True), strict=True))


class Attempts:
    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._db = database
        self._namespace = store.namespace
        self._told: dict[JobId, int] = {}  # the attempts whose start is told already

    def succeed(self, tx: Transaction, node: int, ended: Sequence[Success]) -> set[JobId]:
        if not ended:
            return set()
        # By columns: thousands a second come through here, and a name looked up in each of them is a tenth of its cost.
        columns = _columns(ended)
        quiet = True in columns["quiet"]
        written = [one.untold() if one.quiet else one for one in ended] if quiet else ended
        matched = tx.matched("succeed", written, node=node)
        runs: set[JobId] = set()
        if matched is not None and len(matched) < len(ended):
            ours = set(matched)
            runs = self._succeed_runs(tx, node, [one for one in ended if one[:2] not in ours])
            ended = list({one[:2]: one for one in ended if one[:2] in ours}.values())
            if not ended:
                return runs
            columns = _columns(ended)
        ids, attempts, started = columns["id"], columns["attempt"], columns["started"]
        self._look_at_children(tx, "succeeded", ids)
        if quiet or self._told:
            told = self._told
            started = tuple(
                None if one.quiet or told.get(one.id) == one.attempt else one.started
                for one in ended
            )
        each: dict[str, Sequence[Any]] = {"started": started} if any(started) else {}
        if attempts.count(1) < len(attempts):
            each["attempt"] = attempts
        self._store.events.tell(tx, "succeeded", ids, node=node, each=each)
        if any(columns["limited"]):
            self._store.limits.moved(tx, [one.id for one in ended if one.limited])
        return {*ids, *runs}

    def _succeed_runs(self, tx: Transaction, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Those of them that a schedule has made: more follows from their end than from that of a plain job."""
        found = tx.batch("scheduled_among", [(one.id, one.attempt, one.claim) for one in ended])
        counted = {
            id: dict(zip(("retries", "crashes", "losses"), counts, strict=True))
            for id, *counts in found
        }
        endings = [
            replace(one.as_ending(), **counted[one.id]) for one in ended if one.id in counted
        ]
        return self.end(tx, node, endings) if endings else set()

    def requeue(self, tx: Transaction, id: JobId) -> bool:
        """False if it is not final.  What its row tells of its last attempt goes to the others first."""
        if not tx.one("requeue", id=id, namespace=self._namespace, age_step=self._store.age_step):
            return False
        tx.run("archive_last_run", id=id)
        tx.run("clear_last_run", id=id)
        return True

    def after_end(self, tx: Transaction, kind: str, ids: Sequence[JobId], **more: Any) -> None:
        """Of jobs that were not running."""
        if ids:
            self._look_at_children(tx, kind, ids)
            self._store.events.tell(tx, kind, ids, **more)
            self._call_hooks(tx, ids)

    def _look_at_children(self, tx: Transaction, kind: str, ids: Sequence[JobId]) -> None:
        """After the jobs' rows are written, never before: an edge we do not see yet will see our lock."""
        if self._store.dependencies.awaited(tx, kind, ids):
            self._store.children_wait = True

    def runs_ended(self, tx: Transaction, ended: Sequence[tuple[JobId, str, int | None]]) -> None:
        runs = [
            RunEnd(schedule, id, state)
            for id, state, schedule in ended
            if schedule and state in _OVER
        ]
        if runs and self._store.schedules.ended(tx, runs):
            self._store.children_wait = True  # the next one may be due before anybody would look

    def end(self, tx: Transaction, node: int | None, ended: Sequence[Ending]) -> set[JobId]:
        now = tx.now()
        rows = [
            (
                e.id,
                e.attempt,
                e.claim,
                e.state,
                e.attempt if e.happened else e.attempt - 1,
                *_when(e, now, self._store.age_step),
                e.retries,
                e.crashes,
                e.losses,
                e.reason,
                e.error,
                e.result,
                e.progress,
            )
            for e in ended
        ]
        found = tx.batch("end_attempts", rows)
        matched = {(row[0], row[1], row[-1]): row[2:] for row in found}
        if not matched:
            return set()
        self.runs_ended(tx, [(row[0], row[3], row[4]) for row in found])
        # By the whole fence: an attempt that was given back before it began has its number again in the next claim, and
        # that it was given back may be told once more, if the answer was lost, beside how it then ended.
        mine = [e for e in {_fence(e): e for e in ended}.values() if _fence(e) in matched]
        tx.batch(
            "insert_attempts",
            [
                (
                    e.id,
                    e.attempt,
                    matched[_fence(e)][0],
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
                for e in mine
                if e.happened
                and (not e.quiet or e.state in _UNHAPPY)  # of a success the job's row says it all
            ],
        )
        held = [(e.id, e.attempt) for e in mine if e.locks]
        if held:
            self._store.locks.free_attempts(tx, held)
        for e in mine:
            if e.attempt % SHORTEN == 0:
                tx.run("shorten_history", job_id=e.id, before=e.attempt - ATTEMPTS)
        self._enqueue_clones(
            tx, [e for e in mine if e.clones and matched[_fence(e)][1] == "succeeded"]
        )
        self._tell_of_ends(tx, node, [(e, matched[_fence(e)][1]) for e in mine], now)
        self._call_hooks(tx, [e.id for e in mine if e.hooked and matched[_fence(e)][1] in FINAL])
        aside = {
            e.id for e in mine if e.cause == Cause.NOT_READY
        }  # free their slots, and do not stand in line again
        limited = [
            LimitedJob(
                row[0],
                row[5],
                row[6],
                "held" if row[0] in aside and row[3] == "waiting" else row[3],
            )
            for row in found
            if row[5] is not None
        ]
        if limited:
            self._store.limits.ended(tx, limited)
        return {e.id for e in mine}

    def _call_hooks(self, tx: Transaction, ids: Sequence[JobId]) -> None:
        hooks = on_final_jobs(tx, self._namespace, ids) if ids else []
        if hooks:
            self._store.enqueuer.insert(tx, hooks)
            self._store.children_wait = True

    def _enqueue_clones(self, tx: Transaction, ended: Sequence[Ending]) -> None:
        """After the rows of those that they are copies of: a key is free only then."""
        clones = [msgspec.msgpack.decode(clone, type=NewJob) for e in ended for clone in e.clones]
        if clones:
            self._store.conditions.ask_for(tx, clones, self._store.enqueuer.insert(tx, clones))

    def _tell_of_ends(
        self, tx: Transaction, node: int | None, ended: Sequence[tuple[Ending, str]], now: Micros
    ) -> None:
        told: dict[str, list[tuple[Ending, bool]]] = {}
        for e, state in ended:
            known = self._told.get(e.id) == e.attempt or e.told
            if not e.quiet or state in FINAL:
                told.setdefault(_kind(e, state), []).append((e, known))
        for kind, some in told.items():
            ids = [e.id for e, _ in some]
            if kind in FINAL:
                self._look_at_children(tx, kind, ids)
            each: dict[str, list[Any]] = {
                "attempt": [e.attempt for e, _ in some],
                "cause": [e.cause for e, _ in some],
                "reason": [e.reason for e, _ in some],
                "due": [e.due(now) for e, _ in some],
                "started": [
                    e.started if e.happened and not known and not e.quiet else None
                    for e, known in some
                ],
            }
            each = {
                name: values
                for name, values in each.items()
                if any(value is not None for value in values)
            }
            self._store.events.tell(tx, kind, ids, node=node, each=each)

    def mark(
        self, started: Sequence[tuple[JobId, int, int, Micros]], *, late: bool = False
    ) -> set[JobId]:
        """Note that these attempts (id, attempt, claim, moment) have started; `late`: if nobody holds their rows."""
        attempts = {one[0]: one[1] for one in started}
        with self._db.transaction() as tx:
            rows = tx.batch("mark_started_late" if late else "mark_started", started)
            ids = [id for id, options in rows if not is_quiet(options)]
            if ids:
                self._store.events.tell(
                    tx, "running", ids, each={"attempt": [attempts[id] for id in ids]}
                )
        self._told.update((id, attempts[id]) for id in ids)
        while len(self._told) > REMEMBERED:  # they have ended themselves, and nobody told us
            self._told.pop(next(iter(self._told)))
        return {id for id, _ in rows}

    def forget(self, ended: Sequence[Success] | Sequence[Ending]) -> None:
        """That these have ended is committed.  Not before: whoever writes it again must know what was told."""
        if self._told:
            for one in ended:
                self._told.pop(one.id, None)

    def progress(self, notes: Sequence[tuple[JobId, int, int, str]]) -> set[JobId]:
        told = {note[0]: note[3] for note in notes}
        with self._db.transaction() as tx:
            rows = tx.batch("set_progress", notes)
            ids = [id for id, options in rows if not is_quiet(options)]
            if ids:
                done = [msgspec.json.decode(told[id]) for id in ids]
                each = {"done": [one[0] for one in done], "total": [one[1] for one in done]}
                each["note"] = [one[2] or None for one in done]
                self._store.events.tell(tx, "progress", ids, each=each)
        return {id for id, _ in rows}


def _when(
    ending: Ending, now: Micros, age_step: Micros
) -> tuple[Micros | None, Micros | None, int | None]:
    """When it comes back, what that counts from, and its rank then.

    By the clock of this moment: the node's own idea of the time is as old as its last beat.
    """
    due = ending.due(now)
    if due is None:
        return None, None, None
    return (
        due,
        EXACT_MOMENT if ending.wait is None else now,
        rank(due, ending.rank_priority, age_step),
    )


def _kind(ending: Ending, state: str) -> str:
    """The event that tells of this end; `state` is what the job came to."""
    if state in (*FINAL, "held"):
        return state
    if not ending.happened or ending.cause in ("drain", "collateral"):
        return "released"
    return (
        "retrying" if ending.cause in ("exception", "timeout", "stall", "returned") else "crashed"
    )
