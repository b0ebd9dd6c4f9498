from __future__ import annotations

import pytest

from genba.domain.duration import MINUTE, SECOND
from genba.errors import BadOption
from genba.options.values import Dep, Limit, Rate, Wait


@pytest.mark.parametrize("bucket", ["gpu", "tenant:{tenant}", "{a}/{b}", "a{{b}}"])
def test_a_limit_takes_a_bucket_template(bucket):
    assert Limit(bucket, 2).bucket == bucket


@pytest.mark.parametrize(
    "bucket", ["", "x" * 201, "{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>9}", None, 3]
)
def test_a_bucket_that_could_not_be_filled_is_refused(bucket):
    with pytest.raises(BadOption, match="bucket"):
        Limit(bucket, 1)
    if bucket is not None:
        with pytest.raises(BadOption, match="bucket"):
            Rate(bucket, "1/s")


@pytest.mark.parametrize("n", [-1, True, 1.0, "1", None, 2**31])
def test_a_limit_is_a_whole_number_and_not_a_negative_one(n):
    with pytest.raises(BadOption, match="whole number"):
        Limit("gpu", n)


def test_only_a_limit_of_one_can_be_ordered():
    assert Limit("stripe", 1, ordered=True).ordered
    with pytest.raises(BadOption, match="must be 1, got 2"):
        Limit("stripe", 2, ordered=True)
    with pytest.raises(BadOption, match="True or False"):
        Limit("stripe", 1, ordered=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "n", "per"),
    [
        ("10/s", 10, SECOND),
        ("100/m", 100, MINUTE),
        ("5/30s", 5, 30 * SECOND),
        (" 1 / minute ", 1, MINUTE),
    ],
)
def test_a_rate_is_a_count_and_a_time(rate, n, per):
    assert (Rate(None, rate).n, Rate(None, rate).per) == (n, per)


@pytest.mark.parametrize(
    "rate", ["", "10", "10/", "/s", "0/s", "-1/s", "1/0s", "1.5/s", "1/x", "1/900d", 10, None]
)
def test_a_rate_that_says_nothing_is_refused(rate):
    with pytest.raises(BadOption):
        Rate(None, rate)


def test_a_burst_is_at_least_one():
    assert Rate(None, "1/s", burst=5).burst == 5
    with pytest.raises(BadOption, match="burst"):
        Rate(None, "1/s", burst=0)


def test_a_dependency_is_on_success_unless_said_otherwise():
    assert Dep(42).on == "success"
    assert Dep(object(), on="finished").on == "finished"


@pytest.mark.parametrize("job", [None, "42", True, 1.0, b"x"])
def test_a_dependency_needs_a_job(job):
    with pytest.raises(BadOption, match="dependency"):
        Dep(job)


def test_a_dependency_knows_three_conditions():
    with pytest.raises(BadOption, match="success, finished, failure"):
        Dep(1, on="done")  # type: ignore[arg-type]


def test_a_wait_is_longer_than_nothing():
    assert Wait("30s").micros == 30 * SECOND
    for bad in (0, -1, "soon", True):
        with pytest.raises(BadOption):
            Wait(bad)
