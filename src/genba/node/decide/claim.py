"""How many jobs to claim, of which queues, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from genba.domain.duration import SECOND
from genba.node.decide.actions import Action, ClaimAwaited, ClaimDedicated, ClaimJobs
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.queue_weights import QueueWeights
from genba.node.decide.shared_workers import SharedWorkers
from genba.node.decide.state import NodeState
from genba.storage.records import Claimed, Micros

DEDICATED_EVERY_US = SECOND  # between two looks for dedicated jobs while no slot is free
OTHER_TASKS_EVERY_US = SECOND  # between two looks for other tasks while shared workers have room
AWAITED_EVERY_US = SECOND // 4  # between two looks for awaited jobs, if the first found none
AFTER_FAILURE_US = SECOND // 2


class ClaimPlanner:
    """At most one claim is under way.

    A queue that gave nothing is claimed from again after a wake-up.
    """

    def __init__(
        self,
        state: NodeState,
        pool_size: PoolSize,
        dispatcher: Dispatcher,
        shared_workers: SharedWorkers,
    ) -> None:
        self._state = state
        self._pool_size = pool_size
        self._dispatcher = dispatcher
        self._shared_workers = shared_workers
        self.gate_closed = False  # the machine has enough to do
        self._claiming: tuple[str, ...] = ()  # the queues of the claim under way
        self._claiming_tasks: tuple[str, ...] | None = None
        self._woken = False  # since that claim began, which may have missed the new job
        self._last_was_for_all = False  # the last claim was for all tasks, not for the seats
        self._empty: set[str] = set()  # queues in which the last claim found nothing
        self._empty_for_seats: set[str] = set()  # the same for claims of shared tasks
        self._not_before: Micros = 0
        self._other_tasks_at: Micros = 0
        self._claiming_dedicated = False
        self._dedicated_at: Micros = 0
        self._claiming_awaited = False
        self._awaited_at: Micros = 0
        self._weights = QueueWeights()

    def on_answer(self, jobs: Sequence[Claimed], now: Micros, *, failed: bool) -> None:
        """Note what the claim under way has given."""
        if not (failed or self._woken):
            empty = self._empty if self._claiming_tasks is None else self._empty_for_seats
            if not jobs or len(self._claiming) > 1:
                empty |= set(self._claiming) - {job.queue for job in jobs}
        if len(self._state.settings.queues) > 1:
            for queue, count in Counter(job.queue for job in jobs).items():
                self._weights.record(queue, count, self._weight(queue))
        self._claiming, self._claiming_tasks, self._woken = (), None, False
        if failed:
            self._not_before = now + AFTER_FAILURE_US

    def on_dedicated_answer(self) -> None:
        self._claiming_dedicated = False

    def on_awaited_answer(self, jobs: Sequence[Claimed]) -> None:
        self._claiming_awaited = False
        if jobs:
            self._awaited_at = 0

    def on_wakeup(self) -> None:
        self._woken = bool(self._claiming)
        self._empty.clear()
        self._empty_for_seats.clear()

    def claim_more(self, actions: list[Action], now: Micros) -> None:
        if now < self._not_before or self.gate_closed:
            return
        if not self._pool_size.can_spawn or self._pool_size.helpless:
            return
        state = self._state
        if state.reserve:
            self._claim_awaited(actions, now)
        if self._claiming:
            return
        depth = 1 if state.reserve else self._dispatcher.depth_with_queue()
        slots = state.slots
        target = slots * depth
        lack = target - self._have(depth)
        if lack <= 0 and now >= self._dedicated_at:
            self._claim_dedicated(actions, now)
        wants: dict[str, int] = {}
        if lack > 0 and not (target > 2 * slots and lack < target // 2):
            wants = self._divide(lack, self._empty)
        seats_matter = bool(state.concurrency) and not state.shared
        if seats_matter and (self._last_was_for_all or not wants):
            # Before all tasks again: otherwise one worker without a job leaves the seats of all
            # others empty.
            self._claim_for_seats(actions, now)
        if wants and not self._claiming:
            self._claiming, self._last_was_for_all = tuple(wants), True
            actions.append(ClaimJobs(wants))

    def _have(self, depth: int) -> int:
        """Give how many jobs the node has, apart from dedicated ones."""
        state = self._state
        waiting = (
            len(state.ready)
            + len(state.exclusive)
            + len(state.shared)
            + len(state.unchecked)
            + len(state.taking_slots)
            + len(state.marking)
        )
        workers = state.workers()
        return waiting + sum(worker.load(depth) for worker in workers if not worker.dedicated)

    def _claim_for_seats(self, actions: list[Action], now: Micros) -> None:
        """Claim jobs of tasks with a free seat.

        Now and then one job of any task is claimed, which would wait for ever otherwise.
        """
        if now >= self._other_tasks_at and not (self._state.ready or self._state.exclusive_next):
            self._other_tasks_at = now + OTHER_TASKS_EVERY_US
            wants = self._divide(1, self._empty)
            if wants:
                self._claiming = tuple(wants)
                actions.append(ClaimJobs(wants))
                return
        room = self._shared_workers.room()
        wants = self._divide(sum(room.values()), self._empty_for_seats) if room else {}
        if wants:
            self._claiming, self._claiming_tasks = tuple(wants), tuple(sorted(room))
            self._last_was_for_all = False
            actions.append(ClaimJobs(wants, self._claiming_tasks))

    def _claim_dedicated(self, actions: list[Action], now: Micros) -> None:
        """Claim dedicated jobs now and then although no slot is free: they need none."""
        state = self._state
        workers = sum(1 for worker in state.by_slot.values() if worker.dedicated)
        marking = sum(1 for claimed in state.marking.values() if claimed.dedicated)
        room = state.settings.max_dedicated - max(workers, len(state.dedicated) + marking)
        if room > 0 and not self._claiming_dedicated:
            self._claiming_dedicated, self._dedicated_at = True, now + DEDICATED_EVERY_US
            actions.append(ClaimDedicated(list(state.settings.queues), room))

    def _claim_awaited(self, actions: list[Action], now: Micros) -> None:
        """Claim one awaited job, if a slot or the reserve is free."""
        state = self._state
        if self._claiming_awaited or now < self._awaited_at or not state.awaited:
            return
        queues = (state.ready, state.exclusive, state.shared, state.unchecked, state.marking)
        if state.busy_workers + sum(map(len, queues)) <= state.slots:
            self._claiming_awaited, self._awaited_at = True, now + AWAITED_EVERY_US
            actions.append(ClaimAwaited(list(state.settings.queues), state.awaited))

    def _divide(self, lack: int, empty: set[str]) -> dict[str, int]:
        """Give how many jobs to claim of each queue.

        They are divided by weight, and no queue gets more than its slots here.
        """
        state = self._state
        queues = {
            queue: slots for queue, slots in state.settings.queues.items() if queue not in empty
        }
        if len(queues) == 1 and None in queues.values():
            return dict.fromkeys(queues, lack)
        claimed = Counter[str]()
        if any(queues.values()):
            claimed.update(job.job.queue for job in state.claimed_jobs())
        room = {
            queue: lack if slots is None else slots + state.lent_by_queue[queue] - claimed[queue]
            for queue, slots in queues.items()
        }
        return self._weights.divide(lack, {queue: self._weight(queue) for queue in queues}, room)

    def _weight(self, queue: str) -> int:
        """Give its slots; those of the node, if it has no number of its own."""
        return self._state.settings.queues.get(queue) or self._state.settings.slots
