"""How attempts ended: what workers tell, and what is left to say when one cannot tell any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from genba import wire
from genba.domain.states import PANIC, Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import Action, WriteEvent
from genba.node.decide.endings import cause_of_death, headline, text_of
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import Bunch, ClaimedJob, WorkerState, WorkerView
from genba.storage.records import Claimed, Ending, Micros, Success

UNUSUAL, HICCUP = (
    16,
    50_000,
)  # times the mean, µs: what took longer than that, but not very long, may have been held up

_new = tuple.__new__  # a NamedTuple without a call of its Python constructor
_of_interest = itemgetter(*map(Claimed._fields.index, ("id", "attempt", "claimed_at", "buckets")))
_STRAYS = {"strays"}  # all that is told of a call that ended well and left processes behind


def take_results(
    floor: NodeState,
    actions: list[Action],
    hand: WorkerState,
    results: Sequence[Sequence[Any]],
    now: Micros,
) -> tuple[list[Success], list[Ending]]:
    """What they say of the jobs in `hand`."""
    fine: list[Success] = []
    add = fine.append
    other: list[Ending] = []
    skew, cancelled, meter = floor.skew, floor.cancelled, floor.meter
    mean = floor.mean if hand.task is None else floor.paces.get(hand.task, 0.0)
    came = cpu_told = 0
    bunch: Bunch | None = None
    for serial, index, outcome, payload, started, ended, cpu, peak, extra in results:
        if bunch is None or bunch.serial != serial:
            bunch = hand.bunches.get(serial)
        held = bunch.jobs[index] if bunch else None
        if bunch is None or held is None:
            continue
        bunch.jobs[index] = None
        bunch.left -= 1
        if not bunch.left:
            del hand.bunches[serial]
        came += 1
        cpu_told += cpu or 0
        spent = ended - started
        if spent < 1:
            spent = 1  # the clock may have been set back
        if not mean:
            mean = spent
        elif (
            UNUSUAL * mean < spent < HICCUP
        ):  # it had to wait for the processor: no reason to claim one by one
            mean += (UNUSUAL - 1) * mean * 0.05
        else:
            mean += (spent - mean) * 0.05
        job, snapshot, pid = held.job, held.snapshot, hand.pid
        if extra is not None:
            pid = extra.pop("pid", pid)  # it had a process of its own
            if "strays" in extra and not (snapshot and snapshot.history == "final"):
                actions.append(
                    WriteEvent(
                        "strays_killed",
                        job.id,
                        {"attempt": job.attempt, "processes": extra["strays"]},
                    )
                )
        plain = (
            outcome == wire.RETURNED
            and (not extra or extra.keys() == _STRAYS)
            and (snapshot is None or not (snapshot.explicit_outcome or snapshot.on_final))
            and not (cancelled and job.id in cancelled)
        )
        if meter is not None:
            meter.ran(job, started + skew, spent, outcome, plain)
        if plain:
            quiet = snapshot is not None and snapshot.history == "final"
            id, attempt, claimed, buckets = _of_interest(job)
            began, over, limited = started + skew, ended + skew, buckets is not None
            written = (
                id,
                attempt,
                held.claim,
                payload,
                claimed,
                began,
                over,
                pid,
                cpu,
                peak,
                quiet,
                limited,
            )
            add(_new(Success, written))
        elif outcome == wire.APPLIED:
            cancelled.pop(job.id, None)  # it has written its end itself
        else:
            result = wire.JobResult(
                serial, index, outcome, payload, started, ended, cpu, peak, extra or None
            )
            other.append(replace(_other_end(floor, hand, held, result, now), pid=pid))
        if hand.stops:
            hand.stops.pop(wire.place(serial, index), None)
    if hand.task is None:
        floor.mean = mean
    else:
        floor.paces[hand.task] = mean
    hand.outstanding -= came
    if came and not hand.seats:
        hand.slow = False
    hand.cpu_told += cpu_told
    hand.idle_since = now
    hand.ended += len(results)
    if not hand.outstanding:
        hand.alone = hand.weighed = hand.timed = False
    return fine, other


def _other_end(
    floor: NodeState, hand: WorkerState, held: ClaimedJob, result: wire.JobResult, now: Micros
) -> Ending:
    """Anything but a plain return."""
    extra = result.extra or {}
    wants, reason = extra.get("wants"), extra.get("reason")
    place = wire.place(result.serial, result.at)
    error: str | None = None
    match result.outcome:
        case wire.BAD_ARGUMENTS:
            end = AttemptEnd(cause=Cause.EXCEPTION, started=True, wants="hold", reason=reason)
        case wire.STOPPED:
            stop = hand.stops.get(place)
            cause = stop.cause if stop else Cause.DRAIN
            error = None if cause in (Cause.DRAIN, Cause.CANCELLED) else text_of(result.payload)
            end = AttemptEnd(cause=cause, started=True)
        case wire.RETURNED:
            if wants is None and held.options.explicit_outcome:
                wants, reason = "hold", f"{PANIC}: it returned no outcome"
            end = AttemptEnd(cause=Cause.RETURNED, started=True, wants=wants, reason=reason)
        case _:
            error = text_of(result.payload)
            reason = reason or headline(error)
            if extra.get("final") and wants is None and held.options.on_exception == "retry":
                wants = "fail"
            end = AttemptEnd(cause=Cause.EXCEPTION, started=True, wants=wants, reason=reason)
    if wants == "retry":
        end = replace(
            end,
            retry_at=extra.get("at"),
            retry_in=extra.get("delay"),
            free_retry=extra.get("free", False),
        )
    return replace(
        floor.ending(held, end, now),
        error=error,
        result=result.payload if result.outcome == wire.RETURNED else None,
        progress=extra.get("progress"),
        log=extra.get("log"),
        locks="locks" in extra,
        clones=tuple(extra.get("clones", ())),
        started=result.started + floor.skew,
        ended=result.ended + floor.skew,
        cpu=result.cpu,
        peak=result.peak,
    )


def endings_of_refused(floor: NodeState, lost: Sequence[Success]) -> list[Ending]:
    """Successes that the store refused: asked to stop meanwhile, or not ours any more; the fence will tell."""
    return [
        Ending(
            id=s.id,
            attempt=s.attempt,
            claim=s.claim,
            state="cancelled",
            cause=Cause.CANCELLED,
            reason=floor.cancelled.pop(s.id, None),  # the store may know better
            started=s.started,
            ended=s.ended,
            pid=s.pid,
            cpu=s.cpu,
            peak=s.peak,
            quiet=s.quiet,
        )
        for s in lost
    ]


def end_seat(
    floor: NodeState,
    seat: WorkerState,
    sight: WorkerView,
    forced: bool,
    status: int | None,
    endings: list[Ending],
    now: Micros,
) -> ClaimedJob | None:
    """Of a dead worker: what ran there.  If we had to kill it for one of its jobs, the others are not to blame."""
    victim = seat.at(sight.place) if sight.phase == wire.RUNNING else None
    if victim is not None:
        spared = forced and sight.place not in seat.stops
        cause = Cause.COLLATERAL if spared else cause_of_death(seat, sight.place, status)
        endings.append(
            floor.last_seen(
                floor.ending(victim, AttemptEnd(cause=cause, started=True), now), seat, sight
            )
        )
    return victim
