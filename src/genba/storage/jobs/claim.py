"""Claim jobs: lease the best due jobs of each queue to a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from genba.domain.states import State
from genba.storage.engines.database import Transaction
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.fairness import Fairness
from genba.storage.namespace import Namespace
from genba.storage.operators import OperatorRules, Operators
from genba.storage.records import Claimed, JobId, JobRecord, Success

# Claims come in a few sizes, so that each is a prepared statement.
CLAIM_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
DEDICATED_MARK = '"dedicated":true'  # in the options of a dedicated job
# Builds a `Claimed` without the call of its Python constructor, for each claimed row.
_to_claimed: Callable[[Any], Claimed] = partial(tuple.__new__, Claimed)


class Claims:
    def __init__(
        self, namespace: Namespace, operators: Operators, fairness: Fairness, attempts: Attempts
    ) -> None:
        self._db = namespace.database
        self._namespace = namespace.name
        self._operators = operators
        self._fairness = fairness
        self._attempts = attempts

    def warm_up(self, node: int) -> None:
        """Prepare the session of a thread that is about to claim and end jobs.

        The first statements of a PostgreSQL session take ten times as long as the next ones: it
        reads the catalog and makes the plans.
        """
        if self._db.parallel_writers < 2:
            return
        no_job = Success(-1, 1, 0, b"", 0, 0, 0, 0, 0, 0)
        with self._db.single_write() as tx:
            for limit in (1, max(CLAIM_SIZES)):
                tx.claim(
                    namespace="",
                    queue="",
                    node=node,
                    claim=0,
                    tasks=tx.names(["x"]),
                    epoch=0,
                    limit=limit,
                )
            tx.matched("succeed", [no_job], node=node)

    def finish_and_claim(
        self,
        node: int,
        claim: int,
        ended: Sequence[Success],
        wants: Mapping[str, int],
        tasks: Sequence[str],
    ) -> tuple[set[JobId], list[Claimed]]:
        """Finish one batch and claim the next, in one commit."""
        with self._db.transaction() as tx:
            matched = self._attempts.succeed(tx, node, ended)
            jobs = self._claim(tx, node, claim, wants, tasks)
        self._attempts.forget_starts(ended)
        return matched, jobs

    def claim(
        self, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]
    ) -> list[Claimed]:
        """Lease the best due jobs of each queue to `node`.

        As many as it wants, for as long as it lives.
        """
        open_tx = self._db.single_write if len(wants) == 1 else self._db.transaction
        with open_tx() as tx:
            return self._claim(tx, node, claim, wants, tasks)

    def _claim(
        self,
        tx: Transaction,
        node: int,
        claim: int,
        wants: Mapping[str, int],
        tasks: Sequence[str],
    ) -> list[Claimed]:
        rules = self._operators.rules_in(tx)
        jobs = self._claim_by_rules(tx, rules, node, claim, wants, tasks)
        if not jobs and self._operators.stale(tx):
            rules = self._operators.read_rules(tx)
            jobs = self._claim_by_rules(tx, rules, node, claim, wants, tasks)
        return jobs

    def _claim_by_rules(
        self,
        tx: Transaction,
        rules: OperatorRules,
        node: int,
        claim: int,
        wants: Mapping[str, int],
        tasks: Sequence[str],
    ) -> list[Claimed]:
        claimed: list[Claimed] = []
        enabled = tx.names(
            [task for task in tasks if task not in rules.disabled] if rules.disabled else tasks
        )
        for queue, count in wants.items():
            if count < 1 or queue in rules.paused:
                continue
            rows = tx.claim(
                namespace=self._namespace,
                queue=queue,
                node=node,
                claim=claim,
                tasks=enabled,
                epoch=rules.epoch,
                limit=_claim_size(count),
            )
            jobs = sorted(map(_to_claimed, rows))
            if queue in rules.fair:
                self._fairness.advance(tx, queue, jobs)
            claimed += jobs
        return claimed

    def claim_dedicated(
        self, node: int, claim: int, queues: Sequence[str], tasks: Sequence[str], limit: int
    ) -> list[Claimed]:
        """Lease dedicated jobs near the front of their queues, for a node without a free slot."""
        rules = self._operators.rules()
        enabled, mark = set(tasks) - rules.disabled, f"%{DEDICATED_MARK}%"
        with self._db.statement() as tx:
            ids = [
                id
                for queue in queues
                if queue not in rules.paused
                for id, task in tx.all(
                    "dedicated_ahead", namespace=self._namespace, queue=queue, mark=mark
                )
                if task in enabled
            ]
        if not ids:
            return []
        with self._db.transaction() as tx:
            values = {
                "node": node,
                "claim": claim,
                "namespace": self._namespace,
                "epoch": rules.epoch,
            }
            rows = [tx.one("claim_waiting_job", id=id, **values) for id in ids[:limit]]
        return [Claimed(*row) for row in rows if row is not None]

    def claim_awaited(
        self,
        node: int,
        claim: int,
        queues: Sequence[str],
        tasks: Sequence[str],
        ids: Sequence[JobId],
    ) -> list[Claimed]:
        """Lease the first of these jobs that may start, whatever is ahead of it in its queue."""
        rules = self._operators.rules()
        enabled, served = set(tasks) - rules.disabled, set(queues) - rules.paused
        with self._db.statement() as tx:
            rows = [tx.one("job", namespace=self._namespace, id=id) for id in ids]
        jobs = [JobRecord(*row) for row in rows if row is not None]
        may_start = [
            job.id
            for job in jobs
            if job.state == State.WAITING and job.queue in served and job.task in enabled
            if job.parked_on is None and DEDICATED_MARK not in (job.options or "")
        ]
        for id in may_start:
            with self._db.transaction() as tx:
                row = tx.one(
                    "claim_waiting_job",
                    id=id,
                    node=node,
                    claim=claim,
                    namespace=self._namespace,
                    epoch=rules.epoch,
                )
            if row is not None:
                return [Claimed(*row)]
        return []

    def claim_job(self, node: int, claim: int, id: JobId) -> Claimed | None:
        """Lease one job to `node`, due or not; None if its state does not let it start."""
        with self._db.single_write() as tx:
            row = tx.one("claim_job", namespace=self._namespace, node=node, claim=claim, id=id)
        return Claimed(*row) if row else None

    def jobs_of_claim(self, node: int, claim: int) -> list[Claimed]:
        """Read the jobs of a claim whose answer was lost."""
        with self._db.statement() as tx:
            return [
                Claimed(*row) for row in sorted(tx.all("jobs_of_claim", node=node, claim=claim))
            ]


def _claim_size(count: int) -> int:
    """Give the largest of the few sizes that does not exceed `count`."""
    return max((size for size in CLAIM_SIZES if size <= count), default=1)
