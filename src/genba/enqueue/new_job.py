"""Intake: calls become rows of the store, with all that code and operators say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec

from genba.client.job import Job, copy_of
from genba.client.operators import fair, obey
from genba.client.schedule import When, check_schedule, wanted
from genba.client.settings import Settings
from genba.client.task import Call, parents_first
from genba.domain.untrusted_json import DECODE_ERRORS
from genba.enqueue.arguments import arguments_by_name
from genba.enqueue.identity import call_identity, key_identity
from genba.enqueue.trace import current_traceparent
from genba.errors import BadOption
from genba.options import limits as limit_options
from genba.options.merge import with_definition
from genba.options.parse import parse_job_id
from genba.options.snapshot import encode_snapshot
from genba.options.table import DEFAULT_OPTIONS, DEFAULT_POLICY, Options, Policy
from genba.options.values import Dep
from genba.storage.operators import OperatorRules
from genba.storage.records import Edge, JobRecord, NewJob, UniformJobs
from genba.storage.schedules.rows import NewSchedule

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.client.registry import Registry


class _Usual(NamedTuple):
    """A plain call of a task, ready but for its arguments: most enqueues are of this kind."""

    options: Options
    policy: Policy
    settings: Settings
    job: NewJob

    def fits(self, call: Call[Any], settings: Settings) -> bool:
        same = (
            self.options is call.options
            and self.policy is call.policy
            and self.settings is settings
        )
        return same and self.job.task == call.task


class NewJobs:
    """The way of a call into the store."""

    def __init__(self, app: Client, registry: Registry) -> None:
        self._app = app
        self._registry = registry
        self._usual: dict[str, _Usual] = {}

    def submit(self, calls: Sequence[Call[Any]], conn: Any) -> list[Job[Any]]:
        conn = _one_connection(calls, conn)
        calls, order = parents_first(calls)
        done = obey(self._app.store, calls, partial(self.rows, trace=current_traceparent()), conn)
        handles: list[Job[Any]] = [
            Job(self._app, made.id, created=made.created, arguments=call.arguments)
            for made, call in zip(done, calls, strict=True)
        ]
        return handles if order is None else [handles[place] for place in order]

    def rows(
        self, calls: Sequence[Call[Any]], rules: OperatorRules, trace: str | None = None
    ) -> list[NewJob]:
        """`rules` are those of operators."""
        usual = self._usual.get(calls[0].task) if trace is None else None
        if usual is not None and all(map(usual.fits, calls, repeat(self._app.settings))):
            alike = UniformJobs(
                [msgspec.structs.replace(usual.job, args=call.args) for call in calls]
            )
            return fair(calls, alike, rules, _values)
        places = {id(call): i for i, call in enumerate(calls)}
        prepared: dict[tuple[int, int, str], NewJob] = {}
        unknown = {call.task for call in calls if call.arguments is None}
        told = self._app.store.definitions(unknown) if unknown else {}
        told = {task: definition for task, definition in told.items() if _is_sound(definition)}
        calls = _defined(calls, told, rules) if told else calls
        jobs = [self._new_job(call, places, prepared, told, trace) for call in calls]
        return fair(calls, jobs, rules, partial(_values, told=told))

    def clone(self, record: JobRecord, changes: Mapping[str, Any]) -> bytes:
        """A copy of a job of ours, as the store can read it when that one has succeeded."""
        copy = copy_of(self._registry.tasks[record.task], record, changes)
        (made,) = self.rows([copy], self._app.store.policy.rules(), current_traceparent())
        return msgspec.msgpack.encode(msgspec.structs.replace(made, max_waiting=None))

    def wanted(self, name: str, call: Call[Any], when: When, now: int) -> NewSchedule:
        """The schedule `name` for `call`; BadOption for what makes no sense."""
        if not isinstance(call, Call):
            raise BadOption(
                f"schedule {name!r}: recur takes a call, like add.call(1), not {call!r}"
            )
        check_schedule(name, call.options)
        return wanted(
            name, self.rows([call], OperatorRules(0))[0], when, now, self._app.settings.zone
        )

    def _new_job(
        self,
        call: Call[Any],
        places: Mapping[int, int],
        prepared: dict[tuple[int, int, str], NewJob],
        told: Mapping[str, Mapping[str, Any]],
        trace: str | None,
    ) -> NewJob:
        options, policy = call.options, call.policy
        same = (id(options), id(policy), call.task)  # most calls of a batch share all
        if same not in prepared:
            self._check_unique(call)
            options = self._registry.conditions.of_call(
                options, known=call.task in self._registry.tasks
            )
            task = self._registry.tasks.get(call.task)
            limits = task.options.limits if task else None
            columns = _columns(
                options, encode_snapshot(options, policy, limits, trace), self._app.settings
            )
            columns |= self._limits_of(call, told.get(call.task))
            made = prepared[same] = NewJob(task=call.task, args=b"", **columns)
            if (
                task is not None
                and call.options is task.options
                and trace is None
                and _is_plain(call, made)
            ):
                self._usual[call.task] = _Usual(call.options, policy, self._app.settings, made)
        job = msgspec.structs.replace(prepared[same], args=call.args)
        if job.rules:
            job = msgspec.structs.replace(
                job, needs=limit_options.slots_needed(job.rules, partial(_values, call, told))
            )
        if options.after or options.key is not None or options.once:
            after = tuple(_edge(dep, places) for dep in options.after)
            job = msgspec.structs.replace(job, after=after, identity=_identity(call))
        return job

    def _check_unique(self, call: Call[Any]) -> None:
        """BadOption for a `unique_for` that would do nothing; that of the app is for those jobs that are unique."""
        options = call.options
        if options.unique_for is None or options.key is not None or options.once:
            return
        by_task = (
            call.task in self._registry.tasks
            and options.unique_for != self._registry.options.unique_for
        )
        if by_task or "unique_for" in call.said:
            raise BadOption(
                f"task {call.task!r}: unique_for says for how long the identity of a job stays taken, "
                "and this one has none: give key= or once=, too"
            )

    def _limits_of(self, call: Call[Any], told: Mapping[str, Any] | None) -> dict[str, Any]:
        """`told` is the definition of a task that this app does not have: its limits hold here too."""
        rules, most = (
            limit_options.rules_of(call.task, call.options, call.policy),
            call.policy.max_waiting,
        )
        if told is not None:
            own = {rule.template for rule in rules}
            rules = (
                *rules,
                *(rule for rule in limit_options.rules_from_json(told) if rule.template not in own),
            )
            most = told.get("max_waiting") if most is None else most
        self._registry.templates.check(rules)
        return {"rules": rules, "capped": most is not None, "max_waiting": most}


def _one_connection(calls: Sequence[Call[Any]], conn: Any) -> Any:
    """The one that they all go through: the caller's, or that of the calls which name one."""
    for call in calls:
        named = call.options.conn
        if named is not None and named is not conn:
            if conn is not None:
                raise BadOption(
                    "conn: these calls name different connections; all of one enqueue_many go through one"
                )
            conn = named
    return conn


def _is_plain(call: Call[Any], made: NewJob) -> bool:
    """Nothing in its row depends on its arguments."""
    return not (
        made.rules or call.options.after or call.options.key is not None or call.options.once
    )


class _Parameter(TypedDict):
    name: str
    kind: str


def _is_sound(definition: Mapping[str, Any]) -> bool:
    """One that was written by hand may say anything; then its task is one that no node has told of."""
    try:
        with_definition(DEFAULT_OPTIONS, DEFAULT_POLICY, (), definition)
        limit_options.rules_from_json(definition)
        msgspec.convert(definition.get("parameters", ()), list[_Parameter])
        msgspec.convert(definition.get("max_waiting"), int | None)
    except (*DECODE_ERRORS, BadOption, LookupError, AttributeError):
        return False
    return True


def _defined(
    calls: Sequence[Call[Any]], told: Mapping[str, Mapping[str, Any]], rules: OperatorRules
) -> list[Call[Any]]:
    """Calls by name, with the options that the code of their task gives, wherever that is; operators' words stay."""
    shared: dict[tuple[int, int, frozenset[str], str], tuple[Options, Policy]] = {}
    found = []
    for call in calls:
        if call.arguments is None and call.task in told:
            same = (id(call.options), id(call.policy), call.said, call.task)
            if same not in shared:
                said = {*call.said, *rules.overrides.get(call.task, ())}
                shared[same] = with_definition(call.options, call.policy, said, told[call.task])
            call = Call(call.task, call.args, *shared[same], None, call.said)
        found.append(call)
    return found


def _values(
    call: Call[Any], told: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> dict[str, Any]:
    """Its arguments by name; of a task whose code is elsewhere, as far as nodes have told, defaults applied."""
    if call.arguments is not None:
        return call.arguments.by_name(call.args)
    parameters = told.get(call.task, {}).get("parameters", ())
    defaults = {one["name"]: one["default"] for one in parameters if "default" in one}
    return {
        **defaults,
        **arguments_by_name(call.args, ((one["name"], one["kind"]) for one in parameters)),
    }


def _columns(options: Options, written: bytes | None, settings: Settings) -> dict[str, Any]:
    """`written` is what travels with the job."""
    zone = settings.zone
    due, later = options.due_at(0, zone), options.due_at(1, zone)
    relative = due is not None and later == due + 1
    expires, expires_later = options.expires_at(0, zone), options.expires_at(1, zone)
    expires_relative = expires is not None and expires_later == expires + 1
    parent = options.parent
    return {
        "namespace": settings.namespace,
        "queue": options.queue,
        "priority": options.priority,
        "due_at": None if relative else due,
        "delay": max(0, due) if relative and due is not None else 0,
        "expires_at": None if expires_relative else expires,
        "expires_in": expires if expires_relative else None,
        "key": options.key,
        "once_waiting": options.once == "waiting",
        "unique_for": options.unique_for,
        "on_conflict": options.on_conflict,
        "parent_id": None if parent is None else parse_job_id("parent", parent),
        "tags": options.tags,
        "options": written.decode() if written else None,
        "ready": options.ready,
    }


def _edge(dep: Dep, places: Mapping[int, int]) -> Edge:
    target = dep.job
    if isinstance(target, Call):
        if id(target) not in places:
            raise BadOption(
                f"after: {target!r} is not in this enqueue_many; enqueue it first, or together"
            )
        return Edge(places[id(target)], dep.on, inside=True)
    if isinstance(target, Job):
        return Edge(target.id, dep.on)
    if isinstance(target, int):
        return Edge(parse_job_id("after", target), dep.on)
    raise BadOption(
        f"after: {target!r} is neither a job, nor a job's id, nor a call of this enqueue_many"
    )


def _identity(call: Call[Any]) -> str | None:
    options = call.options
    if options.key is not None:
        return key_identity(options.key).hex()
    if not options.once:
        return None
    return call_identity(call.task, None if options.once == "task" else call.args).hex()
