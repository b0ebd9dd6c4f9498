"""Tasks and queues as operators change them: disable, override, pause, resume."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection
from genba.client.filters import read_filter
from genba.client.registry import Registry
from genba.client.task import Task
from genba.domain.duration import Micros, to_datetime
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.enqueue.new_job import NewJobs
from genba.enqueue.new_schedule import new_schedule
from genba.errors import BadOption, ScheduleNotFound, UnknownTask
from genba.options.merge import (
    check_against_definition,
    check_overrides,
    merge_overrides,
    task_schedule,
)
from genba.options.parse import NAME_PATTERN, parse_reason
from genba.options.table import SCHEDULE_OPTIONS
from genba.storage.operators import QueueRecord, TaskRecord
from genba.storage.schedules.rows import NewSchedule, ScheduleRecord
from genba.storage.schedules.schedules import BY_CODE


def current_account() -> str:
    """Return the account that changes something, with its host."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return socket.gethostname()


class Tasks:
    """All tasks that nodes have declared or this app has, by name."""

    def __init__(self, connection: ClientConnection, registry: Registry, new_jobs: NewJobs) -> None:
        self._connection = connection
        self.registry = registry
        self.new_jobs = new_jobs

    def __getitem__(self, name: str | Task[..., Any, Any]) -> TaskControl:
        """Return the control of a task, without a look whether the task exists."""
        name = name.name if isinstance(name, Task) else name
        if NAME_PATTERN.fullmatch(str(name)) is None:
            raise BadOption(f"{name!r} is not a valid name of a task")
        return TaskControl(self, name)

    def __iter__(self) -> Iterator[str]:
        stored = {record.name for record in self._connection.store.operators.tasks()}
        return iter(sorted(stored | self.registry.tasks.keys()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def values(self) -> list[TaskControl]:
        return [TaskControl(self, name) for name in self]

    def __repr__(self) -> str:
        return f"<Tasks of {self._connection.settings.namespace}>"


class TaskControl:
    """One task as an operator sees it.  Its attributes are read from the store each time."""

    def __init__(self, tasks: Tasks, name: str) -> None:
        self._connection = tasks._connection
        self._registry = tasks.registry
        self._new_jobs = tasks.new_jobs
        self.name = name

    def __repr__(self) -> str:
        return f"<TaskControl {self.name}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TaskControl)
            and other.name == self.name
            and other._connection is self._connection
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def _code(self) -> dict[str, Any] | None:
        """Return the definition by the code of this app, if the task is in it."""
        task = self._registry.tasks.get(self.name)
        return task.describe() if task is not None else None

    def _record(self) -> TaskRecord:
        record = self._connection.store.operators.task(self.name)
        if record is not None:
            return record
        code = self._code()
        if code is None:
            raise UnknownTask(f"no node has declared a task {self.name!r}, and this app has none")
        return TaskRecord(
            self.name, code.get("title"), msgspec.json.encode(code).decode(), None, True, 0, None
        )

    @property
    def enabled(self) -> bool:
        return self._record().enabled

    @property
    def title(self) -> str | None:
        return self.settings.get("title")

    @property
    def definition(self) -> dict[str, Any]:
        """What the code says, in the version of the node that started last."""
        return read_json(self._record().definition, dict[str, Any], {})

    @property
    def override(self) -> dict[str, Any]:
        """What operators have changed."""
        return read_json(self._record().override, dict[str, Any], {})

    @property
    def settings(self) -> dict[str, Any]:
        """What holds: the definition with the override over it."""
        return {**self.definition, **self.override}

    @property
    def queue(self) -> str:
        return str(self.settings.get("queue", "default"))

    @property
    def changed_by(self) -> str | None:
        return self._record().changed_by

    @property
    def changed_at(self) -> datetime | None:
        record = self._record()
        return to_datetime(record.changed_at) if record.changed_by is not None else None

    def to_json(self) -> dict[str, Any]:
        record = self._record()
        definition = read_json(record.definition, dict[str, Any], {})
        changed = read_json(
            record.override, dict[str, Any], {UNREADABLE: None} if record.override else {}
        )
        settings = {**definition, **changed}
        return {
            "name": record.name,
            "enabled": record.enabled,
            "title": settings.get("title"),
            "queue": settings.get("queue", "default"),
            "override": changed,
            "definition": definition,
            "changed_by": record.changed_by,
            "changed_at": to_datetime(record.changed_at) if record.changed_by is not None else None,
        }

    def disable(self, reason: str | None = None) -> bool:
        """Start no job of it any more, and refuse new ones; False if it was disabled already.

        Waiting jobs stay until `enable`; running ones see `should_stop`, and may end as they like.
        """
        return self._switch(False, reason)

    adisable = async_method(disable)

    def enable(self, reason: str | None = None) -> bool:
        """Start jobs of it again; False if it was enabled already."""
        return self._switch(True, reason)

    aenable = async_method(enable)

    def _switch(self, enabled: bool, reason: str | None) -> bool:
        policy = self._connection.store.operators
        why = parse_reason(reason)
        return policy.switch(self.name, enabled, current_account(), why, self._code())

    def set(self, /, **changes: Any) -> dict[str, Any]:
        """Override options and policy of the code, for jobs enqueued from now on.

        Options of a call, by `.using(…)`, still win.  None is a value (`timeout=None`: no timeout);
        `reset` takes a change back.  Nodes apply `concurrency` with their next maintenance; `cron`,
        `every` and `tz` change the task's own schedule; `on_final` is the name of a task.  Returns
        all that is overridden now.
        """
        if not changes:
            raise BadOption("nothing to change: name an option, for example set(timeout='5m')")
        values = check_overrides(changes)
        definition = self.definition
        self._registry.check_concurrency(self.name, values.get("concurrency", 1))

        def with_values(old: dict[str, Any]) -> dict[str, Any]:
            after = merge_overrides(old, values)
            check_against_definition(definition, after)
            return after

        if not values.keys() & set(SCHEDULE_OPTIONS):
            return self._override(with_values)
        self._check_schedule(definition, self.override, values)
        after = self._override(with_values)
        self._write_schedule(definition, after)
        return after

    aset = async_method(set)

    def reset(self, *names: str) -> dict[str, Any]:
        """Take back changes of these options, or all.  Returns what is still overridden."""

        def without_names(old: dict[str, Any]) -> dict[str, Any]:
            unchanged = [name for name in names if name not in old]
            if unchanged:
                hint = f"changed are {', '.join(sorted(old))}" if old else "nothing is changed"
                raise BadOption(f"{unchanged[0]!r} of task {self.name!r} is not changed: {hint}")
            left = {name: value for name, value in old.items() if names and name not in names}
            check_against_definition(definition, left)
            return left

        definition, before = self.definition, self.override
        after = self._override(without_names)
        if (before.keys() - after.keys()) & set(SCHEDULE_OPTIONS):
            self._write_schedule(definition, after)
        return after

    areset = async_method(reset)

    def _override(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        policy = self._connection.store.operators
        return policy.override(self.name, change, current_account(), self._code())

    # its own schedule

    def _check_schedule(
        self, definition: dict[str, Any], old: dict[str, Any], values: dict[str, Any]
    ) -> None:
        """Raise BadOption if the schedule is not the task's, or would not run."""
        row, after = self._schedule(), merge_overrides(old, values)
        check_against_definition(definition, after)
        if row is not None and row.owner is None:
            raise BadOption(
                f"schedule {self.name!r} was made or changed by hand, "
                f"so the task cannot change it: use app.schedule({self.name!r}).set(…)"
            )
        of_task = task_schedule(definition, {}) is not None or old.keys() & set(SCHEDULE_OPTIONS)
        if row is not None and not of_task:
            raise BadOption(
                f"schedule {self.name!r} is another one, which code declares by app.recur"
            )
        rule_options = task_schedule(definition, after)
        if rule_options is None:
            return
        required = [one["name"] for one in definition.get("parameters", ()) if one.get("required")]
        if required:
            raise BadOption(
                "a task that runs by itself gets no arguments, "
                f"and {self.name!r} needs {required[0]!r}"
            )
        self._new_schedule(rule_options, row)

    def _write_schedule(self, definition: dict[str, Any], after: dict[str, Any]) -> None:
        """Write the schedule at once; nodes that start later write the same."""
        schedules = self._connection.store.schedules
        rule_options = task_schedule(definition, after)
        if rule_options is None:
            schedules.undeclare(self.name)
        else:
            schedules.put(self._new_schedule(rule_options, self._schedule()), BY_CODE)
        self._connection.wake()

    def _schedule(self) -> ScheduleRecord | None:
        store = self._connection.store
        store.install()
        try:
            return store.schedules.named(self.name)
        except ScheduleNotFound:
            return None

    def _new_schedule(
        self, rule_options: dict[str, Any], row: ScheduleRecord | None
    ) -> NewSchedule:
        """Build the schedule, with the stored job if the code of the task is not here."""
        connection = self._connection
        if row is not None and self._code() is None:
            return new_schedule(self.name, row.job, rule_options, 0, connection.settings.zone)
        call = self._registry.call(self.name, (), {}, {})
        return self._new_jobs.schedule(
            connection.store, self.name, call, rule_options, connection.now()
        )


class Queues:
    """All queues that nodes serve, that have waiting jobs, or that were paused, by name."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def __getitem__(self, name: str) -> QueueControl:
        if NAME_PATTERN.fullmatch(str(name)) is None:
            raise BadOption(f"{name!r} is not a valid name of a queue")
        return QueueControl(self._connection, name)

    def __iter__(self) -> Iterator[str]:
        policy = self._connection.store.operators
        parked = {queue for _, queue, _ in policy.parked()}
        paused = {record.name for record in policy.queues()}
        return iter(sorted(paused | policy.waiting().keys() | parked))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def values(self) -> list[QueueControl]:
        return [QueueControl(self._connection, name) for name in self]

    def to_json(self) -> list[dict[str, Any]]:
        """Return all of them with the number of jobs that wait in each."""
        store = self._connection.store
        now = store.now()
        records = {record.name: record for record in store.operators.queues()}
        waiting, parked = store.operators.waiting(), store.operators.parked()
        names = records.keys() | waiting.keys() | {queue for _, queue, _ in parked}
        return [
            _queue_to_json(records.get(name) or _unpaused(name), now, waiting.get(name, 0), parked)
            for name in sorted(names)
        ]

    def __repr__(self) -> str:
        return f"<Queues of {self._connection.settings.namespace}>"


def _queue_to_json(
    record: QueueRecord, now: Micros, waiting: int, parked: Iterable[tuple[str, str, int]]
) -> dict[str, Any]:
    until = record.paused_until
    paused = _is_paused(record, now)
    return {
        "name": record.name,
        "paused": paused,
        "paused_until": to_datetime(until) if paused and until is not None else None,
        "fair_by": record.fair_by,
        "waiting": waiting,
        "parked": {why: count for why, queue, count in parked if queue == record.name},
        "changed_by": record.changed_by,
    }


def _unpaused(name: str) -> QueueRecord:
    """Return the record of a queue that no operator has changed."""
    return QueueRecord(name, False, None, None, 0, None)


def _is_paused(record: QueueRecord, now: Micros) -> bool:
    """Whether it is paused; a pause may have an end."""
    over = record.paused_until is not None and record.paused_until <= now
    return record.paused and not over


class QueueControl:
    """One queue as an operator sees it; it need not exist yet."""

    def __init__(self, connection: ClientConnection, name: str) -> None:
        self._connection = connection
        self.name = name

    def __repr__(self) -> str:
        return f"<QueueControl {self.name}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, QueueControl)
            and other.name == self.name
            and other._connection is self._connection
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def _record(self) -> QueueRecord:
        records = self._connection.store.operators.queues()
        return next((one for one in records if one.name == self.name), _unpaused(self.name))

    @property
    def paused(self) -> bool:
        return _is_paused(self._record(), self._connection.store.now())

    @property
    def paused_until(self) -> datetime | None:
        """When a pause ends by itself; None if it does not, or there is no pause."""
        until = self._record().paused_until
        return to_datetime(until) if until is not None and self.paused else None

    @property
    def fair_by(self) -> str | None:
        return self._record().fair_by

    @property
    def changed_by(self) -> str | None:
        return self._record().changed_by

    @property
    def waiting(self) -> int:
        """The number of its waiting jobs, with parked ones."""
        jobs = read_filter(self._connection, {"state": "waiting", "queue": self.name})
        self._connection.store.install()
        return self._connection.store.search.count(jobs)

    def pause(self, until: Any = None, reason: str | None = None) -> None:
        """Start none of its jobs until `resume`, or until a moment or for a time: "5m", a datetime.

        Running jobs go on, and jobs can be enqueued.
        """
        end = None if until is None else self._connection.moment_or_delay(until)
        policy = self._connection.store.operators
        policy.pause(self.name, end, current_account(), parse_reason(reason))

    apause = async_method(pause)

    def resume(self) -> bool:
        """Start its jobs again; False if it was not paused."""
        return self._connection.store.operators.resume(self.name, current_account())

    aresume = async_method(resume)
