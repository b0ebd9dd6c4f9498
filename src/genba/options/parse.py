"""From what a user may write to what we keep: a reader for each option, which refuses what makes no sense."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

from genba.domain.cron import cron
from genba.domain.duration import DAY, Micros, duration, moment
from genba.domain.retry import Retry
from genba.domain.states import FINAL
from genba.errors import BadOption, JobNotFound
from genba.options.values import Dep, DependencyOutcome, Limit, Rate

KeepTimes: TypeAlias = Micros | dict[str, Micros | None] | None  # for every outcome, or by outcome
Parser: TypeAlias = Callable[[str, Any], Any]

NAME_PATTERN = re.compile(r"[A-Za-z_][\w.:#-]{0,199}")


def _refuse(name: str, value: object, wanted: str) -> BadOption:
    text = repr(value)
    return BadOption(f"{name} must be {wanted}, not {text if len(text) <= 80 else text[:79] + '…'}")


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refuse(name, value, f"a whole number within {low} … {high}")
        return int(value)

    return read


def _most(name: str, value: Any) -> int | None:
    """At most so many; 0 and None are no limit."""
    return None if value is None else _whole(0, 2**31 - 1)(name, value) or None


def _time(*, none: bool = True, zero: bool = False) -> Parser:
    def read(name: str, value: Any) -> Micros | None:
        if none and value is None:
            return None
        try:
            micros = duration(value)
        except BadOption as error:
            raise BadOption(f"{name}: {error}") from None
        if micros == 0 and not zero:
            raise _refuse(
                name, value, "longer than nothing" + (" (None: without limit)" if none else "")
            )
        return micros

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _one_of(*allowed: object) -> Parser:
    def read(name: str, value: Any) -> Any:
        # 1 == True, and is not what `once=1` could mean.
        if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
            raise _refuse(name, value, "one of " + ", ".join(map(repr, allowed)))
        return value

    return read


def _text(longest: int, *, none: bool = True) -> Parser:
    def read(name: str, value: Any) -> str | None:
        if none and value is None:
            return None
        if not isinstance(value, str) or not 1 <= len(value) <= longest or not _storable(value):
            raise _refuse(name, value, f"a text of 1 to {longest} characters")
        return str(value)

    return read


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or NAME_PATTERN.fullmatch(value) is None:
        raise _refuse(
            name, value, "a name: a letter or _, then up to 199 letters, digits or _ . : # -"
        )
    return str(value)


def _storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _nice(name: str, value: Any) -> int:
    return -_whole(-20, 20)(name, value)


def _at(name: str, value: Any) -> Any:
    if isinstance(value, timedelta):
        value = max(value, timedelta(0))  # what has been is due now, as with a moment
    return (
        _delay(name, value)
        if value is None or isinstance(value, timedelta)
        else _moment(name, value)
    )


def _delay(name: str, value: Any) -> timedelta | None:
    micros = _time(zero=True)(name, value)
    return None if micros is None else timedelta(microseconds=micros)


def _expires(name: str, value: Any) -> Any:
    """A duration, as for `timeout`, or else a moment; a number is a duration."""
    if isinstance(value, datetime) or (isinstance(value, str) and not _is_duration(value)):
        return _moment(name, value)
    micros = _time()(name, value)
    return None if micros is None else timedelta(microseconds=micros)


def _is_duration(text: str) -> bool:
    if text.lstrip().startswith(("+", "-")):
        return False  # from now on, not from when the job may start
    try:
        duration(text)
    except BadOption:
        return False
    return True


def _moment(name: str, value: Any) -> Any:
    try:
        moment(value, 0)
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None
    return value


def _retry(name: str, value: Any) -> Retry:
    try:
        return Retry.of(value)
    except TypeError as error:
        raise BadOption(f"{name}: {error}") from None


_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)
_SIZE_STEPS = "KMGT"


def parse_size(name: str, value: Any) -> int | None:
    """Bytes; K, M, G and T are powers of 1024, with or without the i and the B."""
    if value is None:
        return None
    count = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        step = 0 if match[2] is None else _SIZE_STEPS.index(match[2].upper()) + 1
        count = int(float(match[1]) * 1024**step)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 2**63:
        raise _refuse(name, value, 'a number of bytes or a text like "512M" or "2G"')
    return count


def _items(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, value, wanted)
    return tuple(value)


def _after(name: str, value: Any) -> tuple[Dep, ...]:
    if value is None:
        return ()
    return tuple(_each_dep(value, "success"))


def _each_dep(value: Any, on: DependencyOutcome) -> Iterator[Dep]:
    """A job, a group of them, a Dep of either, or a list of such."""
    if isinstance(value, Dep):
        yield from _each_dep(value.job, value.on)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from _each_dep(item, on)
    else:
        yield Dep(value, on)


def _tags(name: str, value: Any) -> tuple[str, ...]:
    one_tag = _text(100, none=False)
    return tuple(
        dict.fromkeys(one_tag("a tag", tag) for tag in _items(name, value, "a list of texts"))
    )


def _limits(name: str, value: Any) -> tuple[Limit | Rate, ...]:
    one = isinstance(value, Limit | Rate)
    limits = (
        () if value is None else _items(name, [value] if one else value, "a list of Limit and Rate")
    )
    if not all(isinstance(limit, Limit | Rate) for limit in limits):
        raise _refuse(name, value, "a list of Limit and Rate")
    plain = [limit for limit in limits if isinstance(limit, Limit)]
    if sum(limit.ordered for limit in plain) > 1:
        raise BadOption("a job can have one ordered limit: it has its turn in one place")
    for limit in plain:
        if any(other.bucket == limit.bucket and other != limit for other in plain):
            raise BadOption(f"{name}: bucket {limit.bucket!r} is limited twice, and not alike")
    return limits


def _ready(name: str, value: Any) -> tuple[Any, ...]:
    """Names; in a decorator also functions, and "#method" of the task's own class."""
    one = callable(value) or isinstance(value, str)
    conditions = _items(name, [value] if one else value, "a list of names of conditions")
    return tuple(
        condition if callable(condition) else _condition(condition) for condition in conditions
    )


def _condition(value: Any) -> str:
    own = isinstance(value, str) and value.startswith("#")
    return (
        f"#{_name('the name of a condition', value[1:])}"
        if own
        else _name("the name of a condition", value)
    )


def _parent(name: str, value: Any) -> Any:
    if isinstance(value, bool | float | str | bytes):
        raise _refuse(name, value, "a job or its id")
    return value


def _on_final(name: str, value: Any) -> Any:
    return value if value is None or callable(value) else _name(name, value)


def _rate(name: str, value: Any) -> Rate | None:
    return value if value is None or isinstance(value, Rate) else Rate(None, value)


def parse_every(name: str, value: Any) -> Micros | None:
    """A duration; -1 means again at once, 0 and None mean no interval."""
    return -1 if value == -1 and type(value) is int else _time(zero=True)(name, value) or None


def _cron(name: str, value: Any) -> str | None:
    text: str | None = _text(200)(name, value)
    if text is not None:
        cron(text)
    return text


def parse_keep(name: str, value: Any) -> KeepTimes:
    """How long; or for some outcomes, the rest as usual."""
    one: Callable[[str, Any], Micros | None] = _time(zero=True)
    if not isinstance(value, Mapping):
        return one(name, value)
    unknown = [outcome for outcome in value if outcome not in FINAL]
    if unknown:
        raise _refuse(name, value, f"a duration, or one for each of {', '.join(sorted(FINAL))}")
    return {
        **dict.fromkeys(sorted(FINAL), 7 * DAY),
        **{str(each): one(name, much) for each, much in value.items()},
    }


def parse_zone(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        return str(ZoneInfo(str(value)).key)
    except (ValueError, OSError, LookupError):  # ZoneInfoNotFoundError is a KeyError
        raise _refuse(name, value, 'a time zone like "Europe/Zurich"') from None


# what is no option


def parse_text(name: str, value: Any) -> str:
    """Any text that both databases can keep, or look for."""
    if not isinstance(value, str) or not _storable(value):
        raise _refuse(name, value, "a text without NUL and lone surrogates")
    return str(value)


def parse_reason(value: Any) -> str | None:
    """Why somebody does something, if he says so."""
    return None if value is None else parse_text("reason", value)


def parse_job_id(name: str, value: Any) -> int:
    """The id of a job, given as such or by its handle; JobNotFound for one that no job can have."""
    id = getattr(value, "id", value)
    if isinstance(id, bool) or not isinstance(id, int):
        raise _refuse(name, value, "a job or its id, a whole number")
    if not 0 < id < 2**63:
        raise JobNotFound(f"{name}: there is no job {id}; ids are those that enqueue gives")
    return int(id)


ALIASES: Mapping[str, str] = MappingProxyType({"nice": "priority", "delay": "at"})

OPTION_PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "queue": _name,
        "priority": _whole(-(2**31), 2**31 - 1),
        "nice": _nice,
        "at": _at,
        "delay": _delay,
        "expires": _expires,
        "retry": _retry,
        "timeout": _time(),
        "grace": _time(none=False, zero=True),
        "stall_timeout": _time(),
        "memory": parse_size,
        "cpu": _time(),
        "after": _after,
        "on_dependency_failure": _one_of("cancel", "run", "hold"),
        "ready": _ready,
        "limits": _limits,
        "key": _text(200),
        "once": _one_of(False, True, "task", "waiting"),
        "unique_for": _time(),
        "on_conflict": _one_of("return", "raise", "replace"),
        "dedicated": _flag,
        "tags": _tags,
        "parent": _parent,
        "conn": lambda name, value: value,
    }
)

POLICY_PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "name": _name,
        "title": _text(200),
        "max_running": _most,
        "exclusive": _flag,
        "max_waiting": _most,
        "rate": _rate,
        "fair_by": _text(200),
        "on_exception": _one_of("retry", "fail", "hold"),
        "explicit_outcome": _flag,
        "at_most_once": _flag,
        "max_crashes": _whole(1, 2**31 - 1),
        "concurrency": _whole(1, 1000),
        "keep": parse_keep,
        "on_final": _on_final,
        "progress_every": _time(none=False, zero=True),
        "history": _one_of("all", "final"),
        "cron": _cron,
        "every": parse_every,
        "tz": parse_zone,
    }
)

ALL_PARSERS: Mapping[str, Parser] = MappingProxyType({**OPTION_PARSERS, **POLICY_PARSERS})
