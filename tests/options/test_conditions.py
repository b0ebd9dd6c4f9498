"""The combined answers of conditions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba import Wait, ready
from genba.errors import BadOption, BadTask
from genba.options.conditions import (
    AnyOf,
    Candidate,
    CheckTerm,
    Conditions,
    LimitTo,
    Readiness,
    Ready,
    arity,
    evaluate,
)

JOB = Candidate(7, "shop.pay", {"tenant": "acme"}, {}, 1)


def answer(value: Any, calls: Any = None) -> Readiness:
    def call(fn, job):
        if calls is not None:
            calls.append(fn)
        return fn(job) if arity(fn) else fn()

    return evaluate([("c", lambda: value)], JOB, call)


def yes():
    return True


def no():
    return False


def test_true_false_wait_and_the_empty_chain():
    assert answer(True)
    assert answer(ready())
    assert not answer(False)
    assert answer(False) == Readiness(ways=(), refused_by="c")
    assert answer(Wait("30s")) == Readiness(ways=(), wait=30_000_000, refused_by="c")


@pytest.mark.parametrize("value", [None, 1, "yes", []])
def test_anything_else_is_an_error(value):
    with pytest.raises(TypeError, match="True, False, Wait"):
        answer(value)


def test_several_conditions_are_and_and_stop_at_the_first_no():
    asked: list[Any] = []

    def call(fn: Any, job: Candidate) -> Any:
        asked.append(fn)
        return fn()

    verdict = evaluate([("a", yes), ("b", no), ("c", yes)], JOB, call)
    assert (verdict.refused_by, asked) == ("b", [yes, no])


def test_a_chain_stops_at_the_first_no_and_any_at_the_first_yes():
    calls: list = []
    assert not answer(ready().check(no).check(yes), calls)
    assert calls[1:] == [no]
    calls.clear()
    assert answer(ready().any(ready().check(yes), ready().check(no)), calls)
    assert calls[1:] == [yes]


def test_the_chain_of_lzq():
    chain = (
        ready()
        .limit_to(5, bucket="acme")
        .limit_to(15)
        .check(yes)
        .any(ready().check(yes).check(no), ready().check(yes))
    )
    assert answer(chain).ways == ((("shop.pay:acme", 5), ("shop.pay", 15)),)


def test_a_losing_branch_asks_for_no_slot():
    chain = ready().any(
        ready().limit_to(1, "lost").check(no), ready().limit_to(2, "won").check(yes)
    )
    assert answer(chain).ways == ((("shop.pay:won", 2),),)


def test_a_limit_of_nothing_is_never_ready():
    assert not answer(ready().limit_to(0))
    assert answer(ready().any(ready().limit_to(0), ready()))


def test_a_bucket_is_any_plain_value():
    values = (None, "x", {"b": 1, "a": 2}, {"a": 2, "b": 1}, 3)
    names = [answer(ready().limit_to(1, value)).ways[0][0][0] for value in values]
    assert names == [
        "shop.pay",
        "shop.pay:x",
        'shop.pay:{"a":2,"b":1}',
        'shop.pay:{"a":2,"b":1}',
        "shop.pay:3",
    ]
    with pytest.raises(TypeError, match="bucket"):
        answer(ready().limit_to(1, object()))


def test_any_that_waits_says_when_the_first_may_change():
    assert (
        answer(ready().any(ready().check(lambda: Wait(5)), ready().check(lambda: Wait(2)))).wait
        == 2_000_000
    )
    assert answer(ready().any(ready().check(lambda: Wait(5)), ready().check(no))).wait is None


chains = st.recursive(
    st.just(Ready()),
    lambda inner: st.builds(
        lambda terms: Ready(tuple(terms)),
        st.lists(
            st.one_of(
                st.sampled_from([CheckTerm(yes), CheckTerm(no)]),
                st.builds(LimitTo, st.integers(1, 3), st.sampled_from("abc")),
                st.builds(lambda some: AnyOf(tuple(some)), st.lists(inner, min_size=1, max_size=3)),
            ),
            max_size=4,
        ),
    ),
    max_leaves=8,
)


def holds(chain: Ready, free: set[str]) -> bool:
    """Evaluate a chain in the plainest way, with slots in these buckets."""
    for term in chain.terms:
        fine = False
        match term:
            case CheckTerm(fn):
                fine = fn()
            case LimitTo(_, bucket):
                fine = f"shop.pay:{bucket}" in free
            case AnyOf(some):
                fine = any(holds(one, free) for one in some)
        if not fine:
            return False
    return True


@given(chains)
def test_a_way_can_be_had_exactly_when_the_chain_holds(chain):
    ways = answer(chain).ways
    for taken in product([True, False], repeat=3):
        free = {f"shop.pay:{name}" for name, has in zip("abc", taken, strict=True) if has}
        assert any(all(bucket in free for bucket, _ in way) for way in ways) == holds(chain, free)


def test_bad_terms_are_refused():
    not_a_function: Any = 3
    for wrong in (
        lambda: ready().limit_to(-1),
        lambda: ready().limit_to(True),
        lambda: ready().check(not_a_function),
    ):
        with pytest.raises(BadOption):
            wrong()
    with pytest.raises(BadOption):
        ready().any()


def test_a_condition_takes_the_job_or_nothing():
    with pytest.raises(BadOption, match="takes the job or nothing"):
        Conditions().add(lambda one, other: True, "c")


def test_two_conditions_of_one_name_are_refused():
    conditions = Conditions()
    conditions.add(yes, "c")
    conditions.add(yes, "c")
    with pytest.raises(BadTask, match="'c' is registered already"):
        conditions.add(no, "c")
