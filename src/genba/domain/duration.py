"""Durations and moments: parse every form that a user may write into integer microseconds."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

from genba.errors import BadOption

Micros: TypeAlias = int
Duration: TypeAlias = int | float | timedelta | str
Moment: TypeAlias = int | float | datetime | str

MILLISECOND: Micros = 1_000
SECOND: Micros = 1_000_000
MINUTE: Micros = 60 * SECOND
HOUR: Micros = 60 * MINUTE
DAY: Micros = 24 * HOUR
WEEK: Micros = 7 * DAY

# Short enough that "now plus one and a half times this" is still a date.
_LONGEST: Micros = 365_000 * DAY

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = timedelta(microseconds=1)
_FIRST: Micros = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICRO
_LAST: Micros = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICRO

_DURATION_FORMS = 'allowed: seconds, a timedelta, "5m", "1h30m", "90 minutes", "12:00:00", "PT5M"'
_MOMENT_FORMS = (
    'allowed: a datetime, epoch seconds, "now", "+1 hour", "in 5 minutes", "2026-01-31T03:00+01:00"'
)
_NO_FIXED_LENGTH = "months and years have no fixed length; give days"
_MAX_TEXT_LENGTH = 100

_UNITS: Mapping[str, Micros] = MappingProxyType(
    {
        **dict.fromkeys(("us", "µs", "μs", "microsecond", "microseconds"), 1),
        **dict.fromkeys(("ms", "millisecond", "milliseconds"), MILLISECOND),
        **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), SECOND),
        **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), MINUTE),
        **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), HOUR),
        **dict.fromkeys(("d", "day", "days"), DAY),
        **dict.fromkeys(("w", "week", "weeks"), WEEK),
    }
)
_CALENDAR_UNITS = frozenset({"mo", "month", "months", "y", "yr", "year", "years"})

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PART = re.compile(rf"({_NUMBER})\s*([^\W\d_]+)\s*")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")
_SECONDS = re.compile(_NUMBER)
_CLOCK = re.compile(r"([0-9]+):([0-5][0-9])(?::([0-5][0-9](?:\.[0-9]+)?))?")
_ISO_NUMBER = r"[0-9]+(?:[.,][0-9]+)?"
_ISO = re.compile(
    rf"P(?=[0-9T])(?:({_ISO_NUMBER})Y)?(?:({_ISO_NUMBER})M)?"
    rf"(?:({_ISO_NUMBER})W)?(?:({_ISO_NUMBER})D)?"
    rf"(?:T(?=[0-9])(?:({_ISO_NUMBER})H)?(?:({_ISO_NUMBER})M)?(?:({_ISO_NUMBER})S)?)?"
)
_ISO_UNITS = (WEEK, DAY, HOUR, MINUTE, SECOND)

# `fromisoformat` accepts any character between date and time.
_ISO_MOMENT = re.compile(r"[0-9W-]+(?:[T ][0-9:.,]+(?:Z|[+-][0-9:.]+)?)?")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def duration(value: Duration, *, allow_negative: bool = False) -> Micros:
    """Parse a length of time; numbers, and text that is only a number, are seconds."""
    if isinstance(value, str):
        micros = _signed_text(value)
    elif isinstance(value, timedelta):
        micros = value // _MICRO
    else:
        micros = _seconds(value, "duration", _DURATION_FORMS)
    if abs(micros) > _LONGEST:
        raise _refused("duration", value, f"the longest is {_LONGEST // DAY} days")
    if micros < 0 and not allow_negative:
        raise _refused("duration", value, "it must not be negative")
    return micros


def moment(value: Moment, now: Micros, tz: tzinfo = UTC) -> Micros:
    """Parse a moment, relative to `now`; a date and time without a zone are in `tz`.

    A time that `tz` has twice means the first one.  A time that `tz` skips moves forward by the
    length of the gap.
    """
    if isinstance(value, datetime):
        micros = _instant(value, tz)
    elif isinstance(value, str):
        micros = _moment_text(value, now, tz)
    else:
        micros = _seconds(value, "moment", _MOMENT_FORMS)
    if not _FIRST <= micros <= _LAST:
        raise _refused("moment", value, "it is outside the years 1 to 9999")
    return micros


def to_datetime(micros: Micros) -> datetime:
    """Convert to an aware datetime in UTC; the first or last possible one if it is out of range."""
    return _EPOCH + timedelta(microseconds=min(max(micros, _FIRST), _LAST))


def format_duration(micros: Micros) -> str:
    """Format as the shortest text with units, "1m30s"; `duration` parses it without loss."""
    sign, rest = ("-", -micros) if micros < 0 else ("", micros)
    if rest == 0:
        return "0s"
    if rest < MILLISECOND:
        return f"{sign}{rest}us"
    if rest < SECOND:
        return f"{sign}{_decimal(rest, MILLISECOND)}ms"
    words = [sign]
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "m")):
        count, rest = divmod(rest, unit)
        if count:
            words.append(f"{count}{name}")
    if rest:
        words.append(f"{_decimal(rest, SECOND)}s")
    return "".join(words)


def _decimal(micros: Micros, unit: Micros) -> str:
    whole, rest = divmod(micros, unit)
    digits = len(str(unit)) - 1
    return f"{whole}.{rest:0{digits}}".rstrip("0") if rest else str(whole)


def _seconds(value: object, what: str, forms: str) -> Micros:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(what, value, forms)
    if isinstance(value, int):
        return value * SECOND
    if not math.isfinite(value) or not math.isfinite(value * SECOND):
        raise _refused(what, value, "it must be finite")
    return round(value * SECOND)


def _signed_text(text: str) -> Micros:
    body = text.strip()
    if body.startswith("-"):
        return -_text(body[1:])
    return _text(body.removeprefix("+"))


@lru_cache(maxsize=1024)
def _text(text: str) -> Micros:
    """Parse a text without a sign."""
    body = text.strip()
    if len(body) > _MAX_TEXT_LENGTH:
        raise _refused("duration", text, _DURATION_FORMS)
    if _SECONDS.fullmatch(body):
        return _total([(body, SECOND)])
    if clock := _CLOCK.fullmatch(body):
        return _total(zip(clock.groups(default="0"), (HOUR, MINUTE, SECOND), strict=True))
    if iso := _ISO.fullmatch(body):
        years, months, *numbers = iso.groups()
        if years or months:
            raise _refused("duration", text, _NO_FIXED_LENGTH)
        return _total(
            (n.replace(",", "."), unit) for n, unit in zip(numbers, _ISO_UNITS, strict=True) if n
        )
    if _PARTS.fullmatch(body):
        parts = [(number, _unit(word, text)) for number, word in _PART.findall(body)]
        if any(larger <= smaller for (_, larger), (_, smaller) in pairwise(parts)):
            raise _refused("duration", text, "give each unit once, larger units first")
        return _total(parts)
    raise _refused("duration", text, _DURATION_FORMS)


def _unit(word: str, text: str) -> Micros:
    # "M" alone may mean a month or a minute, so a single letter is case-sensitive.
    name = word if len(word) == 1 else word.lower()
    if name in _CALENDAR_UNITS:
        raise _refused("duration", text, _NO_FIXED_LENGTH)
    if name not in _UNITS:
        raise _refused("duration", text, _DURATION_FORMS)
    return _UNITS[name]


def _total(parts: Iterable[tuple[str, Micros]]) -> Micros:
    return round(sum((Decimal(number) * unit for number, unit in parts), Decimal()))


def _moment_text(value: str, now: Micros, tz: tzinfo) -> Micros:
    text = value.strip()
    if text.lower() == "now":
        return now
    if text.startswith(("+", "-")):
        return now + _signed_text(text)
    if text[:3].lower() == "in ":
        return now + _text(text[3:])
    if _ISO_MOMENT.fullmatch(text):
        try:
            return _instant(datetime.fromisoformat(text), tz)
        except ValueError as error:
            raise _refused("moment", value, str(error)) from None
    raise _refused("moment", value, _MOMENT_FORMS)


def _instant(value: datetime, tz: tzinfo) -> Micros:
    if value.utcoffset() is None:
        # fold=1 would move a skipped time backward.
        value = value.replace(tzinfo=tz, fold=0)
    return (value - _EPOCH) // _MICRO


def _refused(what: str, value: object, why: str) -> BadOption:
    return BadOption(f"not a {what}: {_shown(value)}; {why}")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest
    return _SHORT.repr(value)
