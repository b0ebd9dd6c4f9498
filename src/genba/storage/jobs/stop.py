"""Stop one job inside a transaction: cancel or hold it, or ask the node that runs it."""

from __future__ import annotations

import time
from typing import Any

from genba.storage.engines.database import Transaction
from genba.storage.jobs.attempts import Attempts
from genba.storage.namespace import Namespace
from genba.storage.records import JobId

# Seconds before each try to get a row that another transaction holds.
_ROW_WAITS_SECONDS = (0.0, 0.02, 0.05, 0.1, 0.1)


class Stopping:
    def __init__(self, namespace: Namespace, attempts: Attempts) -> None:
        self._namespace = namespace
        self._attempts = attempts

    def cancel_or_hold(
        self, tx: Transaction, verb: str, id: JobId, reason: str, by: str | None = None
    ) -> bool:
        """Cancel or hold a job that has not started; False if it has, or is final.

        The caller then calls `limits.after_move`, after everything else that may wait for a row.
        """
        row = tx.one(verb, id=id, namespace=self._namespace.name, reason=reason)
        if row is None:
            return False
        data: dict[str, Any] = {"reason": reason} if by is None else {"reason": reason, "by": by}
        if verb == "cancel":
            self._attempts.runs_ended(tx, [(id, "cancelled", row[1])])
            self._attempts.after_end(tx, "cancelled", [id], **data)
        else:
            self._namespace.events.add(tx, "held", [id], **data)
        return True

    def cancel_or_hold_with_slots(self, tx: Transaction, verb: str, id: JobId, reason: str) -> bool:
        """Do the same and free the job's slots at once."""
        stopped = self.cancel_or_hold(tx, verb, id, reason)
        self._namespace.limits.after_move(tx, [id])
        return stopped

    def ask_to_stop(self, tx: Transaction, id: JobId, how: str, reason: str | None) -> int | None:
        """Ask the node that runs a job to stop it; gives that node, None if the job does not run.

        A job holds its own row while its `transaction()` is open.  In that case only its node is
        asked, and the row is not changed: if the job commits before it learns of the request, it
        has ended by itself.
        """
        row = None
        for pause in _ROW_WAITS_SECONDS:
            time.sleep(pause)
            row = tx.one(
                "request_stop", id=id, namespace=self._namespace.name, how=how, reason=reason
            )
            running = row or tx.one("node_of_job", id=id, namespace=self._namespace.name)
            if row or running is None:
                break
            row = running
        if row is None:
            return None
        node, attempt = row
        tx.run("insert_command", node=node, job_id=id, attempt=attempt, verb=how, data=reason)
        self._namespace.events.add(
            tx,
            "stop_requested",
            [id],
            how=how,
            reason=reason,
            by=self._namespace.changed_by(),
            attempt=attempt,
        )
        return int(node)
