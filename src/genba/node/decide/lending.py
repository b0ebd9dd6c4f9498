"""Lending: a job that waits for other jobs needs its worker, but not its slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from genba import wire
from genba.domain.duration import SECOND
from genba.domain.states import Cause
from genba.node.decide.actions import (
    Action,
    CheckAwaited,
    RefuseWait,
    TakeJobsBack,
    WriteEndings,
)
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import WorkerState, WorkerView
from genba.storage.records import Ending, JobId, Micros

MOST_LENT = 8  # slots; one more worker then runs awaited jobs only
LOOK_AGAIN_US = (
    SECOND // 2
)  # µs between two looks at a deadlock; a wait is refused after the second
_MOST_LOOKED_AT = 256  # awaited jobs in one look


class WaitInJob(NamedTuple):
    """A job that waits for others, as its worker shows it."""

    slot: int  # of the worker, or of its seat
    place: int
    worker: WorkerState
    job: JobId
    queue: str
    awaited: tuple[JobId, ...]

    @property
    def key(self) -> tuple[int, int]:
        return self.slot, self.place


class Lending:
    """Lends the slots of jobs that wait, and finds waits that cannot end.

    A worker lends one slot, however many of its jobs wait; a dedicated job has none.  When no more
    slots may be lent, the reserve, one more worker, runs awaited jobs and nothing else, so that
    parents in the queue do not take the place of the children.  Only when the reserve waits too,
    and no awaited job can run elsewhere, the newest wait is refused.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._since: dict[tuple[int, int], Micros] = {}
        self._group: dict[tuple[int, int], WaitInJob] = {}  # waits that may be in a deadlock
        self._looking: frozenset[tuple[int, int]] | None = None
        self._suspected: frozenset[tuple[int, int]] | None = None
        self._look_after: Micros = 0

    def update(self, actions: list[Action], views: Mapping[int, WorkerView], now: Micros) -> None:
        waits = self._waits(views)
        self._since = {wait.key: self._since.get(wait.key, now) for wait in waits}
        self._lend(actions, waits)
        self._state.awaited = _distinct(wait.awaited for wait in waits)
        self._dismiss_spare(actions, now)
        self._look(actions, waits, now)

    def _waits(self, views: Mapping[int, WorkerView]) -> list[WaitInJob]:
        waits = []
        for shown in self._state.by_slot.values():
            view = views.get(shown.slot)
            if view is None or not view.waits or view.phase != wire.RUNNING:
                continue
            claimed = shown.job_at(view.place)
            if claimed is None:
                continue
            worker = shown if shown.host is None else self._state.by_slot[shown.host]
            job = claimed.job
            waits.append(WaitInJob(shown.slot, view.place, worker, job.id, job.queue, view.awaited))
        return waits

    def _lend(self, actions: list[Action], waits: Sequence[WaitInJob]) -> None:
        waiting = {wait.worker.slot for wait in waits if not wait.worker.dedicated}
        workers = self._state.workers()
        for worker in workers:
            worker.lends_slot = worker.lends_slot and worker.slot in waiting
        lent = sum(worker.lends_slot for worker in workers)
        for worker in workers:
            if worker.lends_slot or worker.slot not in waiting:
                continue
            starts = lent < MOST_LENT
            if worker.outstanding > 1 and (starts or not worker.seats):
                actions.append(TakeJobsBack(worker.slot))  # an awaited job may stand behind it
            worker.lends_slot = starts
            lent += starts
        self._state.reserve = lent >= MOST_LENT
        self._state.lent_by_queue = Counter(wait.queue for wait in waits if wait.worker.lends_slot)

    def keep_reserve(self, actions: list[Action], now: Micros) -> None:
        """Give back what would take the reserve from awaited jobs."""
        state = self._state
        free, awaited = max(0, state.slots - state.busy_workers), set(state.awaited)
        endings: list[Ending] = []
        for queue in (state.exclusive, state.shared, state.unchecked, state.ready):
            jobs = list(queue)
            queue.clear()
            for claimed in jobs:
                if claimed.job.id in awaited:
                    queue.append(claimed)
                elif free:
                    queue.append(claimed)
                    free -= 1
                else:
                    endings.append(state.ending_unstarted(claimed, Cause.DRAIN, now))
        if endings:
            actions.append(WriteEndings(endings))

    def _dismiss_spare(self, actions: list[Action], now: Micros) -> None:
        workers = [w for w in self._state.workers() if not w.dedicated and not w.leaving]
        spare = len(workers) - self._state.slots_with_reserve
        for worker in workers:
            idle = worker.ready and not worker.outstanding and worker.dismissed_at is None
            if spare > 0 and idle:
                self._state.dismiss(actions, worker, now)
                spare -= 1

    # deadlocks

    def _look(self, actions: list[Action], waits: Sequence[WaitInJob], now: Micros) -> None:
        """Let the database be asked whether anything can end the waits of this node."""
        settings = self._state.settings
        usual = [wait for wait in waits if not wait.worker.dedicated]
        dedicated = [wait for wait in waits if wait.worker.dedicated]
        no_slot = len(_all_waiting(usual)) > settings.slots + MOST_LENT
        no_dedicated = bool(dedicated) and len(dedicated) >= settings.max_dedicated
        group = (usual if no_slot else []) + (dedicated if no_dedicated else [])
        self._group = {wait.key: wait for wait in group}
        if not group or self._state.draining:
            self._suspected = None
            return
        if self._looking is not None or now < self._look_after:
            return
        self._looking = frozenset(self._group)
        actions.append(
            CheckAwaited(
                _distinct(wait.awaited for wait in group),
                waiting=frozenset(wait.job for wait in waits),
                slot_free=not no_slot,
                dedicated_free=not no_dedicated,
            )
        )

    def on_checked(self, can_end: bool, now: Micros) -> list[Action]:
        """Refuse the newest wait if two looks, one after the other, found the same deadlock."""
        looked_at, self._looking = self._looking, None
        self._look_after = now + LOOK_AGAIN_US
        if can_end or looked_at is None or looked_at != self._group.keys():
            self._suspected = None
            return []
        if looked_at != self._suspected:
            self._suspected = looked_at
            return []
        self._suspected = None
        newest = max(self._group.values(), key=lambda wait: (self._since[wait.key], wait.job))
        return [RefuseWait(newest.slot, newest.place)]


def _all_waiting(waits: Iterable[WaitInJob]) -> list[WorkerState]:
    """Return the workers all of whose jobs wait."""
    counts = Counter(wait.worker.slot for wait in waits)
    workers = {wait.worker.slot: wait.worker for wait in waits}
    return [
        worker
        for slot, worker in workers.items()
        if counts[slot] >= min(worker.outstanding, len(worker.seats) or 1)
    ]


def _distinct(awaited: Iterable[tuple[JobId, ...]]) -> tuple[JobId, ...]:
    """Return the ids once each, the first of every wait before the second of any."""
    columns = list(awaited)
    longest = max(map(len, columns), default=0)
    ids = (column[i] for i in range(longest) for column in columns if i < len(column))
    return tuple(islice(dict.fromkeys(ids), _MOST_LOOKED_AT))
