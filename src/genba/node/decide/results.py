"""How attempts ended, from what workers report; `worker_death.py` is for workers that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import msgspec

from genba import wire
from genba.domain.states import PANIC, Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import Action, WriteEvent
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import Bunch, ClaimedJob, WorkerState
from genba.storage.records import Claimed, Ending, Micros, Success

# A job that took more than UNUSUAL times the mean, but less than HICCUP_US, may have waited for the
# processor.
UNUSUAL = 16
HICCUP_US = 50_000
SMOOTHING = 0.05  # the weight of one job in the mean

_new = tuple.__new__  # makes a NamedTuple without calling its Python constructor
_success_fields = itemgetter(
    *map(Claimed._fields.index, ("id", "attempt", "claimed_at", "buckets"))
)
_ONLY_STRAYS = {"strays"}  # the extras of a job that succeeded and left processes behind


def take_results(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    results: Sequence[Sequence[Any]],
    now: Micros,
) -> tuple[list[Success], list[Ending]]:
    """Give the successes and the other endings that a worker reports.

    The loop runs once for each job of the node, so a plain return is dealt with inline, in 0.5 µs:
    each function call would add a tenth of a microsecond.
    """
    successes: list[Success] = []
    add = successes.append
    endings: list[Ending] = []
    skew, cancelled, counters = state.skew, state.cancelled, state.counters
    spent_times: list[Micros] = []
    cpu_reported = 0
    bunch: Bunch | None = None
    for serial, index, outcome, payload, started, ended, cpu, peak, extra in results:
        if bunch is None or bunch.serial != serial:
            bunch = worker.bunches.get(serial)
        claimed = bunch.jobs[index] if bunch else None
        if bunch is None or claimed is None:
            continue
        bunch.jobs[index] = None
        bunch.left -= 1
        if not bunch.left:
            del worker.bunches[serial]
        cpu_reported += cpu or 0
        spent = ended - started
        if spent < 1:
            spent = 1  # the clock may have been set back
        spent_times.append(spent)
        job, snapshot, pid = claimed.job, claimed.snapshot, worker.pid
        if extra is not None:
            pid = extra.pop("pid", pid)  # the job had a process of its own
            _report_strays(actions, claimed, extra)
        plain = (
            outcome == wire.RETURNED
            and (not extra or extra.keys() == _ONLY_STRAYS)
            and (snapshot is None or not (snapshot.explicit_outcome or snapshot.on_final))
            and not (cancelled and job.id in cancelled)
        )
        if counters is not None:
            counters.count_run(job, started + skew, spent, outcome, plain)
        if plain:
            quiet = snapshot is not None and snapshot.history == "final"
            id, attempt, claimed_at, buckets = _success_fields(job)
            began, over, limited = started + skew, ended + skew, buckets is not None
            # fmt: off
            success = (id, attempt, claimed.claim, payload, claimed_at, began, over, pid, cpu, peak,
                       quiet, limited)
            # fmt: on
            add(_new(Success, success))
        elif outcome == wire.APPLIED:
            cancelled.pop(job.id, None)  # the job has written its own end
        else:
            fields = (serial, index, outcome, payload, started, ended, cpu, peak, extra or None)
            ending = _ending_of_result(state, worker, claimed, wire.JobResult(*fields), now)
            endings.append(replace(ending, pid=pid))
        if worker.stops:
            worker.stops.pop(wire.place(serial, index), None)
    _update_mean(state, worker, spent_times)
    worker.cpu_reported += cpu_reported
    worker.ended += len(results)
    _after_results(worker, len(spent_times), now)
    return successes, endings


def _update_mean(state: NodeState, worker: WorkerState, spent_times: Sequence[Micros]) -> None:
    """Update the mean time of jobs, which a shared task has of its own."""
    mean = state.mean if worker.task is None else state.task_mean.get(worker.task, 0.0)
    for spent in spent_times:
        if not mean:
            mean = spent
        elif UNUSUAL * mean < spent < HICCUP_US:
            # It waited for the processor: no reason to claim jobs one by one.
            mean += (UNUSUAL - 1) * mean * SMOOTHING
        else:
            mean += (spent - mean) * SMOOTHING
    if worker.task is None:
        state.mean = mean
    else:
        state.task_mean[worker.task] = mean


def _report_strays(actions: list[Action], claimed: ClaimedJob, extra: dict[str, Any]) -> None:
    """Write an event about processes that the job left behind, unless it keeps no history."""
    job, snapshot = claimed.job, claimed.snapshot
    if "strays" in extra and not (snapshot and snapshot.history == "final"):
        more = {"attempt": job.attempt, "processes": extra["strays"]}
        actions.append(WriteEvent("strays_killed", job.id, more))


def _after_results(worker: WorkerState, count: int, now: Micros) -> None:
    worker.outstanding -= count
    if count and not worker.seats:
        worker.slow = False
    worker.idle_since = now
    if not worker.outstanding:
        worker.clear_job_flags()


def _ending_of_result(
    state: NodeState, worker: WorkerState, claimed: ClaimedJob, result: wire.JobResult, now: Micros
) -> Ending:
    """Give the ending of anything but a plain return."""
    extra = result.extra or {}
    end, error = _end_of_result(worker, claimed, result, extra)
    if extra.get("wants") == "retry":
        end = replace(
            end,
            retry_at=extra.get("at"),
            retry_in=extra.get("delay"),
            free_retry=extra.get("free", False),
        )
    return replace(
        state.ending(claimed, end, now),
        error=error,
        result=result.payload if result.outcome == wire.RETURNED else None,
        progress=extra.get("progress"),
        log=extra.get("log"),
        locks="locks" in extra,
        clones=tuple(extra.get("clones", ())),
        started=result.started + state.skew,
        ended=result.ended + state.skew,
        cpu=result.cpu,
        peak=result.peak,
    )


def _end_of_result(
    worker: WorkerState, claimed: ClaimedJob, result: wire.JobResult, extra: dict[str, Any]
) -> tuple[AttemptEnd, str | None]:
    """Give what ended the attempt, and its error."""
    wants, reason = extra.get("wants"), extra.get("reason")
    match result.outcome:
        case wire.BAD_ARGUMENTS:
            return AttemptEnd(
                cause=Cause.EXCEPTION, started=True, wants="hold", reason=reason
            ), None
        case wire.STOPPED:
            stop = worker.stops.get(wire.place(result.serial, result.at))
            cause = stop.cause if stop else Cause.DRAIN
            asked = cause in (Cause.DRAIN, Cause.CANCELLED)
            error = None if asked else text_of(result.payload)
            return AttemptEnd(cause=cause, started=True), error
        case wire.RETURNED:
            if wants is None and claimed.options.explicit_outcome:
                wants, reason = "hold", f"{PANIC}: it returned no outcome"
            return AttemptEnd(cause=Cause.RETURNED, started=True, wants=wants, reason=reason), None
        case _:
            error = text_of(result.payload)
            reason = reason or headline(error)
            if extra.get("final") and wants is None and claimed.options.on_exception == "retry":
                wants = "fail"
            return AttemptEnd(
                cause=Cause.EXCEPTION, started=True, wants=wants, reason=reason
            ), error


def endings_of_refused(state: NodeState, refused: Sequence[Success]) -> list[Ending]:
    """Give endings for successes that the store refused.

    They were cancelled meanwhile, or are not this node's any more; the store finds out which.
    """
    return [
        Ending(
            id=s.id,
            attempt=s.attempt,
            claim=s.claim,
            state="cancelled",
            cause=Cause.CANCELLED,
            reason=state.cancelled.pop(s.id, None),  # the store may know a better one
            started=s.started,
            ended=s.ended,
            pid=s.pid,
            cpu=s.cpu,
            peak=s.peak,
            quiet=s.quiet,
        )
        for s in refused
    ]


# texts


def progress_text(progress: tuple[int, int, float, float, str]) -> str:
    return msgspec.json.encode(progress[2:]).decode()


def text_of(payload: bytes | None) -> str | None:
    return None if payload is None else payload.decode()


def headline(error: str | None) -> str | None:
    """Give type and message of an error in one line."""
    if error is None:
        return None
    described = msgspec.json.decode(error, type=dict[str, Any])
    message = str(described.get("message"))[:500]
    return f"{described.get('type')}: {message}" if message else str(described.get("type"))
