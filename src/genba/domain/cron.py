"""Cron expressions: the moments that they name, in any time zone, also when clocks change.

An expression has five fields (minute, hour, day of month, month, day of week) with lists, ranges,
steps, names, `L`, `W` and `#`, or it is a macro.  If neither day field begins with `*`, a day that
matches either of them is enough.

When clocks change, the rule of Debian's cron holds:

- An expression whose minute and hour both do not begin with `*` names *times of the day*.  A time
  that the zone skips happens once, at the first moment after the gap (all times in one gap happen
  together, once).  A time that the zone has twice happens the first time only.
- Any other expression follows *elapsed time*: it happens whenever the wall clock shows a time that
  matches; never inside a gap, and in both hours of a fold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from genba.domain.duration import Micros
from genba.errors import BadOption

MACROS: Mapping[str, str] = MappingProxyType(
    {
        "@yearly": "0 0 1 1 *",
        "@annually": "0 0 1 1 *",
        "@monthly": "0 0 1 * *",
        "@weekly": "0 0 * * 0",
        "@daily": "0 0 * * *",
        "@midnight": "0 0 * * *",
        "@hourly": "0 * * * *",
    }
)

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  wall times have no zone here
_SECOND = timedelta(seconds=1)
_DAY_SECONDS = 86_400
_LOOKBACK_SECONDS = (3_600, _DAY_SECONDS, 32 * _DAY_SECONDS, 366 * _DAY_SECONDS)
_LAST_YEAR = 9000  # cronsim looks fifty years ahead, and dates end with the year 9999


class Cron:
    """One expression in one zone; `cron` returns the same object for equal ones."""

    def __init__(self, text: str, tz: str = "UTC") -> None:
        self.text = text
        self.tz = tz
        fields = MACROS.get(text.strip().lower(), text)
        if fields.lstrip().startswith("@"):
            raise BadOption(
                f"cron: unknown macro {text.strip()!r}; expected one of {', '.join(MACROS)}"
            )
        parts = fields.split()
        if len(parts) != 5:
            hint = "; for seconds use every=" if len(parts) == 6 else ""
            raise BadOption(
                f"cron: {text!r} has {len(parts)} fields; "
                f"expected five: minute hour day month weekday{hint}"
            )
        self._fields = fields
        self._zone = ZoneInfo(tz)
        self._times_of_day = not parts[0].startswith("*") and not parts[1].startswith("*")
        try:
            next(CronSim(fields, _EPOCH))
        except StopIteration:
            raise BadOption(f"cron: {text!r} names a day that never comes") from None
        except (CronSimError, ValueError, AssertionError) as error:
            raise BadOption(f"cron: {text!r} is not a cron expression: {error}") from None

    def after(self, moment: Micros) -> Micros | None:
        """Return the first moment later than `moment`, or None if the calendar has none."""
        return next(self.moments(moment), None)

    def moments(self, after: Micros) -> Iterator[Micros]:
        """Yield all moments later than `after`, in order."""
        # Moments are whole seconds: a moment later than 10.5 s is also later than 10 s.
        second = after // 1_000_000
        seconds = (
            self._by_time_of_day(second) if self._times_of_day else self._by_elapsed_time(second)
        )
        return (moment * 1_000_000 for moment in seconds)

    def last(self, since: Micros, until: Micros) -> Micros | None:
        """Return the latest moment with since < moment <= until, without a walk from `since`."""
        for lookback in _LOOKBACK_SECONDS:
            begin = max(since, until - lookback * 1_000_000)
            latest = None
            for moment in self.moments(begin):
                if moment > until:
                    break
                latest = moment
            if latest is not None or begin == since:
                return latest
        return self._last_of_all(since, until)

    def _last_of_all(self, since: Micros, until: Micros) -> Micros | None:
        latest = None
        for moment in self.moments(since):  # rarer than once a year
            if moment > until:
                break
            latest = moment
        return latest

    def _walls(self, after: int) -> Iterator[int]:
        """Yield the wall times that match, later than `after`, in seconds as if they were UTC."""
        start = _EPOCH + timedelta(seconds=after)
        if start.year >= _LAST_YEAR:
            return
        for wall in CronSim(self._fields, start):
            yield (wall - _EPOCH) // _SECOND

    def _by_time_of_day(self, after: int) -> Iterator[int]:
        # Wall times up to that of `after` have moments at or before `after`: the mapping from wall
        # time to moment never decreases.
        last = after
        for wall in self._walls(after + self._offset(after)):
            moment = self._first_with(wall)
            if moment > last:
                last = moment
                yield moment

    def _first_with(self, wall: int) -> int:
        """Return the first moment with this wall time, or the end of the gap that skips it."""
        shown = _EPOCH + wall * _SECOND
        offset = self._zone.utcoffset(shown.replace(fold=0))
        assert offset is not None
        moment = wall - offset // _SECOND
        if moment + self._offset(moment) == wall:
            return moment
        changes = _changes(self.tz, shown.year)
        return changes[bisect_right(changes, moment) - 1]

    def _by_elapsed_time(self, after: int) -> Iterator[int]:
        begin = after
        while True:
            offset = self._offset(begin + 1)
            change = None
            for wall in self._walls(begin + offset):
                moment = wall - offset
                change = self._next_change(begin + 1, moment)
                if change is not None:
                    break  # from there on the wall time has another offset
                begin = moment
                yield moment
            if change is None:
                return
            begin = change - 1

    def _next_change(self, after: int, until: int) -> int | None:
        """Return the first change of the offset with after < change <= until."""
        if until - after < _DAY_SECONDS and self._offset(after) == self._offset(until):
            return None
        first_year = (_EPOCH + after * _SECOND).year
        for year in range(first_year, (_EPOCH + until * _SECOND).year + 1):
            changes = _changes(self.tz, year)
            index = bisect_right(changes, after)
            if index < len(changes) and changes[index] <= until:
                return changes[index]
        return None

    def _offset(self, moment: int) -> int:
        offset = datetime.fromtimestamp(moment, self._zone).utcoffset()
        assert offset is not None
        return offset // _SECOND


@lru_cache(maxsize=1024)
def cron(text: str, tz: str = "UTC") -> Cron:
    """Parse an expression once; BadOption if it is not one."""
    return Cron(text, tz)


@lru_cache(maxsize=4096)
def _changes(tz: str, year: int) -> tuple[int, ...]:
    """Return the moments of `year`, and of some days around it, when the zone's offset changes."""
    zone = ZoneInfo(tz)

    def offset(moment: int) -> timedelta | None:
        return datetime.fromtimestamp(moment, zone).utcoffset()

    start = (
        int((datetime(year, 1, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
        - 2 * _DAY_SECONDS
    )
    changes = []
    before = offset(start)
    for day in range(1, 370):
        end = start + day * _DAY_SECONDS
        after = offset(end)
        if after != before:
            low, high = end - _DAY_SECONDS, end
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset(middle) == before else (low, middle)
            changes.append(high)
            before = after
    return tuple(changes)
