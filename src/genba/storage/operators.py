"""What operators have decided about tasks and queues: disabled, paused, changed limits and options.

Each process reads the rules once and keeps them.  Every change increments the namespace's epoch,
and a claim or an enqueue shows the epoch that it knows.  If that is out of date nothing happens,
and the rules are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from genba.domain.untrusted_json import read_json
from genba.errors import BadOption, GenbaError, StoreError, UnknownTask
from genba.options.limits import MAX_RUNNING_PREFIX
from genba.options.parse import KeepTimes, parse_keep
from genba.storage.engines.database import Database, Transaction
from genba.storage.limits.slots import UNLIMITED, LimitSlots
from genba.storage.records import Micros

PARKED_ON_DISABLED = "disabled task "
JOBS_PER_CALL = 2000  # in one transaction, as the query `park_task` has it
_LOWEST_RANK = -(2**63)


class RulesChanged(GenbaError):
    """An operator has changed the rules since they were read: read them and decide again."""


@dataclass(frozen=True, slots=True)
class OperatorRules:
    """The rules of one namespace; `epoch` is their version."""

    epoch: int
    disabled: frozenset[str] = frozenset()
    paused: frozenset[str] = frozenset()
    # Fair queues, and the argument by whose values they are shared.
    fair: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Tasks whose override is damaged: what the code says applies.
    unreadable: frozenset[str] = frozenset()

    @property
    def concern_tasks(self) -> bool:
        return bool(self.disabled or self.overrides)


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task as nodes have declared it and operators changed it (in the order of the query)."""

    name: str
    title: str | None
    definition: str
    override: str | None
    enabled: bool
    changed_at: Micros
    changed_by: str | None


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """A queue (in the order of the query)."""

    name: str
    paused: bool
    paused_until: Micros | None
    fair_by: str | None
    changed_at: Micros
    changed_by: str | None


def _task(row: tuple[Any, ...]) -> TaskRecord:
    name, title, definition, override, enabled, changed_at, changed_by = row
    return TaskRecord(name, title, definition, override, bool(enabled), changed_at, changed_by)


def keep_of(declared: KeepTimes, override: Mapping[str, Any] | None) -> KeepTimes:
    """Give how long final jobs of a task are kept, by its code and an operator's override.

    None: for ever.
    """
    if override is None or "keep" not in override:
        return declared
    try:
        return parse_keep("keep", override["keep"])
    except BadOption:  # the row was changed by hand
        return declared


class Operators:
    def __init__(
        self,
        database: Database,
        namespace: str,
        install: Callable[[], None],
        wake_all_nodes: Callable[[], None],
        limits: LimitSlots,
    ) -> None:
        self._limits = limits
        self._db = database
        self._namespace = namespace
        self._install = install
        self._wake_all_nodes = wake_all_nodes
        self._rules: OperatorRules | None = None

    # the rules

    def rules(self) -> OperatorRules:
        """Give the rules as last read; every use of them shows their epoch."""
        return self._rules or self.refresh()

    def rules_in(self, tx: Transaction) -> OperatorRules:
        """Give the same within a transaction."""
        return self._rules or self.read_rules(tx)

    def refresh(self) -> OperatorRules:
        """Read the rules again."""
        self._install()
        with self._db.statement() as tx:
            return self.read_rules(tx)

    def read_rules(self, tx: Transaction) -> OperatorRules:
        """Read the rules within a transaction.

        The epoch first: if a change comes between, the rules are newer than their epoch, and are
        read once more.
        """
        row = tx.one("epoch", namespace=self._namespace)
        tasks = tx.all("tasks_with_rules", namespace=self._namespace)
        queues = tx.all("queues_with_rules", namespace=self._namespace)
        decoded = {
            name: read_json(override, dict[str, Any], {}) for name, override, _ in tasks if override
        }
        self._rules = OperatorRules(
            epoch=row[0] if row else 0,
            disabled=frozenset(name for name, _, enabled in tasks if not enabled),
            paused=frozenset(name for name, paused, _, _ in queues if paused),
            fair={name: fair_by for name, _, _, fair_by in queues if fair_by is not None},
            overrides={name: override for name, override in decoded.items() if override},
            unreadable=frozenset(name for name, override in decoded.items() if not override),
        )
        return self._rules

    def stale(self, tx: Transaction) -> bool:
        """Tell whether the rules have changed since they were read."""
        row = tx.one("epoch", namespace=self._namespace)
        return self._rules is None or row is None or row[0] != self._rules.epoch

    # tasks

    def definitions(self, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Read what nodes have declared of these tasks.

        Tasks that no node ever had are left out.
        """
        self._install()
        with self._db.statement() as tx:
            rows = [
                tx.one("task_definition", namespace=self._namespace, name=task)
                for task in sorted(tasks)
            ]
        decoded = {row[0]: read_json(row[1], dict[str, Any], {}) for row in rows if row}
        return {task: definition for task, definition in decoded.items() if definition}

    def tasks(self) -> list[TaskRecord]:
        self._install()
        with self._db.statement() as tx:
            return [_task(row) for row in tx.all("tasks_with_changes", namespace=self._namespace)]

    def task(self, name: str) -> TaskRecord | None:
        self._install()
        with self._db.statement() as tx:
            row = tx.one("task_with_changes", namespace=self._namespace, name=name)
            return _task(row) if row else None

    def switch(
        self,
        name: str,
        enabled: bool,
        by: str,
        reason: str | None,
        definition: Mapping[str, Any] | None,
    ) -> bool:
        """Enable or disable a task and unpark or park its jobs; False if it was so already."""
        self._install()
        with self._db.transaction() as tx:
            self._require_task(tx, name, by, definition)
            changed = tx.one(
                "switch_task", namespace=self._namespace, name=name, enabled=enabled, by=by
            )
            if changed:
                self._changed(
                    tx,
                    "task_enabled" if enabled else "task_disabled",
                    task=name,
                    by=by,
                    reason=reason,
                )
        if changed:
            self._wake_all_nodes()
        with suppress(StoreError):  # it is committed; nodes do what is left
            if enabled:
                self.unpark_task(name)
            else:
                self.park_task(name)
        self._wake_all_nodes()
        return changed is not None

    def override(
        self,
        name: str,
        change: Callable[[dict[str, Any]], dict[str, Any]],
        by: str,
        definition: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Replace a task's override by what `change` makes of it; gives the new one."""
        self._install()
        with self._db.transaction() as tx:
            self._require_task(tx, name, by, definition)
            tx.run(
                "next_epoch", namespace=self._namespace
            )  # first, so that two operators take turns
            row = tx.one("task_override", namespace=self._namespace, name=name)
            before = read_json(row[0], dict[str, Any], {}) if row else {}
            after = change(dict(before))
            written = msgspec.json.encode(after).decode() if after else None
            tx.run("override_task", namespace=self._namespace, name=name, override=written, by=by)
            changes = {
                key: after.get(key)
                for key in {*before, *after}
                if before.get(key) != after.get(key)
            }
            self._add_event(tx, "task_changed", task=name, by=by, changes=changes, override=after)
            if changes.keys() & {"max_running", "exclusive"}:
                self._limits.override_limit(tx, MAX_RUNNING_PREFIX + name, _most_running(after))
        self._rules = None
        self._wake_all_nodes()
        return after

    def _require_task(
        self, tx: Transaction, name: str, by: str, definition: Mapping[str, Any] | None
    ) -> None:
        """UnknownTask unless a node has declared the task, or the caller's app defines it."""
        if definition is not None:
            written = msgspec.json.encode(definition, order="deterministic").decode()
            title = definition.get("title")
            tx.run(
                "add_task",
                namespace=self._namespace,
                name=name,
                title=title,
                definition=written,
                by=by,
            )
        elif tx.one("task_with_changes", namespace=self._namespace, name=name) is None:
            raise UnknownTask(
                f"no node has declared a task {name!r}, and this app does not define it: "
                "see `genba task ls`"
            )

    def park_task(self, name: str) -> int:
        """Park the waiting jobs of a disabled task; how many."""
        parked, queue = 0, ""
        while (next_queue := self._next_queue(queue)) is not None:
            queue, last = next_queue, (_LOWEST_RANK, 0)
            while True:
                with self._db.transaction() as tx:
                    rows = tx.all(
                        "park_task",
                        namespace=self._namespace,
                        queue=queue,
                        task=name,
                        parked_on=PARKED_ON_DISABLED + name,
                        rank=last[0],
                        id=last[1],
                    )
                parked += len(rows)
                if len(rows) < JOBS_PER_CALL:
                    break
                last = max((rank, id) for rank, id in rows)
        return parked

    def _next_queue(self, after: str) -> str | None:
        with self._db.statement() as tx:
            row = tx.one("next_waiting_queue", namespace=self._namespace, queue=after)
            return str(row[0]) if row else None

    def unpark_task(self, name: str) -> int:
        """Bring back the jobs of a task that is enabled again; how many."""
        return self.unpark(PARKED_ON_DISABLED + name)

    def unpark(self, reason: str) -> int:
        """Bring back every job that is parked for this reason; how many."""
        unparked = 0
        while True:
            with self._db.transaction() as tx:
                rows = tx.all("unpark", namespace=self._namespace, parked_on=reason)
                self._limits.after_move(tx, [id for id, buckets in rows if buckets is not None])
            unparked += len(rows)
            if not rows:
                return unparked

    def keep_parked(self) -> bool:
        """Finish what an operator's program that was stopped half-way has left.

        True if jobs were unparked.

        Nodes call this now and then.
        """
        for task in self.rules().disabled:
            self.park_task(task)
        with self._db.statement() as tx:
            enabled = [
                (PARKED_ON_DISABLED + row[0],)
                for row in tx.all("enabled_tasks", namespace=self._namespace)
            ]
            left = [
                row[0] for row in tx.batch("parked_on_reasons", enabled, namespace=self._namespace)
            ]
        return sum(map(self.unpark, left)) > 0

    # queues

    def queues(self) -> list[QueueRecord]:
        self._install()
        with self._db.statement() as tx:
            rows = tx.all("all_queues", namespace=self._namespace)
            return [QueueRecord(row[0], bool(row[1]), *row[2:]) for row in rows]

    def waiting(self) -> dict[str, int]:
        """Count the jobs that may start now, by queue."""
        with self._db.statement() as tx:
            return {
                row[0]: row[1] for row in tx.all("waiting_of_queues", namespace=self._namespace)
            }

    def parked(self) -> Sequence[tuple[str, str, int]]:
        """Count the parked jobs: (reason, queue, how many)."""
        with self._db.statement() as tx:
            return [
                (row[0], row[1], row[2])
                for row in tx.all("parked_reasons", namespace=self._namespace)
            ]

    def pause(self, queue: str, until: Micros | None, by: str, reason: str | None) -> None:
        """Let no more jobs of this queue start.

        Its jobs need not be parked, because claims go queue by queue.
        """
        self._install()
        with self._db.transaction() as tx:
            tx.run("pause_queue", namespace=self._namespace, name=queue, until=until, by=by)
            self._changed(tx, "queue_paused", queue=queue, by=by, reason=reason, until=until)
        self._wake_all_nodes()

    def resume(self, queue: str, by: str) -> bool:
        """Let jobs of a paused queue start again; False if it was not paused."""
        self._install()
        with self._db.transaction() as tx:
            resumed = tx.one("resume_queue", namespace=self._namespace, name=queue, by=by)
            if resumed:
                self._changed(tx, "queue_resumed", queue=queue, by=by)
        self._wake_all_nodes()
        return resumed is not None

    def set_limit(self, template: str, n: int | None, by: str) -> None:
        """Set n for all buckets of a template instead of what the code says.

        None: as the code says.
        """
        self._install()
        with self._db.transaction() as tx:
            self._limits.set_limit(tx, template, n)
            self._add_event(tx, "limit_changed", template=template, n=n, by=by)
        self._wake_all_nodes()

    def end_pauses(self) -> list[str]:
        """Resume the queues whose pause is over; gives them."""
        with self._db.transaction() as tx:
            over = [str(row[0]) for row in tx.all("queues_to_resume", namespace=self._namespace)]
            resumed = [
                queue
                for queue in over
                if tx.one("resume_queue", namespace=self._namespace, name=queue, by="its time")
            ]
            for queue in resumed:
                self._changed(tx, "queue_resumed", queue=queue, by="its time")
        if resumed:
            self._wake_all_nodes()
        return resumed

    def make_fair(self, tx: Transaction, queue: str, fair_by: str) -> None:
        """Let the keys of this queue take turns from now on, for good."""
        if queue not in self.rules_in(tx).fair and tx.one(
            "make_fair", namespace=self._namespace, name=queue, fair_by=fair_by
        ):
            self._changed(tx, "queue_changed", queue=queue, fair_by=fair_by)

    def _changed(self, tx: Transaction, kind: str, **data: Any) -> None:
        tx.run("next_epoch", namespace=self._namespace)
        self._add_event(tx, kind, **data)
        self._rules = None

    def _add_event(self, tx: Transaction, kind: str, **data: Any) -> None:
        written = {key: value for key, value in data.items() if value is not None}
        tx.run(
            "insert_client_event",
            namespace=self._namespace,
            kind=kind,
            job_id=None,
            data=msgspec.json.encode(written),
        )


def _most_running(changes: Mapping[str, Any]) -> int | None:
    """Give how many an operator lets run at a time; None: as the code says."""
    if changes.get("exclusive"):
        return 1
    return changes["max_running"] or UNLIMITED if "max_running" in changes else None
