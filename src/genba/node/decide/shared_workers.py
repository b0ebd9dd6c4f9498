"""Shared workers.

Each runs several jobs of one task at a time, and one at a time again when it is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from genba.node.decide.actions import Action, SetSeats, TakeJobsBack
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import ClaimedJob, WorkerState
from genba.storage.records import Micros

log = logging.getLogger("genba.node")


class SharedWorkers:
    def __init__(self, state: NodeState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def give_shared(self, actions: list[Action], now: Micros) -> None:
        """Give each shared job a seat beside others of its task, in one more worker if need be."""
        if self._state.seats_outdated:
            self._close_outdated(actions, now)
        self._give_by_task(actions, now)
        freed = self._make_room(actions, now)
        if freed and not (self._state.ready or self._state.exclusive_next):
            self._give_by_task(actions, now)

    def _close_outdated(self, actions: list[Action], now: Micros) -> None:
        """Close shared workers whose seats do not match the task's concurrency, once empty."""
        outdated = [w for w in self._state.workers() if w.seats and not self._fits(w)]
        for worker in outdated:
            worker.closing = worker.closing or now
            if not worker.outstanding and worker.dismissed_at is None:
                self._unshare(actions, worker)
        self._state.seats_outdated = any(worker.seats for worker in outdated)

    def _fits(self, worker: WorkerState) -> bool:
        return len(worker.seats) == self._state.concurrency.get(worker.task or "", 1)

    def _give_by_task(self, actions: list[Action], now: Micros) -> None:
        shared = self._state.shared
        if not shared:
            return
        jobs_of: dict[str, list[ClaimedJob]] = {}
        for claimed in shared:
            jobs_of.setdefault(claimed.job.task, []).append(claimed)
        shared.clear()
        for task, jobs in jobs_of.items():
            shared.extend(self._give(actions, task, jobs, now))

    def _give(
        self, actions: list[Action], task: str, jobs: Sequence[ClaimedJob], now: Micros
    ) -> Sequence[ClaimedJob]:
        """Fill free seats, then those of more workers, then queue some behind; gives the rest."""
        workers = self._open_workers(task)
        for worker in workers:
            jobs = self._fill(actions, worker, len(worker.seats), jobs, now)
        while jobs and (another := self._share_another(actions, task)) is not None:
            jobs = self._fill(actions, another, len(another.seats), jobs, now)
            workers.append(another)
        depth = self._dispatcher.shared_depth(task)
        workers = [w for w in workers if not w.slow and 2 * w.outstanding <= depth]
        workers.sort(key=lambda worker: worker.outstanding)
        for i, worker in enumerate(workers):
            share = -(-len(jobs) // (len(workers) - i))
            jobs = self._fill(actions, worker, min(depth, worker.outstanding + share), jobs, now)
        return jobs

    def _fill(
        self,
        actions: list[Action],
        worker: WorkerState,
        upto: int,
        jobs: Sequence[ClaimedJob],
        now: Micros,
    ) -> Sequence[ClaimedJob]:
        """Give jobs until the worker has `upto` of them; gives the rest."""
        room = max(0, upto - worker.outstanding)
        given = jobs[:room]
        worker.timed = worker.timed or any(claimed.exclusive for claimed in given)
        self._dispatcher.give_many(actions, worker, given, now)
        return jobs[room:]

    def _make_room(self, actions: list[Action], now: Micros) -> bool:
        """Free shared workers for other jobs that wait; True if one is free now."""
        workers = [
            worker
            for worker in self._state.workers()
            if worker.seats and worker.dismissed_at is None and self._fits(worker)
        ]
        if not self._others_wait():
            for worker in workers:
                worker.closing = None
            return False
        empty = [worker for worker in workers if not worker.outstanding]
        for worker in empty:
            self._unshare(actions, worker)
        self._close_one([worker for worker in workers if worker.outstanding], now)
        return bool(empty)

    def _others_wait(self) -> bool:
        """Whether jobs wait that no shared worker can take."""
        if self._state.ready or self._state.exclusive_next:
            return True
        seated = {worker.task for worker in self._state.workers() if worker.seats}
        return bool(self._state.shared_by_task().keys() - seated)

    def _close_one(self, workers: Sequence[WorkerState], now: Micros) -> None:
        """Give one shared worker no more jobs, if all slots are used and none is closing yet."""
        if not workers or any(worker.closing is not None for worker in workers):
            return
        present = sum(1 for worker in self._state.workers() if not worker.dedicated)
        if present >= self._state.settings.slots and self._state.free_worker() is None:
            min(workers, key=lambda worker: worker.outstanding).closing = now

    def _share_another(self, actions: list[Action], task: str) -> WorkerState | None:
        """Give seats to a worker that has no job; None if there is none."""
        worker = self._state.free_worker()
        if worker is None:
            return None
        first = self._state.last_slot + 1
        self._state.last_slot += self._state.concurrency.get(task, 1)  # a reload may remove it
        worker.seats, worker.task = tuple(range(first, self._state.last_slot + 1)), task
        for slot in worker.seats:
            self._state.by_slot[slot] = worker.new_seat(slot)
        actions.append(SetSeats(worker.slot, worker.seats))
        return worker

    def _open_workers(self, task: str | None = None) -> list[WorkerState]:
        """Give the shared workers, of `task` if given, that may get more jobs."""
        return [
            worker
            for worker in self._state.workers()
            if worker.seats
            and task in (None, worker.task)
            and not worker.leaving
            and worker.closing is None
        ]

    def room(self) -> dict[str, int]:
        """Give how many more jobs of each task can be given now; hundreds, if they are short."""
        room: dict[str, int] = {}
        for worker in self._open_workers():
            assert worker.task is not None
            seats, has = len(worker.seats), worker.outstanding
            depth = seats if worker.slow else self._dispatcher.shared_depth(worker.task)
            if has < seats or 2 * has <= depth:
                room[worker.task] = room.get(worker.task, 0) + depth - has
        return room

    def take_back_spare(self, actions: list[Action]) -> None:
        """Where most running jobs are long, take back those that have no seat yet."""
        for worker in self._state.workers():
            if worker.seats:
                long = sum(self._state.by_slot[slot].slow for slot in worker.seats)
                worker.slow = 2 * long >= len(worker.seats)
                if worker.slow and worker.outstanding > len(worker.seats):
                    actions.append(TakeJobsBack(worker.slot))

    def _unshare(self, actions: list[Action], worker: WorkerState) -> None:
        """Have a worker run one job at a time again."""
        for slot in worker.seats:
            del self._state.by_slot[slot]
        worker.seats, worker.task, worker.closing, worker.slow = (), None, None, False
        actions.append(SetSeats(worker.slot, ()))


def concurrency_of(app: Mapping[str, Any], overrides: Mapping[str, int]) -> dict[str, int]:
    """Give how many jobs of a task run in one worker, where it is more than one."""
    concurrency: dict[str, int] = {}
    for task in app["tasks"]:
        name, declared = task["name"], task.get("concurrency", 1)
        count = overrides.get(name, declared)
        if count > declared and not (task.get("async") and app.get("shareable")):
            log.warning(
                "concurrency=%d of task %s is ignored: the task cannot share a worker", count, name
            )
            count = declared
        if count > 1:
            concurrency[name] = count
    return concurrency
