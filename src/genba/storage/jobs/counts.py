"""Count open jobs for metrics and screens: exact while they are few, bounded when they are many.

A count must never walk millions of rows.  It takes the first so many of each state (of `waiting`:
of each queue) in the order of the index, and says so when there are more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Micros

MOST = 10_000  # jobs of a state that are counted
MOST_PER_QUEUE = 1_000  # ... of a queue, if there are many queues
MANY_QUEUES = 10


class StateCount(NamedTuple):
    """How many jobs of one task and queue are in a state.

    `oldest` is when the first of them was due.
    """

    state: str  # as in a job's record; `parked` for jobs that wait and cannot start
    queue: str
    task: str
    jobs: int
    oldest: Micros


@dataclass(frozen=True, slots=True)
class OpenJobCounts:
    now: Micros
    jobs: list[StateCount]
    # (state, queue or "") of which there are more jobs than were counted
    more: frozenset[tuple[str, str]]
    locks: int  # that are held
    lock_waiters: int
    lock_waiting_since: Micros | None


class JobCounts:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def read(self) -> OpenJobCounts:
        """Count the open jobs and the locks."""
        with self._db.statement() as tx:
            counts: list[StateCount] = []
            more: set[tuple[str, str]] = set()
            queues = [row[0] for row in tx.all("waiting_queues", namespace=self._namespace)]
            each = MOST if len(queues) <= MANY_QUEUES else MOST_PER_QUEUE
            for queue in queues:
                self._count(tx, counts, more, "waiting", "count_waiting", each, queue=queue)
            for state in ("parked", "scheduled", "running"):
                self._count(tx, counts, more, state, f"count_{state}", MOST)
            for state in ("blocked", "held"):
                self._count(tx, counts, more, state, "count_blocked_or_held", MOST, state=state)
            locks = tx.one("count_locks", namespace=self._namespace, limit=MOST)
            assert locks is not None
            return OpenJobCounts(tx.now(), counts, frozenset(more), *locks)

    def _count(
        self,
        tx: Transaction,
        counts: list[StateCount],
        more: set[tuple[str, str]],
        name: str,
        query: str,
        most: int,
        **filters: str,
    ) -> None:
        rows = [
            StateCount(name, *row)
            for row in tx.all(query, namespace=self._namespace, limit=most, **filters)
        ]
        counts += rows
        if sum(row.jobs for row in rows) >= most:
            more.add((name, filters.get("queue", "")))
