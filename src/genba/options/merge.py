"""Merge options: app, task, operators and call become the options of one job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from genba.domain.fairness import names_in
from genba.domain.retry import Retry
from genba.errors import BadOption
from genba.options.parse import KeepTimes, parse_every
from genba.options.snapshot import OptionsSnapshot
from genba.options.table import (
    ALIASES,
    ALL_OPTIONS,
    DEFAULT_OPTIONS,
    DEFAULT_POLICY,
    POLICY_OPTIONS,
    SCHEDULE_OPTIONS,
    TZ_WITHOUT_CRON,
    Options,
    Policy,
    Use,
    check_known,
    check_one_schedule,
    names_with,
    values_of,
)
from genba.options.values import Rate

_OVERRIDABLE = names_with(Use.OPERATOR)
_UPDATABLE = names_with(Use.UPDATE)
_DEFINED = names_with(Use.DEFINITION)
_DEFINED_MICROS = names_with(Use.DEFINITION | Use.MICROS)
_NODE_OPTIONS = (*SCHEDULE_OPTIONS, "concurrency")  # options that no job carries


def build_options(
    values: Mapping[str, Any], options: Options = DEFAULT_OPTIONS, policy: Policy = DEFAULT_POLICY
) -> tuple[Options, Policy]:
    """Build both from the values of a decorator or of an app's `defaults`, which mix them."""
    for name in values:
        check_known(name, ALL_OPTIONS)
    for_policy, for_job = _split(values)
    return Options.build(for_job, options), Policy.build(for_policy, policy)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    for_policy = {name: value for name, value in values.items() if name in POLICY_OPTIONS}
    for_job = {name: value for name, value in values.items() if name not in POLICY_OPTIONS}
    return for_policy, for_job


# operators


def check_overrides(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Check what an operator sets for a task; return plain values that can be stored."""
    for name in changes:
        check_known(name, ALL_OPTIONS)
        if name == "name":
            raise BadOption("name cannot be changed: jobs, schedules and callers refer to it")
        if name not in _OVERRIDABLE:
            raise BadOption(
                f"{name} cannot be changed by an operator; these can: {', '.join(_OVERRIDABLE)}"
            )
    for_policy, for_job = _split(changes)
    for name, value in for_policy.items():
        POLICY_OPTIONS[name].parse(name, value)
    if callable(changes.get("on_final")):
        raise BadOption(
            "on_final must be the name of a task that takes `job`, an id; "
            "only a decorator can give a function"
        )
    check_one_schedule(changes.get("cron"), changes.get("every"))
    Options.build(for_job, DEFAULT_OPTIONS)
    canonical = {
        ALIASES.get(name, name): -value if name == "nice" else value
        for name, value in changes.items()
    }
    return {name: storable(value) for name, value in canonical.items()}


def merge_overrides(old: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge an operator's changes over earlier ones; cron= ends every=, and the reverse."""
    ended: tuple[str, ...] = ()
    if "cron" in changes:
        ended = ("every",) if changes["cron"] is not None else ("tz",)
    elif "every" in changes and parse_every("every", changes["every"]) is not None:
        ended = ("cron", "tz")
    return {**{name: value for name, value in old.items() if name not in ended}, **changes}


def check_against_definition(definition: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Raise BadOption for overrides that contradict the code.

    Otherwise no job of the task could be enqueued, or none could run.
    """
    from_code = {
        name: definition[name]
        for name in ("exclusive", "max_running")
        if definition.get(name) is not None
    }
    for_jobs = {name: value for name, value in changes.items() if name not in SCHEDULE_OPTIONS}
    build_options({**from_code, **for_jobs})
    if changes.get("tz") is not None and "cron" not in (task_schedule(definition, changes) or {}):
        raise BadOption(TZ_WITHOUT_CRON)
    if changes.get("concurrency", 1) > 1 and not definition.get("async", True):
        raise BadOption(
            f"concurrency must be 1 for a task that is not `async def`, "
            f"got {changes['concurrency']}"
        )
    fair_by = changes.get("fair_by")
    if fair_by is not None and "parameters" in definition:
        _check_fair_by(fair_by, [parameter["name"] for parameter in definition["parameters"]])


def _check_fair_by(fair_by: str, parameters: list[str]) -> None:
    unknown = [name for name in names_in(fair_by) if name not in parameters]
    if unknown:
        raise BadOption(
            f"fair_by: the task has no argument {unknown[0]!r}; "
            f"its arguments are {', '.join(parameters) or 'none'}"
        )


def task_schedule(
    definition: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the schedule of a task itself, by its code and overrides, or None if it has none."""
    cron, every, tz = (definition.get(name) for name in SCHEDULE_OPTIONS)
    if "cron" in changes:
        cron, every = changes["cron"], None if changes["cron"] is not None else every
    if "every" in changes:
        every = parse_every("every", changes["every"])
        cron = cron if every is None else None
    if cron is not None:
        return {"cron": cron, "tz": changes.get("tz", tz)}
    if every is None:
        return None
    return {"every": every if every < 0 else timedelta(microseconds=every)}


def storable(value: Any) -> Any:
    """Return a plain value that can be stored and parsed again."""
    if isinstance(value, Retry):
        return value.to_json()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Rate):
        return value.rate
    return value.isoformat() if isinstance(value, datetime) else value


# one call


def with_overrides(
    options: Options, policy: Policy, named: Iterable[str], changes: Mapping[str, Any]
) -> tuple[Options, Policy]:
    """Apply overrides to the options of a call, except for those that the call has `named`."""
    fixed = {ALIASES.get(name, name) for name in named}
    for_jobs = {
        name: value
        for name, value in changes.items()
        if name not in fixed and name not in _NODE_OPTIONS
    }
    return build_options(for_jobs, options, policy)


def with_definition(
    options: Options, policy: Policy, named: Iterable[str], definition: Mapping[str, Any]
) -> tuple[Options, Policy]:
    """Apply the decorator's options to a call by name, except for those that the call has `named`.

    Nodes have stored the decorator's options in the task's definition.  Limits are not among them:
    they are a separate part of the definition.
    """
    fixed = {ALIASES.get(name, name) for name in named}
    values = {name: definition[name] for name in _DEFINED if name in definition}
    values |= {
        name: _durations(values[name]) for name in (*_DEFINED_MICROS, "keep") if name in values
    }
    values = {name: value for name, value in values.items() if name not in fixed}
    before = values_of(options) | values_of(policy)
    built = build_options(values, options, policy)
    after = values_of(built[0]) | values_of(built[1])
    # Only what differs: without repeated defaults the job's snapshot stays as short as any other.
    changed = {name: value for name, value in values.items() if after[name] != before[name]}
    return build_options(changed, options, policy)


def _durations(micros: KeepTimes) -> timedelta | dict[str, Any] | None:
    if isinstance(micros, dict):
        return {name: _durations(time) for name, time in micros.items()}
    return None if micros is None else timedelta(microseconds=micros)


def parse_update(changes: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Parse new options for a job that has not started.

    Returns the options, and the plain values of those that are part of the job's snapshot.
    """
    if not changes:
        raise BadOption(f"nothing to change; give one of {', '.join(_UPDATABLE)}")
    for name in changes:
        check_known(name, ALL_OPTIONS)
        if name not in _UPDATABLE:
            raise BadOption(
                f"{name} of a job cannot be changed; these can: {', '.join(_UPDATABLE)}"
            )
    options = Options.build(changes, DEFAULT_OPTIONS)
    snapshot = OptionsSnapshot.of(options, DEFAULT_POLICY)
    stored = {
        name: getattr(snapshot, name)
        for name in changes
        if name in OptionsSnapshot.__struct_fields__
    }
    return options, stored
