"""Cancel, hold, resume and requeue single jobs, as a person or a program asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from genba.domain.states import default_stop_reason
from genba.errors import StoreError
from genba.storage.engines.database import Transaction
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.settle import Settler
from genba.storage.jobs.stop import Stopping
from genba.storage.namespace import Namespace
from genba.storage.records import JobId

BATCH = 500  # jobs in one transaction


class Steering:
    def __init__(
        self,
        namespace: Namespace,
        attempts: Attempts,
        dependencies: Dependencies,
        stopping: Stopping,
        settler: Settler,
    ) -> None:
        self._namespace = namespace
        self._db = namespace.database
        self._events = namespace.events
        self._limits = namespace.limits
        self._attempts = attempts
        self._dependencies = dependencies
        self._stopping = stopping
        self._settler = settler

    def cancel(self, id: JobId, reason: str | None, how: str = "cancel") -> bool:
        """Cancel a job that has not started, ask a running one to stop.

        False if it is final already.
        """
        with self._db.transaction() as tx:
            node = None
            cancelled = self._cancel_unstarted(tx, id, reason or default_stop_reason(how))
            if not cancelled:
                node = self._stopping.ask_to_stop(tx, id, how, reason)
                if node is None:
                    # Its node may have given it back in the meantime.
                    cancelled = self._cancel_unstarted(tx, id, reason or default_stop_reason(how))
            if not cancelled and node is None:
                return False
            if cancelled:
                self._limits.after_move(tx, [id])
        self._follow_up(set() if node is None else {node}, cancelled=cancelled)
        return True

    def _cancel_unstarted(self, tx: Transaction, id: JobId, reason: str) -> bool:
        by = self._namespace.changed_by()
        return self._stopping.cancel_or_hold(tx, "cancel", id, reason, by=by)

    def cancel_all(self, ids: Sequence[JobId], reason: str | None) -> int:
        """Cancel those of these jobs that are not final; how many."""
        count = 0
        nodes: set[int] = set()
        for start in range(0, len(ids), BATCH):
            with self._db.transaction() as tx:
                cancelled = []
                for id in sorted(ids[start : start + BATCH]):
                    if self._stopping.cancel_or_hold(tx, "cancel", id, reason or "cancelled"):
                        cancelled.append(id)
                    elif (node := self._stopping.ask_to_stop(tx, id, "cancel", reason)) is not None:
                        nodes.add(node)
                        count += 1
                count += len(cancelled)
                self._limits.after_move(tx, cancelled)
        self._follow_up(nodes, cancelled=True)
        return count

    def kill(self, ids: Sequence[JobId], reason: str) -> int:
        """Ask for those of these jobs that run to be killed; how many."""
        with self._db.transaction() as tx:
            nodes = [
                node
                for id in ids
                if (node := self._stopping.ask_to_stop(tx, id, "kill", reason)) is not None
            ]
        self._follow_up(set(nodes), cancelled=False)
        return len(nodes)

    def _follow_up(self, nodes: set[int], *, cancelled: bool) -> None:
        """Do what follows at once; it is committed, so nodes do it later if this fails."""
        with suppress(StoreError):
            if cancelled:
                self._settler.settle()
                self._namespace.wake_for_granted()
            for node in nodes:
                self._namespace.node_wakeups.wake_node(node)

    def hold(self, id: JobId, reason: str) -> bool:
        """Hold a job that has not started."""
        return self._move("hold", "held", id, reason=reason)

    def resume(self, id: JobId) -> bool:
        """Let a held job wait again."""
        return self._move("resume", "resumed", id, age_step=self._namespace.age_step)

    def _move(self, verb: str, kind: str, id: JobId, **values: Any) -> bool:
        with self._db.transaction() as tx:
            row = tx.one(verb, id=id, namespace=self._namespace.name, **values)
            if row:
                data = {"reason": values["reason"]} if "reason" in values else {"state": row[0]}
                self._events.add(tx, kind, [id], by=self._namespace.changed_by(), **data)
                self._limits.after_move(tx, [id])
        if row:
            self._namespace.wake_nodes()
        return row is not None

    def requeue(self, id: JobId) -> bool:
        """Let a final job run again.

        Jobs that were cancelled or held because of it wait for it again.
        """
        with self._db.transaction() as tx:
            if not self._attempts.requeue(tx, id):
                return False
            self._events.add(tx, "requeued", [id], by=self._namespace.changed_by())
            self._dependencies.reopen(tx, id)
            self._limits.after_move(tx, [id])
        self._namespace.wake_nodes()
        return True

    def requeue_failed(self, ids: Sequence[JobId]) -> int:
        """Requeue those of these jobs that did not succeed; how many.

        Jobs that never ran because of other jobs are left out: they follow those.
        """
        with self._db.statement() as tx:
            rows = tx.batch(
                "unsuccessful_jobs", [(id,) for id in ids], namespace=self._namespace.name
            )
        return sum(map(self.requeue, sorted(row[0] for row in rows)))
