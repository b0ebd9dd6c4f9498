from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.states import FINAL, MOVES, OPEN, State, panics_only, parse_states
from genba.errors import BadOption

states = st.sampled_from(State)


def test_every_state_is_either_open_or_final_and_has_its_moves():
    assert set(State) == OPEN | FINAL
    assert not OPEN & FINAL
    assert set(MOVES) == set(State)


@given(states)
def test_any_open_state_may_become_cancelled_and_no_final_one(state):
    assert (State.CANCELLED in MOVES[state]) == (state in OPEN)


@given(states, states)
def test_only_a_waiting_job_starts_and_only_a_running_one_ends_other_than_cancelled(old, new):
    if State.RUNNING in MOVES[old]:
        assert old is State.WAITING
    if new in MOVES[old] and new in FINAL - {State.CANCELLED}:
        assert old is State.RUNNING


@given(st.sampled_from(sorted(FINAL)))
def test_a_final_job_goes_back_to_the_queue_and_nowhere_else(state):
    assert MOVES[state] == {State.BLOCKED, State.SCHEDULED, State.WAITING}


def test_resume_leads_where_the_facts_say():
    assert MOVES[State.HELD] - {State.CANCELLED} == {State.BLOCKED, State.SCHEDULED, State.WAITING}


@given(states)
def test_no_state_moves_to_itself(state):
    assert state not in MOVES[state]


@given(st.sampled_from(sorted(OPEN - {State.HELD})))
def test_every_open_job_may_be_held(state):
    assert State.HELD in MOVES[state]


def test_every_state_can_be_reached_from_a_new_job():
    seen: set[State] = set()
    todo = {State.BLOCKED}
    while todo:
        seen |= todo
        todo = {new for old in todo for new in MOVES[old]} - seen
    assert seen == set(State)


@given(st.lists(states))
def test_several_states_stand_for_all_of_them(names):
    assert parse_states([str(name) for name in names]) == set(names)
    assert parse_states(iter(names)) == set(names)


@given(states)
def test_one_state_stands_for_itself(state):
    assert parse_states(state.value) == {state}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("open", OPEN),
        ("final", FINAL),
        ("any", set(State)),
        ("postponed", {State.SCHEDULED}),
        ("panicked", {State.HELD}),
        ("processing", {State.RUNNING}),
        ("working", {State.RUNNING}),
        ("done", {State.SUCCEEDED}),
        ("complete_success", {State.SUCCEEDED}),
        ("complete_failed", {State.FAILED}),
        (["final", "waiting"], FINAL | {State.WAITING}),
    ],
)
def test_groups_and_the_ancestors_words_are_understood(name, meant):
    assert parse_states(name) == meant


@pytest.mark.parametrize(
    ("names", "only"),
    [
        (["panicked"], True),
        (["failed", "panicked"], True),
        (["panicked", "held"], False),
        (["open", "panicked"], False),
        (["held"], False),
        (["failed"], False),
        ([], False),
    ],
)
def test_panicked_means_some_of_those_that_are_held_unless_all_are_meant(names, only):
    assert panics_only(names) is only


@pytest.mark.parametrize(
    "value", ["", "Waiting", "crashed", ["waiting", "nope"], [None], 3, None, [["open"]], b"open"]
)
def test_an_unknown_state_is_refused_with_what_is_allowed(value):
    with pytest.raises(BadOption, match=r"allowed: .*waiting.*open.*done"):
        parse_states(value)
