"""What a node has in memory at one moment: workers, claimed jobs, averages, deadlines."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from genba.domain.duration import SECOND
from genba.domain.states import Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import Action, DismissWorker, WriteEndings
from genba.node.decide.worker_state import ClaimedJob, WorkerState
from genba.node.settings import NodeSettings
from genba.node.watch.counters import Counters
from genba.storage.jobs.judge import build_ending
from genba.storage.records import Claimed, Ending, JobId, Micros

LONG_JOB_US = SECOND // 4  # a job that runs longer is long: jobs queued behind it go to others

_args = itemgetter(Claimed._fields.index("args"))


class NodeState:
    """The state that all parts of the brain share; what only one part needs is kept there."""

    def __init__(self, settings: NodeSettings, random: Callable[[], float]) -> None:
        self.settings = settings
        self.concurrency: Mapping[str, int] = {}  # of tasks that run several jobs in a worker
        self.seats_outdated = False  # it has changed, and workers may still have the old seats
        self.workers_fork = False  # for each job, if it needs a process of its own
        self.wall_offset: Micros = 0  # the store's wall time minus the node's steady clock
        self.skew: Micros = 0  # the store's wall time minus this machine's
        self._random = random
        self.by_slot: dict[int, WorkerState] = {}  # workers and seats
        self.last_slot = 0  # the last number given to a worker or a seat
        # Claimed jobs that no worker has yet: each waits in one of these.
        self.ready: deque[ClaimedJob] = deque()
        self.exclusive: deque[ClaimedJob] = deque()  # for a worker without other jobs
        self.dedicated: deque[ClaimedJob] = deque()  # for a worker of their own, outside the slots
        self.shared: deque[ClaimedJob] = deque()  # for a seat beside others of the task
        self.unchecked: deque[ClaimedJob] = deque()  # until their conditions were checked
        self.taking_slots: dict[JobId, ClaimedJob] = {}  # until limits have slots for them
        self.marking: dict[JobId, ClaimedJob] = {}  # until their start is written
        self.cancelled: dict[JobId, str] = {}  # the reason
        self.signals_seen: Counter[JobId] = Counter()  # SIGTERMs to its worker, not from this node
        self.disabled: frozenset[str] = frozenset()  # tasks
        self.reserve = False  # no more slots may be lent: one more worker runs awaited jobs only
        self.awaited: tuple[JobId, ...] = ()  # the jobs that this node's jobs wait for
        self.lent_by_queue = Counter[str]()  # jobs that lend their slot
        self.sweeps: dict[int, list[Ending]] = {}  # to write when the leftovers are killed
        self.mean: float = 0.0  # µs per job lately; 0: not known yet
        self.task_mean: dict[str, float] = {}  # the same for each shared task, waits included
        self.mean_args: float = 0.0  # bytes of arguments per job lately
        self.draining_until: Micros | None = None
        self.safe_until: Micros | None = None  # then other nodes may soon take this one for dead
        self.dead_by: Micros = 0
        self.counters: Counters | None = None  # None: no metrics

    def wall(self, now: Micros) -> Micros:
        """Turn a moment of the node's steady clock into the store's wall time."""
        return now + self.wall_offset

    @property
    def draining(self) -> bool:
        return self.draining_until is not None

    @property
    def slots(self) -> int:
        """How many workers there may be: one more for each that lends its slot."""
        return self.settings.slots + sum(worker.lends_slot for worker in self.by_slot.values())

    @property
    def slots_with_reserve(self) -> int:
        return self.slots + self.reserve

    @property
    def empty(self) -> bool:
        """Whether leaving now would lose nothing."""
        waiting = (*self._queues(), self.taking_slots, self.marking, self.sweeps)
        return not any(waiting) and not any(w.outstanding for w in self.by_slot.values())

    @property
    def busy(self) -> bool:
        return any(worker.outstanding or worker.stops for worker in self.by_slot.values())

    @property
    def timed(self) -> bool:
        """Whether a job has a timer or is being stopped, so that ticks must be short."""
        return any(w.exclusive or w.timed or w.stops for w in self.by_slot.values())

    @property
    def measured(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers whose use of memory and CPU is limited."""
        return [(worker.slot, worker.pid) for worker in self.by_slot.values() if worker.measured]

    # claimed jobs

    def _queues(self) -> tuple[deque[ClaimedJob], ...]:
        return (self.ready, self.exclusive, self.dedicated, self.shared, self.unchecked)

    def claimed_jobs(self) -> Iterator[ClaimedJob]:
        for queue in self._queues():
            yield from queue
        yield from (*self.taking_slots.values(), *self.marking.values())
        for worker in self.workers():
            if worker.check is not None:
                yield worker.check.claimed
            yield from worker.unfinished_jobs()

    def claimed_ids(self) -> list[JobId]:
        """Give the jobs that the node has claimed and not yet let go."""
        swept = [ending.id for endings in self.sweeps.values() for ending in endings]
        return [claimed.job.id for claimed in self.claimed_jobs()] + swept

    def queue_for(self, claimed: ClaimedJob) -> deque[ClaimedJob]:
        if claimed.needs_check:
            return self.unchecked
        if claimed.dedicated:
            return self.dedicated
        several = claimed.job.task in self.concurrency and self.settings.pool != "ondemand"
        if several and claimed.shareable:
            return self.shared
        return self.exclusive if claimed.exclusive else self.ready

    @property
    def exclusive_next(self) -> int:
        """How many jobs need a worker that has nothing else."""
        return len(self.exclusive) + min(len(self.unchecked), self.max_checks)

    @property
    def max_checks(self) -> int:
        """How many workers may check conditions at a time."""
        return max(1, self.settings.slots // 10)

    def shared_by_task(self) -> Counter[str]:
        return Counter(claimed.job.task for claimed in self.shared)

    def measure_arguments(self, jobs: Sequence[Claimed]) -> None:
        """Update the average argument size of claimed jobs; larger values take effect at once."""
        if jobs:
            size = sum(map(len, map(_args, jobs))) / len(jobs)
            self.mean_args = size if size > self.mean_args else (size + self.mean_args) / 2

    def put_back(self, jobs: Iterable[ClaimedJob], now: Micros) -> list[Ending]:
        """Put unstarted jobs first in their queues; end those cancelled or disabled meanwhile."""
        endings: list[Ending] = []
        for claimed in sorted(jobs, key=lambda c: (c.job.rank, c.job.id), reverse=True):
            if claimed.job.id in self.cancelled:
                endings.append(self.ending_unstarted(claimed, Cause.CANCELLED, now))
            elif claimed.job.task in self.disabled:
                endings.append(self.ending_unstarted(claimed, Cause.DRAIN, now))
            else:
                self.queue_for(claimed).appendleft(claimed)
        return endings

    def take_out(self, id: JobId) -> ClaimedJob | None:
        """Remove a job from the queue that it waits in; None if it is in none."""
        for queue in self._queues():
            for claimed in queue:
                if claimed.job.id == id:
                    queue.remove(claimed)
                    return claimed
        return None

    def release_disabled(self, now: Micros) -> list[Action]:
        """Give back the queued jobs of disabled tasks."""
        gone: list[ClaimedJob] = []
        for queue in (self.ready, self.exclusive, self.dedicated, self.shared):
            gone += [claimed for claimed in queue if claimed.job.task in self.disabled]
            kept = [claimed for claimed in queue if claimed.job.task not in self.disabled]
            queue.clear()
            queue.extend(kept)
        return write_endings([self.ending_unstarted(job, Cause.DRAIN, now) for job in gone])

    def release_ready(self, now: Micros) -> list[Action]:
        """Give back all queued jobs."""
        jobs = [claimed for queue in self._queues() for claimed in queue]
        for queue in self._queues():
            queue.clear()
        return write_endings([self.ending_unstarted(job, Cause.DRAIN, now) for job in jobs])

    # workers

    def workers(self) -> list[WorkerState]:
        """Give the worker processes, without seats."""
        return [worker for worker in self.by_slot.values() if worker.host is None]

    @property
    def busy_workers(self) -> int:
        """How many workers have jobs, apart from dedicated ones."""
        return sum(1 for w in self.workers() if w.outstanding and not w.dedicated)

    def free_worker(self) -> WorkerState | None:
        for worker in self.by_slot.values():
            if worker.seats or worker.host is not None or not worker.ready or worker.outstanding:
                continue
            if not (worker.leaving or worker.stops):
                return worker
        return None

    def dismiss(self, actions: list[Action], worker: WorkerState, now: Micros) -> None:
        if worker.dismissed_at is None:
            worker.leaving, worker.dismissed_at = True, now
            if not worker.dismissed_early:
                actions.append(DismissWorker(worker.slot))

    # ends

    def ending_unstarted(self, claimed: ClaimedJob, cause: str, now: Micros) -> Ending:
        return without_attempt(self.ending(claimed, AttemptEnd(cause=cause, started=False), now))

    def ending(self, claimed: ClaimedJob, end: AttemptEnd, now: Micros) -> Ending:
        cancelled = self.cancelled.pop(claimed.job.id, None)
        if cancelled is not None:
            end = replace(end, reason=cancelled, cancel_requested=True)
        options, wall = claimed.options, self.wall(now)
        return build_ending(claimed.job, claimed.claim, options, end, wall, self._random())

    def too_late(self, claimed: ClaimedJob, now: Micros, locked: bool = False) -> bool:
        """Whether the job must not run here, as other nodes may soon take this one for dead.

        That holds for a job that runs at most once, and for one that has slots of a limit or locks.
        """
        once = locked or claimed.options.at_most_once or claimed.job.buckets is not None
        return once and self.safe_until is not None and now >= self.safe_until


def write_endings(endings: list[Ending]) -> list[Action]:
    """Give the action, if there is anything to write."""
    return [WriteEndings(endings)] if endings else []


def without_attempt(ending: Ending) -> Ending:
    """Give the ending of a job that did not start: its attempt does not count."""
    return replace(ending, happened=False)
