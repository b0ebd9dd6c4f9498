"""Handing out what is ready: alone, in bunches, or to a worker of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genba.domain.states import Cause, State
from genba.node.decide.actions import Action, DismissWorker, GiveJobs, MarkStarted, WriteEndings
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.state import LONG_JOB_US, SECOND, NodeState
from genba.node.decide.worker_state import WORK_AHEAD_US, Bunch, ClaimedJob, WorkerState
from genba.storage.records import Micros

BUNCH = 64  # jobs in one frame
FRAME = (
    1 << 17
)  # bytes of arguments in one frame: a worker starts with the first when it has all of them
DEEPEST = 2048  # with half of it, workers ran dry while the desk wrote: a sixth less of tiny jobs on SQLite
LOAD = 8 << 20  # bytes of arguments that a worker may have in hand
TOGETHER = (
    40 << 20
)  # ... and so many for all, if few share them: 800 jobs of 10 kB are gone before the next come
FORK = 3_000  # µs that a process of its own costs a job
APART_AGAIN = 2 * SECOND  # a dedicated job for which there is no room here comes back after this


class Dispatcher:
    def __init__(self, floor: NodeState, staffing: PoolSize) -> None:
        self._floor = floor
        self._staffing = staffing
        self._serial = 0

    def give_singles(self, actions: list[Action], now: Micros) -> None:
        while self._floor.single:
            hand = self._floor.free()
            if hand is None or self._floor.too_late(self._floor.single[0], now):
                return
            self.give_alone(actions, hand, self._floor.single.popleft(), now)

    def give_alone(
        self, actions: list[Action], hand: WorkerState, held: ClaimedJob, now: Micros
    ) -> None:
        if held.must_mark and not held.marked:
            self._floor.marking[held.job.id] = held
            job = held.job
            actions.append(
                MarkStarted([(job.id, job.attempt, held.claim, self._floor.wall(now))], first=True)
            )
            return
        self.give(actions, hand, [held], now)
        hand.alone, hand.weighed = True, held.weighed
        hand.heaviest, hand.cpu_before = 0, None

    def give_apart(self, actions: list[Action], now: Micros) -> None:
        """To each its own worker; those for whom there is no room go back, for other nodes or for later."""
        hands = [hand for hand in self._floor.hands.values() if hand.apart]
        for hand in hands:
            if self._floor.apart and hand.ready and not hand.worked and hand.told_to_go is None:
                if self._floor.too_late(self._floor.apart[0], now):
                    return
                self.give_alone(actions, hand, self._floor.apart.popleft(), now)
        coming = sum(1 for hand in hands if not hand.worked and hand.told_to_go is None)
        marking = sum(1 for held in self._floor.marking.values() if held.dedicated)
        lack = len(self._floor.apart) + marking - coming
        if lack > 0 and self._staffing.can_spawn and now >= self._staffing.spawn_after:
            room = max(0, self._floor.settings.max_dedicated - len(hands))
            for _ in range(min(room, lack)):
                self._staffing.spawn(actions, now, apart=True)
            if lack > room:
                self._send_away(actions, lack - room, now)

    def _send_away(self, actions: list[Action], count: int, now: Micros) -> None:
        endings = []
        for _ in range(min(count, len(self._floor.apart))):
            ending = self._floor.unstarted(self._floor.apart.pop(), Cause.DRAIN, now)
            if ending.state == State.WAITING:
                reason = "all workers for dedicated jobs are busy"
                ending = replace(ending, state=State.SCHEDULED, wait=APART_AGAIN, reason=reason)
            endings.append(ending)
        if endings:
            actions.append(WriteEndings(endings))

    def give_bunches(self, actions: list[Action], now: Micros) -> None:
        if not self._floor.ready:
            return
        depth = self.depth()
        hands = [
            hand
            for hand in self._floor.hands.values()
            if hand.ready and not (hand.alone or hand.slow or hand.leaving or hand.stops)
            if not hand.seats and hand.host is None and not hand.overdue(now)
        ]
        hands.sort(key=lambda hand: hand.outstanding)
        del hands[
            : self._floor.alone_next
        ]  # these run dry first, and then take what must start alone
        for i, hand in enumerate(hands):
            room = depth - hand.outstanding
            if self._floor.settings.recycle_jobs is not None:
                room = min(room, self._floor.settings.recycle_jobs - hand.ended - hand.outstanding)
            if not self._floor.ready:
                return
            if room <= 0 or (hand.outstanding and room < depth // 2):
                continue
            share = min(room, -(-len(self._floor.ready) // (len(hands) - i)))
            self.give_many(actions, hand, [self._floor.ready.popleft() for _ in range(share)], now)

    def give_many(
        self, actions: list[Action], hand: WorkerState, jobs: Sequence[ClaimedJob], now: Micros
    ) -> None:
        size = min(BUNCH, self._bearable(FRAME))
        for start in range(0, len(jobs), size):
            self.give(actions, hand, jobs[start : start + size], now)

    def give(
        self,
        actions: list[Action],
        hand: WorkerState,
        jobs: Sequence[ClaimedJob],
        now: Micros,
        each: bool = False,
    ) -> None:
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        hand.bunches[self._serial] = Bunch(self._serial, list(jobs), len(jobs))
        if not hand.outstanding:
            hand.given_at = hand.seen_since = hand.beat_at = now
            hand.seen_place = -1
        hand.outstanding += len(jobs)
        hand.worked = True
        if self._floor.settings.pool == "ondemand":
            hand.leaving = True
        actions.append(GiveJobs(hand.slot, self._serial, [held.travel() for held in jobs], each))
        if hand.leaving and not (hand.farewell or hand.apart):
            hand.farewell = True
            actions.append(DismissWorker(hand.slot))

    def give_newcomers(self, actions: list[Action], now: Micros) -> None:
        """Who comes for one job finds it on arrival; of short ones it gets several, and forks for each."""
        coming = [
            hand
            for hand in self._floor.workers()
            if not (hand.ready or hand.leaving or hand.outstanding)
        ]
        for i, hand in enumerate(coming):
            if self._floor.single:
                held = self._floor.single[0]
                if not ((held.must_mark and not held.marked) or self._floor.too_late(held, now)):
                    self.give_alone(actions, hand, self._floor.single.popleft(), now)
            elif self._floor.ready:
                fair = -(-len(self._floor.ready) // (len(coming) - i))
                jobs = [self._floor.ready.popleft() for _ in range(min(fair, self._at_once()))]
                self.give(actions, hand, jobs, now, each=len(jobs) > 1)

    def _at_once(self) -> int:
        """How many jobs a worker gets that has a process for each: one, unless they are over sooner than it came."""
        return self.ahead() if self._floor.workers_fork and self._floor.mean < FORK else 1

    def depth(self) -> int:
        """How many jobs a worker may have in hand."""
        if (
            self._floor.settings.pool == "ondemand"
            or not self._floor.mean
            or self._floor.mean > WORK_AHEAD_US / 2
        ):
            return 1
        return max(
            1, min(DEEPEST, int(WORK_AHEAD_US / self._floor.mean), self._bearable(self._load()))
        )

    def depth_in_company(self, task: str) -> int:
        """How many jobs a worker may have in hand that runs several at a time; some to spare, if they are short."""
        seats, pace = self._floor.concurrency.get(task, 1), self._floor.paces.get(task, 0.0)
        if not pace or pace > WORK_AHEAD_US / 2:
            return seats
        return max(
            seats,
            min(DEEPEST, int(seats * (1 + WORK_AHEAD_US / pace)), self._bearable(self._load())),
        )

    def ahead(self) -> int:
        """How many jobs to have here for each worker, in its hand or on the pile."""
        mean = self._floor.mean
        if self._floor.settings.pool != "ondemand" or not mean or mean > WORK_AHEAD_US / 2:
            return self.depth()
        return max(1, min(int(4 * WORK_AHEAD_US / (mean + FORK)), self._bearable(self._load())))

    def _load(self) -> int:
        return max(LOAD, TOGETHER // max(1, self._floor.slots))

    def _bearable(self, load: int) -> int:
        """How many jobs have so many bytes of arguments; one at least."""
        return max(1, int(load / (self._floor.heft or 1)))

    def give_up_surplus(self, now: Micros) -> list[Action]:
        """Everyone here is busy for long: let other nodes have what is ready."""
        there = [hand for hand in self._floor.workers() if hand.outstanding and not hand.apart]
        long = sum(
            1
            for hand in there
            if now - (hand.closing or hand.seen_since) >= LONG_JOB_US or (hand.seats and hand.slow)
        )
        if long < self._floor.slots or not (
            self._floor.ready or self._floor.alone_next or self._floor.shared
        ):
            return []
        return self._floor.release_ready(now)
