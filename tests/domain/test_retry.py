from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.duration import DAY, HOUR, SECOND
from genba.domain.retry import Retry
from genba.errors import BadOption

jitters = st.floats(0, 1, exclude_max=True)
micros = st.integers(0, 30 * DAY)
lengths = micros.map(lambda length: timedelta(microseconds=length))
retries = st.builds(
    Retry, times=st.integers(-1, 2**31 - 1), delay=lengths, backoff=st.floats(1, 1e6), cap=lengths
)


@given(micros, st.integers(1, 9), micros, st.integers(0, 40), jitters)
def test_each_wait_lies_between_the_plain_one_and_half_as_much_again(
    delay, backoff, cap, n, jitter
):
    retry = Retry(5, timedelta(microseconds=delay), backoff, timedelta(microseconds=cap))
    plain = min(Fraction(cap), delay * Fraction(backoff) ** n)

    wait = retry.wait(n, jitter)

    assert plain <= wait <= plain * Fraction(3, 2)
    assert abs(wait - plain * (1 + Fraction(jitter) / 2)) <= 1


@given(retries, st.integers(0, 10**9), jitters)
def test_no_number_of_retries_overflows(retry, n, jitter):
    assert 0 <= retry.wait(n, jitter) <= retry.wait(n, 0) * 1.5
    assert retry.wait(n, 0) <= retry.wait(n + 1, 0)


@given(st.integers(0, 10**9), jitters)
def test_no_delay_stays_no_delay(n, jitter):
    assert Retry(-1, delay=0, backoff=1e6).wait(n, jitter) == 0


@given(st.integers(0, 20), st.integers(0, 20))
def test_the_budget_is_times(times, done):
    assert Retry(times).allows(done) == (done < times)


@given(st.integers(0, 2**31))
def test_minus_one_is_endless(done):
    assert Retry(-1).allows(done)


def test_the_default_is_no_retry_then_ten_seconds_doubling_to_an_hour():
    retry = Retry()

    assert not retry.allows(0)
    assert [retry.wait(n, 0) for n in (0, 1, 2, 9)] == [10 * SECOND, 20 * SECOND, 40 * SECOND, HOUR]


@given(retries)
def test_a_rule_survives_json_and_replace(retry):
    assert Retry.from_json(json.loads(json.dumps(retry.to_json()))) == retry
    assert Retry.of(retry.to_json()) == retry
    assert replace(retry) == retry
    assert replace(retry).wait(3, 0.5) == retry.wait(3, 0.5)


def test_stored_rules_carry_every_field():
    assert Retry(3).to_json() == {"times": 3, "delay": "10s", "backoff": 2.0, "cap": "1h"}


def test_the_same_rule_is_equal_however_it_was_written():
    assert Retry(3, delay=90, cap="PT1H") == Retry(
        3, delay="1m30s", backoff=2, cap=timedelta(hours=1)
    )
    assert hash(Retry(3, delay=90)) == hash(Retry(3, delay="90s"))


@given(st.integers(-1, 1000), retries)
def test_a_number_a_rule_and_nothing_are_options(times, retry):
    assert Retry.of(times) == Retry(times=times)
    assert Retry.of(retry) is retry
    assert Retry.of(None) == Retry()
    assert Retry.of({"times": 2, "delay": 5}) == Retry(times=2, delay="5s")


@pytest.mark.parametrize(
    "value", [True, False, "3", 3.0, -2, 2**31, [3], {"tries": 3}, {"times": True}, {3: 3}]
)
def test_what_is_no_retry_option_is_refused(value):
    with pytest.raises(BadOption, match="retry"):
        Retry.of(value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay": -1},
        {"delay": "soon"},
        {"delay": None},
        {"cap": -1},
        {"cap": math.inf},
        {"cap": True},
    ]
    + [{"backoff": b} for b in (0.99, 0, -2, math.nan, math.inf, True, "2", None, 10**400)]
    + [{"times": t} for t in (-2, 1.5, None, "3", True)],
)
def test_a_field_out_of_its_range_is_refused(wrong):
    with pytest.raises(BadOption):
        Retry(**wrong)


class Late(TimeoutError):
    pass


def test_what_failed_at_a_time_is_tried_again_spread_over_seconds():
    """Scorecard 43: of 5,000 jobs that fail together, no second gets twice its share of retries."""
    chance = random.Random(43)

    for done in range(4):
        waits = [Retry(9).wait(done, chance.random()) for _ in range(5_000)]
        seconds = Counter(wait // SECOND for wait in waits)
        assert max(seconds.values()) <= 2 * len(waits) / len(seconds)
        assert len(seconds) >= 5 * 2**done


@pytest.mark.parametrize(
    ("rule", "error", "covered"),
    [
        ({}, KeyboardInterrupt, True),
        ({"on": [OSError]}, Late, True),
        ({"on": OSError}, Late, True),
        ({"on": ["TimeoutError"]}, Late, True),
        ({"on": "Late"}, Late, True),
        ({"on": [Late]}, Late, True),
        ({"on": [Late]}, TimeoutError, False),
        ({"on": [f"{Late.__module__}.Late"]}, Late, True),
        ({"on": [f"{Late.__module__.partition('.')[0]}.Late"]}, Late, True),
        ({"on": ["elsewhere.Late"]}, Late, False),
        ({"never": [OSError]}, Late, False),
        ({"on": [Late], "never": [OSError]}, Late, False),
        ({"on": [OSError], "never": [Late]}, TimeoutError, True),
    ],
)
def test_a_rule_covers_exceptions_by_class_or_name(rule, error, covered):
    retry = Retry(1, **rule)

    assert retry.covers(error) is covered
    assert Retry.from_json(json.loads(json.dumps(retry.to_json()))) == retry


@pytest.mark.parametrize(
    "wrong", [{"on": [int]}, {"never": [3]}, {"on": ["not a name"]}, {"on": 3}, {"on": [""]}]
)
def test_what_is_no_exception_is_refused(wrong):
    with pytest.raises(BadOption, match="retry"):
        Retry(1, **wrong)
