"""When schedules run, as properties."""

from __future__ import annotations

from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genba.domain.cron import cron
from genba.domain.duration import DAY, MILLISECOND, MINUTE, SECOND
from genba.domain.schedule import (
    LONGEST_BACKOFF,
    MOST_AT_ONCE,
    ScheduleRule,
    after_run,
    first_moment,
    jitter_of,
    plan_due_ticks,
    upcoming,
)
from genba.errors import BadOption
from genba.options.schedule_rule import changed_rule, read_rule

UTC = ZoneInfo("UTC")
NOW = 1_767_225_600_000_000
moments = st.integers(NOW - DAY, NOW + DAY)
lengths = st.integers(1, 3 * DAY)
texts = st.sampled_from(["* * * * *", "*/5 * * * *", "0 * * * *", "30 2 * * *", "0 0 1 * *"])


@given(every=lengths, base=moments, moment=moments, ran=lengths)
def test_an_anchored_run_comes_at_the_first_slot_after_the_end(every, base, moment, ran):
    ended = moment + ran
    rule = ScheduleRule(every=every, base=base)
    found = after_run(rule, moment=moment, started=moment, ended=ended, runs=1, failures=0)
    assert found is not None
    assert (found - base) % every == 0
    assert ended < found <= ended + every


@given(every=lengths, base=moments, start=st.none() | moments)
def test_the_first_anchored_run_is_the_first_slot_from_now_on_and_never_before_the_base(
    every, base, start
):
    found = first_moment(ScheduleRule(every=every, base=base, start=start), NOW)
    assert found is not None
    begin = max(NOW, start or NOW)
    if base >= begin:
        assert found == base
    else:
        assert (found - base) % every == 0
        assert begin <= found < begin + every


@given(
    every=lengths,
    moment=moments,
    late=lengths,
    ran=lengths,
    reference=st.sampled_from(["start", "end"]),
)
def test_no_run_of_an_interval_comes_before_the_end_of_the_one_before(
    every, moment, late, ran, reference
):
    started, ended = moment + late, moment + late + ran
    rule = ScheduleRule(every=every, reference=reference)
    found = after_run(rule, moment=moment, started=started, ended=ended, runs=1, failures=0)
    assert found == (ended + every if reference == "end" else max(ended, started + every))


@given(
    every=lengths,
    back=lengths,
    reference=st.sampled_from(["start", "end"]),
    base=st.none() | moments,
)
def test_a_run_during_which_the_clock_was_set_back_is_followed_within_one_interval(
    every, back, reference, base
):
    for rule in (ScheduleRule(every=every, reference=reference, base=base), ScheduleRule(every=-1)):
        found = after_run(rule, moment=NOW, started=NOW, ended=NOW - back, runs=1, failures=0)
        assert found is not None
        assert NOW - back <= found <= NOW - back + max(every, 100 * MILLISECOND)


@given(failures=st.integers(0, 100), ran=st.integers(0, SECOND))
def test_again_at_once_keeps_its_distance_and_backs_off(failures, ran):
    found = after_run(
        ScheduleRule(every=-1), moment=NOW, started=NOW, ended=NOW + ran, runs=1, failures=failures
    )
    assert found is not None
    assert found >= NOW + 100 * MILLISECOND
    assert found - NOW - ran <= LONGEST_BACKOFF
    if failures == 0:
        assert found == max(NOW + ran, NOW + 100 * MILLISECOND)


@settings(max_examples=30)
@given(text=texts, asleep=st.integers(0, 2 * DAY), misfire=st.sampled_from(["skip", "once", "all"]))
def test_every_tick_that_is_due_runs_or_is_skipped_and_none_is_both(text, asleep, misfire):
    rule = ScheduleRule(cron=text, misfire=misfire)
    begin = first_moment(rule, NOW)
    assert begin is not None
    now = begin + asleep
    plan = plan_due_ticks(rule, begin, now, 0)
    all_of_them = [moment for moment in islice(cron(text).moments(NOW), 3000) if moment <= now]
    assert len(plan.runs) + sum(skip.count or 0 for skip in plan.skips) == len(all_of_them)
    assert set(plan.runs) <= set(all_of_them)
    assert len(plan.runs) <= (MOST_AT_ONCE if misfire == "all" else 1)
    assert plan.next_at is None or plan.next_at > now


@settings(max_examples=15)
@given(text=texts, most=st.integers(1, 20))
def test_a_schedule_never_makes_more_jobs_than_it_may(text, most):
    rule = ScheduleRule(cron=text, max_runs=most, misfire="all")
    assert len(list(islice(upcoming(rule, first_moment(rule, NOW) or 0, 0), 50))) == most
    plan = plan_due_ticks(rule, NOW + MINUTE, NOW + 400 * DAY, 0)
    assert len(plan.runs) <= most


@given(jitter=st.integers(0, DAY), moment=moments)
def test_jitter_stays_within_its_bounds_and_is_the_same_for_all(jitter, moment):
    rule = ScheduleRule(cron="* * * * *", jitter=jitter)
    assert 0 <= jitter_of(rule, "s", moment) <= jitter
    assert jitter_of(rule, "s", moment) == jitter_of(rule, "s", moment)


# changed by hand


@pytest.mark.parametrize(
    ("words", "changes", "expected"),
    [
        ({"cron": "0 3 * * *", "tz": "Asia/Tokyo"}, {"cron": "@daily"}, {"cron": "@daily", "tz": "Asia/Tokyo"}),
        ({"cron": "0 3 * * *", "tz": "Asia/Tokyo", "jitter": "5m"}, {"every": "5m"}, {"every": "5m", "jitter": "5m"}),
        ({"every": "12h", "base": "2026-01-01 03:00", "misfire": "skip"}, {"cron": "@daily"},
         {"cron": "@daily", "misfire": "skip"}),
        ({"every": "12h", "base": "2026-01-01 03:00"}, {"every": "6h"}, {"every": "6h", "base": "2026-01-01 03:00"}),
        ({"every": -1, "overlap": "allow"}, {"max_runs": 3}, {"every": -1, "overlap": "allow", "max_runs": 3}),
        ({"every": "1h", "until": "2030-01-01", "grace": 9.00001}, {"until": None}, {"every": "1h", "grace": 9.00001}),
    ],
)  # fmt: skip
def test_what_is_not_said_stays_and_none_takes_one_away(words, changes, expected):
    rule = read_rule(words, NOW, UTC)
    assert changed_rule(rule, changes, NOW, UTC) == read_rule(expected, NOW, UTC)


def test_a_change_that_makes_no_sense_is_refused():
    rule = read_rule({"every": "1h"}, NOW, UTC)
    for changes in (
        {"tz": "Europe/Zurich"},
        {"every": None},
        {"every": 0},
        {"often": 3},
        {"cron": "x"},
    ):
        with pytest.raises(BadOption):
            changed_rule(rule, changes, NOW, UTC)
