"""Edges between jobs: they are added with a job, and settled when the one that it waits for has ended.

Nobody who ends a job touches those that wait for it (decision 4): it leaves a note in `unsettled`, and one settler at
a time works the notes off.  What a job's own end means for its children by `parent=` goes the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from genba.domain.states import FINAL
from genba.domain.untrusted_json import read_json
from genba.errors import JobNotFound
from genba.storage.engines.database import Database, Row, Transaction
from genba.storage.events import Events
from genba.storage.limits.slots import LimitSlots
from genba.storage.records import JobId, Micros

AT_ONCE = 1000  # children in one step, parents in one transaction
TAKES_ITS_CHILDREN = (
    "cancelled",
    "timed_out",
)  # ends of a job after which its children are not wanted any more


class Parent(NamedTuple):
    """A job that another one waits for (the order is that of the query)."""

    id: JobId
    state: str | None  # None: it was deleted
    wants: str
    claimed_at: Micros | None
    task: str | None


class Steering(Protocol):
    """What the settler needs of the store."""

    def cancel_or_hold(self, tx: Transaction, verb: str, id: JobId, reason: str) -> bool: ...

    def record_states(self, tx: Transaction, rows: Sequence[Row]) -> None: ...

    def ask_to_stop(
        self, tx: Transaction, id: JobId, how: str, reason: str | None
    ) -> int | None: ...

    @property
    def age_step(self) -> Micros: ...

    @property
    def limits(self) -> LimitSlots: ...

    @property
    def events(self) -> Events: ...


class Dependencies:
    def __init__(self, database: Database, namespace: str, steering: Steering) -> None:
        self._db = database
        self._namespace = namespace
        self._steering = steering
        self._walked = 0
        self._asked: set[int] = set()
        self._moved: list[JobId] = []  # by the one settler, in this transaction

    def add(self, tx: Transaction, edges: Sequence[tuple[JobId, JobId, str]]) -> None:
        """(child, parent, wants); JobNotFound if a parent is not there."""
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
        self.look_at(tx, parents)

    def look_at(self, tx: Transaction, parents: Sequence[JobId]) -> None:
        """Leave a note that the children of these must be looked at."""
        tx.batch("insert_unsettled", [(parent,) for parent in parents], namespace=self._namespace)

    def awaited(self, tx: Transaction, kind: str, ids: Sequence[JobId]) -> bool:
        """These have ended: note those for whom somebody waits; True if there are any."""
        found = tx.all("parents_with_dependents", ids=tx.numbers(ids))
        if kind in TAKES_ITS_CHILDREN:
            found += tx.all("parents_with_open_children", ids=tx.numbers(ids))
        parents = sorted({row[0] for row in found})
        self.look_at(tx, parents)
        return bool(parents)

    def settle(self) -> int:
        """Look at the children of parents that have ended; how many parents.  Once more, until there are none."""
        with self._db.transaction() as tx:
            tx.run("lock_settling", namespace=self._namespace)
            settled = last = 0
            self._moved = []
            while settled < AT_ONCE:  # an end may be that of others' parent, too
                pending = tx.all("unsettled", namespace=self._namespace, after=last)
                if not pending:
                    break
                last = pending[-1][0]
                parents = tx.numbers(sorted({row[1] for row in pending}))
                states: dict[JobId, str] = dict(tx.all("parent_states", ids=parents))
                # if somebody holds the row of one that is there, another pass will see how that ended
                here = [
                    (seq, parent)
                    for seq, parent, seen in pending
                    if parent in states or seen is None
                ]
                settled += len(here)
                met = self._resolve_met(
                    tx, {parent for _, parent in here if states.get(parent) == "succeeded"}
                )
                done = [
                    (seq,)
                    for seq, parent in here
                    if parent in met or self._resolve(tx, parent, states.get(parent, "deleted"))
                ]
                tx.batch("delete_unsettled", done)
            self._steering.limits.moved(tx, self._moved)
            return settled

    def asked(self) -> list[int]:
        """The nodes that have been told to stop a job, since this was last asked."""
        nodes, self._asked = self._asked - {0}, set()
        return sorted(nodes)

    def _resolve_met(self, tx: Transaction, succeeded: set[JobId]) -> set[JobId]:
        """Those of them that every child had hoped for, all in one go; the others, and great families, one by one."""
        edges = (
            tx.all("dependents_of", ids=tx.numbers(sorted(succeeded))) if len(succeeded) > 1 else []
        )
        if not 0 < len(edges) <= AT_ONCE:
            return set()
        hoped = succeeded - {parent for parent, _, wants in edges if not is_met(wants, "succeeded")}
        ended = sorted((parent, child) for parent, child, _ in edges if parent in hoped)
        self._less(tx, [row[0] for row in tx.batch("meet_edges", ended)])
        return hoped

    def _resolve(self, tx: Transaction, parent: JobId, state: str) -> bool:
        """False if there are more of them than in one step."""
        if state not in FINAL and state != "deleted":
            return True
        children = tx.all("dependents_of_parent", parent_id=parent)
        met = [child for child, wants in children if is_met(wants, state)]
        broken = [child for child, wants in children if not is_met(wants, state)]
        if met:
            self._count_down(tx, parent, met, "met")
        if broken:
            self._put_down(tx, parent, state, broken)
            self._count_down(tx, parent, broken, "broken")
        family = (
            tx.all("open_children", parent_id=parent, namespace=self._namespace)
            if state in TAKES_ITS_CHILDREN
            else []
        )
        for child, was in family:
            reason = f"parent ended: job {parent} ended {state}"
            if was == "running":
                self._asked.add(self._steering.ask_to_stop(tx, child, "cancel", reason) or 0)
            else:
                self._steering.cancel_or_hold(tx, "cancel", child, reason)
                self._moved.append(child)
        return max(len(children), len(family)) < AT_ONCE

    def _count_down(
        self, tx: Transaction, parent: JobId, children: Sequence[JobId], state: str
    ) -> None:
        done = tx.all("set_edge_states", parent_id=parent, state=state, ids=tx.numbers(children))
        self._less(tx, [row[0] for row in done])

    def _less(self, tx: Transaction, children: Sequence[JobId]) -> None:
        """Each waits for one job less, as often as it is named."""
        moved = tx.batch(
            "reduce_open_deps", sorted(Counter(children).items()), age_step=self._steering.age_step
        )
        free = [row[:3] for row in moved if row[3] == 0 and row[1] in ("waiting", "scheduled")]
        self._steering.record_states(tx, free)
        self._moved += [row[0] for row in moved if row[1] == "waiting"]

    def _put_down(
        self, tx: Transaction, parent: JobId, state: str, children: Sequence[JobId]
    ) -> None:
        how = "was deleted" if state == "deleted" else f"ended {state}"
        reason = (
            f"dependency {'succeeded' if state == 'succeeded' else 'failed'}: job {parent} {how}"
        )
        for child, options in sorted(tx.all("options_of", ids=tx.numbers(children))):
            policy = on_dependency_failure(options)
            if policy != "run":
                self._steering.cancel_or_hold(tx, policy, child, reason)
                self._moved.append(child)

    def reopen(self, tx: Transaction, id: JobId) -> None:
        """This one runs again: who was cancelled or held because of it waits again, and who waited for those."""
        parents = [id]
        while parents:
            for (child,) in tx.all("dependents_of_failed", parent_id=parents.pop()):
                if tx.one("block_again", id=child):
                    self._steering.events.tell(tx, "blocked", [child])
                    again = tx.all(
                        "reopen_edges", child_id=child
                    )  # all of them: another may still be broken
                    self.look_at(tx, [row[0] for row in again])
                    parents.append(child)

    def look_for_lost(self) -> int:
        """Note parents that somebody has deleted by hand; a few hundred are looked at in one call.  How many."""
        with self._db.statement() as tx:
            walked = tx.all("parents_after", after=self._walked)
        self._walked = walked[-1][0] if len(walked) == 500 else 0
        lost = [parent for parent, there in walked if not there]
        if lost:
            with self._db.transaction() as tx:
                self.look_at(tx, lost)
        return len(lost)

    def open_parents(self, id: JobId) -> list[Parent]:
        with self._db.statement() as tx:
            return [Parent(*row) for row in tx.all("open_parents", id=id)]

    def results_of_parents(self, id: JobId) -> list[tuple[JobId, bytes | None]]:
        with self._db.statement() as tx:
            return [(row[0], row[1]) for row in tx.all("results_of_parents", id=id)]


def is_met(wants: str, state: str) -> bool:
    """Whether a job that ended like this is what was waited for."""
    match wants:
        case "finished":
            return True
        case "failure":
            return state not in ("succeeded", "deleted")
        case _:
            return state == "succeeded"


def on_dependency_failure(written: str | None) -> str:
    said = read_json(written, dict[str, Any], {}).get("on_dependency_failure")
    return said if said in ("hold", "run") else "cancel"
