"""The options of `app.recur`: read and checked into the rule of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypedDict
from zoneinfo import ZoneInfo

from genba.domain.cron import cron as read_cron
from genba.domain.duration import Duration, Micros, Moment, duration, moment, to_datetime
from genba.domain.schedule import (
    AT_ONCE,
    Misfire,
    Overlap,
    Reference,
    ScheduleRule,
    rule_to_json,
)
from genba.errors import BadOption
from genba.options.parse import parse_every, parse_zone

_MAX_CRON_LENGTH = 200


class RuleOptions(TypedDict, total=False):
    """`cron` (with `tz`) or `every` (with `base` and `reference`), and what both take."""

    cron: str | None
    tz: str | None
    every: Duration | None
    base: Moment | None
    reference: Reference
    misfire: Misfire
    overlap: Overlap | None
    start: Moment | None
    until: Moment | None
    max_runs: int | None
    jitter: Duration | None
    grace: Duration | None
    pause_after_failures: int | None


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "reference": ("end", "start"),
    "misfire": ("skip", "once", "all"),
    "overlap": ("skip", "queue", "allow"),
}


def read_rule(options: Mapping[str, Any], now: Micros, zone: ZoneInfo) -> ScheduleRule:
    """Build the rule; BadOption for an unknown, ill-typed or contradictory option."""
    given = {name: value for name, value in options.items() if value is not None}
    _check_names_and_choices(given)
    every = parse_every("every", given.get("every"))
    _check_cron_or_every(given, every)
    tz = parse_zone("tz", given.get("tz")) or "UTC"
    rule = ScheduleRule(
        cron=_cron(given["cron"], tz) if "cron" in given else None,
        tz=tz,
        every=every,
        base=_moment("base", given, now, zone),
        reference=given.get("reference", "end"),
        misfire=given.get("misfire", "once"),
        overlap=given.get("overlap") or ("allow" if "cron" in given else "skip"),
        start=_moment("start", given, now, zone),
        until=_moment("until", given, now, zone),
        max_runs=_count("max_runs", given),
        jitter=_duration("jitter", given) or 0,
        grace=_duration("grace", given),
        pause_after_failures=_count("pause_after_failures", given),
    )
    if rule.until is not None and rule.start is not None and rule.until < rule.start:
        raise BadOption("until must not be before start: the schedule would never run")
    return rule


def changed_rule(
    rule: ScheduleRule, changes: Mapping[str, Any], now: Micros, zone: ZoneInfo
) -> ScheduleRule:
    """Replace options of a rule; None resets one, cron= ends every=, and the other way round."""
    ended: tuple[str, ...] = ()
    if rule.is_interval and changes.get("cron") is not None:
        ended = ("every", "base", "reference", "overlap")
    elif not rule.is_interval and changes.get("every") is not None:
        ended = ("cron", "tz", "overlap")
    kept = {name: value for name, value in _options_of(rule).items() if name not in ended}
    return read_rule({**kept, **changes}, now, zone)


def _options_of(rule: ScheduleRule) -> dict[str, Any]:
    """Return the options from which `read_rule` builds this rule."""
    options = {**rule_to_json(rule), "overlap": rule.overlap}
    for name in ("base", "start", "until"):
        if name in options:
            options[name] = to_datetime(options[name])
    for name in ("every", "jitter", "grace"):
        if name in options and options[name] != AT_ONCE:
            options[name] = timedelta(microseconds=options[name])
    return options


def _check_names_and_choices(given: Mapping[str, Any]) -> None:
    known = RuleOptions.__annotations__
    for name in given:
        if name not in known:
            raise BadOption(
                f"a schedule has no option {name!r}; expected one of {', '.join(known)}"
            )
    for name, allowed in _CHOICES.items():
        if name in given and given[name] not in allowed:
            raise BadOption(
                f"{name} must be one of {', '.join(map(repr, allowed))}, got {given[name]!r}"
            )


def _check_cron_or_every(given: Mapping[str, Any], every: Micros | None) -> None:
    if ("cron" in given) == (every is not None):
        raise BadOption(
            "a schedule needs either cron= or every= (positive, or -1 to run again at once)"
        )
    for name in ("base", "reference") if "cron" in given else ("tz",):
        if name in given:
            needed = "every=" if "cron" in given else "cron="
            raise BadOption(f"{name} is an option of {needed}; remove it, or give {needed}")
    if every == AT_ONCE and "base" in given:
        raise BadOption("base needs an interval, but every=-1 runs again at once; remove base")


def _cron(text: Any, tz: str) -> str:
    if not isinstance(text, str) or len(text) > _MAX_CRON_LENGTH:
        raise BadOption(f"cron must be a text like '0 3 * * *', got {text!r}")
    read_cron(text, tz)
    return text


def _moment(name: str, given: Mapping[str, Any], now: Micros, zone: ZoneInfo) -> Micros | None:
    return _named(name, given, lambda value: moment(value, now, zone))


def _duration(name: str, given: Mapping[str, Any]) -> Micros | None:
    return _named(name, given, duration)


def _named(name: str, given: Mapping[str, Any], read: Callable[[Any], Micros]) -> Micros | None:
    """Read an option; an error says which one it is."""
    try:
        return read(given[name]) if name in given else None
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None


def _count(name: str, given: Mapping[str, Any]) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadOption(f"{name} must be a whole number of at least 1, got {value!r}")
    return value
