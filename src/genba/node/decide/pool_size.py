"""How many workers there are: when they start, and when they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genba.domain.duration import SECOND
from genba.node.decide.actions import Action, SpawnWorker, TakeJobsBack
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import WorkerState
from genba.node.settings import NodeSettings
from genba.node.timing import IDLE_WORKER_US
from genba.storage.records import Micros

FIRST_BACK_OFF_US = SECOND // 10  # after a worker could not start; doubled each time
LONGEST_BACK_OFF_US = 30 * SECOND


class PoolSize:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.can_spawn = False
        self.spawn_after: Micros = 0
        self.failed_starts = 0

    def back_off(self, now: Micros) -> None:
        self.failed_starts += 1
        pause = FIRST_BACK_OFF_US * 2 ** min(self.failed_starts, 10)
        self.spawn_after = now + min(LONGEST_BACK_OFF_US, pause)

    @property
    def helpless(self) -> bool:
        """Whether workers cannot start here, so that other nodes should have the jobs."""
        workers = self._state.by_slot.values()
        return self.failed_starts > 0 and not any(worker.ready for worker in workers)

    def start_workers(self, actions: list[Action], now: Micros) -> None:
        """Start as many workers as the pool's mode and the work need."""
        if not self.can_spawn or now < self.spawn_after:
            return
        settings = self._state.settings
        present = busy = coming = going = 0
        for worker in self._state.workers():
            if not worker.dedicated:
                going += worker.dismissed_at is not None
                present += 1
                busy += worker.outstanding > 0
                coming += not worker.ready
        waiting = self._waiting()
        lent = self._state.slots_with_reserve - settings.slots
        if settings.pool == "static":
            target = settings.min + lent
        elif settings.pool == "ondemand":
            target = min(settings.max + lent, busy + waiting)
            # Dismissed workers run nothing any more, and the next need not wait for their exit.
            present -= min(going, settings.max)
        else:
            target = max(settings.min, min(settings.max + lent, busy + waiting))
            if coming and waiting <= coming:
                target = min(target, present)
        if self.helpless:
            target = 1  # one tries again; nothing is claimed before it is ready
        for _ in range(target - present):
            self.spawn(actions, now)

    def _waiting(self) -> int:
        """Give how many workers the queued jobs could use."""
        state = self._state
        waiting = len(state.ready) + state.exclusive_next
        if state.shared:
            for task, jobs in state.shared_by_task().items():
                waiting += -(-jobs // state.concurrency.get(task, 1))
        return waiting

    def spawn(self, actions: list[Action], now: Micros, *, dedicated: bool = False) -> None:
        self._state.last_slot += 1
        slot = self._state.last_slot
        worker = WorkerState(slot, idle_since=now, dedicated=dedicated, leaving=dedicated)
        self._state.by_slot[slot] = worker
        actions.append(SpawnWorker(slot))

    def replace_all(self, now: Micros) -> list[Action]:
        """Let all workers end what they run and exit: they have the app's old code."""
        actions: list[Action] = []
        for worker in self._state.workers():
            self._retire(actions, worker, now)
        return actions

    def resize(self, settings: NodeSettings, now: Micros) -> list[Action]:
        """Take new settings; surplus workers, idle ones first, end what they run and exit."""
        self._state.settings = settings
        workers = [worker for worker in self._state.workers() if not worker.leaving]
        workers.sort(key=lambda worker: worker.outstanding)
        actions: list[Action] = []
        for worker in workers[: max(0, len(workers) - settings.slots)]:
            self._retire(actions, worker, now)
        return actions

    def _retire(self, actions: list[Action], worker: WorkerState, now: Micros) -> None:
        if worker.outstanding:
            worker.leaving = True
            actions.append(TakeJobsBack(worker.slot))
        else:
            self._state.dismiss(actions, worker, now)

    def recycle(
        self, actions: list[Action], worker: WorkerState, results: Sequence[Sequence[Any]]
    ) -> None:
        """Replace a worker that has run too many jobs or has grown too large."""
        jobs, memory = self._state.settings.recycle_jobs, self._state.settings.recycle_memory
        if worker.leaving or (jobs is None and memory is None):
            return
        old = jobs is not None and worker.ended >= jobs
        large = memory is not None and bool(results) and results[-1][7] * 1024 >= memory
        if old or large:
            worker.leaving = True
            if worker.outstanding:
                actions.append(TakeJobsBack(worker.slot))

    def shrink(self, actions: list[Action], now: Micros) -> None:
        """Dismiss workers that were idle for long, unless the pool keeps them."""
        settings = self._state.settings
        if settings.pool == "static":
            return
        kept = settings.min if settings.pool == "dynamic" else 0
        staying = [worker for worker in self._state.workers() if not worker.leaving]
        surplus = len(staying) - kept
        for worker in staying:
            if surplus <= 0:
                return
            idle = worker.ready and not worker.outstanding
            if idle and now - worker.idle_since >= IDLE_WORKER_US:
                self._state.dismiss(actions, worker, now)
                surplus -= 1

    def dismiss_unneeded(self, actions: list[Action], now: Micros) -> None:
        """Dismiss workers started for dedicated jobs that were cancelled meanwhile."""
        state = self._state
        if state.dedicated or any(claimed.dedicated for claimed in state.marking.values()):
            return
        for worker in state.by_slot.values():
            if worker.dedicated and worker.ready and not worker.outstanding:
                state.dismiss(actions, worker, now)
