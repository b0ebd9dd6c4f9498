"""The options of a job and the policy of a task: read, checked, and merged (call over task over app)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

import msgspec

from genba.domain.duration import DAY, MILLISECOND, SECOND, Micros, duration, moment
from genba.domain.fairness import names_in
from genba.domain.retry import Retry
from genba.errors import BadOption
from genba.options.parse import (
    ALIASES,
    ALL_PARSERS,
    OPTION_PARSERS,
    POLICY_PARSERS,
    KeepTimes,
    Parser,
)
from genba.options.values import Dep, Limit, Rate

OnDependencyFailure: TypeAlias = Literal["cancel", "run", "hold"]
OnConflict: TypeAlias = Literal["return", "raise", "replace"]
OnException: TypeAlias = Literal["retry", "fail", "hold"]
Kept: TypeAlias = Literal["all", "final"]
Once: TypeAlias = Literal[False, True, "task", "waiting"]


_NO_RETRY = Retry()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one job is to be run.

    `at` and `expires` stay as the user wrote them, because "+1 hour" counts from the enqueue; a `timedelta` is a time
    from then on.
    """

    queue: str = "default"
    priority: int = 0
    at: datetime | timedelta | float | str | None = None
    expires: datetime | timedelta | str | None = None
    retry: Retry = _NO_RETRY
    timeout: Micros | None = None
    grace: Micros = 10 * SECOND
    stall_timeout: Micros | None = None
    memory: int | None = None
    cpu: Micros | None = None
    after: tuple[Dep, ...] = ()
    on_dependency_failure: OnDependencyFailure = "cancel"
    ready: tuple[Any, ...] = ()
    limits: tuple[Limit | Rate, ...] = ()
    key: str | None = None
    once: Once = False
    unique_for: Micros | None = None
    on_conflict: OnConflict = "return"
    dedicated: bool = False
    tags: tuple[str, ...] = ()
    parent: Any = None
    conn: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def build(cls, given: Mapping[str, Any], base: Options) -> Options:
        """`base` with what a user has given on top; BadOption for what is unknown, ill-typed or contradictory."""
        for name in given:
            if name in POLICY_PARSERS:
                raise BadOption(f"{name} belongs to the task: write it in @app.task(…), not here")
            _check_known(name, OPTION_PARSERS)
        return replace(base, **_read_options(given)) if given else base

    def due_at(self, now: Micros, tz: tzinfo = UTC) -> Micros | None:
        """The moment from which the job may start, None for at once; text without a zone is in `tz`."""
        if self.at is None:
            return None
        return (
            now + duration(self.at) if isinstance(self.at, timedelta) else moment(self.at, now, tz)
        )

    def expires_at(self, now: Micros, tz: tzinfo = UTC) -> Micros | None:
        """The moment from which the job must not start any more; a duration counts from when it may start."""
        if self.expires is None:
            return None
        if isinstance(self.expires, timedelta):
            due = self.due_at(now, tz)
            return max(now, now if due is None else due) + duration(self.expires)
        return moment(self.expires, now, tz)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What holds for all jobs of a task."""

    name: str | None = None
    title: str | None = None
    max_running: int | None = None
    exclusive: bool = False
    max_waiting: int | None = None
    rate: Rate | None = None
    fair_by: str | None = None
    on_exception: OnException = "retry"
    explicit_outcome: bool = False
    at_most_once: bool = False
    max_crashes: int = 3
    concurrency: int = 1
    keep: KeepTimes = 7 * DAY
    on_final: Any = None
    progress_every: Micros = 500 * MILLISECOND
    history: Kept = "all"
    cron: str | None = None
    every: Micros | None = None
    tz: str | None = None

    @classmethod
    def build(cls, given: Mapping[str, Any], base: Policy) -> Policy:
        """`base` with what a user has given on top; BadOption for what is unknown, ill-typed or contradictory."""
        for name in given:
            _check_known(name, POLICY_PARSERS)
        policy = replace(
            base, **{name: POLICY_PARSERS[name](name, value) for name, value in given.items()}
        )
        if policy.exclusive and policy.max_running not in (None, 1):
            raise BadOption(
                f"exclusive means that one runs at a time, and max_running is {policy.max_running}"
            )
        if policy.cron is not None and policy.every is not None:
            raise BadOption("cron and every both say when; give one of them")
        if policy.tz is not None and policy.cron is None:
            raise BadOption("tz belongs to cron")
        return policy


DEFAULT_OPTIONS = Options()
DEFAULT_POLICY = Policy()


def build_options(
    given: Mapping[str, Any], options: Options = DEFAULT_OPTIONS, policy: Policy = DEFAULT_POLICY
) -> tuple[Options, Policy]:
    """What a decorator or an app's `defaults` say, where job options and task policy stand side by side."""
    for name in given:
        _check_known(name, ALL_PARSERS)
    own = {name: value for name, value in given.items() if name in POLICY_PARSERS}
    rest = {name: value for name, value in given.items() if name not in POLICY_PARSERS}
    return Options.build(rest, options), Policy.build(own, policy)


def merge(app: Mapping[str, Any], task: Mapping[str, Any], call: Mapping[str, Any]) -> Options:
    """The job options of one call: what the call says, else the task, else the app, else the default."""
    options = DEFAULT_OPTIONS
    for level in (app, task, call):
        options = Options.build(level, options)
    return options


# What an operator may change while the app runs: the rest is part of the code, or of one call.
OVERRIDABLE: tuple[str, ...] = (
    *(
        "queue",
        "priority",
        "nice",
        "expires",
        "retry",
        "timeout",
        "grace",
        "stall_timeout",
        "memory",
        "cpu",
    ),
    *(
        "on_dependency_failure",
        "dedicated",
        "title",
        "max_running",
        "exclusive",
        "max_waiting",
        "rate",
    ),
    *(
        "fair_by",
        "on_exception",
        "explicit_outcome",
        "at_most_once",
        "max_crashes",
        "concurrency",
        "keep",
    ),
    *("on_final", "progress_every", "cron", "every", "tz"),
)
SCHEDULE_OPTIONS = ("cron", "every", "tz")  # the schedule of a task itself
_OF_NODES = (*SCHEDULE_OPTIONS, "concurrency")  # what no job carries
_NO_NAME = "name cannot be changed: jobs, schedules and callers know the task by it"


def override(changes: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator wants of a task, checked, as plain values that can be stored and read again."""
    for name in changes:
        _check_known(name, ALL_PARSERS)
        if name == "name":
            raise BadOption(_NO_NAME)
        if name not in OVERRIDABLE:
            raise BadOption(
                f"{name} cannot be changed from outside; what can: {', '.join(OVERRIDABLE)}"
            )
        if name in POLICY_PARSERS:
            POLICY_PARSERS[name](name, changes[name])
    if callable(changes.get("on_final")):
        raise BadOption(
            "on_final: a function is part of the code; from outside, name a task that takes `job`, an id"
        )
    if changes.get("cron") is not None and changes.get("every") is not None:
        raise BadOption("cron and every both say when; give one of them")
    Options.build(
        {name: value for name, value in changes.items() if name not in POLICY_PARSERS},
        DEFAULT_OPTIONS,
    )
    named = {
        ALIASES.get(name, name): -value if name == "nice" else value
        for name, value in changes.items()
    }
    return {name: storable(value) for name, value in named.items()}


def merge_overrides(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What operators have said before, and what they say now over it: cron= ends every=, and the other way."""
    ended: tuple[str, ...] = ()
    if "cron" in changes:
        ended = ("every",) if changes["cron"] is not None else ("tz",)
    elif "every" in changes and POLICY_PARSERS["every"]("every", changes["every"]) is not None:
        ended = ("cron", "tz")
    return {**{name: value for name, value in old.items() if name not in ended}, **changes}


def check_against_definition(definition: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """BadOption, if what operators want contradicts what the code says: no job could be enqueued, or none run."""
    said = {
        name: definition[name]
        for name in ("exclusive", "max_running")
        if definition.get(name) is not None
    }
    build_options(
        {**said, **{name: value for name, value in changes.items() if name not in SCHEDULE_OPTIONS}}
    )
    if changes.get("tz") is not None and "cron" not in (task_schedule(definition, changes) or {}):
        raise BadOption("tz belongs to cron")
    if changes.get("concurrency", 1) > 1 and not definition.get("async", True):
        raise BadOption(
            "concurrency is for tasks that are `async def`; this one runs one at a time"
        )
    fair_by, known = (
        changes.get("fair_by"),
        [slot["name"] for slot in definition.get("parameters", ())],
    )
    strange = (
        [name for name in names_in(fair_by) if name not in known] if fair_by is not None else []
    )
    if strange and "parameters" in definition:
        raise BadOption(
            f"fair_by names {strange[0]!r}, which is none of its arguments ({', '.join(known)})"
        )


def task_schedule(
    definition: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any] | None:
    """When a task runs by itself, by its code and what operators say; None: it does not."""
    cron, every, tz = (definition.get(name) for name in SCHEDULE_OPTIONS)
    if "cron" in changes:
        cron, every = changes["cron"], None if changes["cron"] is not None else every
    if "every" in changes:
        every = POLICY_PARSERS["every"]("every", changes["every"])
        cron = cron if every is None else None
    if cron is not None:
        return {"cron": cron, "tz": changes.get("tz", tz)}
    if every is None:
        return None
    return {"every": every if every < 0 else timedelta(microseconds=every)}


_DEFINED_TIMES = ("timeout", "grace", "stall_timeout", "cpu", "unique_for", "progress_every")
_DEFINED: tuple[str, ...] = (
    *_DEFINED_TIMES,
    *(
        "queue",
        "priority",
        "expires",
        "memory",
        "retry",
        "dedicated",
        "on_dependency_failure",
        "ready",
        "tags",
    ),
    *(
        "once",
        "on_conflict",
        "fair_by",
        "on_exception",
        "explicit_outcome",
        "at_most_once",
        "max_crashes",
        "history",
    ),
    *("keep", "on_final"),
)


def with_definition(
    options: Options, policy: Policy, said: Iterable[str], definition: Mapping[str, Any]
) -> tuple[Options, Policy]:
    """What holds for a call by name: what it has `said`, else what the decorator says, which nodes have persisted.

    Limits are not among it: they have a part of the definition of their own.
    """
    given = {name: definition[name] for name in _DEFINED if name in definition}
    given |= {name: _times_of(given[name]) for name in (*_DEFINED_TIMES, "keep") if name in given}
    spoken = {ALIASES.get(name, name) for name in said}
    given = {name: value for name, value in given.items() if name not in spoken}
    before = _values(options) | _values(policy)
    built = build_options(given, options, policy)
    after = _values(built[0]) | _values(built[1])
    # Only what differs: with the very defaults in it, the job's snapshot stays as short as that of any other.
    return build_options(
        {name: value for name, value in given.items() if after[name] != before[name]},
        options,
        policy,
    )


def _values(value: Options | Policy) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _times_of(micros: KeepTimes) -> timedelta | dict[str, Any] | None:
    if isinstance(micros, dict):
        return {name: _times_of(time) for name, time in micros.items()}
    return None if micros is None else timedelta(microseconds=micros)


def storable(value: Any) -> Any:
    """As it can be stored, and read again."""
    if isinstance(value, Retry):
        return value.to_json()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Rate):
        return value.rate
    return value.isoformat() if isinstance(value, datetime) else value


def with_overrides(
    options: Options, policy: Policy, said: Iterable[str], changes: Mapping[str, Any]
) -> tuple[Options, Policy]:
    """What holds for a call: an operator's word over that of the task and the app, the call's own over both."""
    spoken = {ALIASES.get(name, name) for name in said}
    for_jobs = {
        name: value
        for name, value in changes.items()
        if name not in spoken and name not in _OF_NODES
    }
    return build_options(for_jobs, options, policy)


class OptionsSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """What node and worker must know of a job's options and its task's policy, as it was at the enqueue.

    Only what differs from the defaults is written, so most jobs carry none; therefore a default, once released, may
    change only for jobs that are not yet enqueued, by way of a migration.
    """

    timeout: Micros | None = None
    grace: Micros = DEFAULT_OPTIONS.grace
    stall_timeout: Micros | None = None
    retry: dict[str, Any] = {}
    memory: int | None = None
    cpu: Micros | None = None
    max_crashes: int = DEFAULT_POLICY.max_crashes
    on_exception: OnException = DEFAULT_POLICY.on_exception
    at_most_once: bool = False
    explicit_outcome: bool = False
    dedicated: bool = False
    on_dependency_failure: OnDependencyFailure = DEFAULT_OPTIONS.on_dependency_failure
    unique_for: Micros | None = None
    keep: KeepTimes = DEFAULT_POLICY.keep
    once: bool | Literal["task", "waiting"] = False
    progress_every: Micros = DEFAULT_POLICY.progress_every
    history: Kept = DEFAULT_POLICY.history
    on_final: str | None = None
    ready: tuple[str, ...] = ()
    limits: tuple[tuple[str | None, int | str, bool | int | None], ...] | None = (
        None  # None: those of its task
    )
    trace: str | None = None  # the traceparent of whoever enqueued it

    @classmethod
    def of(
        cls, options: Options, policy: Policy, usual: Sequence[Limit | Rate] | None = None
    ) -> OptionsSnapshot:
        """`usual` are the limits of the task, if that is known: a copy of the job must have the same as the job."""
        return cls(
            timeout=options.timeout,
            grace=options.grace,
            stall_timeout=options.stall_timeout,
            retry={} if options.retry == DEFAULT_OPTIONS.retry else options.retry.to_json(),
            memory=options.memory,
            cpu=options.cpu,
            max_crashes=policy.max_crashes,
            on_exception=policy.on_exception,
            at_most_once=policy.at_most_once,
            explicit_outcome=policy.explicit_outcome,
            dedicated=options.dedicated,
            on_dependency_failure=options.on_dependency_failure,
            unique_for=options.unique_for,
            keep=policy.keep,
            once=options.once,
            progress_every=policy.progress_every,
            history=policy.history,
            on_final=policy.on_final,
            ready=options.ready,
            limits=None
            if usual is None or options.limits == usual
            else tuple(map(_written_limit, options.limits)),
        )

    def limits_or(self, usual: tuple[Limit | Rate, ...]) -> tuple[Limit | Rate, ...]:
        if self.limits is None:
            return usual
        return tuple(
            Limit(str(bucket), count, bool(more))
            if isinstance(count, int)
            else Rate(bucket, count, more)
            for bucket, count, more in self.limits
        )

    @classmethod
    def read(cls, written: bytes | None) -> OptionsSnapshot:
        """What `snapshot` wrote; fields of a newer version are ignored."""
        return _PLAIN if written is None else _read_snapshot(written)

    def onto(self, options: Options) -> Options:
        """`options`, with those of the job."""
        return replace(
            options,
            retry=self.retry_rule(),
            timeout=self.timeout,
            grace=self.grace,
            stall_timeout=self.stall_timeout,
            memory=self.memory,
            cpu=self.cpu,
            on_dependency_failure=self.on_dependency_failure,
            dedicated=self.dedicated,
            ready=self.ready,
            limits=self.limits_or(options.limits),
            once=self.once,
            unique_for=self.unique_for,
        )

    def retry_rule(self) -> Retry:
        return Retry.from_json(self.retry) if self.retry else DEFAULT_OPTIONS.retry


_TIMES = ("timeout", "grace", "stall_timeout", "cpu", "unique_for")


def changed_options(options: Options) -> dict[str, Any]:
    """The options that are not as usual, as `using` takes them; times in seconds."""
    usual = _values(DEFAULT_OPTIONS)
    said = {
        name: value
        for name, value in _values(options).items()
        if value != usual[name] and name != "conn"
    }
    return {name: value / SECOND if name in _TIMES else value for name, value in said.items()}


# What may change of a job that has not started; its identity, its dependencies and its arguments stay.
_UPDATABLE: tuple[str, ...] = (
    *(
        "queue",
        "priority",
        "nice",
        "at",
        "delay",
        "expires",
        "retry",
        "timeout",
        "grace",
        "stall_timeout",
    ),
    *("memory", "cpu", "on_dependency_failure", "dedicated"),
)


def read_update(changes: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """New options of a job, and those of them that travel with it, as plain values."""
    if not changes:
        raise BadOption(f"nothing to change: name one of {', '.join(_UPDATABLE)}")
    for name in changes:
        _check_known(name, ALL_PARSERS)
        if name not in _UPDATABLE:
            raise BadOption(f"{name} of a job cannot be changed; what can: {', '.join(_UPDATABLE)}")
    options = Options.build(changes, DEFAULT_OPTIONS)
    written = OptionsSnapshot.of(options, DEFAULT_POLICY)
    stored = {
        name: getattr(written, name)
        for name in changes
        if name in OptionsSnapshot.__struct_fields__
    }
    return options, stored


_PLAIN = OptionsSnapshot()
_read_snapshot = msgspec.json.Decoder(OptionsSnapshot).decode


def _written_limit(limit: Limit | Rate) -> tuple[str | None, int | str, bool | int | None]:
    if isinstance(limit, Limit):
        return limit.bucket, limit.n, limit.ordered
    return limit.bucket, limit.rate, limit.burst


def encode_snapshot(
    options: Options,
    policy: Policy,
    usual: Sequence[Limit | Rate] | None = None,
    trace: str | None = None,
) -> bytes | None:
    """The options that travel with the job, as JSON; None when all are the defaults and nobody traces it."""
    snap = OptionsSnapshot.of(options, policy, usual)
    written = msgspec.json.encode(
        snap if trace is None else msgspec.structs.replace(snap, trace=trace)
    )
    return None if written == b"{}" else written


def _check_known(name: str, readers: Mapping[str, Parser]) -> None:
    if name not in readers:
        close = get_close_matches(name, readers)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise BadOption(f"there is no option {name!r}{meant}")


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    for one, other in (("priority", "nice"), ("at", "delay"), ("key", "once")):
        if all(given.get(name) is not None and given[name] is not False for name in (one, other)):
            raise BadOption(f"{one} and {other} exclude each other; give one of them")
    read: dict[str, Any] = {}
    for name, value in given.items():
        read[ALIASES.get(name, name)] = OPTION_PARSERS[name](name, value)
    # The nearer level decides what makes a job unique.
    if read.get("key") is not None:
        read["once"] = False
    elif read.get("once"):
        read["key"] = None
    return read
