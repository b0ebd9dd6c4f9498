"""Tasks and queues as operators hold them: switch off and on, change, pause and resume, while everything runs."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

import msgspec

from genba.client.async_methods import handle_twin
from genba.client.schedule import When, wanted
from genba.client.task import Call, Task
from genba.domain.duration import to_datetime
from genba.domain.fairness import key_of
from genba.domain.pool_settings import PoolSettings, check_changes, check_pool
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.errors import BadOption, GenbaError, ScheduleNotFound, TaskDisabled, UnknownTask
from genba.options.merge import (
    check_against_definition,
    check_overrides,
    merge_overrides,
    parse_update,
    task_schedule,
    with_overrides,
)
from genba.options.parse import NAME_PATTERN, KeepTimes, parse_reason
from genba.options.table import DEFAULT_POLICY, SCHEDULE_OPTIONS, Options, Policy
from genba.options.values import Dep
from genba.storage.jobs.bulk import merge_options
from genba.storage.operators import OperatorRules, QueueRecord, RulesChanged, TaskRecord, keep_of
from genba.storage.records import EXACT_MOMENT, Enqueued, Micros, NewJob
from genba.storage.schedules.rows import NewSchedule, ScheduleRecord
from genba.storage.schedules.schedules import BY_CODE
from genba.storage.store import Store

if TYPE_CHECKING:
    from genba.client.client import Client

_PATIENCE = 20  # operators that change something, one after the other, while one job is enqueued


def obey(
    store: Store,
    calls: Sequence[Call[Any]],
    rows: Callable[[Sequence[Call[Any]], OperatorRules], list[NewJob]],
    conn: Any,
) -> list[Enqueued]:
    """Enqueue by what operators say now; TaskDisabled if one has switched a task off."""
    rules = store.policy.rules()
    for _ in range(_PATIENCE):
        try:
            return store.enqueue(rows(_ruled(calls, rules), rules), conn, rules.epoch)
        except RulesChanged:
            rules = store.policy.refresh()
    raise RulesChanged("the rules of tasks and queues change faster than a job can be enqueued")


def _ruled(calls: Sequence[Call[Any]], rules: OperatorRules) -> Sequence[Call[Any]]:
    """The calls with the options that operators want for them."""
    if not rules.concern_tasks:
        return calls
    off = {call.task for call in calls} & rules.disabled
    if off:
        raise TaskDisabled(
            f"task {min(off)!r} is disabled; to enable it: app.tasks[{min(off)!r}].enable()"
        )
    shared: dict[tuple[int, int, frozenset[str], str], tuple[Options, Policy]] = {}
    ruled: dict[int, Call[Any]] = {}
    for call in calls:
        options, policy = call.options, call.policy
        changes = rules.overrides.get(call.task)
        if changes:
            same = (
                id(options),
                id(policy),
                call.said,
                call.task,
            )  # most calls of a batch share all
            if same not in shared:
                shared[same] = with_overrides(options, policy, call.said, changes)
            options, policy = shared[same]
        if any(
            id(dep.job) in ruled for dep in options.after
        ):  # a call means what the one before it has become
            after = tuple(Dep(ruled.get(id(dep.job), dep.job), dep.on) for dep in options.after)
            options = replace(options, after=after)
        if options is not call.options or policy is not call.policy:
            ruled[id(call)] = Call(call.task, call.args, options, policy, call.arguments, call.said)
    return [ruled.get(id(call), call) for call in calls]


Values = Callable[[Call[Any]], Mapping[str, Any]]  # the arguments of a call by name


def fair(
    calls: Sequence[Call[Any]], jobs: list[NewJob], rules: OperatorRules, values: Values
) -> list[NewJob]:
    """The jobs, those of fair queues with the key by which they take turns; without one, a task is its own."""
    if not rules.fair and all(call.policy.fair_by is None for call in calls):
        return jobs
    return [_keyed(call, job, rules, values) for call, job in zip(calls, jobs, strict=True)]


def _keyed(call: Call[Any], job: NewJob, rules: OperatorRules, values: Values) -> NewJob:
    fair_by = call.policy.fair_by or rules.fair.get(job.queue)
    if fair_by is None:
        return job
    key = key_of(fair_by, values(call))
    return msgspec.structs.replace(
        job, fair_key=key if key is not None else call.task, fair_by=call.policy.fair_by
    )


def who() -> str:
    """The person, or at least the account, that changes something."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return socket.gethostname()


class _Kept(msgspec.Struct):
    keep: KeepTimes = DEFAULT_POLICY.keep


def prune(store: Store, age: Micros | None, code: Mapping[str, KeepTimes]) -> int:
    """Delete final jobs that are as old as `age`, or as long as their task wants them kept.

    `code` is how long that is by our own; what nodes have told is stronger.
    """
    store.install()
    now, gone = store.now(), 0
    if age is not None:
        while some := store.prune(now - age + 1):
            gone += some
        return gone
    keeps = dict(code)
    for record in store.policy.tasks():
        said = read_json(record.definition, _Kept, _Kept()).keep
        keeps[record.name] = keep_of(said, read_json(record.override, dict[str, Any], {}))
    store.pruner.begin(keeps, now, whole=True)
    while (went := store.pruner.step()) is not None:
        gone += went
    return gone


def update(store: Store, id: int, changes: Mapping[str, Any], zone: ZoneInfo) -> bool:
    """Other options for a job that has not started; False if it has."""
    options, stored = parse_update(changes)
    columns = {name: getattr(options, name) for name in ("queue", "priority") if name in changes}
    if "nice" in changes:
        columns["priority"] = options.priority
    now = store.now()
    if "at" in changes or "delay" in changes:
        due = options.due_at(now, zone)
        named = due is not None and due > now and due == options.due_at(now + 1, zone)
        columns["due_at"], columns["due_from"] = (
            max(now, due or now),
            EXACT_MOMENT if named else now,
        )
    if "expires" in changes:
        columns["expires_at"] = options.expires_at(now, zone)
    return store.bulk.change(id, columns, lambda old: merge_options(old, stored))


def tell_node(store: Store, name: str, verb: str, changes: Mapping[str, Any] | None) -> None:
    """Let the living node `name` drain, stop or set something; BadOption if its pool would make no sense."""
    if verb not in ("drain", "stop", "set"):
        raise BadOption(f"a node is told to drain, stop or set, not {verb!r}")
    living = {node.name: node for node in store.nodes.live()}
    if name not in living:
        there = f"there are {', '.join(sorted(living))}" if living else "none is alive"
        raise GenbaError(f"no living node is called {name!r}: {there}")
    if changes:
        check_changes(changes)
        after = msgspec.structs.replace(
            read_json(living[name].pool, PoolSettings, PoolSettings()), **changes
        )
        check_pool(after.pool, after.min, after.max)
    told = msgspec.json.encode(changes).decode() if changes else None
    store.nodes.command(living[name].id, verb, told)


class TaskControl:
    """One task.  Its attributes are read anew each time, and so is what the verbs act on."""

    def __init__(self, app: Client, name: str) -> None:
        self._app = app
        self.name = name

    def __repr__(self) -> str:
        return f"<TaskControl {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskControl) and (other.name, other._app) == (self.name, self._app)

    def __hash__(self) -> int:
        return hash(self.name)

    def _code(self) -> dict[str, Any] | None:
        known = self._app.task_table().get(self.name)
        return known.describe() if known is not None else None

    def _record(self) -> TaskRecord:
        found = self._app.store.policy.task(self.name)
        if found is not None:
            return found
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
        """What the code says, as the node that came last has it."""
        return read_json(self._record().definition, dict[str, Any], {})

    @property
    def override(self) -> dict[str, Any]:
        """What operators say instead."""
        return read_json(self._record().override, dict[str, Any], {})

    @property
    def settings(self) -> dict[str, Any]:
        """What holds: the definition, and the override over it."""
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
        return {
            "name": record.name,
            "enabled": record.enabled,
            "title": {**definition, **changed}.get("title"),
            "queue": {**definition, **changed}.get("queue", "default"),
            "override": changed,
            "definition": definition,
            "changed_by": record.changed_by,
            "changed_at": to_datetime(record.changed_at) if record.changed_by is not None else None,
        }

    def disable(self, reason: str | None = None) -> bool:
        """No job of it starts any more, and none can be enqueued; what waits comes back with `enable`.

        Jobs of it that run see `should_stop`, and may end as they like.  False if it was disabled already.
        """
        return self._app.store.policy.switch(
            self.name, False, who(), parse_reason(reason), self._code()
        )

    adisable = handle_twin(disable)

    def enable(self, reason: str | None = None) -> bool:
        """False if it was enabled already."""
        return self._app.store.policy.switch(
            self.name, True, who(), parse_reason(reason), self._code()
        )

    aenable = handle_twin(enable)

    def set(self, /, **changes: Any) -> dict[str, Any]:
        """Options and policy that hold instead of what the code says, for jobs enqueued from now on.

        What a call gives by `.using(…)` still wins.  None is a value (`timeout=None`: no timeout); `reset` takes a
        change back.  `concurrency` holds from the nodes' next look on; `cron`, `every` and `tz` change the task's own
        schedule; `on_final` is the name of a task.  Gives all that is changed now.
        """
        if not changes:
            raise BadOption("nothing to change: name an option, for example set(timeout='5m')")
        plain = check_overrides(changes)
        definition = self.definition
        self._app.registry.check_concurrency(self.name, plain.get("concurrency", 1))

        def more(old: dict[str, Any]) -> dict[str, Any]:
            after = merge_overrides(old, plain)
            check_against_definition(definition, after)
            return after

        if not plain.keys() & set(SCHEDULE_OPTIONS):
            return self._app.store.policy.override(self.name, more, who(), self._code())
        self._check_schedule(definition, self.override, plain)
        after = self._app.store.policy.override(self.name, more, who(), self._code())
        self._plan(definition, after)
        return after

    aset = handle_twin(set)

    def reset(self, *names: str) -> dict[str, Any]:
        """Let the code decide again about these options, or about all.  Gives what is still changed."""

        def less(old: dict[str, Any]) -> dict[str, Any]:
            strange = [name for name in names if name not in old]
            if strange:
                there = f"changed are {', '.join(sorted(old))}" if old else "nothing is changed"
                raise BadOption(f"{strange[0]!r} of task {self.name!r} is not changed: {there}")
            left = {name: value for name, value in old.items() if names and name not in names}
            check_against_definition(definition, left)
            return left

        definition, before = self.definition, self.override
        after = self._app.store.policy.override(self.name, less, who(), self._code())
        if (before.keys() - after.keys()) & set(SCHEDULE_OPTIONS):
            self._plan(definition, after)
        return after

    areset = handle_twin(reset)

    # its own schedule

    def _check_schedule(
        self, definition: dict[str, Any], old: dict[str, Any], plain: dict[str, Any]
    ) -> None:
        """BadOption if it is not the task's to change, or would not run; before anything is written."""
        row, after = self._schedule(), merge_overrides(old, plain)
        check_against_definition(definition, after)
        if row is not None and row.owner is None:
            raise BadOption(
                f"schedule {self.name!r} was made or changed by hand, and the task has no say in it: "
                f"app.schedule({self.name!r}).set(…) changes it"
            )
        if (
            row is not None
            and task_schedule(definition, {}) is None
            and not old.keys() & set(SCHEDULE_OPTIONS)
        ):
            raise BadOption(
                f"schedule {self.name!r} is another one, which code declares by app.recur"
            )
        when = task_schedule(definition, after)
        needs = [slot["name"] for slot in definition.get("parameters", ()) if slot.get("required")]
        if when is not None and needs:
            raise BadOption(
                f"a task that runs by itself gets no arguments, and {self.name!r} needs {needs[0]!r}"
            )
        if when is not None:
            self._wanted(when, row)

    def _plan(self, definition: dict[str, Any], after: dict[str, Any]) -> None:
        """At once; nodes that come later do the same."""
        when = task_schedule(definition, after)
        if when is None:
            self._app.store.schedules.undeclare(self.name)
        else:
            self._app.store.schedules.put(self._wanted(when, self._schedule()), BY_CODE)
        self._app.wake()

    def _schedule(self) -> ScheduleRecord | None:
        self._app.store.install()
        try:
            return self._app.store.schedules.named(self.name)
        except ScheduleNotFound:
            return None

    def _wanted(self, when: dict[str, Any], row: ScheduleRecord | None) -> NewSchedule:
        """What is run stays as the code has it, which is not here perhaps."""
        if row is not None and self._code() is None:
            return wanted(self.name, row.job, when, 0, self._app.settings.zone)
        return self._app.wanted(self.name, self._app.call(self.name), cast("When", when))


class Tasks:
    """All tasks that nodes have declared or this app has, by name."""

    def __init__(self, app: Client) -> None:
        self._app = app

    def __getitem__(self, name: str | Task[..., Any, Any]) -> TaskControl:
        """Looks nothing up: a name that nobody knows is an error of what is then done with it."""
        name = name.name if isinstance(name, Task) else name
        if NAME_PATTERN.fullmatch(str(name)) is None:
            raise BadOption(f"{name!r} is no name of a task")
        return TaskControl(self._app, name)

    def __iter__(self) -> Iterator[str]:
        stored = {record.name for record in self._app.store.policy.tasks()}
        return iter(sorted(stored | self._app.task_table().keys()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def values(self) -> list[TaskControl]:
        return [TaskControl(self._app, name) for name in self]

    def __repr__(self) -> str:
        return f"<Tasks of {self._app.namespace}>"


class QueueControl:
    """One queue.  It need not be known to anybody yet."""

    def __init__(self, app: Client, name: str) -> None:
        self._app = app
        self.name = name

    def __repr__(self) -> str:
        return f"<QueueControl {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueControl) and (other.name, other._app) == (
            self.name,
            self._app,
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def _record(self) -> QueueRecord:
        found = [record for record in self._app.store.policy.queues() if record.name == self.name]
        return found[0] if found else QueueRecord(self.name, False, None, None, 0, None)

    @property
    def paused(self) -> bool:
        record = self._record()
        over = record.paused_until is not None and record.paused_until <= self._app.store.now()
        return record.paused and not over

    @property
    def paused_until(self) -> datetime | None:
        """When a pause ends by itself; None: not at all, or there is none."""
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
        """How many of its jobs wait, parked ones too."""
        return self._app.count(state="waiting", queue=self.name)

    def pause(self, until: Any = None, reason: str | None = None) -> None:
        """None of its jobs starts until `resume`, or until a moment or after a time: "5m", "+1 hour", a datetime.

        What runs goes on, and jobs can be enqueued.
        """
        end = None if until is None else self._app.later(until)
        self._app.store.policy.pause(self.name, end, who(), parse_reason(reason))

    apause = handle_twin(pause)

    def resume(self) -> bool:
        """False if it was not paused."""
        return self._app.store.policy.resume(self.name, who())

    aresume = handle_twin(resume)


class Queues:
    """All queues that nodes serve, that have jobs waiting, or that were paused, by name."""

    def __init__(self, app: Client) -> None:
        self._app = app

    def __getitem__(self, name: str) -> QueueControl:
        if NAME_PATTERN.fullmatch(str(name)) is None:
            raise BadOption(f"{name!r} is no name of a queue")
        return QueueControl(self._app, name)

    def __iter__(self) -> Iterator[str]:
        policy = self._app.store.policy
        return iter(
            sorted(
                {record.name for record in policy.queues()}
                | policy.waiting().keys()
                | self._parked()
            )
        )

    def _parked(self) -> set[str]:
        return {queue for _, queue, _ in self._app.store.policy.parked()}

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def values(self) -> list[QueueControl]:
        return [QueueControl(self._app, name) for name in self]

    def to_json(self) -> list[dict[str, Any]]:
        """All of them at one look, with what waits in each."""
        policy, now = self._app.store.policy, self._app.store.now()
        records = {record.name: record for record in policy.queues()}
        waiting, parked = policy.waiting(), policy.parked()
        told = []
        for name in sorted(records.keys() | waiting.keys() | {queue for _, queue, _ in parked}):
            record = records.get(name) or QueueRecord(name, False, None, None, 0, None)
            until = record.paused_until
            paused = record.paused and not (until is not None and until <= now)
            told.append(
                {
                    "name": name,
                    "paused": paused,
                    "paused_until": to_datetime(until) if paused and until is not None else None,
                    "fair_by": record.fair_by,
                    "waiting": waiting.get(name, 0),
                    "parked": _counted(parked, name),
                    "changed_by": record.changed_by,
                }
            )
        return told

    def __repr__(self) -> str:
        return f"<Queues of {self._app.namespace}>"


def _counted(parked: Iterable[tuple[str, str, int]], queue: str) -> dict[str, int]:
    return {why: count for why, where, count in parked if where == queue}
