"""Move jobs whose moment has come: scheduled jobs become waiting, expired jobs are cancelled."""

from __future__ import annotations

from genba.domain.duration import Micros
from genba.storage.jobs.attempts import Attempts
from genba.storage.namespace import Namespace


class DueJobs:
    def __init__(self, namespace: Namespace, attempts: Attempts) -> None:
        self._db = namespace.database
        self._namespace = namespace
        self._attempts = attempts

    def promote(self) -> int:
        """Let scheduled jobs wait whose moment has come; how many."""
        with self._db.transaction() as tx:
            rows = tx.all(
                "promote", namespace=self._namespace.name, age_step=self._namespace.age_step
            )
            self._namespace.events.add_states(tx, [row[:3] for row in rows])
            self._namespace.limits.after_move(tx, [row[0] for row in rows if row[3] is not None])
            return len(rows)

    def next_due(self) -> Micros | None:
        """Give the moment of the next scheduled job."""
        with self._db.statement() as tx:
            row = tx.one("next_due", namespace=self._namespace.name)
            return row[0] if row else None

    def expire(self) -> int:
        """Cancel the jobs that have not started in time; how many."""
        with self._db.transaction() as tx:
            rows = tx.all("expire", namespace=self._namespace.name)
            ids = [row[0] for row in rows]
            self._attempts.runs_ended(tx, [(id, "cancelled", schedule) for id, schedule in rows])
            self._attempts.after_end(tx, "cancelled", ids, reason="expired")
            self._namespace.limits.after_move(tx, ids)
            return len(ids)
