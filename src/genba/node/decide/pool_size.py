"""Who is in the pool: workers come as the work wants them, and go when they are old, idle or too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genba import wire
from genba.node.decide.actions import Action, RefuseWait, SpawnWorker, TakeJobsBack
from genba.node.decide.state import SECOND, NodeState
from genba.node.decide.worker_state import WorkerState, WorkerView
from genba.node.settings import NodeSettings
from genba.storage.records import Micros

IDLE_FOR = 10 * SECOND
LENT = 8  # slots of jobs that wait for others


class PoolSize:
    def __init__(self, floor: NodeState) -> None:
        self._floor = floor
        self.can_spawn = False
        self.spawn_after: Micros = 0
        self.failed_starts = 0

    def back_off(self, now: Micros) -> None:
        self.failed_starts += 1
        self.spawn_after = now + min(30 * SECOND, SECOND // 10 * 2 ** min(self.failed_starts, 10))

    @property
    def helpless(self) -> bool:
        """Workers do not come up here: others should have the jobs."""
        return self.failed_starts > 0 and not any(hand.ready for hand in self._floor.hands.values())

    def staff(self, actions: list[Action], now: Micros) -> None:
        """As many workers as the pool's mode and the work want."""
        if not self.can_spawn or now < self.spawn_after:
            return
        s = self._floor.settings
        there = busy = coming = going = 0
        for hand in self._floor.workers():
            if not hand.apart:
                going += hand.told_to_go is not None
                there += 1
                busy += hand.outstanding > 0
                coming += not hand.ready
        waiting = len(self._floor.ready) + self._floor.alone_next
        if self._floor.shared:
            seats, company = self._floor.concurrency, self._floor.in_company()
            waiting += sum(-(-n // seats.get(task, 1)) for task, n in company.items())
        lent = self._floor.slots - s.slots
        if s.pool == "static":
            wanted = s.min + lent
        elif s.pool == "ondemand":
            wanted = min(s.max + lent, busy + waiting)
            there -= min(
                going, s.max
            )  # they run nothing any more, and the next need not wait for their end
        else:
            wanted = max(s.min, min(s.max + lent, busy + waiting))
            if coming and waiting <= coming:
                wanted = min(wanted, there)
        if self.helpless:
            wanted = 1  # one tries again; nothing is claimed before it is there
        for _ in range(wanted - there):
            self.spawn(actions, now)

    def spawn(self, actions: list[Action], now: Micros, *, apart: bool = False) -> None:
        slot = self._floor.slot = self._floor.slot + 1
        self._floor.hands[slot] = WorkerState(slot, idle_since=now, apart=apart, leaving=apart)
        actions.append(SpawnWorker(slot))

    def renew(self, now: Micros) -> list[Action]:
        """The app's code is another one: whoever has the old one ends what it runs, and goes."""
        actions: list[Action] = []
        for hand in self._floor.workers():
            if hand.outstanding:
                hand.leaving = True
                actions.append(TakeJobsBack(hand.slot))
            else:
                self._floor.dismiss(actions, hand, now)
        return actions

    def resize(self, settings: NodeSettings, now: Micros) -> list[Action]:
        """The pool has another size or another way: who is too many leaves, when it has ended what it runs."""
        self._floor.settings = settings
        there = [hand for hand in self._floor.workers() if not hand.leaving]
        there.sort(key=lambda hand: hand.outstanding)
        actions: list[Action] = []
        for hand in there[: max(0, len(there) - settings.slots)]:
            hand.leaving = True
            if hand.outstanding:
                actions.append(TakeJobsBack(hand.slot))
            else:
                self._floor.dismiss(actions, hand, now)
        return actions

    def recycle(
        self, actions: list[Action], hand: WorkerState, results: Sequence[Sequence[Any]]
    ) -> None:
        """A worker that has run so many jobs, or has grown so large, leaves; another one comes."""
        jobs, memory = self._floor.settings.recycle_jobs, self._floor.settings.recycle_memory
        if hand.leaving or (jobs is None and memory is None):
            return
        tired = jobs is not None and hand.ended >= jobs
        if tired or (memory is not None and results and results[-1][7] * 1024 >= memory):
            hand.leaving = True
            if hand.outstanding:
                actions.append(TakeJobsBack(hand.slot))

    def lend(self, actions: list[Action], sights: Mapping[int, WorkerView], now: Micros) -> None:
        """A job that waits for others needs no slot: another worker may come for it, and go when it is back."""
        for hand in self._floor.hands.values():
            sight = sights.get(hand.slot)
            hand.lends = (
                hand.lends and sight is not None and sight.waits and sight.phase == wire.RUNNING
            )
        lent = sum(hand.lends for hand in self._floor.hands.values())
        for hand in self._floor.hands.values():
            sight = sights.get(hand.slot)
            if sight is None or hand.lends or not sight.waits or sight.phase != wire.RUNNING:
                continue
            if lent >= LENT:
                actions.append(RefuseWait(hand.slot, sight.place))
                continue
            hand.lends = True
            lent += 1
            worker = hand if hand.host is None else self._floor.hands[hand.host]
            if worker.outstanding > 1:
                actions.append(TakeJobsBack(worker.slot))  # what it waits for may stand behind it
        there = [hand for hand in self._floor.workers() if not hand.apart and not hand.leaving]
        spare = len(there) - self._floor.slots
        for hand in there:
            if spare > 0 and hand.ready and not hand.outstanding and hand.told_to_go is None:
                self._floor.dismiss(actions, hand, now)
                spare -= 1

    def shrink(self, actions: list[Action], now: Micros) -> None:
        """Who has been idle for long goes, unless the pool keeps it."""
        if self._floor.settings.pool == "static":
            return
        kept = self._floor.settings.min if self._floor.settings.pool == "dynamic" else 0
        staying = [hand for hand in self._floor.workers() if not hand.leaving]
        spare = len(staying) - kept
        for hand in staying:
            if spare <= 0:
                return
            if hand.ready and not hand.outstanding and now - hand.idle_since >= IDLE_FOR:
                self._floor.dismiss(actions, hand, now)
                spare -= 1

    def dismiss_unneeded(self, actions: list[Action], now: Micros) -> None:
        """Who has come for a dedicated job that was cancelled meanwhile."""
        if self._floor.apart or any(held.dedicated for held in self._floor.marking.values()):
            return
        for hand in self._floor.hands.values():
            if hand.apart and hand.ready and not hand.outstanding:
                self._floor.dismiss(actions, hand, now)
