"""Fair queues in the store: give each key its turns, and advance the queue's virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from genba.domain.fairness import TURN, UNRANKED, fair_rank, start_of, starts
from genba.storage.engines.database import Transaction
from genba.storage.namespace import Namespace
from genba.storage.operators import Operators
from genba.storage.records import Claimed, Enqueued, JobId, NewJob

JOBS_PER_CALL = 1000  # as the query `unranked` has it


class Fairness:
    def __init__(self, namespace: Namespace, operators: Operators) -> None:
        self._db = namespace.database
        self._namespace = namespace.name
        self._age_step = namespace.age_step
        self._operators = operators

    def rank_new(
        self, tx: Transaction, jobs: Sequence[NewJob], enqueued: Sequence[Enqueued]
    ) -> None:
        """Rank the new jobs of fair queues, the keys in turn."""
        created = [
            (row.id, job)
            for job, row in zip(jobs, enqueued, strict=True)
            if job.fair_key is not None and row.created
        ]
        if not created:
            return
        for queue, fair_by in sorted(
            {job.queue: job.fair_by for job in jobs if job.fair_by is not None}.items()
        ):
            self._operators.make_fair(tx, queue, fair_by)
        now = [
            (id, job.queue, str(job.fair_key), job.priority)
            for id, job in created
            if _waits_at_once(job)
        ]
        later = [
            (id, str(job.fair_key), UNRANKED) for id, job in created if not _waits_at_once(job)
        ]
        tx.batch("set_fair_ranks", [*self._ranked(tx, now), *later])

    def _ranked(
        self, tx: Transaction, jobs: Sequence[tuple[JobId, str, str, int]]
    ) -> Iterator[tuple[JobId, str, int]]:
        if not jobs:
            return
        turns = Counter((queue, key) for _, queue, key, _ in jobs)
        rows = [(queue, key, count * TURN) for (queue, key), count in sorted(turns.items())]
        clocks: Mapping[Any, Iterator[int]] = {
            (queue, key): iter(starts(last, turns[queue, key]))
            for queue, key, last in tx.batch("advance_fair_keys", rows, namespace=self._namespace)
        }
        for id, queue, key, priority in jobs:
            yield id, key, fair_rank(next(clocks[queue, key]), priority, self._age_step)

    def rank_unranked(self) -> int:
        """Rank the jobs that started to wait after they were enqueued: due, retried, resumed.

        How many.
        """
        ranked = 0
        for queue in sorted(self._operators.rules().fair):
            while True:
                with self._db.transaction() as tx:
                    rows = tx.all("unranked_jobs", namespace=self._namespace, queue=queue)
                    if rows:
                        jobs = [
                            (id, queue, key, priority - crashes)
                            for id, queue, key, priority, crashes in rows
                        ]
                        tx.batch("set_fair_ranks", list(self._ranked(tx, jobs)))
                ranked += len(rows)
                if len(rows) < JOBS_PER_CALL:
                    break
        return ranked

    def advance(self, tx: Transaction, queue: str, claimed: Sequence[Claimed]) -> None:
        """Set the queue's virtual time to the start of the job that was claimed last."""
        times = [
            start_of(job.rank, job.priority - job.crashes, self._age_step)
            for job in claimed
            if job.rank < UNRANKED
        ]
        if times:
            tx.run("advance_queue_time", namespace=self._namespace, queue=queue, vtime=max(times))

    def forget_idle_keys(self) -> int:
        """Delete the keys that the queue's time has overtaken; how many."""
        if not self._operators.rules().fair:
            return 0
        with self._db.transaction() as tx:
            return tx.run("prune_fair_keys", namespace=self._namespace)


def _waits_at_once(job: NewJob) -> bool:
    """Tell whether it waits from the beginning; other jobs take their turn when they do."""
    return not job.after and not job.delay and job.due_at is None
