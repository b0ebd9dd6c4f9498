"""Conditions in the store: which jobs wait for which check, and when it is made again.

A waiting job with conditions is parked on a *check*: the same conditions for the same task and
arguments are one check, however many jobs wait for it.  When it is time, one of these jobs, the
scout, is let into the claim index.  The node that claims the scout runs its conditions and writes
the answer here.  (The table is called `question`.)

Locks are taken in this order: the check, then the rows of jobs, then the buckets of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from genba.domain.duration import SECOND, Micros
from genba.storage.engines.database import Transaction
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.stop import Stopping
from genba.storage.namespace import Namespace
from genba.storage.records import Ending, Enqueued, JobId, NewJob

# Jobs that one yes lets start; the next ones follow a second later, if the answer is still yes.
JOBS_PER_YES = 1000
FIRST_PAUSE_US = 1 * SECOND
LONGEST_PAUSE_US = 60 * SECOND
SCOUT_PATIENCE_US = 5 * SECOND  # until a scout that no node has claimed is looked for
HOLD_AFTER_ERRORS = 5  # answers in a row that raised

_json = msgspec.json.Encoder()


def check_key(task: str, conditions: Sequence[str], args: bytes, options: str | None) -> str:
    """Compute the key of a check: the same for jobs that ask the same."""
    subject = _json.encode((task, conditions, options))
    return blake2b(subject + b"\0" + args, digest_size=16).hexdigest()


def parked_on_check(key: str) -> str:
    """Give the reason for which jobs are parked that wait for a check."""
    return f"question {key}"


def parked_on_unknown(condition: str) -> str:
    """Give the reason for which jobs are parked whose condition no node knows."""
    return f"unknown condition {condition}"


def pause_after_checks(checks: int) -> Micros:
    """Give the pause before the next check, after this many that said no."""
    return min(LONGEST_PAUSE_US, FIRST_PAUSE_US << min(checks, 10))


BucketSizes = tuple[tuple[str, int], ...]  # (bucket, how many jobs may have a slot of it)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionAnswer:
    """Why a job that a node has claimed must not start now.

    `ending` gives the job back without a trace.

    `shared`: the same check was answered a moment ago, so this answer does not count again.
    """

    ending: Ending
    key: str
    task: str
    conditions: tuple[str, ...]
    wait: Micros | None = None  # None: the pauses grow from check to check
    said: str | None = None
    error: str | None = None
    unknown: str | None = None  # a condition that this node does not know
    shared: bool = False


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A claimed job that may start if it gets the slots of one of these ways.

    `answer` gives it back otherwise.
    """

    answer: ConditionAnswer
    ways: tuple[BucketSizes, ...]


class ConditionCheck(NamedTuple):
    """A check as its row says (in the order of the query)."""

    key: str
    task: str
    conditions: str
    look_at: Micros
    looks: int
    raised: int
    scout: JobId | None
    said: str | None
    said_at: Micros | None


class Conditions:
    def __init__(self, namespace: Namespace, attempts: Attempts, stopping: Stopping) -> None:
        self._db = namespace.database
        self._namespace = namespace.name
        self._events = namespace.events
        self._limits = namespace.limits
        self._attempts = attempts
        self._stopping = stopping

    def park_new(
        self, tx: Transaction, jobs: Sequence[NewJob], enqueued: Sequence[Enqueued]
    ) -> None:
        """Park the new jobs with conditions that could start now.

        Not those of a caller's own transaction, which must not hold what others wait for.  Not
        those with limits either: the slots come first, and the node that claims such a job runs its
        conditions.
        """
        keys = {
            row.id: (check_key(job.task, job.ready, job.args, job.options), job)
            for job, row in zip(jobs, enqueued, strict=True)
            if job.ready and row.created and not job.needs
        }
        if not keys:
            return
        checks = {(key, job.task, _json.encode(job.ready).decode()) for key, job in keys.values()}
        tx.batch("insert_conditions", sorted(checks), namespace=self._namespace)
        tx.batch("park_on_condition", [(id, parked_on_check(key)) for id, (key, _) in keys.items()])

    def send_scouts(self) -> tuple[int, Micros | None]:
        """Send a scout for each check that is due; how many, and the moment of the next check."""
        with self._db.transaction() as tx:
            due = tx.all("due_conditions", namespace=self._namespace)
            sent = sum(self._send_scout(tx, key, scout) for key, scout in due)
            row = tx.one("next_condition_check", namespace=self._namespace)
            return sent, row[0] if row else None

    def _send_scout(self, tx: Transaction, key: str, scout: JobId | None) -> bool:
        line = parked_on_check(key)
        if scout is not None and tx.one("scout_is_under_way", id=scout, line=line):
            jobs = [(scout,)]
        else:
            jobs = tx.all("first_parked_on_condition", namespace=self._namespace, line=line, most=1)
            self._unpark(tx, jobs)
        if jobs:
            tx.run(
                "set_scout",
                namespace=self._namespace,
                key=key,
                scout=jobs[0][0],
                patience=SCOUT_PATIENCE_US,
            )
        else:
            tx.run("delete_condition", namespace=self._namespace, key=key)
        return bool(jobs)

    def _unpark(self, tx: Transaction, jobs: Sequence[tuple[JobId]]) -> None:
        """Let jobs into the claim index, or into the line of a bucket."""
        tx.batch("unpark_for_check", jobs)
        self._limits.after_move(tx, [id for (id,) in jobs])

    def record_answers(self, node: int, answers: Sequence[ConditionAnswer]) -> None:
        """Give back jobs that must not start now: they wait for the next check."""
        known = [answer for answer in answers if answer.unknown is None]
        first = {answer.key: answer for answer in known if not answer.shared}
        with self._db.transaction() as tx:
            checks = {(a.key, a.task, _json.encode(a.conditions).decode()) for a in known}
            tx.batch("insert_conditions", sorted(checks), namespace=self._namespace)
            rows = {
                key: tx.one("lock_condition", namespace=self._namespace, key=key)
                for key in sorted(first)
            }
            ours = self._attempts.end(tx, node, [answer.ending for answer in answers])
            lines = sorted((answer.ending.id, _parked_on(answer)) for answer in answers)
            tx.batch("park_on_condition", [line for line in lines if line[0] in ours])
            # An answer for a job that is no longer ours was written before: it must not count
            # again.
            written = {answer.key for answer in answers if answer.ending.id in ours}
            for key in sorted(first.keys() & written):
                self._write_answer(tx, first[key], rows[key] or (0, 0, None))

    def _write_answer(
        self, tx: Transaction, answer: ConditionAnswer, before: Sequence[Any]
    ) -> None:
        checks, errors = int(before[0]), int(before[1]) + 1 if answer.error is not None else 0
        if answer.error is not None:
            data: dict[str, Any] = {
                "condition": answer.said,
                "error": answer.error,
                "times": errors,
            }
            self._events.add(tx, "condition_failed", [answer.ending.id], **data)
        if errors >= HOLD_AFTER_ERRORS:
            self._hold_parked(tx, answer, errors)
            checks = errors = 0
        pause = answer.wait if answer.wait is not None else pause_after_checks(checks)
        said = f"{answer.said} raised {answer.error}" if answer.error is not None else answer.said
        values = {"looks": checks + 1, "raised": errors, "said": said, "pause": pause}
        tx.one("save_answer", namespace=self._namespace, key=answer.key, **values)

    def _hold_parked(self, tx: Transaction, answer: ConditionAnswer, errors: int) -> None:
        """Hold the jobs that wait for a check which only raises."""
        line = parked_on_check(answer.key)
        reason = f"condition {answer.said} raised {errors} times in a row: {answer.error}"
        for (id,) in tx.all(
            "first_parked_on_condition", namespace=self._namespace, line=line, most=JOBS_PER_YES
        ):
            self._stopping.cancel_or_hold_with_slots(tx, "hold", id, reason)

    def take_slots(self, node: int, requests: Sequence[SlotRequest]) -> set[JobId]:
        """Take slots for jobs that may start with them; gives the jobs that got them.

        The others are given back, and wait in the line of a bucket.
        """
        with self._db.transaction() as tx:
            return {
                request.answer.ending.id
                for request in sorted(requests, key=_request_id)
                if self._take_slots(tx, node, request)
            }

    def _take_slots(self, tx: Transaction, node: int, request: SlotRequest) -> bool:
        ending = request.answer.ending
        if tx.one("own_job", id=ending.id, attempt=ending.attempt, claim=ending.claim) is None:
            return False
        if any(self._limits.take(tx, ending.id, dict(way)) is None for way in request.ways):
            return True
        if self._attempts.end(tx, node, [ending]):
            self._limits.wait_for(tx, ending.id, dict(request.ways[0]))
        return False

    def open(self, key: str) -> int:
        """Let the jobs start that wait for a check whose answer is yes; how many."""
        with self._db.transaction() as tx:
            if tx.one("lock_condition", namespace=self._namespace, key=key) is None:
                return 0
            jobs = tx.all(
                "first_parked_on_condition",
                namespace=self._namespace,
                line=parked_on_check(key),
                most=JOBS_PER_YES,
            )
            self._unpark(tx, jobs)
            if len(jobs) < JOBS_PER_YES:
                tx.run("delete_condition", namespace=self._namespace, key=key)
            else:
                values = {"looks": 0, "raised": 0, "said": None, "pause": FIRST_PAUSE_US}
                tx.one("save_answer", namespace=self._namespace, key=key, **values)
            return len(jobs)

    def check(self, key: str) -> ConditionCheck | None:
        """Read a check; None if no job waits for it."""
        with self._db.statement() as tx:
            row = tx.one("condition", namespace=self._namespace, key=key)
            return ConditionCheck(*row) if row else None


def _parked_on(answer: ConditionAnswer) -> str:
    if answer.unknown is not None:
        return parked_on_unknown(answer.unknown)
    return parked_on_check(answer.key)


def _request_id(request: SlotRequest) -> JobId:
    return request.answer.ending.id
