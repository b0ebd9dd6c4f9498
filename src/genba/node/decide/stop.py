"""What runs too long or takes too much, and how it is stopped: flag, SIGTERM, SIGKILL."""

from __future__ import annotations

import signal

from genba import wire
from genba.domain.states import Cause
from genba.node.decide.actions import (
    Action,
    KillJobProcess,
    MarkStarted,
    RequestStop,
    SignalWorker,
    StopSeat,
    SuggestStop,
    TakeJobsBack,
    WriteProgress,
)
from genba.node.decide.endings import progress_text
from genba.node.decide.state import LONG_JOB_US, SECOND, NodeState
from genba.node.decide.worker_state import (
    WORK_AHEAD_US,
    ClaimedJob,
    ResourceUse,
    StopProgress,
    WorkerState,
    WorkerView,
)
from genba.storage.records import JobId, Micros

MARK_AFTER_US = 1 * SECOND
SIGNALLED_ALONE_US = SECOND // 2  # then a signal was for one worker, and not for the whole node
MAX_SIGNALS = 5  # for so many the same job is not to blame
KILL_BY_WORKER_US = SECOND // 2  # for a worker to end the process of its job
DRAIN_KILL_US = (
    1 * SECOND
)  # a node is gone 2 s after its grace: one is for the sweep and the last writes
DRAIN_LEAVE_US = (
    SECOND * 7 // 4
)  # ... of which it keeps a quarter, for a machine that is slow to end a process


def request_stop(hand: WorkerState, place: int, held: ClaimedJob, how: str, now: Micros) -> None:
    """If it has started; else it comes back by its token.  To ask again never gives it more time."""
    cause, grace = (Cause.KILLED, 0) if how == "kill" else (Cause.CANCELLED, held.options.grace)
    before = hand.stops.get(place)
    if before is not None:
        before.kill_at = min(before.kill_at, now + grace)
        if before.cause != Cause.KILLED:
            before.cause = cause
    else:
        hand.stops[place] = StopProgress(place, cause, now, now + grace)


def watch_job(
    floor: NodeState, actions: list[Action], hand: WorkerState, sight: WorkerView, now: Micros
) -> None:
    running = sight.phase == wire.RUNNING
    if (running and sight.place != hand.seen_place) or not (running or hand.alone):
        hand.seen_place, hand.seen_since = sight.place, now if not hand.alone else hand.given_at
        hand.beats, hand.beat_at = sight.beats, now
        hand.slow = False
    held = hand.at(sight.place) if running else None
    if held is None:
        return
    ran = now - hand.seen_since
    if ran >= LONG_JOB_US:
        hand.slow = True
        if hand.host is None:
            floor.mean = max(
                floor.mean, WORK_AHEAD_US
            )  # no more in advance, while jobs are like this
        if hand.outstanding > 1:
            actions.append(TakeJobsBack(hand.slot))
    job, options = held.job, held.options
    if job.task in floor.disabled and hand.bowing != sight.place:
        hand.bowing = sight.place
        actions.append(SuggestStop(hand.slot, sight.place))
    noted = sight.noted
    fresh = noted is not None and noted[1] == sight.place and noted[0] != hand.noted
    tells = fresh and now - hand.noted_at >= options.progress_every
    if (ran >= MARK_AFTER_US or tells) and not held.marked:  # who tells of progress is known to run
        held.marked = True
        actions.append(
            MarkStarted([(job.id, job.attempt, held.claim, floor.wall(hand.seen_since))])
        )
    if sight.beats != hand.beats:
        hand.beats, hand.beat_at = sight.beats, now
    if noted and tells:
        hand.noted, hand.noted_at = noted[0], now
        actions.append(WriteProgress([(job.id, job.attempt, held.claim, progress_text(noted))]))
    if sight.use is not None and not floor.settings.debug:
        _weigh(hand, held, sight.place, sight.use, now)
    place = sight.place
    if place not in hand.stops and not floor.settings.debug:
        if options.timeout is not None and ran >= options.timeout:
            hand.stops[place] = StopProgress(place, Cause.TIMEOUT, now, now + options.grace)
        elif options.stall_timeout is not None and now - hand.beat_at >= options.stall_timeout:
            hand.stops[place] = StopProgress(place, Cause.STALL, now, now + options.grace)
        elif floor.too_late(held, now, sight.locked):
            hand.stops[place] = StopProgress(
                place, Cause.LEASE_LOST, now, min(now + options.grace, floor.dead_by)
            )


def _weigh(hand: WorkerState, held: ClaimedJob, place: int, use: ResourceUse, now: Micros) -> None:
    """For CPU time there is a grace as for any time; memory would be gone before that is over."""
    options = held.options
    hand.heaviest = max(hand.heaviest, use.memory)
    if hand.cpu_before is None:
        hand.cpu_before = use.cpu
    if options.memory is not None and use.memory > options.memory:
        hand.stops[place] = StopProgress(place, Cause.OUT_OF_MEMORY, now, now)
    elif (
        options.cpu is not None
        and use.cpu - hand.cpu_before >= options.cpu
        and place not in hand.stops
    ):
        hand.stops[place] = StopProgress(place, Cause.CPU_LIMIT, now, now + options.grace)


def escalate(
    floor: NodeState,
    actions: list[Action],
    hand: WorkerState,
    sight: WorkerView | None,
    now: Micros,
) -> None:
    """Flag, then SIGTERM (at half the grace for one that looks at the flag), then SIGKILL."""
    running = sight is not None and sight.phase == wire.RUNNING
    stop = hand.stops.get(sight.place) if sight is not None and running else None
    if stop is None and hand.host is None and not hand.seats and len(hand.stops) == 1:
        (stop,) = hand.stops.values()  # it may be about to start, and shall see the flag at once
    if stop is None:
        return
    if not stop.flagged:
        stop.flagged = True
        actions.append(RequestStop(hand.slot, stop.place))
    if sight is None or sight.place != stop.place or not running:
        return  # its result is on the way; whoever runs now must not be hit
    term_at = (stop.asked_at + stop.kill_at) // 2 if sight.looked else stop.asked_at
    if now >= stop.kill_at:
        if hand.host is not None:
            floor.hands[hand.host].forced = True
        worker = hand.slot if hand.host is None else hand.host
        if sight.pid and now < stop.kill_at + KILL_BY_WORKER_US:
            # It has forked for this job, ends it, and dies like it: so it is known what the job has used.
            actions += [KillJobProcess(worker, stop.place), SignalWorker(worker, signal.SIGTERM)]
        else:
            actions.append(SignalWorker(worker, signal.SIGKILL))
    elif not stop.termed and now >= term_at:
        stop.termed = True
        seated = hand.host is not None
        actions.append(
            StopSeat(hand.slot, stop.place) if seated else SignalWorker(hand.slot, signal.SIGTERM)
        )


def release_signalled(
    floor: NodeState,
    actions: list[Action],
    hand: WorkerState,
    sights: dict[int, WorkerView],
    now: Micros,
) -> None:
    """Somebody else has told this worker to go, and it will: what it runs goes back.

    Unless we hear soon that we shall drain: a service manager tells all processes at once, and then a job has its time.
    """
    if hand.hit_at is None:
        hand.hit_at, hand.leaving = now, True
        if hand.host is None and hand.outstanding > 1:
            actions.append(TakeJobsBack(hand.slot))
    if now - hand.hit_at < SIGNALLED_ALONE_US or floor.draining:
        return
    for number in (hand.slot, *hand.seats):
        busy, sight = floor.hands[number], sights.get(number)
        held = busy.at(sight.place) if sight and sight.phase == wire.RUNNING else None
        if sight and held and sight.place not in busy.stops:
            cause = _cause_of_hit(floor, held.job.id)
            busy.stops[sight.place] = StopProgress(
                sight.place, cause, now, now + held.options.grace
            )


def stop_paused_writer(
    floor: NodeState,
    actions: list[Action],
    hand: WorkerState,
    sights: dict[int, WorkerView],
    now: Micros,
) -> None:
    """Somebody below this worker was stopped in the middle of a write, and keeps all others from writing.

    It cannot hear a flag or a SIGTERM.  In company nobody can tell whose write it was: it is put down to all.
    """
    for number in (hand.slot, *hand.seats):
        busy, sight = floor.hands[number], sights.get(number)
        if sight and sight.phase == wire.RUNNING and busy.at(sight.place):
            busy.stops.setdefault(sight.place, StopProgress(sight.place, Cause.PAUSE, now, now))
    actions.append(SignalWorker(hand.slot, signal.SIGKILL))


def _cause_of_hit(floor: NodeState, job: JobId) -> str:
    """A job that is hit again and again does it itself, and would be given back for ever."""
    floor.hits[job] += 1
    return Cause.DRAIN if floor.hits[job] <= MAX_SIGNALS else f"signal {signal.SIGTERM.value}"


def end_drain(
    floor: NodeState,
    actions: list[Action],
    sights: dict[int, WorkerView],
    since: Micros,
    now: Micros,
) -> None:
    """The grace is over: stop what runs, and who was told to go and has not gone has no more time than that."""
    for slot, sight in sights.items():
        hand = floor.hands.get(slot)
        if (
            hand
            and sight.place not in hand.stops
            and sight.phase == wire.RUNNING
            and hand.at(sight.place)
        ):
            hand.stops[sight.place] = StopProgress(
                sight.place, Cause.DRAIN, now, now + DRAIN_KILL_US
            )
    if now >= since + DRAIN_KILL_US:
        slow = [hand for hand in floor.workers() if hand.told_to_go is not None]
        actions += [SignalWorker(hand.slot, signal.SIGKILL) for hand in slow]
