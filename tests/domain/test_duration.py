from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from genba.domain.duration import (
    DAY,
    HOUR,
    MINUTE,
    SECOND,
    WEEK,
    duration,
    format_duration,
    moment,
    to_datetime,
)
from genba.errors import BadOption

NOW = 1_767_225_600_000_000  # 2026-01-01
ZURICH = ZoneInfo("Europe/Zurich")
LONGEST = 365_000 * DAY

lengths = st.integers(0, LONGEST) | st.integers(0, 10 * MINUTE)
signed_lengths = st.integers(-LONGEST, LONGEST) | st.integers(-SECOND, SECOND)
zones = st.sampled_from(
    [ZURICH, ZoneInfo("America/New_York"), ZoneInfo("Australia/Lord_Howe"), UTC]
)
EARLY, LATE = datetime.fromisoformat("1950-01-01"), datetime.fromisoformat("2200-01-01")
naive = st.datetimes(EARLY, LATE)
aware = st.datetimes(EARLY, LATE, timezones=zones)


@given(signed_lengths)
def test_a_formatted_duration_reads_back_exactly(micros):
    assert duration(format_duration(micros), allow_negative=True) == micros


@given(signed_lengths)
def test_a_timedelta_is_exact(micros):
    assert duration(timedelta(microseconds=micros), allow_negative=True) == micros


@given(st.integers(0, LONGEST // SECOND))
def test_a_number_is_seconds_also_as_text(seconds):
    assert (
        duration(seconds) == duration(str(seconds)) == duration(float(seconds)) == seconds * SECOND
    )


@given(st.floats(0, 1e9))
def test_a_fraction_of_a_second_is_rounded_to_the_nearest_microsecond(seconds):
    assert abs(duration(seconds) - seconds * SECOND) <= 0.5


@given(st.integers(0, 9999), st.integers(0, 59), st.integers(0, 59), st.integers(0, SECOND - 1))
def test_one_length_is_the_same_in_every_form(hours, minutes, seconds, micros):
    second = f"{seconds:02}.{micros:06}"
    meant = hours * HOUR + minutes * MINUTE + seconds * SECOND + micros

    assert duration(f"{hours}:{minutes:02}:{second}") == meant
    assert duration(f"PT{hours}H{minutes}M{second}S") == meant
    assert duration(f"{hours}h{minutes}m{second}s") == meant
    assert duration(f"{hours} hours {minutes} minutes {second} seconds") == meant


@given(lengths)
def test_a_negative_duration_must_be_allowed(micros):
    assume(micros)
    for value in (timedelta(microseconds=-micros), "-" + format_duration(micros)):
        assert duration(value, allow_negative=True) == -micros
        with pytest.raises(BadOption, match="negative"):
            duration(value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("5m", 5 * MINUTE),
        ("2s", 2 * SECOND),
        ("500ms", SECOND // 2),
        ("7us", 7),
        ("7µs", 7),
        ("1h30m", 90 * MINUTE),
        ("1h 30m", 90 * MINUTE),
        ("7d", WEEK),
        ("2w", 2 * WEEK),
        ("1 hour", HOUR),
        ("90 minutes", 90 * MINUTE),
        ("1 Week 2 Days", 9 * DAY),
        ("1.5h", 90 * MINUTE),
        ("  5m ", 5 * MINUTE),
        ("0", 0),
        ("12:00:00", 12 * HOUR),
        ("12:00", 12 * HOUR),
        ("0:05", 5 * MINUTE),
        ("100:00", 100 * HOUR),
        ("1:02:03.5", HOUR + 2 * MINUTE + 3 * SECOND + SECOND // 2),
        ("PT5M", 5 * MINUTE),
        ("P1DT2H", DAY + 2 * HOUR),
        ("P2W", 2 * WEEK),
        ("PT0,5S", SECOND // 2),
    ],
)
def test_the_forms_of_a_duration(text, meant):
    assert duration(text) == meant


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "0s"),
        (90 * SECOND, "1m30s"),
        (1_500_000, "1.5s"),
        (500_000, "500ms"),
        (1_500, "1.5ms"),
        (7, "7us"),
        (DAY, "1d"),
        (WEEK + HOUR + 1, "7d1h0.000001s"),
        (-90 * SECOND, "-1m30s"),
    ],
)
def test_a_duration_is_shown_in_units(micros, text):
    assert format_duration(micros) == text


@pytest.mark.parametrize("text", ["P1Y", "P1M", "P1Y2M3DT4H", "1 month", "2 years", "1y"])
def test_months_and_years_are_refused_with_the_reason(text):
    with pytest.raises(BadOption, match="no fixed length"):
        duration(text)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "  ",
            "m",
            "5 parsecs",
            "5M",
            "1e3",
            "P",
            "PT",
            "P1DT",
            "PT5",
            "1:60",
            "1:5",
            "1:00:60",
            "--5m",
            "+-5m",
        ),
        *(
            "1h1h",
            "30m1h",
            "1h,30m",
            "\u0663s",
            ".5s",
            "5 m m",
            "5m!",
            "nan",
            "now",
            pytest.param("9" * 1_000_001, id="long"),
        ),
        *(True, False, None, [], {}, b"5m", 1j, date(2026, 1, 1)),
    ],
)
def test_anything_else_is_refused_with_the_value_and_the_forms(value):
    with pytest.raises(BadOption, match="not a duration: ") as refusal:
        duration(value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 1.7e308, 1e30, 10**30, timedelta.max, timedelta.min),
        *("365001d", "9" * 99, "9" * 60 + "w", LONGEST // SECOND + 1),
        *(pytest.param(10**5000, id="huge"), pytest.param(-(10**5000), id="-huge")),
    ],
)
def test_what_is_not_finite_or_too_long_is_refused(value):
    with pytest.raises(BadOption, match="not a duration"):
        duration(value, allow_negative=True)


@given(st.text(max_size=20) | st.text(alphabet="0123456789:.PTDHMSWhmswd+- in", max_size=12))
def test_any_text_is_a_duration_or_refused_and_never_anything_else(text):
    with suppress(BadOption):
        assert 0 <= duration(text) <= LONGEST


@given(aware)
def test_an_aware_datetime_is_that_moment_whatever_the_zone_of_the_app(value):
    assert to_datetime(moment(value, NOW, ZURICH)) == value.astimezone(UTC)


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_reads_back_exactly(value):
    micros = moment(value, NOW)
    assert to_datetime(micros) == value
    assert to_datetime(micros).tzinfo is UTC
    assert moment(value.isoformat(), NOW, ZURICH) == micros
    assert moment(value.isoformat(" ").replace("+00:00", "Z"), NOW, ZURICH) == micros


@given(naive, st.integers(-14 * 60, 14 * 60))
def test_text_with_a_zone_ignores_the_zone_of_the_app(value, minutes):
    zoned = value.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    assert moment(zoned.isoformat(), NOW, ZURICH) == moment(zoned, NOW)


@given(naive, zones)
def test_a_naive_moment_is_local_and_a_skipped_one_moves_forward(value, tz):
    local = to_datetime(moment(value, NOW, tz)).astimezone(tz).replace(tzinfo=None)
    assert value <= local <= value + timedelta(hours=1)
    assert moment(value.isoformat(), NOW, tz) == moment(value, NOW, tz)


@given(naive, zones)
def test_of_a_moment_that_comes_twice_the_first_is_meant(value, tz):
    first, second = (value.replace(tzinfo=tz, fold=fold).astimezone(UTC) for fold in (0, 1))
    assume(first <= second)
    assert to_datetime(moment(value.replace(fold=1), NOW, tz)) == first


@pytest.mark.parametrize("fold", [0, 1])
def test_summer_and_winter_in_zurich(fold):
    def at(text: str) -> datetime:
        return to_datetime(moment(datetime.fromisoformat(text).replace(fold=fold), NOW, ZURICH))

    assert at("2026-03-29 02:30") == datetime(
        2026, 3, 29, 1, 30, tzinfo=UTC
    )  # skipped: 03:30 summer time
    assert at("2026-10-25 02:30") == datetime(
        2026, 10, 25, 0, 30, tzinfo=UTC
    )  # twice: still summer time
    assert at("2026-07-01 12:00") == datetime(2026, 7, 1, 10, 0, tzinfo=UTC)


@given(lengths.filter(lambda micros: micros < 7000 * 365 * DAY))
def test_relative_moments_count_from_now(micros):
    text = format_duration(micros)
    assert moment(f"+{text}", NOW) == moment(f"in {text}", NOW) == NOW + micros
    assume(micros < 1000 * 365 * DAY)
    assert moment(f"-{text}", NOW) == NOW - micros


@given(st.integers(-(10**10), 10**11))
def test_a_number_is_seconds_since_the_epoch(seconds):
    assert moment(seconds, NOW) == moment(float(seconds), NOW) == seconds * SECOND


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("now", NOW),
        (" NOW ", NOW),
        ("+1 hour", NOW + HOUR),
        ("-5m", NOW - 5 * MINUTE),
        ("in 5 minutes", NOW + 5 * MINUTE),
        ("+PT5M", NOW + 5 * MINUTE),
        ("2026-01-02", NOW + DAY),
        ("2026-01-01T03:00", NOW + 3 * HOUR),
        ("2026-01-01 03:00:00.5", NOW + 3 * HOUR + SECOND // 2),
        ("2026-01-01T03:00Z", NOW + 3 * HOUR),
        ("2026-01-01T03:00+01:00", NOW + 2 * HOUR),
        (1_767_225_600.25, NOW + SECOND // 4),
    ],
)
def test_the_forms_of_a_moment(value, meant):
    assert moment(value, NOW) == meant


def test_a_date_alone_is_midnight_in_the_zone_of_the_app():
    assert moment("2026-01-01", NOW, ZURICH) == NOW - HOUR


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "tomorrow",
            "in",
            "in -5m",
            "in now",
            "+",
            "+-5m",
            "+1 month",
            "5m",
            "2026-13-01",
            "2026-02-30",
            "12:00",
        ),
        *(
            "2026-01-01x03:00",
            "2026-01-01T25:00",
            "1767225600",
            "2026-01-01T03:00+99:00",
            "0000-01-01",
            "+9999999d",
        ),
        *(
            True,
            None,
            [],
            timedelta(1),
            date(2026, 1, 1),
            math.nan,
            math.inf,
            1.7e308,
            10**12,
            -(10**12),
        ),
        *("0001-01-01T00:00+14:00", datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))),
        *(pytest.param("9" * 1_000_001, id="long"), pytest.param(10**5000, id="huge")),
    ],
)
def test_anything_else_is_no_moment(value):
    with pytest.raises(BadOption, match=r"not a (moment|duration): "):
        moment(value, NOW)


@given(st.text(max_size=20) | st.text(alphabet="0123456789:.PTDHMSWZ+- in", max_size=16))
def test_any_text_is_a_moment_or_refused_and_never_anything_else(text):
    with suppress(BadOption):
        to_datetime(moment(text, NOW, ZURICH))
