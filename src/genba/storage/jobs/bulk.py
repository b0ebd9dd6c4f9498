"""Change many jobs at once, in batches of one transaction each.

Also: change the columns and options of one job that has not started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from genba.domain.rank import rank
from genba.domain.untrusted_json import read_json
from genba.errors import StoreError
from genba.storage.engines.database import Transaction
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.prune import DELETED_WITH_JOB
from genba.storage.jobs.search import Filter, Search
from genba.storage.jobs.settle import Settler
from genba.storage.namespace import Namespace
from genba.storage.records import JobId

BATCH = 500  # jobs in one transaction


class BulkChanges:
    def __init__(
        self,
        namespace: Namespace,
        search: Search,
        attempts: Attempts,
        dependencies: Dependencies,
        settler: Settler,
    ) -> None:
        self._namespace = namespace
        self._db = namespace.database
        self._limits = namespace.limits
        self._search = search
        self._attempts = attempts
        self._dependencies = dependencies
        self._settler = settler

    def each(
        self,
        filter: Filter,
        act: Callable[[Sequence[JobId]], int],
        progress: Callable[[int], None] | None = None,
        *,
        newest_first: bool = False,
    ) -> int:
        """Call `act` with all jobs that fit, a batch at a time; how many it has changed."""
        changed = 0
        for ids in self._batches(filter, newest_first):
            changed += act(ids)
            if progress is not None:
                progress(changed)
        return changed

    def _batches(self, filter: Filter, newest_first: bool) -> Iterator[list[JobId]]:
        """Walk by id, so that a job that `act` has moved is not met again."""
        last = filter.last_id
        while True:
            page = replace(filter, oldest_first=not newest_first, last_id=last)
            ids = self._search.ids(page, BATCH)
            if ids:
                yield ids
            if len(ids) < BATCH:
                return
            last = ids[-1]

    def hold(self, ids: Sequence[JobId], reason: str) -> int:
        """Hold those of these jobs that have not started; how many."""
        return self._move("hold", "held", ids, reason=reason)

    def resume(self, ids: Sequence[JobId]) -> int:
        """Let those of these jobs that are held wait again; how many."""
        return self._move("resume", "resumed", ids, age_step=self._namespace.age_step)

    def _move(self, verb: str, kind: str, ids: Sequence[JobId], **values: Any) -> int:
        namespace = self._namespace.name
        with self._db.transaction() as tx:
            moved = [id for id in ids if tx.one(verb, id=id, namespace=namespace, **values)]
            self._add_event(tx, kind, moved)
            self._limits.after_move(tx, moved)
        self._namespace.wake_nodes()
        return len(moved)

    def requeue(self, ids: Sequence[JobId]) -> int:
        """Let those of these jobs that are final run again; how many."""
        with self._db.transaction() as tx:
            moved = [id for id in ids if self._attempts.requeue(tx, id)]
            self._add_event(tx, "requeued", moved)
            for id in moved:
                self._dependencies.reopen(tx, id)
            self._limits.after_move(tx, moved)
        self._namespace.wake_nodes()
        return len(moved)

    def delete(self, ids: Sequence[JobId]) -> int:
        """Delete those of these jobs that do not run, with their history; how many.

        Jobs that wait for one of them are settled as for a deleted parent.
        """
        namespace = self._namespace.name
        with self._db.transaction() as tx:
            parents = tx.all("parents_with_dependents", ids=tx.numbers(ids))
            limited = self._limits.of(tx, ids)
            rows = tx.batch("delete_job", [(id,) for id in ids], namespace=namespace)
            for name in DELETED_WITH_JOB:
                tx.batch(name, rows)
            deleted = {row[0] for row in rows}
            self._dependencies.note_ended(tx, [row[0] for row in parents if row[0] in deleted])
            self._add_event(tx, "deleted", sorted(deleted))
            self._limits.free_slots(
                tx, [job._replace(state="cancelled") for job in limited if job.id in deleted]
            )
        if parents:
            with suppress(StoreError):  # nodes do it later
                self._settler.settle()
        return len(rows)

    def change(
        self, id: JobId, columns: Mapping[str, Any], options: Callable[[str | None], str | None]
    ) -> bool:
        """Change queue, priority, moment … of a job that has not started; False if it has.

        `options` makes the new options out of the old.  The update names the version that was read
        and a state that has not started, so a node that claims the job at the same time gets it as
        it was, or as it is then.
        """
        while True:
            with self._db.transaction() as tx:
                row = tx.one("changeable_job", id=id, namespace=self._namespace.name)
                if row is None:
                    return False
                version, priority, due, since, expires, crashes, queue, old = row
                values = {
                    "priority": priority,
                    "due_at": due,
                    "due_from": since,
                    "expires_at": expires,
                    "queue": queue,
                    **columns,
                }
                changed = tx.one(
                    "change_job",
                    id=id,
                    version=version,
                    options=options(old),
                    moved="due_at" in columns,
                    rank=rank(
                        values["due_at"], values["priority"] - crashes, self._namespace.age_step
                    ),
                    **values,
                )
                if changed is None:
                    continue
                self._add_event(tx, "updated", [id])
                self._limits.after_move(tx, [id])
            self._namespace.wake_nodes()
            return True

    def _add_event(self, tx: Transaction, kind: str, ids: Sequence[JobId]) -> None:
        if ids:
            self._namespace.events.add(tx, kind, ids, by=self._namespace.changed_by())


def merge_options(written: str | None, changes: Mapping[str, Any]) -> str | None:
    """Change some of the stored options."""
    options = {**read_json(written, dict[str, Any], {}), **changes}
    return msgspec.json.encode(options).decode() if options else None
