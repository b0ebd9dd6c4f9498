"""Edges between jobs (`after=`), which are added with a job.

Ending a job never touches the jobs that wait for it (decision 4).  It leaves a note in `unsettled`,
and one settler at a time works through the notes (settle.py).  The same notes cover children by
`parent=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from genba.domain.untrusted_json import read_json
from genba.errors import JobNotFound
from genba.storage.engines.database import Transaction
from genba.storage.namespace import Namespace
from genba.storage.records import JobId, Micros

# A job that ends like this takes its children by `parent=` with it.
FAMILY_ENDS = ("cancelled", "timed_out")
_PARENTS_PER_LOOK = 500  # as the query `lost_parents` has it


class Parent(NamedTuple):
    """A job that another job waits for (in the order of the query)."""

    id: JobId
    state: str | None  # None: it was deleted
    wants: str
    claimed_at: Micros | None
    task: str | None


class Dependencies:
    def __init__(self, namespace: Namespace) -> None:
        self._db = namespace.database
        self._namespace = namespace.name
        self._events = namespace.events
        self._last_looked_at = 0
        # A hint for the node: since it was last cleared, a job with children has ended.
        self.unsettled = False

    def add(self, tx: Transaction, edges: Sequence[tuple[JobId, JobId, str]]) -> None:
        """Add edges (child, parent, wants); JobNotFound if a parent does not exist."""
        if not edges:
            return
        parents = sorted({parent for _, parent, _ in edges})
        known = {
            row[0]
            for row in tx.batch(
                "states", [(parent,) for parent in parents], namespace=self._namespace
            )
        }
        unknown = [parent for parent in parents if parent not in known]
        if unknown:
            raise JobNotFound(f"after: there is no job {', '.join(map(str, unknown))}")
        tx.batch("add_edges", edges)
        self.note_ended(tx, parents)

    def note_ended(self, tx: Transaction, parents: Sequence[JobId]) -> None:
        """Leave a note that the settler must look at the children of these jobs."""
        tx.batch("insert_unsettled", [(parent,) for parent in parents], namespace=self._namespace)

    def jobs_ended(self, tx: Transaction, state: str, ids: Sequence[JobId]) -> None:
        """Leave a note for those of these ended jobs that have children.

        Call it after the jobs' rows are written, never before: an edge that is not visible yet will
        see our lock.
        """
        parents = tx.all("parents_with_dependents", ids=tx.numbers(ids))
        if state in FAMILY_ENDS:
            parents += tx.all("parents_with_open_children", ids=tx.numbers(ids))
        noted = sorted({row[0] for row in parents})
        self.note_ended(tx, noted)
        if noted:
            self.unsettled = True

    def reopen(self, tx: Transaction, id: JobId) -> None:
        """Let jobs that were cancelled or held because of this one wait again, and theirs too."""
        parents = [id]
        while parents:
            for (child,) in tx.all("dependents_of_failed", parent_id=parents.pop()):
                if tx.one("block_again", id=child):
                    self._events.add(tx, "blocked", [child])
                    # All edges of the child: another one may still be broken.
                    edges = tx.all("reopen_edges", child_id=child)
                    self.note_ended(tx, [row[0] for row in edges])
                    parents.append(child)

    def look_for_lost(self) -> int:
        """Note parents whose rows were deleted by hand; how many.

        One call looks at a few hundred parents.
        """
        with self._db.statement() as tx:
            parents = tx.all("parents_after", after=self._last_looked_at)
        self._last_looked_at = parents[-1][0] if len(parents) == _PARENTS_PER_LOOK else 0
        lost = [parent for parent, exists in parents if not exists]
        if lost:
            with self._db.transaction() as tx:
                self.note_ended(tx, lost)
        return len(lost)

    def open_parents(self, id: JobId) -> list[Parent]:
        with self._db.statement() as tx:
            return [Parent(*row) for row in tx.all("open_parents", id=id)]

    def results_of_parents(self, id: JobId) -> list[tuple[JobId, bytes | None]]:
        with self._db.statement() as tx:
            return [(row[0], row[1]) for row in tx.all("results_of_parents", id=id)]


def is_met(wants: str, state: str) -> bool:
    """Tell whether a job that ended in this state gives its child what it waits for."""
    match wants:
        case "finished":
            return True
        case "failure":
            return state not in ("succeeded", "deleted")
        case _:
            return state == "succeeded"


def on_dependency_failure(options: str | None) -> str:
    """Read from a job's stored options what happens to it when a dependency fails."""
    policy = read_json(options, dict[str, Any], {}).get("on_dependency_failure")
    return policy if policy in ("hold", "run") else "cancel"
