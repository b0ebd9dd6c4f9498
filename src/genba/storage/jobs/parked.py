"""Park waiting jobs that no node can start, outside of the claim index, and bring them back."""

from __future__ import annotations

from collections.abc import Iterable

from genba.storage.namespace import Namespace

# Jobs at the front of a queue in which unknown tasks are looked for: about one claim.
FRONT_JOBS = 2000


class ParkedJobs:
    def __init__(self, namespace: Namespace) -> None:
        self._db = namespace.database
        self._namespace = namespace.name
        self._limits = namespace.limits

    def park_unknown(self, queue: str, known: Iterable[str]) -> int:
        """Park the jobs at the front of a queue whose tasks no live node knows; how many.

        The look takes no lock and reads only the front.  Jobs further back are parked when they get
        there.
        """
        with self._db.statement() as tx:
            tasks = tx.names(sorted(known))
            rows = tx.all(
                "unknown_in_front",
                namespace=self._namespace,
                queue=queue,
                tasks=tasks,
                front=FRONT_JOBS,
            )
        if not rows:
            return 0
        with self._db.transaction() as tx:
            return tx.run("park_unknown", ids=tx.numbers([id for (id,) in rows]), tasks=tasks)

    def unpark(self, reasons: Iterable[str]) -> int:
        """Bring back the jobs that are parked for these reasons; how many."""
        with self._db.transaction() as tx:
            rows = [
                row
                for reason in reasons
                for row in tx.all("unpark", namespace=self._namespace, parked_on=reason)
            ]
            self._limits.after_move(tx, [id for id, buckets in rows if buckets is not None])
            return len(rows)

    def reasons_among(self, reasons: Iterable[str]) -> set[str]:
        """Give those of these reasons for which jobs are parked."""
        with self._db.statement() as tx:
            rows = tx.batch(
                "parked_on_reasons", [(reason,) for reason in reasons], namespace=self._namespace
            )
            return {row[0] for row in rows}
