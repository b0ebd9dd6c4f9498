"""Fair queues in the store: who takes a turn, and how the queue's time moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genba.domain.fairness import TURN, UNRANKED, fair_rank, start_of, starts
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import Claimed, Enqueued, JobId, NewJob

if TYPE_CHECKING:
    from genba.storage.store import Store


class Fairness:
    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._db = database
        self._namespace = store.namespace
        self._policy = store.policy

    def place(self, tx: Transaction, jobs: Sequence[NewJob], done: Sequence[Enqueued]) -> None:
        """Give new jobs of fair queues their places, each key by turns."""
        made = [
            (one.id, job)
            for job, one in zip(jobs, done, strict=True)
            if job.fair_key is not None and one.created
        ]
        if not made:
            return
        for queue, fair_by in sorted(
            {job.queue: job.fair_by for job in jobs if job.fair_by is not None}.items()
        ):
            self._policy.make_fair(tx, queue, fair_by)
        now = [
            (id, job.queue, str(job.fair_key), job.priority) for id, job in made if _at_once(job)
        ]
        later = [(id, str(job.fair_key), UNRANKED) for id, job in made if not _at_once(job)]
        tx.batch("set_fair_ranks", [*self._ranked(tx, now), *later])

    def _ranked(
        self, tx: Transaction, jobs: Sequence[tuple[JobId, str, str, int]]
    ) -> Iterator[tuple[JobId, str, int]]:
        if not jobs:
            return
        turns = Counter((queue, key) for _, queue, key, _ in jobs)
        asked = [(queue, key, count * TURN) for (queue, key), count in sorted(turns.items())]
        clocks: Mapping[Any, Iterator[int]] = {
            (queue, key): iter(starts(last, turns[queue, key]))
            for queue, key, last in tx.batch("advance_fair_keys", asked, namespace=self._namespace)
        }
        for id, queue, key, priority in jobs:
            yield id, key, fair_rank(next(clocks[queue, key]), priority, self._store.age_step)

    def rank_new(self) -> int:
        """Places for jobs that have become waiting since they were enqueued: due, retried, resumed; how many."""
        ranked = 0
        for queue in sorted(self._policy.rules().fair):
            while True:
                with self._db.transaction() as tx:
                    rows = tx.all("unranked_jobs", namespace=self._namespace, queue=queue)
                    if rows:
                        found = [
                            (id, queue, key, priority - crashes)
                            for id, queue, key, priority, crashes in rows
                        ]
                        tx.batch("set_fair_ranks", list(self._ranked(tx, found)))
                ranked += len(rows)
                if len(rows) < 1000:
                    break
        return ranked

    def move(self, tx: Transaction, queue: str, claimed: Sequence[Claimed]) -> None:
        """The queue's time is the start of what was claimed last."""
        step = self._store.age_step
        known = [
            start_of(job.rank, job.priority - job.crashes, step)
            for job in claimed
            if job.rank < UNRANKED
        ]
        if known:
            tx.run("advance_queue_time", namespace=self._namespace, queue=queue, vtime=max(known))

    def forget(self) -> int:
        """Keys that have nothing to remember."""
        if not self._policy.rules().fair:
            return 0
        with self._db.transaction() as tx:
            return tx.run("prune_fair_keys", namespace=self._namespace)


def _at_once(job: NewJob) -> bool:
    """It waits from the beginning; others take their turn when they do."""
    return not job.after and not job.delay and job.due_at is None
