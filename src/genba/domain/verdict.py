"""What becomes of a job when an attempt at it has ended: the table of the design, as one function."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from genba.domain.duration import Micros
from genba.domain.retry import Retry
from genba.domain.states import PANIC, Cause, State

MAX_LOSSES = 10
LOWEST_PRIORITY = -(2**31)

_CRASH_BACKOFF = Retry(times=-1, delay="500ms", backoff=4, cap="5m")

_OVERTIME = frozenset({Cause.TIMEOUT, Cause.STALL})
_GIVEN_BACK = frozenset({Cause.DRAIN, Cause.COLLATERAL, Cause.NOT_READY})
_OWNER_LOST = frozenset({Cause.NODE_LOST, Cause.LEASE_LOST})
_DIED = frozenset({Cause.OUT_OF_MEMORY, Cause.CPU_LIMIT, Cause.PAUSE})
_DIED_WITH_NUMBER = re.compile(r"(?:signal|exit) [0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended.

    `wants` ("succeed", "fail", "hold", "retry") is what the job's code asked for; it counts only when the code came to
    its own end.  With an exception it is what the exception itself says (RetryJob, FailJob): one forgets what was asked
    for before it.
    """

    cause: str
    started: bool  # known to have begun the user's code
    retry_at: Micros | None = None
    retry_in: Micros | None = None
    free_retry: bool = False
    wants: str | None = None
    reason: str | None = None
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the job's row says: its policy, and what has been counted so far."""

    priority: int
    retries: int
    crashes: int
    losses: int
    retry: Retry
    max_crashes: int
    on_exception: str
    at_most_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The job's next state and its new counts.

    `due_at` is a moment that the job's code has named, `wait` counts from when the verdict is written, by the clock of
    that moment; neither keeps the due time it has, and with it the place in the queue.
    `rank_priority` is None when there is no queue to rank in.
    """

    state: State
    cause: str  # to record for the attempt
    due_at: Micros | None
    wait: Micros | None
    retries: int
    crashes: int
    losses: int
    rank_priority: int | None
    reason: str | None
    alone: bool  # the next claim takes it without company


def judge(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    """The one place that decides where a job goes after `end`; `jitter` in [0, 1) spreads the waits."""
    if end.cancel_requested or end.cause in (Cause.CANCELLED, Cause.KILLED):
        return _cancelled(end, job)
    if end.cause == Cause.RETURNED:
        return _as_asked(end, job, now, jitter)
    if end.cause == Cause.EXCEPTION:
        return _after_exception(end, job, now, jitter)
    if end.cause in _OVERTIME:
        if job.at_most_once and end.started:
            return _rest(State.TIMED_OUT, end, job, end.reason or end.cause)
        return _counted_retry(end, job, now, jitter, spent=State.TIMED_OUT)
    if end.cause in _GIVEN_BACK or _is_death(end.cause) or end.cause == Cause.MAYBE_RAN:
        return _after_death(end, job, jitter)
    raise ValueError(f"unknown cause {end.cause!r}")


def _cancelled(end: AttemptEnd, job: Standing) -> Verdict:
    cause = Cause.CANCELLED if end.cause == Cause.RETURNED else end.cause
    return _rest(State.CANCELLED, replace(end, cause=cause), job, end.reason or cause)


def _as_asked(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    match end.wants:
        case None | "succeed":
            return _rest(State.SUCCEEDED, end, job, end.reason)
        case "fail":
            return _rest(State.FAILED, end, job, end.reason or "failed by its own code")
        case "hold":
            return _rest(State.HELD, end, job, end.reason or "held by its own code")
        case "retry" if end.free_retry:
            return _asked_again(end, job, now, jitter, end.reason)
        case "retry":
            return _counted_retry(end, job, now, jitter, spent=State.FAILED)
    raise ValueError(f"unknown wish {end.wants!r}")


def _after_exception(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    if end.wants not in (None, "succeed"):
        return _as_asked(end, job, now, jitter)
    reason = end.reason or end.cause
    match job.on_exception:
        case "fail":
            return _rest(State.FAILED, end, job, reason)
        case "hold":
            return _rest(State.HELD, end, job, f"{PANIC}: {reason}")
        case "retry":
            return _counted_retry(
                replace(end, retry_at=None, retry_in=None), job, now, jitter, spent=State.FAILED
            )
    raise ValueError(f"unknown on_exception {job.on_exception!r}")


def _after_death(end: AttemptEnd, job: Standing, jitter: float) -> Verdict:
    """The attempt did not come to its own end; whether its code had begun decides."""
    if end.cause == Cause.MAYBE_RAN or (job.at_most_once and end.started):
        reason = end.reason or f"it may have run, and must not run twice: {end.cause}"
        return _rest(State.FAILED, replace(end, cause=Cause.MAYBE_RAN), job, reason)
    if end.cause in _GIVEN_BACK:
        return _again(end, job, end.reason)
    if end.started:
        return _after_crash(end, job, jitter)
    if end.cause in _OWNER_LOST:
        return _after_loss(end, job)
    return _again(end, job, end.reason)


def _after_crash(end: AttemptEnd, job: Standing, jitter: float) -> Verdict:
    crashed = replace(job, crashes=job.crashes + 1)
    if crashed.crashes >= job.max_crashes:
        return _rest(
            State.HELD, end, crashed, f"crashed {_times(crashed.crashes)}, last by {end.cause}"
        )
    wait = _CRASH_BACKOFF.wait(job.crashes, jitter)
    return _again(end, crashed, end.reason or f"crashed by {end.cause}", wait=wait)


def _after_loss(end: AttemptEnd, job: Standing) -> Verdict:
    lost = replace(job, losses=job.losses + 1)
    if lost.losses >= MAX_LOSSES:
        return _rest(
            State.HELD,
            end,
            lost,
            f"lost {_times(lost.losses)} before it started, last by {end.cause}",
        )
    return _again(end, lost, end.reason)


def _counted_retry(
    end: AttemptEnd, job: Standing, now: Micros, jitter: float, *, spent: State
) -> Verdict:
    reason = end.reason or end.cause
    if not job.retry.allows(job.retries):
        return _rest(spent, end, job, reason)
    again = _asked_again(end, job, now, jitter, reason)
    return replace(again, retries=job.retries + 1)


def _asked_again(
    end: AttemptEnd, job: Standing, now: Micros, jitter: float, reason: str | None
) -> Verdict:
    """When its code has said, else by its rule."""
    if end.retry_at is not None and end.retry_at > now:
        return _again(end, job, reason, due_at=end.retry_at)
    if end.retry_at is not None:
        return _again(end, job, reason, wait=0)  # a moment in the past must not jump the queue
    wait = job.retry.wait(job.retries, jitter) if end.retry_in is None else max(0, end.retry_in)
    return _again(end, job, reason, wait=wait)


def _again(
    end: AttemptEnd,
    job: Standing,
    reason: str | None,
    *,
    due_at: Micros | None = None,
    wait: Micros | None = None,
) -> Verdict:
    """Back into the queue: at `due_at`, after `wait`, or in its old place."""
    return Verdict(
        state=State.SCHEDULED if due_at is not None or wait else State.WAITING,
        cause=end.cause,
        due_at=due_at,
        wait=wait,
        retries=job.retries,
        crashes=job.crashes,
        losses=job.losses,
        rank_priority=max(LOWEST_PRIORITY, job.priority - job.crashes),
        reason=reason,
        alone=job.losses > 0 and not end.started,
    )


def _rest(state: State, end: AttemptEnd, job: Standing, reason: str | None) -> Verdict:
    """Out of the queue: final, or held."""
    return Verdict(
        state=state,
        cause=end.cause,
        due_at=None,
        wait=None,
        retries=job.retries,
        crashes=job.crashes,
        losses=job.losses,
        rank_priority=None,
        reason=reason,
        alone=False,
    )


def _is_death(cause: str) -> bool:
    return cause in _OWNER_LOST or cause in _DIED or _DIED_WITH_NUMBER.fullmatch(cause) is not None


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
