from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.history_check import STEPS, FaultKind, HistoryCheck
from genba.domain.states import FINAL, OPEN, State

# An event, and the states that it may leave a job in, as bits of their own.
BITS = {1 << place: state for place, state in enumerate(State)}


def checked(*kinds: str, complete: bool = True) -> tuple[HistoryCheck, list[FaultKind]]:
    replay = HistoryCheck(complete)
    faults = [replay.check_event(7, kind) for kind in kinds]
    return replay, [fault.kind for fault in faults if fault]


@pytest.mark.parametrize(
    "kinds",
    [
        ("waiting", "running", "succeeded"),
        (
            "scheduled",
            "waiting",
            "running",
            "retrying",
            "waiting",
            "running",
            "failed",
            "requeued",
            "succeeded",
        ),
        (
            "blocked",
            "cancelled",
            "blocked",
            "waiting",
            "running",
            "progress",
            "held",
            "resumed",
            "cancelled",
        ),
        (
            "waiting",
            "updated",
            "waiting",
            "running",
            "released",
            "running",
            "crashed",
            "timed_out",
            "deleted",
        ),
        ("succeeded",),
        ("scheduled", "blocked", "waiting"),
    ],
)
def test_a_life_that_can_be_is_no_fault(kinds):
    assert checked(*kinds)[1] == []


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (("waiting", "running", "succeeded", "succeeded"), FaultKind.TWICE),
        (("waiting", "cancelled", "failed"), FaultKind.TWICE),
        (("waiting", "succeeded", "running"), FaultKind.MOVE),
        (("waiting", "succeeded", "waiting"), FaultKind.MOVE),
        (("waiting", "succeeded", "held"), FaultKind.MOVE),
        (("blocked", "running"), FaultKind.MOVE),
        (("scheduled", "succeeded"), FaultKind.MOVE),
        (("waiting", "resumed"), FaultKind.MOVE),
        (("waiting", "requeued"), FaultKind.MOVE),
        (("waiting", "deleted", "running"), FaultKind.MOVE),
        (("waiting", "running", "deleted"), FaultKind.MOVE),
        (("crashed",), FaultKind.MOVE),
    ],
)
def test_a_life_that_cannot_be_is_named(kinds, kind):
    assert checked(*kinds)[1] == [kind]


@given(st.sampled_from(sorted(FINAL)), st.sampled_from(sorted(FINAL)))
def test_whatever_ended_does_not_end_again(first, second):
    assert checked("waiting", first, second)[1] == [FaultKind.TWICE]
    assert checked("waiting", first, "requeued", second)[1] == []


@given(st.sampled_from(sorted(STEPS)), st.sampled_from(State))
def test_a_row_in_another_state_than_its_history_says_is_a_fault(kind, state):
    replay = HistoryCheck(complete=False)
    replay.check_event(7, kind)
    _, after = STEPS[kind]
    possible = {one for bit, one in BITS.items() if after & bit}
    reached = state in possible or (
        state == State.RUNNING and possible & {State.WAITING, State.SCHEDULED, State.HELD}
    )
    unrecorded = (
        kind not in ("waiting", "scheduled", "blocked") and state in OPEN and possible & OPEN
    )

    assert (replay.check_row(7, state, final_only=False) is None) == bool(reached or unrecorded)


def test_a_job_that_is_gone_before_its_end_is_lost():
    replay = HistoryCheck(complete=True)
    for job, kind in (
        (1, "waiting"),
        (2, "succeeded"),
        (3, "blocked"),
        (9000, "scheduled"),
        (9001, "waiting"),
    ):
        replay.check_event(job, kind)
    replay.check_event(9001, "deleted")
    replay.check_row(3, "blocked", final_only=False)

    assert [(fault.kind, fault.which) for fault in replay.lost_jobs()] == [
        (FaultKind.LOST, "job 1"),
        (FaultKind.LOST, "job 9000"),
    ]


def test_what_is_known_of_a_job_takes_two_bytes():
    tracemalloc.start()
    replay = HistoryCheck(complete=True)
    for job in range(100_000):
        replay.check_event(job, "waiting")
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used < 4 * 100_000
