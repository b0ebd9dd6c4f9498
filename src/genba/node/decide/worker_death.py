"""How the attempts of a dead worker ended, by its exit status and its shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from genba import wire
from genba.domain.states import Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.results import progress_text
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import ClaimedJob, WorkerState, WorkerView
from genba.storage.records import Ending, JobId, Micros


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """What is known of a dead worker.

    `out_of_memory`: the kernel has lately killed for want of memory.
    """

    status: int | None
    cpu: Micros
    peak: int  # kB
    view: WorkerView
    out_of_memory: bool
    seat_views: Mapping[int, WorkerView]


def end_attempts(
    state: NodeState, worker: WorkerState, death: WorkerDeath, now: Micros
) -> tuple[list[Ending], list[ClaimedJob]]:
    """Give the endings of the jobs that ran in a dead worker, and the jobs that had not started."""
    view = death.view
    running = [worker.job_at(view.place) if view.phase == wire.RUNNING else None]
    endings: list[Ending] = []
    if running[0] is not None:
        cause = cause_of_death(worker, view.place, death.status, death.out_of_memory)
        ending = state.ending(running[0], AttemptEnd(cause=cause, started=True), now)
        endings.append(_with_usage(with_last_view(state, ending, worker, view), worker, death))
    for slot in worker.seats:
        seat, seat_view = state.by_slot.pop(slot), death.seat_views[slot]
        running.append(_end_seat(state, endings, worker, seat, seat_view, death.status, now))
    unstarted = [
        claimed
        for claimed in worker.unfinished_jobs()
        if not any(claimed is ended for ended in running)
    ]
    return endings, unstarted


def _with_usage(ending: Ending, worker: WorkerState, death: WorkerDeath) -> Ending:
    spent = max(0, death.cpu - worker.cpu_reported)
    if worker.ended and ending.started is not None and ending.ended is not None:
        # CPU time between earlier jobs is part of no result, and must not be put down to this one.
        spent = min(spent, max(0, ending.ended - ending.started))
    return replace(ending, cpu=spent, peak=max(death.peak, worker.peak_memory // 1024))


def _end_seat(
    state: NodeState,
    endings: list[Ending],
    worker: WorkerState,
    seat: WorkerState,
    view: WorkerView,
    status: int | None,
    now: Micros,
) -> ClaimedJob | None:
    """Add the ending of the job that ran at a dead worker's seat, and give that job.

    If this node killed the worker for the job of another seat, this one is not to blame.
    """
    running = seat.job_at(view.place) if view.phase == wire.RUNNING else None
    if running is not None:
        spared = worker.killed_for_seat and view.place not in seat.stops
        cause = Cause.COLLATERAL if spared else cause_of_death(seat, view.place, status)
        ending = state.ending(running, AttemptEnd(cause=cause, started=True), now)
        endings.append(with_last_view(state, ending, seat, view))
    return running


def end_all_attempts(
    state: NodeState, views: Mapping[int, WorkerView], now: Micros
) -> tuple[list[Ending], set[JobId]]:
    """Give the endings of all running jobs, and their ids, after the guard has died."""
    endings: list[Ending] = []
    ended: set[JobId] = set()
    for slot, worker in state.by_slot.items():
        view = views.get(slot)
        claimed = worker.job_at(view.place) if view and view.phase == wire.RUNNING else None
        if view and claimed:
            ended.add(claimed.job.id)
            ending = state.ending(claimed, AttemptEnd(cause=Cause.COLLATERAL, started=True), now)
            endings.append(with_last_view(state, ending, worker, view))
    return endings, ended


def cause_of_death(
    worker: WorkerState, place: int, status: int | None, out_of_memory: bool = False
) -> str:
    """Give the cause that a worker's death is for its job.

    `out_of_memory` says that the kernel has lately killed a process for want of memory.
    """
    stop = worker.stops.get(place)
    if stop is not None:
        return stop.cause
    if status is None:
        return Cause.COLLATERAL
    if not os.WIFSIGNALED(status):
        return f"exit {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    if out_of_memory and number == signal.SIGKILL:
        return Cause.OUT_OF_MEMORY
    return Cause.CPU_LIMIT if number == signal.SIGXCPU else f"signal {number}"


def with_last_view(
    state: NodeState, ending: Ending, worker: WorkerState, view: WorkerView
) -> Ending:
    """Add what the shared memory shows of an attempt whose worker can report nothing more."""
    started: Micros | None = None
    if view.started:
        started = view.started + state.skew
    elif worker.exclusive or worker.seen_place == view.place:
        started = state.wall(worker.seen_since)
    ended = ending.ended
    if started is not None and ended is not None:
        # `started` is by this machine's clock, and the estimate of the store's time is a little
        # behind it.
        ended = max(started, ended)
    progress = view.progress
    ours = progress is not None and progress[1] == view.place
    return replace(
        ending,
        pid=view.pid or worker.pid,
        started=started,
        ended=ended,
        progress=progress_text(progress) if ours and progress else None,
        log=view.log,
        locks=view.locked,
    )
