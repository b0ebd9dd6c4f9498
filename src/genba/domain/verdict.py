"""Decide a job's next state after an attempt has ended: the design's table as one function."""

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
_RELEASED = frozenset({Cause.DRAIN, Cause.COLLATERAL, Cause.NOT_READY})
_OWNER_LOST = frozenset({Cause.NODE_LOST, Cause.LEASE_LOST})
_DIED = frozenset({Cause.OUT_OF_MEMORY, Cause.CPU_LIMIT, Cause.PAUSE})
_DIED_WITH_NUMBER = re.compile(r"(?:signal|exit) [0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended.

    `wants` ("succeed", "fail", "hold", "retry") is the outcome that the job's code requested.  It
    counts only if the code came to its own end.  After an exception it is the outcome that the
    exception names (RetryJob, FailJob); earlier requests are dropped.
    """

    cause: str
    started: bool  # the user's code is known to have begun
    retry_at: Micros | None = None
    retry_in: Micros | None = None
    free_retry: bool = False
    wants: str | None = None
    reason: str | None = None
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The job's row before the verdict: its policy and its counts so far."""

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

    `due_at` is a moment that the job's code has named; `wait` counts from the moment when the
    verdict is written.  Without both, the job keeps its due time and with it its place in the
    queue.  `rank_priority` is None if the job leaves the queue.
    """

    state: State
    cause: str  # recorded for the attempt
    due_at: Micros | None
    wait: Micros | None
    retries: int
    crashes: int
    losses: int
    rank_priority: int | None
    reason: str | None


def judge(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    """Decide the job's next state after `end`; `jitter` in [0, 1) spreads the waits."""
    if end.cancel_requested or end.cause in (Cause.CANCELLED, Cause.KILLED):
        return _cancelled(end, job)
    if end.cause == Cause.RETURNED:
        return _as_requested(end, job, now, jitter)
    if end.cause == Cause.EXCEPTION:
        return _after_exception(end, job, now, jitter)
    if end.cause in _OVERTIME:
        if job.at_most_once and end.started:
            return _leave_queue(State.TIMED_OUT, end, job, end.reason or end.cause)
        return _counted_retry(end, job, now, jitter, spent=State.TIMED_OUT)
    if end.cause in _RELEASED or _is_death(end.cause) or end.cause == Cause.MAYBE_RAN:
        return _after_death(end, job, jitter)
    raise ValueError(f"unknown cause {end.cause!r}")


def _cancelled(end: AttemptEnd, job: Standing) -> Verdict:
    cause = Cause.CANCELLED if end.cause == Cause.RETURNED else end.cause
    return _leave_queue(State.CANCELLED, replace(end, cause=cause), job, end.reason or cause)


def _as_requested(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    match end.wants:
        case None | "succeed":
            return _leave_queue(State.SUCCEEDED, end, job, end.reason)
        case "fail":
            return _leave_queue(State.FAILED, end, job, end.reason or "failed by its own code")
        case "hold":
            return _leave_queue(State.HELD, end, job, end.reason or "held by its own code")
        case "retry" if end.free_retry:
            return _retry(end, job, now, jitter, end.reason)
        case "retry":
            return _counted_retry(end, job, now, jitter, spent=State.FAILED)
    raise ValueError(f"unknown outcome request {end.wants!r}")


def _after_exception(end: AttemptEnd, job: Standing, now: Micros, jitter: float) -> Verdict:
    if end.wants not in (None, "succeed"):
        return _as_requested(end, job, now, jitter)
    reason = end.reason or end.cause
    match job.on_exception:
        case "fail":
            return _leave_queue(State.FAILED, end, job, reason)
        case "hold":
            return _leave_queue(State.HELD, end, job, f"{PANIC}: {reason}")
        case "retry":
            return _counted_retry(
                replace(end, retry_at=None, retry_in=None), job, now, jitter, spent=State.FAILED
            )
    raise ValueError(f"unknown on_exception {job.on_exception!r}")


def _after_death(end: AttemptEnd, job: Standing, jitter: float) -> Verdict:
    """Decide after an attempt that did not come to its own end, by whether its code had begun."""
    if end.cause == Cause.MAYBE_RAN or (job.at_most_once and end.started):
        reason = end.reason or f"it may have run, and must not run twice: {end.cause}"
        return _leave_queue(State.FAILED, replace(end, cause=Cause.MAYBE_RAN), job, reason)
    if end.cause in _RELEASED:
        return _requeue(end, job, end.reason)
    if end.started:
        return _after_crash(end, job, jitter)
    if end.cause in _OWNER_LOST:
        return _after_loss(end, job)
    return _requeue(end, job, end.reason)


def _after_crash(end: AttemptEnd, job: Standing, jitter: float) -> Verdict:
    crashed = replace(job, crashes=job.crashes + 1)
    if crashed.crashes >= job.max_crashes:
        return _leave_queue(
            State.HELD, end, crashed, f"crashed {_times(crashed.crashes)}, last by {end.cause}"
        )
    wait = _CRASH_BACKOFF.wait(job.crashes, jitter)
    return _requeue(end, crashed, end.reason or f"crashed by {end.cause}", wait=wait)


def _after_loss(end: AttemptEnd, job: Standing) -> Verdict:
    lost = replace(job, losses=job.losses + 1)
    if lost.losses >= MAX_LOSSES:
        return _leave_queue(
            State.HELD,
            end,
            lost,
            f"lost {_times(lost.losses)} before it started, last by {end.cause}",
        )
    return _requeue(end, lost, end.reason)


def _counted_retry(
    end: AttemptEnd, job: Standing, now: Micros, jitter: float, *, spent: State
) -> Verdict:
    reason = end.reason or end.cause
    if not job.retry.allows(job.retries):
        return _leave_queue(spent, end, job, reason)
    again = _retry(end, job, now, jitter, reason)
    return replace(again, retries=job.retries + 1)


def _retry(
    end: AttemptEnd, job: Standing, now: Micros, jitter: float, reason: str | None
) -> Verdict:
    """Run again at the moment that the code requested, otherwise by the job's retry rule."""
    if end.retry_at is not None and end.retry_at > now:
        return _requeue(end, job, reason, due_at=end.retry_at)
    if end.retry_at is not None:
        # A moment in the past must not move the job to the front of the queue.
        return _requeue(end, job, reason, wait=0)
    wait = job.retry.wait(job.retries, jitter) if end.retry_in is None else max(0, end.retry_in)
    return _requeue(end, job, reason, wait=wait)


def _requeue(
    end: AttemptEnd,
    job: Standing,
    reason: str | None,
    *,
    due_at: Micros | None = None,
    wait: Micros | None = None,
) -> Verdict:
    """Return the job to its queue: at `due_at`, after `wait`, or in its old place."""
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
    )


def _leave_queue(state: State, end: AttemptEnd, job: Standing, reason: str | None) -> Verdict:
    """Take the job out of its queue: final, or held."""
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
    )


def _is_death(cause: str) -> bool:
    return cause in _OWNER_LOST or cause in _DIED or _DIED_WITH_NUMBER.fullmatch(cause) is not None


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
