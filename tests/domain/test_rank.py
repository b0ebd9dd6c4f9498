from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genba.domain.rank import AGE_STEP, MAX_BOOST, boost, rank

moments = st.integers(0, 2**53)
priorities = st.integers(-1000, 1000)


def test_an_hour_of_waiting_is_worth_one_priority():
    assert AGE_STEP == 3_600_000_000
    assert rank(AGE_STEP, 1, AGE_STEP) == rank(0, 0, AGE_STEP)


@given(moments, priorities, st.integers(1, 1000))
def test_at_the_same_time_the_higher_priority_goes_first(due_at, priority, more):
    assert rank(due_at, priority + more, AGE_STEP) < rank(due_at, priority, AGE_STEP)


@given(moments, priorities, st.integers(1, 2**40))
def test_at_the_same_priority_the_older_goes_first(due_at, priority, later):
    assert rank(due_at, priority, AGE_STEP) < rank(due_at + later, priority, AGE_STEP)


@given(moments, priorities, st.integers(0, 1000), st.integers(1, 2**40))
def test_nothing_starves_an_old_job_passes_every_later_one_of_higher_priority(
    due_at, priority, more, step
):
    assert rank(due_at, priority, step) < rank(due_at + more * step + 1, priority + more, step)


@given(
    st.integers(0, 62),
    st.integers(-(2**31), 2**31) | st.sampled_from([-(2**31), 2**31]),
    st.integers(0, 2**62),
)
def test_a_rank_fits_sixty_four_bits_and_keeps_its_direction(bits, priority, step):
    due_at, step = 2**bits, step | 2**40
    number = rank(due_at, priority, step)

    assert -(2**63) <= number < 2**63
    assert number >= rank(due_at, priority + 1, step)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**55))
def test_a_priority_is_worth_its_steps_unless_that_is_more_than_fits(priority, step):
    assert boost(priority, step) == max(-MAX_BOOST, min(MAX_BOOST, priority * step))
    assert boost(priority, AGE_STEP) == priority * AGE_STEP
