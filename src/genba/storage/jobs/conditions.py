"""Conditions, as far as the database knows them: who waits for which answer, and when it is asked for again.

A job with conditions is parked on its *question*: the same conditions, task and arguments are one question, however
many jobs wait for the answer.  When it is time, one of them, the scout, is let into the claim index; the node that
claims it has its conditions asked, and tells the answer here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from genba.domain.duration import SECOND
from genba.storage.engines.database import Database, Transaction
from genba.storage.events import Events
from genba.storage.limits.slots import LimitSlots
from genba.storage.nodes.nodes import EndJobs
from genba.storage.records import Ending, Enqueued, JobId, Micros, NewJob

MOST = 1000  # jobs that start on one yes; the next of them a second later, if it is still yes
ROUND = 1 * SECOND
LONGEST = 60 * SECOND
PATIENCE = 5 * SECOND  # before a scout that nobody has claimed is looked for
HOLD_AFTER = 5  # answers in a row that raised

_json = msgspec.json.Encoder()


def check_key(task: str, conditions: Sequence[str], args: bytes, options: str | None) -> str:
    """The same for jobs that ask the same."""
    told = _json.encode((task, conditions, options))
    return blake2b(told + b"\0" + args, digest_size=16).hexdigest()


def parked_on_check(key: str) -> str:
    """What a job that waits for the answer is parked on."""
    return f"question {key}"


def parked_on_unknown(condition: str) -> str:
    return f"unknown condition {condition}"


def pause_after_checks(looks: int) -> Micros:
    """Between two looks, after so many of them in vain."""
    return min(LONGEST, ROUND << min(looks, 10))


BucketSizes = tuple[tuple[str, int], ...]  # (bucket, how many may have a slot of it)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionAnswer:
    """What a node has heard about a job that it had claimed; `ending` gives that back, as if nothing had happened.

    `shared`: an equal question was answered a moment ago, and this one need not count again.
    """

    ending: Ending
    key: str
    task: str
    conditions: tuple[str, ...]
    wait: Micros | None = None  # None: ask again by and by
    said: str | None = None
    error: str | None = None
    unknown: str | None = None  # a condition that this node does not know
    shared: bool = False


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A job that may start if it has the slots of one of these ways; `answer` gives it back if they cannot be had."""

    answer: ConditionAnswer
    ways: tuple[BucketSizes, ...]


class ConditionCheck(NamedTuple):
    """(the order is that of the query)"""

    key: str
    task: str
    conditions: str
    look_at: Micros
    looks: int
    raised: int
    scout: JobId | None
    said: str | None
    said_at: Micros | None


class Steering(NamedTuple):
    """What questions need of the store."""

    end: EndJobs
    cancel_or_hold: Callable[[Transaction, str, JobId, str], bool]
    events: Events
    limits: LimitSlots


class Conditions:
    def __init__(self, database: Database, namespace: str, steering: Steering) -> None:
        self._db = database
        self._namespace = namespace
        self._steering = steering

    def ask_for(self, tx: Transaction, jobs: Sequence[NewJob], made: Sequence[Enqueued]) -> None:
        """New jobs with conditions: those that could start now wait for the answer instead.

        Not those of a caller's own transaction, which must not hold what others wait for, and not those with limits,
        which come first: a node asks for them when it has claimed them.
        """
        pairs = zip(jobs, made, strict=True)
        asking = [
            (job, one.id) for job, one in pairs if job.ready and one.created and not job.needs
        ]
        if not asking:
            return
        keys = {id: check_key(job.task, job.ready, job.args, job.options) for job, id in asking}
        wanted = {(keys[id], job.task, _json.encode(job.ready).decode()) for job, id in asking}
        tx.batch("insert_conditions", sorted(wanted), namespace=self._namespace)
        tx.batch("park_on_condition", [(id, parked_on_check(key)) for id, key in keys.items()])

    def look(self) -> tuple[int, Micros | None]:
        """Send a scout for each question whose time has come; how many, and when the next one comes."""
        with self._db.transaction() as tx:
            due = tx.all("due_conditions", namespace=self._namespace)
            sent = sum(self._send_scout(tx, key, scout) for key, scout in due)
            found = tx.one("next_condition_check", namespace=self._namespace)
            return sent, found[0] if found else None

    def _send_scout(self, tx: Transaction, key: str, scout: JobId | None) -> bool:
        line = parked_on_check(key)
        if scout is not None and tx.one("scout_is_under_way", id=scout, line=line):
            heads = [(scout,)]
        else:
            heads = tx.all(
                "first_parked_on_condition", namespace=self._namespace, line=line, most=1
            )
            self._let_in(tx, heads)
        if heads:
            tx.run(
                "set_scout",
                namespace=self._namespace,
                key=key,
                scout=heads[0][0],
                patience=PATIENCE,
            )
        else:
            tx.run("delete_condition", namespace=self._namespace, key=key)
        return bool(heads)

    def _let_in(self, tx: Transaction, jobs: Sequence[tuple[JobId]]) -> None:
        """Into the claim index, or into the line of a bucket."""
        tx.batch("unpark_for_check", jobs)
        self._steering.limits.moved(tx, [id for (id,) in jobs])

    def answered(self, node: int, answers: Sequence[ConditionAnswer]) -> None:
        """These must not start now: they wait for the next look."""
        with self._db.transaction() as tx:
            first = {
                answer.key: answer
                for answer in answers
                if not answer.shared and answer.unknown is None
            }
            asked = sorted(
                {
                    (a.key, a.task, _json.encode(a.conditions).decode())
                    for a in answers
                    if a.unknown is None
                }
            )
            tx.batch("insert_conditions", asked, namespace=self._namespace)
            held = {
                key: tx.one("lock_condition", namespace=self._namespace, key=key)
                for key in sorted(first)
            }
            ours = self._steering.end(tx, node, [answer.ending for answer in answers])
            lines = [
                (
                    a.ending.id,
                    parked_on_check(a.key) if a.unknown is None else parked_on_unknown(a.unknown),
                )
                for a in answers
            ]
            tx.batch("park_on_condition", [line for line in sorted(lines) if line[0] in ours])
            told = {
                answer.key for answer in answers if answer.ending.id in ours
            }  # else: told again, without an answer
            for key in sorted(first.keys() & told):
                self._note(tx, first[key], held[key] or (0, 0, None))

    def _note(self, tx: Transaction, answer: ConditionAnswer, before: Sequence[Any]) -> None:
        looks, raised = int(before[0]), int(before[1]) + 1 if answer.error is not None else 0
        id = answer.ending.id
        if answer.error is not None:
            told: dict[str, Any] = {
                "condition": answer.said,
                "error": answer.error,
                "times": raised,
            }
            self._steering.events.tell(tx, "condition_failed", [id], **told)
        if raised >= HOLD_AFTER:
            line = parked_on_check(answer.key)
            reason = f"condition {answer.said} raised {raised} times in a row: {answer.error}"
            for (one,) in tx.all(
                "first_parked_on_condition", namespace=self._namespace, line=line, most=MOST
            ):
                self._steering.cancel_or_hold(tx, "hold", one, reason)
            looks = raised = 0
        pause = answer.wait if answer.wait is not None else pause_after_checks(looks)
        said = f"{answer.said} raised {answer.error}" if answer.error is not None else answer.said
        values = {"looks": looks + 1, "raised": raised, "said": said, "pause": pause}
        tx.one("save_answer", namespace=self._namespace, key=answer.key, **values)

    def take(self, node: int, wanted: Sequence[SlotRequest]) -> set[JobId]:
        """Slots for jobs that may start with them; gives those that have them, the others stand in line."""
        with self._db.transaction() as tx:
            return {
                one.answer.ending.id for one in sorted(wanted, key=_id) if self._take(tx, node, one)
            }

    def _take(self, tx: Transaction, node: int, wanted: SlotRequest) -> bool:
        limits, ending = self._steering.limits, wanted.answer.ending
        if tx.one("own_job", id=ending.id, attempt=ending.attempt, claim=ending.claim) is None:
            return False
        if any(limits.take(tx, ending.id, dict(way)) is None for way in wanted.ways):
            return True
        if self._steering.end(tx, node, [ending]):
            limits.wait_for(tx, ending.id, dict(wanted.ways[0]))
        return False

    def opened(self, key: str) -> int:
        """The answer is yes: those who wait for it may start; how many."""
        with self._db.transaction() as tx:
            if tx.one("lock_condition", namespace=self._namespace, key=key) is None:
                return 0
            heads = tx.all(
                "first_parked_on_condition",
                namespace=self._namespace,
                line=parked_on_check(key),
                most=MOST,
            )
            self._let_in(tx, heads)
            if len(heads) < MOST:
                tx.run("delete_condition", namespace=self._namespace, key=key)
            else:
                values = {"looks": 0, "raised": 0, "said": None, "pause": ROUND}
                tx.one("save_answer", namespace=self._namespace, key=key, **values)
            return len(heads)

    def question(self, key: str) -> ConditionCheck | None:
        with self._db.statement() as tx:
            row = tx.one("condition", namespace=self._namespace, key=key)
            return ConditionCheck(*row) if row else None


def _id(wanted: SlotRequest) -> JobId:
    return wanted.answer.ending.id
