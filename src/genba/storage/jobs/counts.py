"""How much there is of what is open, for those who watch: exact while it is little, bounded when it is much.

A look must never walk millions of rows.  Of each state (of `waiting`: of each queue) it counts the first so many in
the order of the index, and says so when there are more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Micros

MOST = 10_000  # jobs of a state that are counted
MOST_EACH = 1_000  # ... of a queue, if there are many queues
MANY_QUEUES = 10


class StateCount(NamedTuple):
    """`oldest` is the earliest moment at which one of them was due."""

    state: str  # as a job says it; `parked` for those that wait, and could not start
    queue: str
    task: str
    jobs: int
    oldest: Micros


@dataclass(frozen=True, slots=True)
class OpenJobCounts:
    now: Micros
    jobs: list[StateCount]
    more: frozenset[
        tuple[str, str]
    ]  # (state, queue or "") of which there are more than were counted
    locks: int  # places that are taken
    lock_waiters: int
    lock_waiting_since: Micros | None


class JobCounts:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def look(self) -> OpenJobCounts:
        with self._db.statement() as tx:
            found: list[StateCount] = []
            more: set[tuple[str, str]] = set()
            queues = [row[0] for row in tx.all("waiting_queues", namespace=self._namespace)]
            each = MOST if len(queues) <= MANY_QUEUES else MOST_EACH
            for queue in queues:
                self._count(tx, found, more, "waiting", "count_waiting", each, queue=queue)
            for state in ("parked", "scheduled", "running"):
                self._count(tx, found, more, state, f"count_{state}", MOST)
            for state in ("blocked", "held"):
                self._count(tx, found, more, state, "count_blocked_or_held", MOST, state=state)
            locks = tx.one("count_locks", namespace=self._namespace, limit=MOST)
            assert locks is not None
            return OpenJobCounts(tx.now(), found, frozenset(more), *locks)

    def _count(
        self,
        tx: Transaction,
        found: list[StateCount],
        more: set[tuple[str, str]],
        name: str,
        query: str,
        most: int,
        **asked: str,
    ) -> None:
        rows = [
            StateCount(name, *row)
            for row in tx.all(query, namespace=self._namespace, limit=most, **asked)
        ]
        found += rows
        if sum(row.jobs for row in rows) >= most:
            more.add((name, asked.get("queue", "")))
