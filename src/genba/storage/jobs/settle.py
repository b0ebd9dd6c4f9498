"""Settle dependencies: decide about the jobs that wait for jobs that have ended.

One settler at a time works through the notes in `unsettled` (see dependencies.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from genba.domain.states import FINAL
from genba.storage.engines.database import Transaction
from genba.storage.jobs.dependencies import (
    FAMILY_ENDS,
    Dependencies,
    is_met,
    on_dependency_failure,
)
from genba.storage.jobs.stop import Stopping
from genba.storage.namespace import Namespace
from genba.storage.records import JobId

PER_STEP = 1000  # children in one step, parents in one transaction


class Settler:
    def __init__(
        self, namespace: Namespace, dependencies: Dependencies, stopping: Stopping
    ) -> None:
        self._namespace = namespace
        self._db = namespace.database
        self._dependencies = dependencies
        self._stopping = stopping
        self._asked_nodes: set[int] = set()
        self._moved: list[JobId] = []  # in this transaction; there is one settler at a time

    def settle(self) -> int:
        """Look at the children of parents that have ended; how many parents.

        Call it again until there are none.
        """
        settled = self._settle()
        nodes, self._asked_nodes = self._asked_nodes - {0}, set()
        for node in sorted(nodes):
            self._namespace.node_wakeups.wake_node(node)
        return settled

    def _settle(self) -> int:
        with self._db.transaction() as tx:
            tx.run("lock_settling", namespace=self._namespace.name)
            settled = last = 0
            self._moved = []
            while settled < PER_STEP:  # the end of a child may be that of another job's parent
                notes = tx.all("unsettled", namespace=self._namespace.name, after=last)
                if not notes:
                    break
                last = notes[-1][0]
                settled += self._settle_notes(tx, notes)
            self._namespace.limits.after_move(tx, self._moved)
            return settled

    def _settle_notes(
        self, tx: Transaction, notes: Sequence[tuple[int, JobId, JobId | None]]
    ) -> int:
        parents = tx.numbers(sorted({note[1] for note in notes}))
        states: dict[JobId, str] = dict(tx.all("parent_states", ids=parents))
        # If another transaction holds the row of a parent that exists, a later pass sees how it
        # ended.
        visible = [(seq, parent) for seq, parent, seen in notes if parent in states or seen is None]
        met = self._resolve_met(
            tx, {parent for _, parent in visible if states.get(parent) == "succeeded"}
        )
        done = [
            (seq,)
            for seq, parent in visible
            if parent in met or self._resolve(tx, parent, states.get(parent, "deleted"))
        ]
        tx.batch("delete_unsettled", done)
        return len(visible)

    def _resolve_met(self, tx: Transaction, succeeded: set[JobId]) -> set[JobId]:
        """Resolve in one go the parents whose success is what every child waits for.

        The others, and parents with very many children, are resolved one by one.
        """
        edges = (
            tx.all("dependents_of", ids=tx.numbers(sorted(succeeded))) if len(succeeded) > 1 else []
        )
        if not 0 < len(edges) <= PER_STEP:
            return set()
        met = succeeded - {parent for parent, _, wants in edges if not is_met(wants, "succeeded")}
        ended = sorted((parent, child) for parent, child, _ in edges if parent in met)
        self._count_down(tx, [row[0] for row in tx.batch("meet_edges", ended)])
        return met

    def _resolve(self, tx: Transaction, parent: JobId, state: str) -> bool:
        """Resolve the edges of one parent; False if it has more children than one step takes."""
        if state not in FINAL and state != "deleted":
            return True
        children = tx.all("dependents_of_parent", parent_id=parent)
        met = [child for child, wants in children if is_met(wants, state)]
        broken = [child for child, wants in children if not is_met(wants, state)]
        if met:
            self._close_edges(tx, parent, met, "met")
        if broken:
            self._stop_broken(tx, parent, state, broken)
            self._close_edges(tx, parent, broken, "broken")
        family = (
            tx.all("open_children", parent_id=parent, namespace=self._namespace.name)
            if state in FAMILY_ENDS
            else []
        )
        for child, child_state in family:
            reason = f"parent ended: job {parent} ended {state}"
            if child_state == "running":
                node = self._stopping.ask_to_stop(tx, child, "cancel", reason)
                self._asked_nodes.add(node or 0)
            else:
                self._stopping.cancel_or_hold(tx, "cancel", child, reason)
                self._moved.append(child)
        return max(len(children), len(family)) < PER_STEP

    def _close_edges(
        self, tx: Transaction, parent: JobId, children: Sequence[JobId], state: str
    ) -> None:
        closed = tx.all("set_edge_states", parent_id=parent, state=state, ids=tx.numbers(children))
        self._count_down(tx, [row[0] for row in closed])

    def _count_down(self, tx: Transaction, children: Sequence[JobId]) -> None:
        """Let each child wait for one job less, as often as it is named."""
        moved = tx.batch(
            "reduce_open_deps", sorted(Counter(children).items()), age_step=self._namespace.age_step
        )
        free = [row[:3] for row in moved if row[3] == 0 and row[1] in ("waiting", "scheduled")]
        self._namespace.events.add_states(tx, free)
        self._moved += [row[0] for row in moved if row[1] == "waiting"]

    def _stop_broken(
        self, tx: Transaction, parent: JobId, state: str, children: Sequence[JobId]
    ) -> None:
        """Cancel or hold the children that can no longer get what they wait for."""
        how = "was deleted" if state == "deleted" else f"ended {state}"
        reason = (
            f"dependency {'succeeded' if state == 'succeeded' else 'failed'}: job {parent} {how}"
        )
        for child, options in sorted(tx.all("options_of", ids=tx.numbers(children))):
            policy = on_dependency_failure(options)
            if policy != "run":
                self._stopping.cancel_or_hold(tx, policy, child, reason)
                self._moved.append(child)
