"""The keys of a fair queue take turns, in any order of arrival and with any number of jobs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.fairness import TURN, UNRANKED, fair_rank, key_of, names_in, start_of, starts


@given(last=st.integers(0, 2**61), count=st.integers(1, 1000))
def test_starts_are_a_turn_apart_and_end_at_the_keys_clock(last: int, count: int) -> None:
    found = list(starts(last, count))
    assert len(found) == count
    assert found[-1] == last
    assert all(after - before == TURN for before, after in pairwise(found))


@given(
    start=st.integers(0, 2**61), priority=st.integers(-(2**20), 2**20), step=st.integers(1, 2**40)
)
def test_a_rank_tells_its_start_and_is_never_the_mark_of_the_unranked(
    start: int, priority: int, step: int
) -> None:
    place = fair_rank(start, priority, step)
    assert place < UNRANKED
    assert start_of(place, priority, step) == start


def test_a_key_is_an_argument_or_made_of_several() -> None:
    args = {"tenant": "acme", "n": 3}
    assert names_in("{tenant}/{n}") == ["tenant", "n"]
    assert (key_of("tenant", args), key_of("{tenant}/{n}", args), key_of("n", args)) == (
        "acme",
        "acme/3",
        "3",
    )
    assert key_of("region", args) is None


@pytest.mark.parametrize("text", ["tenant", "{tenant}"])
def test_both_forms_of_a_name_are_the_same(text: str) -> None:
    assert key_of(text, {"tenant": 1}) == "1"
