"""The assignment of slots to waiting jobs: pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.limits import (
    LIMIT,
    MAX_BUCKET_LENGTH,
    ORDERED,
    Bucket,
    BucketWaiter,
    LimitRule,
    SlotNeed,
    assign_slots,
    bucket_of,
    bucket_to_wait_for,
    needs_of,
    read_needs,
    write_needs,
)
from genba.errors import BadArguments

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("template", "values", "bucket"),
    [
        ("gpu", {}, "gpu"),
        ("tenant:{tenant}", {"tenant": "acme"}, "tenant:acme"),
        ("{a}/{b}", {"a": 1, "b": None}, "1/null"),
        ("{a}", {"a": {"y": 1, "x": [True]}}, '{"x":[true],"y":1}'),
    ],
)
def test_a_bucket_is_its_template_with_the_arguments_in_place(template, values, bucket):
    assert bucket_of(template, values) == bucket


def test_a_missing_argument_is_named():
    with pytest.raises(BadArguments, match="'tenant'"):
        bucket_of("t:{tenant}", {})


@given(st.text(max_size=400), st.text(max_size=400))
def test_long_names_are_shortened_and_stay_different(a, b):
    one, other = bucket_of("{x}", {"x": a}), bucket_of("{x}", {"x": b})

    assert len(one) <= MAX_BUCKET_LENGTH
    assert (one == other) == (a == b)


def test_needs_are_sorted_one_of_each_bucket_and_come_back_as_they_were():
    rules = (
        LimitRule("b", 2),
        LimitRule("a:{x}", 1, True),
        LimitRule("b", 2),
        LimitRule("rate r", 5, False, SECOND),
    )
    needs = needs_of(rules, {"x": 7})

    assert [need.name for need in needs] == ["a:7", "b", "rate r"]
    assert read_needs(write_needs(needs)) == needs
    assert bucket_to_wait_for(needs) == needs[0]
    assert bucket_to_wait_for(needs, owned=True) == needs[1]
    assert bucket_to_wait_for(()) is None


@given(
    st.integers(1, 20),
    st.integers(1, 10 * SECOND),
    st.integers(1, 10),
    st.lists(st.integers(0, 3 * SECOND), max_size=60),
)
def test_a_rate_never_lets_more_start_than_its_burst_and_its_pace(n, per, burst, waits):
    bucket = Bucket("r", "r", n, False, per, burst)
    now, starts = 10**15, []
    for wait in waits:
        now += wait
        if bucket.room(now):
            bucket.take(1, now)
            starts.append(now)

    step = -(-per // n)
    for i, first in enumerate(starts):
        for k, last in enumerate(starts[i:], 1):
            assert (k - burst) * step <= last - first


@given(st.integers(1, 20), st.integers(1, 10 * SECOND))
def test_a_rate_is_not_slower_than_it_says(n, per):
    bucket = Bucket("r", "r", n, False, per, 1)
    now = 10**15
    for _ in range(20):
        assert bucket.room(now) == 1
        bucket.take(1, now)
        assert bucket.room(now) == 0
        assert bucket.ripe_at(now) == now + -(-per // n)
        now = bucket.ripe_at(now)


NAMES = "abc"


@st.composite
def lines(draw):
    """Return buckets, some of them ordered, and jobs in their lines, in any order."""
    buckets = {}
    for name in NAMES:
        ordered = name == "a"
        n = 1 if ordered else draw(st.integers(1, 3))
        taken = 0 if ordered else draw(st.integers(0, n))
        buckets[name] = Bucket(name, name, n, ordered, None, None, taken)
    waiters = []
    for id in range(draw(st.integers(0, 12))):
        names = sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1)))
        needs = tuple(SlotNeed(name, name, ORDERED if name == "a" else LIMIT) for name in names)
        line = bucket_to_wait_for(needs)
        assert line is not None
        waiters.append(
            BucketWaiter(
                draw(st.integers(0, 5)),
                id,
                line.name,
                needs,
                draw(st.booleans()) or line.kind == LIMIT,
            )
        )
    return buckets, waiters


@given(lines())
def test_slots_are_assigned_within_limits_in_order_and_until_nothing_fits(given_lines):
    buckets, waiters = given_lines
    before = {name: bucket.taken for name, bucket in buckets.items()}

    done = assign_slots(buckets, waiters, 0)

    granted = done.grants
    for name, bucket in buckets.items():
        held = sum(name in {need.name for need in waiter.needs} for waiter in granted)
        if bucket.ordered:
            assert held <= 1
        else:
            assert bucket.taken == before[name] + held <= bucket.n
    gone = {waiter.id for waiter in (*granted, *done.turns, *(waiter for waiter, _ in done.moves))}
    for waiter in sorted(waiters):
        if waiter.id not in gone:
            assert not buckets[waiter.line].fits(waiter.id, 0), (
                "the bucket has room, but the job was left in its line"
            )
            behind = [other for other in granted if other.line == waiter.line and other > waiter]
            assert behind == [], "a job behind it got a slot first"


def test_a_needed_bucket_that_was_not_passed_in_is_reported():
    needs = (SlotNeed("a", "a", LIMIT), SlotNeed("z", "z", LIMIT))

    done = assign_slots(
        {"a": Bucket("a", "a", 1, False, None, None)}, [BucketWaiter(0, 1, "a", needs)], 0
    )

    assert (done.unseen, done.grants) == ({"z"}, [])
