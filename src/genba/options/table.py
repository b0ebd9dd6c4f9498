"""The table of options: one row per option of a job and per policy of a task.

`Options` and `Policy` hold the values and their defaults.  The rows say how a value is parsed, and
where else the option counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from enum import Flag, auto
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from genba.domain.duration import DAY, MILLISECOND, SECOND, Micros, duration, moment
from genba.domain.retry import Retry
from genba.errors import BadOption
from genba.options.parse import (
    MAX_INT32,
    KeepTimes,
    Parser,
    accept,
    one_of,
    parse_after,
    parse_at,
    parse_cron,
    parse_delay,
    parse_every,
    parse_expires,
    parse_flag,
    parse_keep,
    parse_limits,
    parse_maximum,
    parse_name,
    parse_nice,
    parse_on_final,
    parse_parent,
    parse_rate,
    parse_ready,
    parse_retry,
    parse_size,
    parse_tags,
    parse_zone,
    text,
    time,
    whole_number,
)
from genba.options.values import Dep, Limit, Rate

OnDependencyFailure: TypeAlias = Literal["cancel", "run", "hold"]
OnConflict: TypeAlias = Literal["return", "raise", "replace"]
OnException: TypeAlias = Literal["retry", "fail", "hold"]
History: TypeAlias = Literal["all", "final"]
Once: TypeAlias = Literal[False, True, "task", "waiting"]


class Use(Flag):
    """Where an option counts, besides decorators and calls."""

    NONE = 0
    OPERATOR = auto()  # an operator may change it while the app runs
    UPDATE = auto()  # it may change until the job starts
    DEFINITION = auto()  # nodes store it with the task, for calls by name
    MICROS = auto()  # its value is kept in microseconds


@dataclass(frozen=True, slots=True)
class Row:
    """One option."""

    name: str
    parse: Parser
    use: Use = Use.NONE


_O, _U, _D, _M = Use.OPERATOR, Use.UPDATE, Use.DEFINITION, Use.MICROS

_JOB_ROWS = (
    Row("queue", parse_name, _O | _U | _D),
    Row("priority", whole_number(-(2**31), MAX_INT32), _O | _U | _D),
    Row("nice", parse_nice, _O | _U),
    Row("at", parse_at, _U),
    Row("delay", parse_delay, _U),
    Row("expires", parse_expires, _O | _U | _D),
    Row("retry", parse_retry, _O | _U | _D),
    Row("timeout", time(), _O | _U | _D | _M),
    Row("grace", time(none=False, zero=True), _O | _U | _D | _M),
    Row("stall_timeout", time(), _O | _U | _D | _M),
    Row("memory", parse_size, _O | _U | _D),
    Row("cpu", time(), _O | _U | _D | _M),
    Row("after", parse_after),
    Row("on_dependency_failure", one_of("cancel", "run", "hold"), _O | _U | _D),
    Row("ready", parse_ready, _D),
    Row("limits", parse_limits),
    Row("key", text(200)),
    Row("once", one_of(False, True, "task", "waiting"), _D),
    Row("unique_for", time(), _D | _M),
    Row("on_conflict", one_of("return", "raise", "replace"), _D),
    Row("dedicated", parse_flag, _O | _U | _D),
    Row("tags", parse_tags, _D),
    Row("parent", parse_parent),
    Row("conn", accept),
)

_POLICY_ROWS = (
    Row("name", parse_name),
    Row("title", text(200), _O),
    Row("max_running", parse_maximum, _O),
    Row("exclusive", parse_flag, _O),
    Row("max_waiting", parse_maximum, _O),
    Row("rate", parse_rate, _O),
    Row("fair_by", text(200), _O | _D),
    Row("on_exception", one_of("retry", "fail", "hold"), _O | _D),
    Row("explicit_outcome", parse_flag, _O | _D),
    Row("at_most_once", parse_flag, _O | _D),
    Row("max_crashes", whole_number(1, MAX_INT32), _O | _D),
    Row("concurrency", whole_number(1, 1000), _O),
    Row("keep", parse_keep, _O | _D),
    Row("on_final", parse_on_final, _O | _D),
    Row("progress_every", time(none=False, zero=True), _O | _D | _M),
    Row("history", one_of("all", "final"), _D),
    Row("cron", parse_cron, _O),
    Row("every", parse_every, _O),
    Row("tz", parse_zone, _O),
)

JOB_OPTIONS: Mapping[str, Row] = MappingProxyType({row.name: row for row in _JOB_ROWS})
POLICY_OPTIONS: Mapping[str, Row] = MappingProxyType({row.name: row for row in _POLICY_ROWS})
ALL_OPTIONS: Mapping[str, Row] = MappingProxyType({**JOB_OPTIONS, **POLICY_OPTIONS})

# Other names of options: `nice` is the negative priority, `delay` a duration as `at`.
ALIASES: Mapping[str, str] = MappingProxyType({"nice": "priority", "delay": "at"})
SCHEDULE_OPTIONS = ("cron", "every", "tz")  # the schedule of a task itself


def names_with(use: Use, options: Mapping[str, Row] = ALL_OPTIONS) -> tuple[str, ...]:
    """Return the names of the options with all these uses."""
    return tuple(row.name for row in options.values() if use in row.use)


_NO_RETRY = Retry()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one job is to be run.

    `at` and `expires` stay as the user wrote them, because "+1 hour" counts from the enqueue; a
    `timedelta` is a time from then on.
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
    def build(cls, values: Mapping[str, Any], base: Options) -> Options:
        """Parse `values` over `base`; BadOption if one is unknown, ill-typed or contradictory."""
        for name in values:
            if name in POLICY_OPTIONS:
                raise BadOption(f"{name} is a policy of the task; set it in @app.task(…), not here")
            check_known(name, JOB_OPTIONS)
        return replace(base, **_parse_job_options(values)) if values else base

    def due_at(self, now: Micros, tz: tzinfo = UTC) -> Micros | None:
        """Return the moment from which the job may start, or None for now.

        Text without a zone is in `tz`.
        """
        if self.at is None:
            return None
        return (
            now + duration(self.at) if isinstance(self.at, timedelta) else moment(self.at, now, tz)
        )

    def expires_at(self, now: Micros, tz: tzinfo = UTC) -> Micros | None:
        """Return the moment from which the job must not start any more, or None for never.

        A duration counts from the moment from which the job may start.
        """
        if self.expires is None:
            return None
        if isinstance(self.expires, timedelta):
            due = self.due_at(now, tz)
            return max(now, now if due is None else due) + duration(self.expires)
        return moment(self.expires, now, tz)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings that hold for all jobs of a task."""

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
    history: History = "all"
    cron: str | None = None
    every: Micros | None = None
    tz: str | None = None

    @classmethod
    def build(cls, values: Mapping[str, Any], base: Policy) -> Policy:
        """Parse `values` over `base`; BadOption if one is unknown, ill-typed or contradictory."""
        for name in values:
            check_known(name, POLICY_OPTIONS)
        parsed = {name: POLICY_OPTIONS[name].parse(name, value) for name, value in values.items()}
        policy = replace(base, **parsed)
        if policy.exclusive and policy.max_running not in (None, 1):
            raise BadOption(
                "exclusive runs one job at a time and contradicts "
                f"max_running={policy.max_running}; give one of them"
            )
        check_one_schedule(policy.cron, policy.every)
        if policy.tz is not None and policy.cron is None:
            raise BadOption(TZ_WITHOUT_CRON)
        return policy


DEFAULT_OPTIONS = Options()
DEFAULT_POLICY = Policy()
TZ_WITHOUT_CRON = "tz is the time zone of cron; give cron, too"


def values_of(settings: Options | Policy) -> dict[str, Any]:
    """Return all values by name."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def changed_options(options: Options) -> dict[str, Any]:
    """Return the options that differ from the defaults, as `using` takes them; times in seconds."""
    defaults = values_of(DEFAULT_OPTIONS)
    changed = {
        name: value
        for name, value in values_of(options).items()
        if value != defaults[name] and name != "conn"
    }
    return {
        name: value / SECOND if Use.MICROS in JOB_OPTIONS[name].use else value
        for name, value in changed.items()
    }


def check_known(name: str, options: Mapping[str, Row]) -> None:
    """Raise BadOption for a name that is not an option, with names that are close to it."""
    if name not in options:
        close = get_close_matches(name, options)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise BadOption(f"there is no option {name!r}{hint}")


def check_one_schedule(cron: object, every: object) -> None:
    """Raise BadOption if a task has both kinds of schedule."""
    if cron is not None and every is not None:
        raise BadOption("cron and every exclude each other; give one of them")


def _parse_job_options(values: Mapping[str, Any]) -> dict[str, Any]:
    for first, second in (("priority", "nice"), ("at", "delay"), ("key", "once")):
        pair = (values.get(first), values.get(second))
        if all(value is not None and value is not False for value in pair):
            raise BadOption(f"{first} and {second} exclude each other; give one of them")
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        parsed[ALIASES.get(name, name)] = JOB_OPTIONS[name].parse(name, value)
    # The last one of app, task and call that gives `key` or `once` decides what makes a job unique.
    if parsed.get("key") is not None:
        parsed["once"] = False
    elif parsed.get("once"):
        parsed["key"] = None
    return parsed
