"""Stopping jobs: first a flag, then SIGTERM, then SIGKILL.

Jobs are stopped that run too long, use too much, are cancelled, or outlive a drain.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

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
from genba.node.decide.results import progress_text
from genba.node.decide.state import LONG_JOB_US, NodeState
from genba.node.decide.worker_state import (
    WORK_AHEAD_US,
    ClaimedJob,
    ResourceUse,
    StopProgress,
    WorkerState,
    WorkerView,
)
from genba.node.timing import (
    DRAIN_KILL_US,
    KILL_BY_WORKER_US,
    MARK_AFTER_US,
    SIGNALLED_ALONE_US,
)
from genba.storage.records import JobId, Micros

MAX_SIGNALS = 5  # of SIGTERMs to the worker of one job, which is not to blame for so many


def request_stop(
    worker: WorkerState, place: int, claimed: ClaimedJob, how: str, now: Micros
) -> None:
    """Cancel or kill the job at `place`, if it has started.

    A second request never gives it more time.
    """
    kill = how == "kill"
    cause, grace = (Cause.KILLED, 0) if kill else (Cause.CANCELLED, claimed.options.grace)
    before = worker.stops.get(place)
    if before is not None:
        before.kill_at = min(before.kill_at, now + grace)
        if before.cause != Cause.KILLED:
            before.cause = cause
    else:
        worker.stops[place] = StopProgress(place, cause, now, now + grace)


# a look at each running job


def watch_job(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    view: WorkerView,
    now: Micros,
) -> None:
    """Note what the worker runs and for how long.

    Stop the job if it has run out of time or resources.
    """
    _note_place(worker, view, now)
    claimed = worker.job_at(view.place) if view.phase == wire.RUNNING else None
    if claimed is None:
        return
    ran = now - worker.seen_since
    if ran >= LONG_JOB_US:
        _take_back_behind_long(state, actions, worker)
    if claimed.job.task in state.disabled and worker.stop_suggested != view.place:
        worker.stop_suggested = view.place
        actions.append(SuggestStop(worker.slot, view.place))
    _write_start_and_progress(state, actions, worker, claimed, view, now)
    if view.beats != worker.beats:
        worker.beats, worker.beat_at = view.beats, now
    if not state.settings.debug:
        if view.use is not None:
            _stop_large(worker, claimed, view.place, view.use, now)
        _stop_late(state, worker, claimed, view, now)


def _note_place(worker: WorkerState, view: WorkerView, now: Micros) -> None:
    running = view.phase == wire.RUNNING
    if (running and view.place != worker.seen_place) or not (running or worker.exclusive):
        worker.seen_place = view.place
        worker.seen_since = worker.given_at if worker.exclusive else now
        worker.beats, worker.beat_at = view.beats, now
        worker.slow = False


def _take_back_behind_long(state: NodeState, actions: list[Action], worker: WorkerState) -> None:
    """Take back what is queued behind a long job, and give fewer jobs ahead."""
    worker.slow = True
    if worker.host is None:
        state.mean = max(state.mean, WORK_AHEAD_US)
    if worker.outstanding > 1:
        actions.append(TakeJobsBack(worker.slot))


def _write_start_and_progress(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    claimed: ClaimedJob,
    view: WorkerView,
    now: Micros,
) -> None:
    job, progress = claimed.job, view.progress
    fresh = (
        progress is not None
        and progress[1] == view.place
        and progress[0] != worker.progress_number
        and now - worker.progress_at >= claimed.options.progress_every
    )
    # A job that reports progress is known to run.
    if (fresh or now - worker.seen_since >= MARK_AFTER_US) and not claimed.marked:
        claimed.marked = True
        started = state.wall(worker.seen_since)
        actions.append(MarkStarted([(job.id, job.attempt, claimed.claim, started)]))
    if progress and fresh:
        worker.progress_number, worker.progress_at = progress[0], now
        text = progress_text(progress)
        actions.append(WriteProgress([(job.id, job.attempt, claimed.claim, text)]))


def _stop_large(
    worker: WorkerState, claimed: ClaimedJob, place: int, use: ResourceUse, now: Micros
) -> None:
    """Stop a job that uses too much.

    For CPU time it has its grace; for memory it has none, or the memory would be gone before.
    """
    options = claimed.options
    worker.peak_memory = max(worker.peak_memory, use.memory)
    if worker.cpu_at_start is None:
        worker.cpu_at_start = use.cpu
    cpu = use.cpu - worker.cpu_at_start
    if options.memory is not None and use.memory > options.memory:
        worker.stops[place] = StopProgress(place, Cause.OUT_OF_MEMORY, now, now)
    elif options.cpu is not None and cpu >= options.cpu and place not in worker.stops:
        worker.stops[place] = StopProgress(place, Cause.CPU_LIMIT, now, now + options.grace)


def _stop_late(
    state: NodeState, worker: WorkerState, claimed: ClaimedJob, view: WorkerView, now: Micros
) -> None:
    """Stop a job at its timeout, when it stalls, or when other nodes may soon run it."""
    options, place = claimed.options, view.place
    if place in worker.stops:
        return
    kill_at = now + options.grace
    if options.timeout is not None and now - worker.seen_since >= options.timeout:
        worker.stops[place] = StopProgress(place, Cause.TIMEOUT, now, kill_at)
    elif options.stall_timeout is not None and now - worker.beat_at >= options.stall_timeout:
        worker.stops[place] = StopProgress(place, Cause.STALL, now, kill_at)
    elif state.too_late(claimed, now, view.locked):
        kill_at = min(kill_at, state.dead_by)
        worker.stops[place] = StopProgress(place, Cause.LEASE_LOST, now, kill_at)


# from the flag to SIGKILL


def escalate(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    view: WorkerView | None,
    now: Micros,
) -> None:
    """Set the flag, then send SIGTERM, then SIGKILL.

    A job that checks the flag gets SIGTERM at half its grace only.
    """
    running = view is not None and view.phase == wire.RUNNING
    stop = worker.stops.get(view.place) if view is not None and running else None
    if stop is None and worker.host is None and not worker.seats and len(worker.stops) == 1:
        (stop,) = worker.stops.values()  # it may be about to start, and finds the flag set
    if stop is None:
        return
    if not stop.flag_set:
        stop.flag_set = True
        actions.append(RequestStop(worker.slot, stop.place))
    if view is None or view.place != stop.place or not running:
        return  # its result is on the way, and a signal would hit the next job
    checked = view.checked_stop
    term_at = (stop.requested_at + stop.kill_at) // 2 if checked else stop.requested_at
    if now >= stop.kill_at:
        _kill(state, actions, worker, view, stop, now)
    elif not stop.sigterm_sent and now >= term_at:
        stop.sigterm_sent = True
        if worker.host is not None:
            actions.append(StopSeat(worker.slot, stop.place))
        else:
            actions.append(SignalWorker(worker.slot, wire.STOP_SIGNAL))


def _kill(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    view: WorkerView,
    stop: StopProgress,
    now: Micros,
) -> None:
    slot = worker.slot
    if worker.host is not None:
        slot = worker.host
        state.by_slot[slot].killed_for_seat = True
    if view.pid and now < stop.kill_at + KILL_BY_WORKER_US:
        # The worker has forked for this job.  It kills that process and dies in the same way, so
        # that what the job has used is known.
        actions += [KillJobProcess(slot, stop.place), SignalWorker(slot, wire.STOP_SIGNAL)]
    else:
        actions.append(SignalWorker(slot, signal.SIGKILL))


# workers that cannot go on


def release_signalled(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    views: Mapping[int, WorkerView],
    now: Micros,
) -> None:
    """Give back what a worker runs that got a SIGTERM from outside the node, and will exit.

    A service manager signals all processes at once.  Then the node soon drains, and the job has the
    grace.
    """
    if worker.signalled_at is None:
        worker.signalled_at, worker.leaving = now, True
        if worker.host is None and worker.outstanding > 1:
            actions.append(TakeJobsBack(worker.slot))
    if now - worker.signalled_at < SIGNALLED_ALONE_US or state.draining:
        return
    for slot in (worker.slot, *worker.seats):
        busy, view = state.by_slot[slot], views.get(slot)
        claimed = busy.job_at(view.place) if view and view.phase == wire.RUNNING else None
        if view and claimed and view.place not in busy.stops:
            cause = _cause_of_signal(state, claimed.job.id)
            kill_at = now + claimed.options.grace
            busy.stops[view.place] = StopProgress(view.place, cause, now, kill_at)


def _cause_of_signal(state: NodeState, job: JobId) -> str:
    """Blame a job whose worker is signalled again and again: it would be given back for ever."""
    state.signals_seen[job] += 1
    if state.signals_seen[job] <= MAX_SIGNALS:
        return Cause.DRAIN
    return f"signal {signal.SIGTERM.value}"


def stop_paused_writer(
    state: NodeState,
    actions: list[Action],
    worker: WorkerState,
    views: Mapping[int, WorkerView],
    now: Micros,
) -> None:
    """Kill a worker one of whose processes is stopped (SIGSTOP) in a write and blocks others.

    It sees no flag and no SIGTERM.  In a shared worker the write may be any job's, so all of them
    are blamed.
    """
    for slot in (worker.slot, *worker.seats):
        busy, view = state.by_slot[slot], views.get(slot)
        if view and view.phase == wire.RUNNING and busy.job_at(view.place):
            busy.stops.setdefault(view.place, StopProgress(view.place, Cause.PAUSE, now, now))
    actions.append(SignalWorker(worker.slot, signal.SIGKILL))


def end_drain(
    state: NodeState,
    actions: list[Action],
    views: Mapping[int, WorkerView],
    since: Micros,
    now: Micros,
) -> None:
    """After the grace, stop what runs; kill dismissed workers that have not exited soon after."""
    for slot, view in views.items():
        worker = state.by_slot.get(slot)
        if worker is None or view.place in worker.stops or view.phase != wire.RUNNING:
            continue
        if worker.job_at(view.place):
            stop = StopProgress(view.place, Cause.DRAIN, now, now + DRAIN_KILL_US)
            worker.stops[view.place] = stop
    if now >= since + DRAIN_KILL_US:
        slow = [worker for worker in state.workers() if worker.dismissed_at is not None]
        actions += [SignalWorker(worker.slot, signal.SIGKILL) for worker in slow]
