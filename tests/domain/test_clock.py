"""The skew between two clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genba.domain.clock import skew

SECOND = 1_000_000
moments = st.integers(0, 10**16)
journeys = st.integers(0, 60 * SECOND)


@given(moments, journeys, st.floats(0, 1))
def test_equal_clocks_are_equal_however_long_the_answer_took(
    asked: int, journey: int, when: float
) -> None:
    assert skew(asked + int(journey * when), asked + journey, journey) == 0


@given(moments, journeys, st.integers(SECOND, 10**12))
def test_a_clock_that_is_ahead_is_ahead_by_so_much_or_less_what_the_answer_took(
    asked: int, journey: int, ahead: int
) -> None:
    assert ahead - journey - SECOND // 20 <= skew(asked + ahead, asked + journey, journey) <= ahead


@given(moments, journeys, st.integers(SECOND, 10**12))
def test_a_clock_that_is_behind_is_behind_by_more_than_the_journey_explains(
    asked: int, journey: int, behind: int
) -> None:
    assert skew(asked - behind, asked + journey, journey) == -behind - journey
