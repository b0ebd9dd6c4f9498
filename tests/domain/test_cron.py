"""Compare cron with a brute-force search that shares no code with it.

The search has a parser of its own and tries every minute of the wall clock.
"""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

import pytest

from genba.domain.cron import MACROS, cron
from genba.errors import BadOption

ODD = (
    "Australia/Lord_Howe",
    "Pacific/Chatham",
    "Antarctica/Troll",
    "Africa/Casablanca",
    "America/Santiago",
)
ZONES = sorted(zone for zone in available_timezones() if zone != "localtime")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
FIRST, LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 12, 31, tzinfo=UTC)
HORIZON = timedelta(days=3 * 366)
MINUTE = timedelta(minutes=1)


# the oracle


def values(
    field: str, low: int, high: int, names: tuple[str, ...] = (), first: int = 0
) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        body, _, step = part.partition("/")
        begin, dash, end = body.partition("-")
        if body == "*":
            span = range(low, high + 1)
        elif dash:
            span = range(number(begin, names, first), number(end, names, first) + 1)
        else:
            one = number(begin, names, first)
            span = range(one, high + 1) if step else range(one, one + 1)
        found |= set(span[:: int(step or 1)])
    return found


def number(word: str, names: tuple[str, ...], first: int) -> int:
    return names.index(word.upper()) + first if word.upper() in names else int(word)


class Oracle:
    def __init__(self, text: str, zone: str) -> None:
        minute, hour, day, month, weekday = text.split()
        self.minutes, self.hours = values(minute, 0, 59), values(hour, 0, 23)
        self.days, self.months = values(day, 1, 31), values(month, 1, 12, MONTHS, 1)
        self.weekdays = {one % 7 for one in values(weekday, 0, 7, DAYS)}
        self.both = day.startswith("*") or weekday.startswith("*")
        self.fixed = not minute.startswith("*") and not hour.startswith("*")
        self.zone = ZoneInfo(zone)

    def fits_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, (day.weekday() + 1) % 7 in self.weekdays
        return of_month and of_week if self.both else of_month or of_week

    def fits(self, wall: datetime) -> bool:
        return (
            wall.minute in self.minutes and wall.hour in self.hours and self.fits_day(wall.date())
        )

    def fires(self, moment: datetime) -> bool:
        """Return whether the expression fires at this minute."""
        wall = moment.astimezone(self.zone)
        if not self.fixed:
            return self.fits(wall)
        if wall.fold == 0 and self.fits(wall):
            return True
        minute_ago = (moment - MINUTE).astimezone(self.zone).replace(tzinfo=None) + MINUTE
        # Just after a gap, try the wall times in it, too.
        while minute_ago < wall.replace(tzinfo=None):
            if self.fits(minute_ago):
                return True
            minute_ago += MINUTE
        return False

    def after(self, moment: datetime, skip: bool = True) -> datetime | None:
        """Search minute by minute; with `skip`, leave out hours that cannot match."""
        now = moment.replace(second=0, microsecond=0) + MINUTE
        end = now + HORIZON
        while now < end:
            if skip and now.minute == 0:
                if now.hour == 0 and not any(
                    self.fits_day(now.date() + timedelta(days=i)) for i in (-1, 0, 1)
                ):
                    now += timedelta(days=1)
                    continue
                if not self._hour_may_fit(now):
                    now += timedelta(hours=1)
                    continue
            if self.fires(now):
                return now
            now += MINUTE
        return None

    def _hour_may_fit(self, now: datetime) -> bool:
        walls = [
            (now + timedelta(minutes=i)).astimezone(self.zone)
            for i in (-1, 0, 14, 15, 29, 30, 44, 45, 59)
        ]
        if len({wall.utcoffset() for wall in walls}) > 1:
            return True
        return any(wall.hour in self.hours for wall in walls[1:])


# random expressions


def a_field(
    rng: random.Random, low: int, high: int, names: tuple[str, ...] = (), first: int = 0
) -> str:
    def one() -> str:
        value = rng.randint(low, high)
        return (
            names[value - first]
            if names and value - first < len(names) and rng.random() < 0.3
            else str(value)
        )

    match rng.randrange(8):
        case 0 | 1 | 2:
            return "*"
        case 3:
            return (
                f"*/{rng.choice((2, 3, 5, 7, 10, 15, 20))}"
                if high > 20
                else f"*/{rng.randint(1, 4)}"
            )
        case 4:
            begin, end = sorted(rng.sample(range(low, high + 1), 2))  # cronsim reads 5-5/2 as 5/2
            return f"{begin}-{end}" + (f"/{rng.randint(1, 5)}" if rng.random() < 0.4 else "")
        case 5:
            return ",".join(one() for _ in range(rng.randint(2, 4)))
        case _:
            return one()


def an_expression(rng: random.Random) -> str:
    minute = a_field(rng, 0, 59)
    # half of them near the hours at which clocks change
    hour = a_field(rng, 0, 23) if rng.random() < 0.5 else a_field(rng, 0, 3)
    day = "*" if rng.random() < 0.6 else a_field(rng, 1, 28)
    month = "*" if rng.random() < 0.6 else a_field(rng, 1, 12, MONTHS, 1)
    weekday = "*" if rng.random() < 0.6 else a_field(rng, 0, 7, DAYS)
    return f"{minute} {hour} {day} {month} {weekday}"


@lru_cache(maxsize=4096)
def changes(zone: str) -> tuple[datetime, ...]:
    """Return hours of 2020 to 2030 in which the zone's clocks change."""
    tz, found = ZoneInfo(zone), []
    now = FIRST
    while now < LAST:
        if now.astimezone(tz).utcoffset() != (now + timedelta(days=1)).astimezone(tz).utcoffset():
            found.append(now)
        now += timedelta(days=1)
    return tuple(found)


def a_moment(rng: random.Random, zone: str) -> datetime:
    """Return a moment of 2020 to 2030, more often one near a change of the clocks."""
    near = changes(zone)
    if near and rng.random() < 0.7:
        return rng.choice(near) + timedelta(
            minutes=rng.randint(-1440, 2880), seconds=rng.choice((0, 30))
        )
    return FIRST + timedelta(seconds=rng.randrange(int((LAST - FIRST).total_seconds())))


def compare(rng: random.Random, cases: int, zones: list[str]) -> int:
    """Compare moments and return their number; AssertionError for the first that differs."""
    compared = 0
    while compared < cases:
        zone = rng.choice(ODD) if rng.random() < 0.4 else rng.choice(zones)
        text = an_expression(rng)
        oracle, ours = Oracle(text, zone), cron(text, zone)
        moment = a_moment(rng, zone)
        found = ours.moments(micros(moment))
        for _ in range(4):
            expected = oracle.after(moment)
            if expected is None:
                break
            got = next(found)
            assert got == micros(expected), (
                f"{text!r} in {zone} after {moment}: {when(got)}, but {expected} is right"
            )
            moment, compared = expected, compared + 1
    return compared


def micros(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000


def when(moment: int | None) -> datetime | None:
    return None if moment is None else datetime.fromtimestamp(moment / 1_000_000, UTC)


@pytest.mark.parametrize("seed", range(4))
def test_next_fire_is_what_a_search_minute_by_minute_finds(seed):
    rng = random.Random(seed)
    assert compare(rng, 1_500, rng.sample(ZONES, 60)) >= 1_500


@pytest.mark.soak
def test_next_fire_of_a_million_cases_is_what_a_search_finds():
    assert compare(random.Random(1_000_000), 1_000_000, ZONES) >= 1_000_000


def test_the_search_may_skip_what_it_skips():
    rng = random.Random(7)
    for _ in range(25):
        zone = rng.choice(ODD)
        oracle, moment = (
            Oracle(f"{a_field(rng, 0, 59)} {a_field(rng, 0, 3)} * * *", zone),
            a_moment(rng, zone),
        )
        assert oracle.after(moment) == oracle.after(moment, skip=False)


# the rules in words


def walls(text: str, zone: str, after: str, count: int) -> list[str]:
    begin = datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(zone))
    found = cron(text, zone).moments(micros(begin))
    shown = (datetime.fromtimestamp(next(found) // 1_000_000, ZoneInfo(zone)) for _ in range(count))
    return [f"{wall:%d %H:%M %z}" for wall in shown]


def test_a_time_of_day_inside_the_gap_happens_once_right_after_it():
    assert walls("30 2 * * *", "Europe/Zurich", "2026-03-28 12:00", 2) == [
        "29 03:00 +0200",
        "30 02:30 +0200",
    ]
    assert walls("0,15,30 2 * * *", "Europe/Zurich", "2026-03-28 12:00", 2) == [
        "29 03:00 +0200",
        "30 02:00 +0200",
    ]


def test_a_time_of_day_inside_the_fold_happens_the_first_time_only():
    assert walls("30 2 * * *", "Europe/Zurich", "2026-10-24 12:00", 2) == [
        "25 02:30 +0200",
        "26 02:30 +0100",
    ]


def test_seen_from_the_second_hour_of_the_fold_the_first_is_past():
    begin = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # 02:10 for the second time
    assert when(cron("30 2 * * *", "Europe/Zurich").after(micros(begin))) == datetime(
        2026, 10, 26, 1, 30, tzinfo=UTC
    )


def test_elapsed_time_skips_the_gap_and_runs_in_both_hours_of_the_fold():
    assert walls("*/30 * * * *", "Europe/Zurich", "2026-03-29 01:15", 3) == [
        "29 01:30 +0100",
        "29 03:00 +0200",
        "29 03:30 +0200",
    ]
    assert walls("*/30 * * * *", "Europe/Zurich", "2026-10-25 01:45", 5) == [
        "25 02:00 +0200",
        "25 02:30 +0200",
        "25 02:00 +0100",
        "25 02:30 +0100",
        "25 03:00 +0100",
    ]


def test_half_an_hour_of_lord_howe_and_two_hours_of_troll_are_gaps_too():
    assert walls("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00", 1) == ["04 02:30 +1100"]
    assert walls("30 1,2 * * *", "Antarctica/Troll", "2026-03-28 12:00", 2) == [
        "29 03:00 +0200",
        "30 01:30 +0200",
    ]


@pytest.mark.parametrize(("macro", "fields"), MACROS.items())
def test_a_macro_is_its_expression(macro, fields):
    assert cron(macro).after(0) == cron(fields).after(0)
    assert cron(macro.upper()).after(0) == cron(fields).after(0)


def test_names_lists_ranges_steps_and_the_last_day_are_understood():
    begin = micros(datetime(2026, 2, 1, tzinfo=UTC))
    assert when(cron("0 0 L * *").after(begin)) == datetime(2026, 2, 28, tzinfo=UTC)
    assert when(cron("0 0 * FEB SAT#2").after(begin)) == datetime(2026, 2, 14, tzinfo=UTC)
    assert when(cron("5-59/20 4,6 * * mon-fri").after(begin)) == datetime(
        2026, 2, 2, 4, 5, tzinfo=UTC
    )


def test_the_29th_of_february_and_either_of_two_day_fields():
    begin = micros(datetime(2026, 3, 1, tzinfo=UTC))
    assert when(cron("0 0 29 2 *").after(begin)) == datetime(2028, 2, 29, tzinfo=UTC)
    assert when(cron("0 0 13 * FRI").after(begin)) == datetime(2026, 3, 6, tzinfo=UTC)


def test_the_last_moment_is_found_without_a_walk():
    every_minute = cron("* * * * *")
    now = micros(datetime(2036, 1, 1, tzinfo=UTC)) + 5
    assert every_minute.last(0, now) == now - 5
    assert cron("0 0 29 2 *").last(0, now) == micros(datetime(2032, 2, 29, tzinfo=UTC))
    assert cron("0 0 29 2 *").last(now - 1, now) is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "0 fields"), ("* * * *", "4 fields"), ("0 * * * * *", "every="), ("@reboot", "macro"),
        ("61 * * * *", "minute"),
        ("* 25 * * *", "hour"), ("* * 0 * *", "day-of-month"), ("* * * 13 *", "month"), ("* * * * 8", "day-of-week"),
        ("0 0 30 2 *", "30 2"), ("*/0 * * * *", "minute"), ("a b c d e", "minute"), ("5-1 * * * *", "minute"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_and_named(text, word):
    with pytest.raises(BadOption, match=word.replace("*", r"\*")):
        cron(text)
