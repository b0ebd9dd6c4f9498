"""From calls to rows: what the code, the call and operators say about a new job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict
from zoneinfo import ZoneInfo

import msgspec

from genba.domain.duration import Micros
from genba.domain.fairness import key_of
from genba.domain.untrusted_json import DECODE_ERRORS
from genba.enqueue.arguments import arguments_by_name
from genba.enqueue.call import Call, JobHandle, parents_first
from genba.enqueue.identity import call_identity, key_identity
from genba.enqueue.new_schedule import check_schedule, new_schedule
from genba.errors import BadOption, TaskDisabled
from genba.options import limits as limit_options
from genba.options.conditions import Conditions
from genba.options.merge import with_definition, with_overrides
from genba.options.parse import parse_job_id
from genba.options.snapshot import encode_snapshot
from genba.options.table import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy
from genba.options.values import Dep
from genba.storage.operators import OperatorRules, RulesChanged
from genba.storage.records import Edge, Enqueued, NewJob, UniformJobs
from genba.storage.schedules.rows import NewSchedule
from genba.storage.store import Store

_TRIES = 20  # so often the rules of operators may change while one batch is enqueued

Definitions = Mapping[str, Mapping[str, Any]]  # of tasks without code here, as nodes declared them
Values = Callable[[Call[Any]], Mapping[str, Any]]  # the arguments of a call by name
# Most calls of a batch share all of these, so what follows from them is worked out once.
_Shared = tuple[int, int, frozenset[str], str]  # id(options), id(policy), said, task


class DeclaredTasks(Protocol):
    """What the code of an app declares, as far as a new job depends on it."""

    @property
    def conditions(self) -> Conditions: ...

    @property
    def templates(self) -> limit_options.BucketTemplates: ...

    @property
    def options(self) -> Options:
        """The defaults of the app."""
        ...

    def options_of(self, task: str) -> Options | None:
        """The options of a task; None if its code is not here."""
        ...


class _PlainJob(NamedTuple):
    """The row of a call of which only the arguments differ: most calls are of this kind."""

    options: Options
    policy: Policy
    job: NewJob

    def fits(self, call: Call[Any]) -> bool:
        same = self.options is call.options and self.policy is call.policy
        return same and self.job.task == call.task


class NewJobs:
    """Turns the calls of one app into rows, and enqueues them."""

    def __init__(self, declared: DeclaredTasks, namespace: str, zone: ZoneInfo) -> None:
        self._declared = declared
        self._namespace = namespace
        self._zone = zone
        self._plain: dict[str, _PlainJob] = {}

    def enqueue(
        self, store: Store, calls: Sequence[Call[Any]], conn: Any, trace: str | None
    ) -> list[Enqueued]:
        """Enqueue these calls under the current rules of operators, in one transaction.

        TaskDisabled if an operator has disabled one of the tasks.
        """
        conn = _one_connection(calls, conn)
        calls, order = parents_first(calls)
        rules = store.operators.rules()
        for _ in range(_TRIES):
            try:
                rows = self.rows(store, _apply_rules(calls, rules), rules, trace)
                enqueued = store.enqueue(rows, conn, rules.epoch)
            except RulesChanged:
                rules = store.operators.refresh()
            else:
                return enqueued if order is None else [enqueued[place] for place in order]
        raise RulesChanged("the rules of tasks and queues change faster than a job can be enqueued")

    def rows(
        self,
        store: Store,
        calls: Sequence[Call[Any]],
        rules: OperatorRules,
        trace: str | None = None,
    ) -> list[NewJob]:
        """Build the rows of these calls, which already have the options that operators want."""
        plain = self._plain.get(calls[0].task) if trace is None else None
        if plain is not None and all(map(plain.fits, calls)):
            alike = UniformJobs(
                [msgspec.structs.replace(plain.job, args=call.args) for call in calls]
            )
            return _with_fair_keys(calls, alike, rules, _values)
        places = {id(call): i for i, call in enumerate(calls)}
        prepared: dict[tuple[int, int, str], NewJob] = {}
        by_name_only = {call.task for call in calls if call.arguments is None}
        definitions = _readable(store.operators.definitions(by_name_only)) if by_name_only else {}
        calls = _apply_definitions(calls, definitions, rules) if definitions else calls
        jobs = [self._new_job(call, places, prepared, definitions, trace) for call in calls]
        return _with_fair_keys(calls, jobs, rules, partial(_values, definitions=definitions))

    def encode_clone(self, store: Store, call: Call[Any], trace: str | None) -> bytes:
        """Encode the row of a copy, which the store inserts when the running job has succeeded."""
        (job,) = self.rows(store, [call], store.operators.rules(), trace)
        return msgspec.msgpack.encode(msgspec.structs.replace(job, max_waiting=None))

    def schedule(
        self, store: Store, name: str, call: Call[Any], rule_options: Mapping[str, Any], now: Micros
    ) -> NewSchedule:
        """Build the schedule `name` for `call`; BadOption for options that make no sense."""
        if not isinstance(call, Call):
            raise BadOption(
                f"schedule {name!r}: recur takes a call, like add.call(1), not {call!r}"
            )
        check_schedule(name, call.options)
        (job,) = self.rows(store, [call], OperatorRules(0))
        return new_schedule(name, job, rule_options, now, self._zone)

    def _new_job(
        self,
        call: Call[Any],
        places: Mapping[int, int],
        prepared: dict[tuple[int, int, str], NewJob],
        definitions: Definitions,
        trace: str | None,
    ) -> NewJob:
        options = call.options
        shared = (id(options), id(call.policy), call.task)
        if shared not in prepared:
            prepared[shared] = self._prepare(call, definitions.get(call.task), trace)
        job = msgspec.structs.replace(prepared[shared], args=call.args)
        if job.rules:
            values = partial(_values, call, definitions)
            job = msgspec.structs.replace(job, needs=limit_options.slots_needed(job.rules, values))
        if options.after or options.key is not None or options.once:
            after = tuple(_edge(dep, places) for dep in options.after)
            job = msgspec.structs.replace(job, after=after, identity=_identity(call))
        return job

    def _prepare(
        self, call: Call[Any], definition: Mapping[str, Any] | None, trace: str | None
    ) -> NewJob:
        """Build the part of the row that calls with the same task, options and policy share."""
        self._check_unique(call)
        declared = self._declared.options_of(call.task)
        options = self._declared.conditions.of_call(call.options, known=declared is not None)
        limits = declared.limits if declared else None
        snapshot = encode_snapshot(options, call.policy, limits, trace)
        columns = _columns(options, snapshot, self._namespace, self._zone)
        job = NewJob(task=call.task, args=b"", **columns, **self._limits_of(call, definition))
        if call.options is declared and trace is None and _is_plain(call, job):
            self._plain[call.task] = _PlainJob(call.options, call.policy, job)
        return job

    def _check_unique(self, call: Call[Any]) -> None:
        """Refuse a `unique_for` without effect; the default of the app is for unique jobs only."""
        options = call.options
        if options.unique_for is None or options.key is not None or options.once:
            return
        of_task = (
            self._declared.options_of(call.task) is not None
            and options.unique_for != self._declared.options.unique_for
        )
        if of_task or "unique_for" in call.said:
            raise BadOption(
                f"task {call.task!r}: unique_for says for how long the identity of a job stays "
                "taken, and this one has none: give key= or once=, too"
            )

    def _limits_of(self, call: Call[Any], definition: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the columns about limits, with those of a definition if the code is not here."""
        rules = limit_options.rules_of(call.task, call.options, call.policy)
        max_waiting = call.policy.max_waiting
        if definition is not None:
            own = {rule.template for rule in rules}
            others = limit_options.rules_from_json(definition)
            rules = (*rules, *(rule for rule in others if rule.template not in own))
            max_waiting = definition.get("max_waiting") if max_waiting is None else max_waiting
        self._declared.templates.check(rules)
        return {"rules": rules, "capped": max_waiting is not None, "max_waiting": max_waiting}


def _one_connection(calls: Sequence[Call[Any]], conn: Any) -> Any:
    """Return the one connection for all: the argument, or the option `conn` of the calls."""
    for call in calls:
        named = call.options.conn
        if named is not None and named is not conn:
            if conn is not None:
                raise BadOption(
                    "conn: these calls name different connections; "
                    "all of one enqueue_many go through one"
                )
            conn = named
    return conn


# the rules of operators


def _apply_rules(calls: Sequence[Call[Any]], rules: OperatorRules) -> Sequence[Call[Any]]:
    """Give the calls the options that operators set; TaskDisabled if a task is disabled."""
    if not rules.concern_tasks:
        return calls
    disabled = {call.task for call in calls} & rules.disabled
    if disabled:
        task = min(disabled)
        raise TaskDisabled(f"task {task!r} is disabled; to enable it: app.tasks[{task!r}].enable()")
    shared: dict[_Shared, tuple[Options, Policy]] = {}
    changed: dict[int, Call[Any]] = {}
    for call in calls:
        options, policy = call.options, call.policy
        overrides = rules.overrides.get(call.task)
        if overrides:
            key = (id(options), id(policy), call.said, call.task)
            if key not in shared:
                shared[key] = with_overrides(options, policy, call.said, overrides)
            options, policy = shared[key]
        # A parent of the same batch may have been replaced by a changed call just before.
        if any(id(dep.job) in changed for dep in options.after):
            after = tuple(Dep(changed.get(id(dep.job), dep.job), dep.on) for dep in options.after)
            options = replace(options, after=after)
        if options is not call.options or policy is not call.policy:
            changed[id(call)] = Call(
                call.task, call.args, options, policy, call.arguments, call.said
            )
    return [changed.get(id(call), call) for call in calls]


def _with_fair_keys(
    calls: Sequence[Call[Any]], jobs: list[NewJob], rules: OperatorRules, values: Values
) -> list[NewJob]:
    """Add the key by which jobs of fair queues take turns; by default the task's name."""
    if not rules.fair and all(call.policy.fair_by is None for call in calls):
        return jobs
    return [_with_fair_key(call, job, rules, values) for call, job in zip(calls, jobs, strict=True)]


def _with_fair_key(call: Call[Any], job: NewJob, rules: OperatorRules, values: Values) -> NewJob:
    fair_by = call.policy.fair_by or rules.fair.get(job.queue)
    if fair_by is None:
        return job
    key = key_of(fair_by, values(call))
    return msgspec.structs.replace(
        job, fair_key=key if key is not None else call.task, fair_by=call.policy.fair_by
    )


# the definitions of tasks whose code is elsewhere


class _Parameter(TypedDict):
    name: str
    kind: str


def _readable(definitions: Definitions) -> Definitions:
    """Leave out definitions that cannot be read, for example because they were written by hand."""
    return {task: one for task, one in definitions.items() if _is_readable(one)}


def _is_readable(definition: Mapping[str, Any]) -> bool:
    try:
        with_definition(DEFAULT_OPTIONS, DEFAULT_POLICY, (), definition)
        limit_options.rules_from_json(definition)
        msgspec.convert(definition.get("parameters", ()), list[_Parameter])
        msgspec.convert(definition.get("max_waiting"), int | None)
    except (*DECODE_ERRORS, BadOption, LookupError, AttributeError):
        return False
    return True


def _apply_definitions(
    calls: Sequence[Call[Any]], definitions: Definitions, rules: OperatorRules
) -> list[Call[Any]]:
    """Give calls by name the options that the code of their task gives; operators' options stay."""
    shared: dict[_Shared, tuple[Options, Policy]] = {}
    changed: list[Call[Any]] = []
    for call in calls:
        if call.arguments is None and call.task in definitions:
            key = (id(call.options), id(call.policy), call.said, call.task)
            if key not in shared:
                said: Iterable[str] = {*call.said, *rules.overrides.get(call.task, ())}
                definition = definitions[call.task]
                shared[key] = with_definition(call.options, call.policy, said, definition)
            call = Call(call.task, call.args, *shared[key], None, call.said)
        changed.append(call)
    return changed


def _values(call: Call[Any], definitions: Definitions = MappingProxyType({})) -> dict[str, Any]:
    """Return the arguments by name, with the defaults of the code or of the definition."""
    if call.arguments is not None:
        return call.arguments.by_name(call.args)
    parameters = definitions.get(call.task, {}).get("parameters", ())
    defaults = {one["name"]: one["default"] for one in parameters if "default" in one}
    kinds = ((one["name"], one["kind"]) for one in parameters)
    return {**defaults, **arguments_by_name(call.args, kinds)}


# the columns of one row


def _is_plain(call: Call[Any], job: NewJob) -> bool:
    """Whether nothing in the row depends on the arguments."""
    return not (
        job.rules or call.options.after or call.options.key is not None or call.options.once
    )


def _columns(
    options: Options, snapshot: bytes | None, namespace: str, zone: ZoneInfo
) -> dict[str, Any]:
    # A time that moves with the clock is relative, and is stored as such: the store adds its now.
    due, due_later = options.due_at(0, zone), options.due_at(1, zone)
    due_relative = due is not None and due_later == due + 1
    expires, expires_later = options.expires_at(0, zone), options.expires_at(1, zone)
    expires_relative = expires is not None and expires_later == expires + 1
    parent = options.parent
    return {
        "namespace": namespace,
        "queue": options.queue,
        "priority": options.priority,
        "due_at": None if due_relative else due,
        "delay": max(0, due) if due_relative and due is not None else 0,
        "expires_at": None if expires_relative else expires,
        "expires_in": expires if expires_relative else None,
        "key": options.key,
        "once_waiting": options.once == "waiting",
        "unique_for": options.unique_for,
        "on_conflict": options.on_conflict,
        "parent_id": None if parent is None else parse_job_id("parent", parent),
        "tags": options.tags,
        "options": snapshot.decode() if snapshot else None,
        "ready": options.ready,
    }


def _edge(dep: Dep, places: Mapping[int, int]) -> Edge:
    parent = dep.job
    if isinstance(parent, Call):
        if id(parent) not in places:
            raise BadOption(
                f"after: {parent!r} is not in this enqueue_many; enqueue it first, or together"
            )
        return Edge(places[id(parent)], dep.on, inside=True)
    if isinstance(parent, JobHandle):
        return Edge(parent.id, dep.on)
    if isinstance(parent, int):
        return Edge(parse_job_id("after", parent), dep.on)
    raise BadOption(
        f"after: {parent!r} is neither a job, nor a job's id, nor a call of this enqueue_many"
    )


def _identity(call: Call[Any]) -> str | None:
    options = call.options
    if options.key is not None:
        return key_identity(options.key).hex()
    if not options.once:
        return None
    return call_identity(call.task, None if options.once == "task" else call.args).hex()
