"""Jobs that are cancelled, belong to a disabled task, or are taken back from a worker."""

from __future__ import annotations

from collections.abc import Iterator

from genba import wire
from genba.domain.states import Cause, default_stop_reason
from genba.node.decide.actions import Action, TakeJobsBack, WriteEndings
from genba.node.decide.state import NodeState
from genba.node.decide.stop import request_stop
from genba.node.decide.worker_state import ClaimedJob, WorkerState
from genba.storage.records import Ending, JobId, Micros


def cancel(
    state: NodeState, id: JobId, how: str, reason: str | None, now: Micros, attempt: int | None
) -> tuple[list[Action], bool]:
    """End a job that waits here, or stop one that a worker has; True if it waited.

    `attempt` is None for whichever attempt the job is at.
    """
    before = state.cancelled.get(id)  # a second request without a reason does not remove the first
    if not reason:
        reason = before if before not in (None, Cause.CANCELLED) else default_stop_reason(how)
    ours = (claimed.job.attempt for claimed in state.claimed_jobs() if claimed.job.id == id)
    if attempt is not None and attempt not in ours:
        return [], False
    queued = state.take_out(id)
    if queued is not None:
        state.cancelled[id] = reason
        return [WriteEndings([state.ending_unstarted(queued, Cause.CANCELLED, now)])], True
    if id in state.marking or id in state.taking_slots:
        state.cancelled[id] = reason  # it ends when the database has answered
    for worker in state.workers():
        if worker.check is not None and worker.check.claimed.job.id == id:
            state.cancelled[id] = reason
        for place, claimed in _places(worker):
            if claimed.job.id == id and attempt in (None, claimed.job.attempt):
                state.cancelled[id] = reason
                request_stop(worker, place, claimed, how, now)
                return [TakeJobsBack(worker.slot)], False
    return [], False


def _places(worker: WorkerState) -> Iterator[tuple[int, ClaimedJob]]:
    for bunch in worker.bunches.values():
        for index, claimed in enumerate(bunch.jobs):
            if claimed is not None:
                yield wire.place(bunch.serial, index), claimed


def disable(state: NodeState, tasks: frozenset[str], now: Micros) -> list[Action]:
    """Start no more jobs of these tasks.

    `stop.watch_job` suggests to running ones that they end.
    """
    state.disabled = tasks
    actions = state.release_disabled(now)
    for worker in state.workers():
        jobs = worker.unfinished_jobs() if worker.outstanding > 1 else ()
        if any(claimed.job.task in tasks for claimed in jobs):
            actions.append(TakeJobsBack(worker.slot))
    return actions


def take_back(state: NodeState, worker: WorkerState, count: int, now: Micros) -> list[Ending]:
    """Queue the last `count` jobs of a worker again, whose tokens it had not read."""
    back: list[ClaimedJob] = []
    for bunch in reversed(list(worker.bunches.values())):
        for index in range(len(bunch.jobs) - 1, -1, -1):
            claimed = bunch.jobs[index]
            if claimed is not None and len(back) < count:
                bunch.jobs[index] = None
                bunch.left -= 1
                back.append(claimed)
        if not bunch.left:
            del worker.bunches[bunch.serial]
    worker.outstanding -= len(back)
    for place in [place for place in worker.stops if worker.job_at(place) is None]:
        del worker.stops[place]
    if not worker.outstanding:
        worker.clear_job_flags()
    return state.put_back(back, now)
