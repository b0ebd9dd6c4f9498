"""Parse options: turn what a user may write into what genba keeps, and refuse what makes no sense.

Every parser takes the name of the option, for its error message, and the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

from genba.domain.cron import cron
from genba.domain.duration import DAY, Micros, duration, moment
from genba.domain.retry import Retry
from genba.domain.states import FINAL
from genba.errors import BadOption, JobNotFound
from genba.options.values import Dep, DependencyOutcome, Limit, Rate

KeepTimes: TypeAlias = Micros | dict[str, Micros | None] | None  # one for all outcomes, or each
Parser: TypeAlias = Callable[[str, Any], Any]

NAME_PATTERN = re.compile(r"[A-Za-z_][\w.:#-]{0,199}")

MAX_INT32 = 2**31 - 1
_MAX_SHOWN_LENGTH = 80


def _refused(name: str, value: object, expected: str) -> BadOption:
    text = repr(value)
    shown = text if len(text) <= _MAX_SHOWN_LENGTH else text[: _MAX_SHOWN_LENGTH - 1] + "…"
    return BadOption(f"{name} must be {expected}, got {shown}")


# numbers, flags and texts


def whole_number(low: int, high: int) -> Callable[[str, Any], int]:
    """Return a parser for a whole number from `low` to `high`."""

    def parse(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refused(name, value, f"a whole number from {low} to {high}")
        return int(value)

    return parse


def parse_maximum(name: str, value: Any) -> int | None:
    """Parse an upper limit; 0 and None mean no limit."""
    return None if value is None else whole_number(0, MAX_INT32)(name, value) or None


def parse_nice(name: str, value: Any) -> int:
    """Parse a niceness into a priority."""
    return -whole_number(-20, 20)(name, value)


def parse_flag(name: str, value: Any) -> bool:
    """Parse True or False."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False")
    return value


def one_of(*choices: object) -> Parser:
    """Return a parser for one of these values."""

    def parse(name: str, value: Any) -> Any:
        # Compare by identity: 1 == True, but `once=1` does not mean True.
        if not any(
            value is choice or (isinstance(choice, str) and value == choice) for choice in choices
        ):
            raise _refused(name, value, "one of " + ", ".join(map(repr, choices)))
        return value

    return parse


def text(max_length: int, *, none: bool = True) -> Parser:
    """Return a parser for a text of 1 to `max_length` characters."""

    def parse(name: str, value: Any) -> str | None:
        if none and value is None:
            return None
        if not isinstance(value, str) or not 1 <= len(value) <= max_length or not _storable(value):
            raise _refused(name, value, f"a text of 1 to {max_length} characters")
        return str(value)

    return parse


def parse_name(name: str, value: Any) -> str:
    """Parse the name of a task, queue or condition."""
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise _refused(
            name, value, "a name: a letter or _, then up to 199 letters, digits or _ . : # -"
        )
    return str(value)


def _storable(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)
_SIZE_UNITS = "KMGT"


def parse_size(name: str, value: Any) -> int | None:
    """Parse bytes; K, M, G and T are powers of 1024, with or without the i and the B."""
    if value is None:
        return None
    size = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        power = 0 if match[2] is None else _SIZE_UNITS.index(match[2].upper()) + 1
        size = int(float(match[1]) * 1024**power)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**63:
        raise _refused(name, value, 'a number of bytes or a text like "512M" or "2G"')
    return size


# times


def time(*, none: bool = True, zero: bool = False) -> Parser:
    """Return a parser for a duration; `none` and `zero` say whether these are allowed."""

    def parse(name: str, value: Any) -> Micros | None:
        if none and value is None:
            return None
        try:
            micros = duration(value)
        except BadOption as error:
            raise BadOption(f"{name}: {error}") from None
        if micros == 0 and not zero:
            raise _refused(name, value, "positive" + (" (None means no limit)" if none else ""))
        return micros

    return parse


def parse_at(name: str, value: Any) -> Any:
    """Parse the moment from which a job may start; a `timedelta` counts from the enqueue."""
    if isinstance(value, timedelta):
        value = max(value, timedelta(0))  # a time in the past means now, as for a moment
    if value is None or isinstance(value, timedelta):
        return parse_delay(name, value)
    return _parse_moment(name, value)


def parse_delay(name: str, value: Any) -> timedelta | None:
    """Parse a duration that counts from the enqueue."""
    micros = time(zero=True)(name, value)
    return None if micros is None else timedelta(microseconds=micros)


def parse_expires(name: str, value: Any) -> Any:
    """Parse a duration, as for `timeout`, or a moment; a number is a duration."""
    if isinstance(value, datetime) or (isinstance(value, str) and not _is_duration(value)):
        return _parse_moment(name, value)
    micros = time()(name, value)
    return None if micros is None else timedelta(microseconds=micros)


def _is_duration(value: str) -> bool:
    if value.lstrip().startswith(("+", "-")):
        return False  # counts from now, not from the moment when the job may start
    try:
        duration(value)
    except BadOption:
        return False
    return True


def _parse_moment(name: str, value: Any) -> Any:
    try:
        moment(value, 0)
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None
    return value


def parse_keep(name: str, value: Any) -> KeepTimes:
    """Parse how long ended jobs are kept: one duration, or one for each of some outcomes."""
    parse_time: Callable[[str, Any], Micros | None] = time(zero=True)
    if not isinstance(value, Mapping):
        return parse_time(name, value)
    if any(outcome not in FINAL for outcome in value):
        raise _refused(name, value, f"a duration, or one for each of {', '.join(sorted(FINAL))}")
    return {
        **dict.fromkeys(sorted(FINAL), 7 * DAY),
        **{str(outcome): parse_time(name, keep) for outcome, keep in value.items()},
    }


# the schedule of a task


def parse_every(name: str, value: Any) -> Micros | None:
    """Parse an interval; -1 means again at once, 0 and None mean no interval."""
    return -1 if value == -1 and type(value) is int else time(zero=True)(name, value) or None


def parse_cron(name: str, value: Any) -> str | None:
    """Parse a cron expression."""
    expression: str | None = text(200)(name, value)
    if expression is not None:
        cron(expression)
    return expression


def parse_zone(name: str, value: Any) -> str | None:
    """Parse the name of a time zone."""
    if value is None:
        return None
    try:
        return str(ZoneInfo(str(value)).key)
    except (ValueError, OSError, LookupError):  # ZoneInfoNotFoundError is a KeyError
        raise _refused(name, value, 'a time zone like "Europe/Zurich"') from None


# structured options


def parse_retry(name: str, value: Any) -> Retry:
    """Parse a retry rule."""
    try:
        return Retry.of(value)
    except TypeError as error:
        raise BadOption(f"{name}: {error}") from None


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refused(name, value, expected)
    return tuple(value)


def parse_after(name: str, value: Any) -> tuple[Dep, ...]:
    """Parse dependencies: jobs, ids, calls, groups of them, or Deps."""
    if value is None:
        return ()
    return tuple(_dependencies(value, "success"))


def _dependencies(value: Any, on: DependencyOutcome) -> Iterator[Dep]:
    if isinstance(value, Dep):
        yield from _dependencies(value.job, value.on)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _dependencies(item, on)
    else:
        yield Dep(value, on)


def parse_tags(name: str, value: Any) -> tuple[str, ...]:
    """Parse a list of tags, each kept once."""
    parse_tag = text(100, none=False)
    tags = _items(name, value, "a list of texts")
    return tuple(dict.fromkeys(parse_tag("a tag", tag) for tag in tags))


def parse_limits(name: str, value: Any) -> tuple[Limit | Rate, ...]:
    """Parse one or several Limits and Rates."""
    expected = "a list of Limit and Rate"
    if value is None:
        return ()
    limits = _items(name, [value] if isinstance(value, Limit | Rate) else value, expected)
    if not all(isinstance(limit, Limit | Rate) for limit in limits):
        raise _refused(name, value, expected)
    counts = [limit for limit in limits if isinstance(limit, Limit)]
    if sum(limit.ordered for limit in counts) > 1:
        raise BadOption(f"{name}: a job can have one ordered limit only; remove the others")
    for limit in counts:
        if any(other.bucket == limit.bucket and other != limit for other in counts):
            raise BadOption(
                f"{name}: bucket {limit.bucket!r} has two different limits; keep one of them"
            )
    return limits


def parse_rate(name: str, value: Any) -> Rate | None:
    """Parse a Rate, or the text of one."""
    return value if value is None or isinstance(value, Rate) else Rate(None, value)


def parse_ready(name: str, value: Any) -> tuple[Any, ...]:
    """Parse names of conditions; decorators also accept functions and "#method" of the class."""
    single = callable(value) or isinstance(value, str)
    conditions = _items(name, [value] if single else value, "a list of names of conditions")
    return tuple(
        condition if callable(condition) else _condition_name(condition) for condition in conditions
    )


def _condition_name(value: Any) -> str:
    method = isinstance(value, str) and value.startswith("#")
    name = parse_name("the name of a condition", value[1:] if method else value)
    return f"#{name}" if method else name


def parse_parent(name: str, value: Any) -> Any:
    """Refuse what cannot be a job or its id."""
    if isinstance(value, bool | float | str | bytes):
        raise _refused(name, value, "a job or its id")
    return value


def parse_on_final(name: str, value: Any) -> Any:
    """Parse a function, or the name of a task."""
    return value if value is None or callable(value) else parse_name(name, value)


def accept(name: str, value: Any) -> Any:
    """Return any value as it is."""
    return value


# values that are not options


def parse_text(name: str, value: Any) -> str:
    """Parse any text that both databases can store."""
    if not isinstance(value, str) or not _storable(value):
        raise _refused(name, value, "a text without NUL and lone surrogates")
    return str(value)


def parse_reason(value: Any) -> str | None:
    """Parse the optional reason of an action."""
    return None if value is None else parse_text("reason", value)


def parse_job_id(name: str, value: Any) -> int:
    """Parse the id of a job, or its handle; JobNotFound for an id that no job can have."""
    id = getattr(value, "id", value)
    if isinstance(id, bool) or not isinstance(id, int):
        raise _refused(name, value, "a job or its id, a whole number")
    if not 0 < id < 2**63:
        raise JobNotFound(f"{name}: there is no job {id}; use an id that enqueue has returned")
    return int(id)
