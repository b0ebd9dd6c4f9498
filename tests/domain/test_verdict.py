from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from genba.domain.duration import MINUTE, SECOND
from genba.domain.retry import Retry
from genba.domain.states import FINAL, MOVES, Cause, State
from genba.domain.verdict import AttemptEnd, Standing, Verdict, judge

NOW = 1_767_225_600_000_000

deaths = st.sampled_from(
    ["out of memory", "cpu limit", "signal 9", "signal 11", "exit 0", "exit 137"]
)
owner_lost = st.sampled_from(["node lost", "lease lost"])
crashes = deaths | owner_lost
overtime = st.sampled_from(["timeout", "stall"])
released = st.sampled_from(["drain", "collateral"])
own_end = st.sampled_from(["returned", "exception"])
requests = st.sampled_from([None, "succeed", "fail", "hold", "retry"])
jitters = st.floats(0, 1, exclude_max=True)
reasons = st.none() | st.just("because")
ends = st.builds(
    AttemptEnd,
    cause=st.sampled_from([str(cause) for cause in Cause]) | crashes,
    started=st.booleans(),
    retry_at=st.none() | st.integers(NOW - MINUTE, NOW + MINUTE),
    retry_in=st.none() | st.integers(-MINUTE, MINUTE),
    free_retry=st.booleans(),
    wants=requests,
    reason=reasons,
    cancel_requested=st.booleans(),
)
standings = st.builds(
    Standing,
    priority=st.integers(-(2**31), 2**31 - 1) | st.integers(-(2**31), -(2**31) + 9),
    retries=st.integers(0, 5),
    crashes=st.integers(0, 9),
    losses=st.integers(0, 12),
    retry=st.builds(Retry, times=st.integers(-1, 5), delay=st.sampled_from([0, "2s", "1m"])),
    max_crashes=st.integers(1, 20),
    on_exception=st.sampled_from(["retry", "fail", "hold"]),
    at_most_once=st.booleans(),
)
repeatable = standings.map(lambda job: replace(job, at_most_once=False))
once_only = standings.map(lambda job: replace(job, at_most_once=True))


def an_end(cause: str, **changes: Any) -> AttemptEnd:
    return AttemptEnd(**{"cause": cause, "started": True, **changes})


def a_job(**changes: Any) -> Standing:
    counts = {"priority": 0, "retries": 0, "crashes": 0, "losses": 0}
    policy = {"retry": Retry(), "max_crashes": 3, "on_exception": "retry", "at_most_once": False}
    return Standing(**{**counts, **policy, **changes})


def counts(job: Standing | Verdict) -> tuple[int, int, int]:
    return job.retries, job.crashes, job.losses


@given(ends, standings, jitters)
def test_every_end_leads_to_a_state_that_a_running_job_may_take(end, job, jitter):
    verdict = judge(end, job, NOW, jitter)

    assert verdict.state in MOVES[State.RUNNING]
    assert (verdict.state is State.SCHEDULED) == (verdict.due_at is not None or bool(verdict.wait))
    assert verdict.due_at is None or (verdict.due_at > NOW and verdict.wait is None)
    assert verdict.wait is None or verdict.wait > 0 or verdict.state is State.WAITING
    assert verdict.reason or verdict.state not in (FINAL | {State.HELD}) - {State.SUCCEEDED}
    assert (verdict.rank_priority is None) == (verdict.state in FINAL | {State.HELD})


@given(ends, standings, jitters)
def test_an_end_counts_as_one_thing_at_most(end, job, jitter):
    steps = [
        new - old
        for new, old in zip(counts(judge(end, job, NOW, jitter)), counts(job), strict=True)
    ]

    assert sorted(steps) in ([0, 0, 0], [0, 0, 1])


@given(ends, standings, jitters)
def test_the_rank_falls_by_one_per_crash_and_never_below_the_lowest(end, job, jitter):
    verdict = judge(end, job, NOW, jitter)
    assume(verdict.rank_priority is not None)

    assert verdict.rank_priority == max(-(2**31), job.priority - verdict.crashes)


@given(ends, standings, jitters)
def test_a_cancel_that_was_asked_for_wins_over_every_end(end, job, jitter):
    verdict = judge(replace(end, cancel_requested=True), job, NOW, jitter)

    assert verdict.state is State.CANCELLED
    assert counts(verdict) == counts(job)
    assert verdict.cause != "returned"


@given(st.sampled_from(["cancelled", "killed"]), ends, standings)
def test_a_cancelled_or_killed_job_is_cancelled_with_the_reason(cause, end, job):
    verdict = judge(replace(end, cause=cause), job, NOW, 0)

    assert (verdict.state, verdict.cause) == (State.CANCELLED, cause)
    assert verdict.reason == (end.reason or cause)


@given(st.sampled_from([None, "succeed"]), standings)
def test_a_return_succeeds(wants, job):
    verdict = judge(an_end("returned", wants=wants), job, NOW, 0)

    assert verdict.state is State.SUCCEEDED
    assert counts(verdict) == counts(job)


@given(
    own_end,
    st.sampled_from([("fail", State.FAILED), ("hold", State.HELD)]),
    standings,
    st.booleans(),
)
def test_fail_and_hold_are_obeyed_whatever_the_policy(cause, wish, job, started):
    wants, state = wish
    verdict = judge(an_end(cause, started=started, wants=wants, reason="why"), job, NOW, 0)

    assert (verdict.state, verdict.reason) == (state, "why")
    assert counts(verdict) == counts(job)


@given(own_end, standings, st.integers(1, 10**12))
def test_a_free_retry_takes_nothing_from_the_budget(cause, job, later):
    end = an_end(cause, wants="retry", free_retry=True, retry_at=NOW + later)
    verdict = judge(end, job, NOW, 0)

    assert (verdict.state, verdict.due_at) == (State.SCHEDULED, NOW + later)
    assert counts(verdict) == counts(job)


@given(own_end, standings, st.integers(-MINUTE, 10**12))
def test_a_retry_after_a_delay_counts_from_when_it_is_written(cause, job, delay):
    verdict = judge(an_end(cause, wants="retry", free_retry=True, retry_in=delay), job, NOW, 0)

    assert (verdict.due_at, verdict.wait) == (None, max(0, delay))


@given(own_end, standings, st.integers(1, 10**12))
def test_a_retry_that_was_asked_for_takes_from_the_budget_whatever_on_exception_says(
    cause, job, later
):
    verdict = judge(an_end(cause, wants="retry", retry_at=NOW + later), job, NOW, 0)

    if job.retry.allows(job.retries):
        assert (verdict.state, verdict.due_at, verdict.retries) == (
            State.SCHEDULED,
            NOW + later,
            job.retries + 1,
        )
    else:
        assert (verdict.state, verdict.retries) == (State.FAILED, job.retries)


@given(st.sampled_from([None, "succeed"]), standings, jitters)
def test_an_exception_follows_on_exception_even_after_a_wish_to_succeed(wants, job, jitter):
    end = an_end("exception", wants=wants, retry_at=NOW + 1, reason="ValueError: x")
    verdict = judge(end, job, NOW, jitter)

    assert verdict.reason == (
        "panic: ValueError: x" if job.on_exception == "hold" else "ValueError: x"
    )
    if job.on_exception == "fail":
        assert verdict.state is State.FAILED
    elif job.on_exception == "hold":
        assert verdict.state is State.HELD
    else:
        assert_retried_or(State.FAILED, verdict, job, jitter)


@given(overtime, st.booleans(), requests, repeatable, jitters)
def test_overtime_is_retried_until_the_budget_is_spent_then_timed_out(
    cause, started, wants, job, jitter
):
    assert_retried_or(
        State.TIMED_OUT,
        judge(an_end(cause, started=started, wants=wants), job, NOW, jitter),
        job,
        jitter,
    )


def assert_retried_or(spent: State, verdict: Verdict, job: Standing, jitter: float) -> None:
    if job.retry.allows(job.retries):
        wait = job.retry.wait(job.retries, jitter)
        assert verdict.state is (State.SCHEDULED if wait else State.WAITING)
        assert (verdict.due_at, verdict.wait, verdict.retries) == (None, wait, job.retries + 1)
    else:
        assert (verdict.state, verdict.retries) == (spent, job.retries)


@given(st.integers(0, 8), overtime | st.just("exception"))
def test_a_job_with_n_retries_is_tried_n_plus_one_times(times, cause):
    job, tries = a_job(retry=Retry(times)), 1
    while (verdict := judge(an_end(cause), job, NOW, 0)).state is State.SCHEDULED:
        job, tries = replace(job, retries=verdict.retries), tries + 1

    assert tries == times + 1


@given(st.integers(NOW - MINUTE, NOW), st.booleans())
def test_a_retry_in_the_past_waits_behind_jobs_that_are_due_already(past, free):
    end = an_end("returned", wants="retry", free_retry=free, retry_at=past)
    verdict = judge(end, a_job(retry=Retry(1)), NOW, 0)

    assert (verdict.state, verdict.due_at, verdict.wait) == (State.WAITING, None, 0)


@given(crashes, repeatable, requests, jitters)
def test_a_started_attempt_that_died_is_a_crash_and_is_held_at_the_cap(cause, job, wants, jitter):
    verdict = judge(an_end(cause, wants=wants), job, NOW, jitter)

    assert counts(verdict) == (job.retries, job.crashes + 1, job.losses)
    assert verdict.cause == cause
    if verdict.crashes >= job.max_crashes:
        assert verdict.state is State.HELD
        assert cause in (verdict.reason or "")
    else:
        wait = min(5 * MINUTE, SECOND // 2 * 4**job.crashes)
        assert verdict.state is State.SCHEDULED
        assert wait <= (verdict.wait or 0) <= wait * 1.5


@given(st.integers(1, 20), crashes)
def test_a_poison_job_dies_as_often_as_the_cap_says(cap, cause):
    job, deaths_seen = a_job(max_crashes=cap, retry=Retry(-1)), 1
    while (verdict := judge(an_end(cause), job, NOW, 0)).state is State.SCHEDULED:
        job, deaths_seen = replace(job, crashes=verdict.crashes), deaths_seen + 1

    assert (verdict.state, deaths_seen) == (State.HELD, cap)


@given(owner_lost, standings)
def test_a_job_lost_before_its_start_waits_and_is_held_after_ten_losses(cause, job):
    verdict = judge(an_end(cause, started=False), job, NOW, 0)

    assert counts(verdict) == (job.retries, job.crashes, job.losses + 1)
    if verdict.losses >= 10:
        assert verdict.state is State.HELD
        assert cause in (verdict.reason or "")
    else:
        assert (verdict.state, verdict.due_at) == (State.WAITING, None)


@given(owner_lost)
def test_a_job_is_lost_ten_times_before_a_person_must_look(cause):
    job, seen = a_job(), 1
    while (verdict := judge(an_end(cause, started=False), job, NOW, 0)).state is State.WAITING:
        job, seen = replace(job, losses=verdict.losses), seen + 1

    assert (verdict.state, seen) == (State.HELD, 10)


@given(released, st.booleans(), requests, repeatable)
def test_a_released_job_keeps_its_place_and_counts(cause, started, wants, job):
    verdict = judge(an_end(cause, started=started, wants=wants), job, NOW, 0)

    assert (verdict.state, verdict.due_at) == (State.WAITING, None)
    assert counts(verdict) == counts(job)


@given(deaths | released, standings)
def test_a_job_that_had_not_started_when_its_worker_died_counts_nothing(cause, job):
    verdict = judge(an_end(cause, started=False), job, NOW, 0)

    assert (verdict.state, verdict.due_at) == (State.WAITING, None)
    assert counts(verdict) == counts(job)


@given(crashes | released | st.just("maybe_ran"), once_only, requests)
def test_at_most_once_is_failed_as_maybe_ran_when_it_died_after_its_start(cause, job, wants):
    verdict = judge(an_end(cause, wants=wants), job, NOW, 0)

    assert (verdict.state, verdict.cause) == (State.FAILED, "maybe_ran")
    assert cause in (verdict.reason or "")
    assert counts(verdict) == counts(job)


@given(overtime, once_only)
def test_at_most_once_is_not_repeated_after_its_time_was_over(cause, job):
    verdict = judge(an_end(cause), job, NOW, 0)

    assert (verdict.state, verdict.cause) == (State.TIMED_OUT, cause)


@pytest.mark.parametrize(
    "cause", ["", "sigkill", "signal", "signal x", "exit -1", "exit 3x", "Timeout", "expired"]
)
def test_an_unknown_cause_is_an_error_and_not_a_guess(cause):
    with pytest.raises(ValueError, match="cause"):
        judge(an_end(cause), a_job(), NOW, 0)


@given(own_end)
def test_an_unknown_outcome_request_is_an_error_and_not_a_guess(cause):
    with pytest.raises(ValueError, match="outcome request"):
        judge(an_end(cause, wants="explode"), a_job(), NOW, 0)
