"""Which worker gets which claimed jobs: one by one, in bunches, or to a dedicated worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genba.domain.duration import SECOND
from genba.domain.states import Cause, State
from genba.node.decide.actions import Action, DismissWorker, GiveJobs, MarkStarted, WriteEndings
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.state import LONG_JOB_US, NodeState
from genba.node.decide.worker_state import WORK_AHEAD_US, Bunch, ClaimedJob, WorkerState
from genba.storage.records import Micros

BUNCH_SIZE = 64  # jobs in one frame
# Of arguments in one frame: a worker starts the first job when it has the whole frame.
FRAME_BYTES = 1 << 17
# Jobs that a worker may have.  With half as many, workers ran dry while the writer was in a commit:
# a sixth fewer tiny jobs per second on SQLite.
DEEPEST = 2048
# Of arguments that a worker may have; and for all workers together, if there are few: 800 jobs of
# 10 kB are done before the next come.
WORKER_BYTES = 8 << 20
TOTAL_BYTES = 40 << 20
FORK_US = 3_000  # what a process of its own costs a job
DEDICATED_AGAIN_US = 2 * SECOND  # a dedicated job without room here comes back after this


class Dispatcher:
    def __init__(self, state: NodeState, pool_size: PoolSize) -> None:
        self._state = state
        self._pool_size = pool_size
        self._serial = 0

    def give_exclusive(self, actions: list[Action], now: Micros) -> None:
        queue = self._state.exclusive
        while queue:
            worker = self._state.free_worker()
            if worker is None or self._state.too_late(queue[0], now):
                return
            self.give_one(actions, worker, queue.popleft(), now)

    def give_one(
        self, actions: list[Action], worker: WorkerState, claimed: ClaimedJob, now: Micros
    ) -> None:
        """Give a job to a worker that has no other; have its start written first, if it must be."""
        if claimed.must_mark and not claimed.marked:
            job = claimed.job
            self._state.marking[job.id] = claimed
            mark = (job.id, job.attempt, claimed.claim, self._state.wall(now))
            actions.append(MarkStarted([mark], first=True))
            return
        self.give(actions, worker, [claimed], now)
        worker.exclusive, worker.measured = True, claimed.measured
        worker.peak_memory, worker.cpu_at_start = 0, None

    def give_dedicated(self, actions: list[Action], now: Micros) -> None:
        """Give each dedicated job its own worker.

        Without room, give it back for other nodes or later.
        """
        state = self._state
        workers = [worker for worker in state.by_slot.values() if worker.dedicated]
        unused = [w for w in workers if not w.worked and w.dismissed_at is None]
        for worker in unused:
            if state.dedicated and worker.ready:
                if state.too_late(state.dedicated[0], now):
                    return
                self.give_one(actions, worker, state.dedicated.popleft(), now)
        coming = sum(1 for worker in unused if not worker.worked)
        marking = sum(1 for claimed in state.marking.values() if claimed.dedicated)
        lack = len(state.dedicated) + marking - coming
        if lack > 0 and self._pool_size.can_spawn and now >= self._pool_size.spawn_after:
            room = max(0, state.settings.max_dedicated - len(workers))
            for _ in range(min(room, lack)):
                self._pool_size.spawn(actions, now, dedicated=True)
            if lack > room:
                self._release_dedicated(actions, lack - room, now)

    def _release_dedicated(self, actions: list[Action], count: int, now: Micros) -> None:
        state = self._state
        endings = []
        for _ in range(min(count, len(state.dedicated))):
            ending = state.ending_unstarted(state.dedicated.pop(), Cause.DRAIN, now)
            if ending.state == State.WAITING:
                ending = replace(
                    ending,
                    state=State.SCHEDULED,
                    wait=DEDICATED_AGAIN_US,
                    reason="all workers for dedicated jobs are busy",
                )
            endings.append(ending)
        if endings:
            actions.append(WriteEndings(endings))

    def give_ready(self, actions: list[Action], now: Micros) -> None:
        """Divide the ready jobs among workers that have room for some, in bunches."""
        ready = self._state.ready
        if not ready:
            return
        depth = self.depth()
        workers = [w for w in self._state.by_slot.values() if _takes_ready_jobs(w, now)]
        workers.sort(key=lambda worker: worker.outstanding)
        # The first of them are left to run dry, and then get the jobs that need a worker alone.
        del workers[: self._state.exclusive_next]
        for i, worker in enumerate(workers):
            if not ready:
                return
            room = self._room(worker, depth)
            if room <= 0 or (worker.outstanding and room < depth // 2):
                continue
            share = min(room, -(-len(ready) // (len(workers) - i)))
            self.give_many(actions, worker, [ready.popleft() for _ in range(share)], now)

    def _room(self, worker: WorkerState, depth: int) -> int:
        room = depth - worker.outstanding
        recycle_jobs = self._state.settings.recycle_jobs
        if recycle_jobs is None:
            return room
        return min(room, recycle_jobs - worker.ended - worker.outstanding)

    def give_many(
        self, actions: list[Action], worker: WorkerState, jobs: Sequence[ClaimedJob], now: Micros
    ) -> None:
        size = min(BUNCH_SIZE, self._jobs_in(FRAME_BYTES))
        for start in range(0, len(jobs), size):
            self.give(actions, worker, jobs[start : start + size], now)

    def give(
        self,
        actions: list[Action],
        worker: WorkerState,
        jobs: Sequence[ClaimedJob],
        now: Micros,
        each: bool = False,
    ) -> None:
        """Give a bunch of jobs; with `each`, the worker forks for each of them."""
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        worker.bunches[self._serial] = Bunch(self._serial, list(jobs), len(jobs))
        if not worker.outstanding:
            worker.given_at = worker.seen_since = worker.beat_at = now
            worker.seen_place = -1
        worker.outstanding += len(jobs)
        worker.worked = True
        if self._state.settings.pool == "ondemand":
            worker.leaving = True
        messages = [claimed.message() for claimed in jobs]
        actions.append(GiveJobs(worker.slot, self._serial, messages, each))
        if worker.leaving and not (worker.dismissed_early or worker.dedicated):
            worker.dismissed_early = True
            actions.append(DismissWorker(worker.slot))

    def give_new_workers(self, actions: list[Action], now: Micros) -> None:
        """Give workers of an on-demand pool their jobs before they are up."""
        state = self._state
        coming = [w for w in state.workers() if not (w.ready or w.leaving or w.outstanding)]
        for i, worker in enumerate(coming):
            if state.exclusive:
                first = state.exclusive[0]
                unmarked = first.must_mark and not first.marked
                if not (unmarked or state.too_late(first, now)):
                    self.give_one(actions, worker, state.exclusive.popleft(), now)
            elif state.ready:
                share = -(-len(state.ready) // (len(coming) - i))
                count = min(share, self._jobs_per_new_worker())
                jobs = [state.ready.popleft() for _ in range(count)]
                self.give(actions, worker, jobs, now, each=len(jobs) > 1)

    def _jobs_per_new_worker(self) -> int:
        """Give one, unless jobs are over sooner than a worker comes and it can fork for each."""
        several = self._state.workers_fork and self._state.mean < FORK_US
        return self.depth_with_queue() if several else 1

    # how many jobs ahead

    def depth(self) -> int:
        """Give how many jobs a worker may have."""
        mean = self._state.mean
        if self._state.settings.pool == "ondemand" or not mean or mean > WORK_AHEAD_US / 2:
            return 1
        most = min(DEEPEST, int(WORK_AHEAD_US / mean), self._jobs_in(self._worker_bytes()))
        return max(1, most)

    def shared_depth(self, task: str) -> int:
        """Give how many jobs a shared worker may have: one per seat, and more if they are short."""
        seats = self._state.concurrency.get(task, 1)
        mean = self._state.task_mean.get(task, 0.0)
        if not mean or mean > WORK_AHEAD_US / 2:
            return seats
        most = int(seats * (1 + WORK_AHEAD_US / mean))
        return max(seats, min(DEEPEST, most, self._jobs_in(self._worker_bytes())))

    def depth_with_queue(self) -> int:
        """Give how many jobs the node should have for each worker, given to it or not."""
        mean = self._state.mean
        if self._state.settings.pool != "ondemand" or not mean or mean > WORK_AHEAD_US / 2:
            return self.depth()
        most = int(4 * WORK_AHEAD_US / (mean + FORK_US))
        return max(1, min(most, self._jobs_in(self._worker_bytes())))

    def _worker_bytes(self) -> int:
        return max(WORKER_BYTES, TOTAL_BYTES // max(1, self._state.slots))

    def _jobs_in(self, size: int) -> int:
        """Give how many jobs have so many bytes of arguments; one at least."""
        return max(1, int(size / (self._state.mean_args or 1)))

    def release_surplus(self, now: Micros) -> list[Action]:
        """Give back what is queued here, for other nodes, if all workers have long jobs."""
        state = self._state
        busy = [w for w in state.workers() if w.outstanding and not w.dedicated]
        long = sum(
            1
            for worker in busy
            if now - (worker.closing or worker.seen_since) >= LONG_JOB_US
            or (worker.seats and worker.slow)
        )
        if long < state.slots_with_reserve or not (
            state.ready or state.exclusive_next or state.shared
        ):
            return []
        return state.release_ready(now)


def _takes_ready_jobs(worker: WorkerState, now: Micros) -> bool:
    if not worker.ready or worker.exclusive or worker.slow or worker.leaving or worker.stops:
        return False
    return not worker.seats and worker.host is None and not worker.overdue(now)
