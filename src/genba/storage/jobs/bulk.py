"""Change many jobs at once, or one that has not started: in batches, each of which is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from genba.domain.rank import rank
from genba.domain.untrusted_json import read_json
from genba.errors import StoreError
from genba.storage.engines.database import Database, Transaction
from genba.storage.jobs.search import Filter
from genba.storage.records import JobId

if TYPE_CHECKING:
    from genba.storage.store import Store

BATCH = 500
# with a job that is deleted
DELETED_WITH_JOB = (
    "prune_attempts",
    "prune_tags",
    "prune_edges",
    "prune_messages",
    "prune_arguments",
)


class BulkChanges:
    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._db = database

    def _batches(self, filter: Filter, down: bool) -> Iterator[list[JobId]]:
        """By id, upwards or down: what has been moved is not met again."""
        last = filter.last_id
        while True:
            ids = self._store.search.ids(
                replace(filter, oldest_first=not down, last_id=last), BATCH
            )
            if ids:
                yield ids
            if len(ids) < BATCH:
                return
            last = ids[-1]

    def each(
        self,
        filter: Filter,
        act: Callable[[Sequence[JobId]], int],
        step: Callable[[int], None] | None = None,
        *,
        down: bool = False,
    ) -> int:
        """`act` upon all that fit, some hundred at a time, the newest first if `down`; how many it has moved."""
        moved = 0
        for ids in self._batches(filter, down):
            moved += act(ids)
            if step is not None:
                step(moved)
        return moved

    def hold(self, ids: Sequence[JobId], reason: str) -> int:
        return self._move("hold", "held", ids, reason=reason)

    def resume(self, ids: Sequence[JobId]) -> int:
        return self._move("resume", "resumed", ids, age_step=self._store.age_step)

    def requeue(self, ids: Sequence[JobId]) -> int:
        store = self._store
        with self._db.transaction() as tx:
            moved = [id for id in ids if store.running.requeue(tx, id)]
            self._tell(tx, "requeued", moved)
            for id in moved:
                store.dependencies.reopen(tx, id)
            store.limits.moved(tx, moved)
        self._ring()
        return len(moved)

    def _move(self, verb: str, kind: str, ids: Sequence[JobId], **values: Any) -> int:
        store = self._store
        with self._db.transaction() as tx:
            moved = [id for id in ids if tx.one(verb, id=id, namespace=store.namespace, **values)]
            self._tell(tx, kind, moved)
            store.limits.moved(tx, moved)
        self._ring()
        return len(moved)

    def _tell(self, tx: Transaction, kind: str, ids: Sequence[JobId]) -> None:
        if ids:
            self._store.events.tell(tx, kind, ids, by=self._store.by())

    def _ring(self) -> None:
        with suppress(StoreError):  # it is done: nodes look every second anyway
            self._store.node_wakeups.wake_nodes(self._store.namespace, None)

    def delete(self, ids: Sequence[JobId]) -> int:
        """With their history; not those that run.  Whoever waits for one of them learns that it is gone."""
        store = self._store
        with self._db.transaction() as tx:
            parents = tx.all("parents_with_dependents", ids=tx.numbers(ids))
            limited = store.limits.of(tx, ids)
            gone = tx.batch("delete_job", [(id,) for id in ids], namespace=store.namespace)
            for name in DELETED_WITH_JOB:
                tx.batch(name, gone)
            deleted = {row[0] for row in gone}
            tx.batch(
                "insert_unsettled",
                [row for row in parents if row[0] in deleted],
                namespace=store.namespace,
            )
            self._tell(tx, "deleted", sorted(deleted))
            store.limits.ended(
                tx, [job._replace(state="cancelled") for job in limited if job.id in deleted]
            )
        if parents:
            with suppress(StoreError):  # keepers do it later
                store.settle()
        return len(gone)

    def kill(self, ids: Sequence[JobId], reason: str) -> int:
        """Those of these that run."""
        store = self._store
        with self._db.transaction() as tx:
            asked = [
                node
                for id in ids
                if (node := store.ask_to_stop(tx, id, "kill", reason)) is not None
            ]
        with suppress(StoreError):  # the commands are written
            for node in set(asked):
                store.node_wakeups.wake_node(node)
        return len(asked)

    def change(
        self, id: JobId, columns: Mapping[str, Any], options: Callable[[str | None], str | None]
    ) -> bool:
        """Another queue, priority, moment … of a job that has not started; False if it has.

        `options` makes the new options out of the old.  The update names the version that it has read, and a state
        that has not started: who claims it at the same time has it as it was, or as it is then.
        """
        store = self._store
        while True:
            with self._db.transaction() as tx:
                row = tx.one("changeable_job", id=id, namespace=store.namespace)
                if row is None:
                    return False
                version, priority, due, since, expires, crashes, queue, old = row
                given = {
                    "priority": priority,
                    "due_at": due,
                    "due_from": since,
                    "expires_at": expires,
                    "queue": queue,
                }
                given |= columns
                changed = tx.one(
                    "change_job",
                    id=id,
                    version=version,
                    options=options(old),
                    moved="due_at" in columns,
                    rank=rank(given["due_at"], given["priority"] - crashes, store.age_step),
                    **given,
                )
                if changed is None:
                    continue
                self._tell(tx, "updated", [id])
                store.limits.moved(tx, [id])
            self._ring()
            return True


def merge_options(written: str | None, changes: Mapping[str, Any]) -> str | None:
    """The stored options with some of them changed."""
    options = {**read_json(written, dict[str, Any], {}), **changes}
    return msgspec.json.encode(options).decode() if options else None
