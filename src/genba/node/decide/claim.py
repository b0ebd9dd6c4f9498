"""Asking for work: how much, of which queues, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from genba.node.decide.actions import Action, ClaimDedicated, ClaimJobs
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.queue_weights import QueueWeights
from genba.node.decide.shared_workers import SharedWorkers
from genba.node.decide.state import SECOND, NodeState
from genba.storage.records import Claimed, Micros

LOOK_FOR_DEDICATED = 1 * SECOND
CURIOUS = 1 * SECOND  # between two looks at what waits behind the jobs that run in company


class ClaimPlanner:
    def __init__(
        self, floor: NodeState, staffing: PoolSize, giving: Dispatcher, seats: SharedWorkers
    ) -> None:
        self._floor = floor
        self._staffing = staffing
        self._giving = giving
        self._seats = seats
        self.closed = False  # by a gate: the machine has enough to do
        self._claiming: tuple[str, ...] = ()  # the queues that are just being asked
        self._claiming_tasks: tuple[str, ...] | None = None
        self._rung = False  # since the claim went off, whose answer may be older than what came
        self._asked_for_any = False  # the last claim was for whatever waits, not for the seats
        self._dry: set[str] = set()  # queues in which the last claim found nothing
        self._no_company: set[str] = set()  # queues that have nothing more for the seats
        self._hungry_until: Micros = 0
        self._curious_at: Micros = 0
        self._apart_asked = False
        self._apart_after: Micros = 0
        self._turns = QueueWeights()

    def answered(self, jobs: Sequence[Claimed], now: Micros, *, failed: bool) -> None:
        """To a claim: a queue that gave nothing is asked again when somebody rings."""
        if not (failed or self._rung):
            dry = self._dry if self._claiming_tasks is None else self._no_company
            if not jobs or len(self._claiming) > 1:
                dry |= set(self._claiming) - {job.queue for job in jobs}
        if len(self._floor.settings.queues) > 1:
            for queue, count in Counter(job.queue for job in jobs).items():
                self._turns.gave(queue, count, self._weight(queue))
        self._claiming, self._claiming_tasks, self._rung = (), None, False
        if failed:
            self._hungry_until = now + SECOND // 2

    def answered_dedicated(self) -> None:
        self._apart_asked = False

    def rung(self) -> None:
        self._rung = bool(self._claiming)
        self._dry.clear()
        self._no_company.clear()

    def ask_for_more(self, actions: list[Action], now: Micros) -> None:
        if self._claiming or now < self._hungry_until or self.closed:
            return
        if not self._staffing.can_spawn or self._staffing.helpless:
            return
        floor = self._floor
        piles = (
            floor.ready,
            floor.single,
            floor.shared,
            floor.unasked,
            floor.taking,
            floor.marking,
        )
        waiting = sum(map(len, piles))
        depth = self._giving.ahead()
        have = waiting + sum(hand.load(depth) for hand in self._floor.workers() if not hand.apart)
        slots = self._floor.slots
        target = slots * depth
        lack = target - have
        if lack <= 0 and now >= self._apart_after:
            self._ask_for_dedicated(actions, now)
        wants: dict[str, int] = {}
        if lack > 0 and not (target > 2 * slots and lack < target // 2):
            wants = self._shares(lack, self._dry)
        company = bool(floor.concurrency) and not floor.shared
        if company and (self._asked_for_any or not wants):
            # Before any task again: one worker without a job would otherwise let all others' seats stay empty.
            self._ask_for_company(actions, now)
        if wants and not self._claiming:
            self._claiming, self._asked_for_any = tuple(wants), True
            actions.append(ClaimJobs(wants))

    def _ask_for_company(self, actions: list[Action], now: Micros) -> None:
        """More of the tasks that have a seat free; and now and then one of any task, which would wait for ever."""
        if now >= self._curious_at and not (self._floor.ready or self._floor.alone_next):
            self._curious_at = now + CURIOUS
            wants = self._shares(1, self._dry)
            if wants:
                self._claiming = tuple(wants)
                actions.append(ClaimJobs(wants))
                return
        room = self._seats.room()
        wants = self._shares(sum(room.values()), self._no_company) if room else {}
        if wants:
            self._claiming, self._claiming_tasks = tuple(wants), tuple(sorted(room))
            self._asked_for_any = False
            actions.append(ClaimJobs(wants, self._claiming_tasks))

    def _ask_for_dedicated(self, actions: list[Action], now: Micros) -> None:
        """They need no slot: a node without a free one looks for them now and then."""
        there = sum(1 for hand in self._floor.hands.values() if hand.apart)
        marking = sum(1 for held in self._floor.marking.values() if held.dedicated)
        room = self._floor.settings.max_dedicated - max(there, len(self._floor.apart) + marking)
        if room > 0 and not self._apart_asked:
            self._apart_asked, self._apart_after = True, now + LOOK_FOR_DEDICATED
            actions.append(ClaimDedicated(list(self._floor.settings.queues), room))

    def _shares(self, lack: int, dry: set[str]) -> dict[str, int]:
        """How many to claim of each queue: by weight, and no more of one than it has slots here."""
        queues = {
            queue: slots for queue, slots in self._floor.settings.queues.items() if queue not in dry
        }
        if len(queues) == 1 and None in queues.values():
            return dict.fromkeys(queues, lack)
        held = (
            Counter(h.job.queue for h in self._floor.held())
            if any(queues.values())
            else Counter[str]()
        )
        room = {
            queue: lack if slots is None else slots - held[queue] for queue, slots in queues.items()
        }
        return self._turns.divide(lack, {queue: self._weight(queue) for queue in queues}, room)

    def _weight(self, queue: str) -> int:
        """Its slots; of a queue without a number, all of the node's."""
        return self._floor.settings.queues.get(queue) or self._floor.settings.slots
