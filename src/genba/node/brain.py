"""What a node decides: events in, actions out; no clock, no process, no database.

Times are micros of the node's own steady clock; `wall` turns one into the store's time.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from genba import wire
from genba.domain.states import Cause, State
from genba.domain.verdict import End
from genba.node.actions import (
    Action,
    AskToStop,
    Claim,
    ClaimDedicated,
    Dismiss,
    DrainAll,
    Finish,
    Give,
    Interrupt,
    Mark,
    Note,
    Share,
    Signal,
    Spawn,
    Succeed,
    Sweep,
    TakeBack,
)
from genba.node.endings import cause_of_death, headline, progress_text, text_of, unhappened
from genba.node.hands import Bunch, Hand, Held, Sight, Stop, Use
from genba.node.settings import NodeSettings
from genba.storage.records import Claimed, Ending, JobId, Micros, Success
from genba.storage.verdicts import UNREADABLE, judged, read_options

SECOND = 1_000_000
WORTH = 50_000  # µs of measured work that a worker may have in hand
BUNCH = 64  # jobs in one frame
DEEPEST = 1024
LONG = 250_000  # µs after which a running job is long: what was given with it goes to others
MARK_AFTER = 1 * SECOND
IDLE_FOR = 10 * SECOND
DRAIN_KILL = 2 * SECOND
LOOK_FOR_DEDICATED = 1 * SECOND
APART_AGAIN = 2 * SECOND  # a dedicated job for which there is no room here comes back after this
CURIOUS = 1 * SECOND  # between two looks at what waits behind the jobs that run in company
LEAVE_WITHIN = 10 * SECOND  # for a worker that was told to go: its app may have something to put away

_NO_SEATS: Mapping[int, Sight] = MappingProxyType({})
_STRAYS = {"strays"}  # all that is told of a call that ended well and left processes behind


class Brain:
    def __init__(self, settings: NodeSettings, tasks: Iterable[str], random: Callable[[], float]) -> None:
        self.settings = settings
        self.tasks = sorted(tasks)
        self.concurrency: Mapping[str, int] = {}  # of tasks that run several at a time
        self.delta: Micros = 0  # store's wall time minus our steady clock
        self.skew: Micros = 0  # store's wall time minus this machine's
        self._random = random
        self._hands: dict[int, Hand] = {}
        self._ready: deque[Held] = deque()
        self._single: deque[Held] = deque()
        self._apart: deque[Held] = deque()  # each gets a worker of its own, outside the slots
        self._shared: deque[Held] = deque()  # each gets a seat beside others of its task
        self._marking: dict[JobId, Held] = {}
        self._cancelled: dict[JobId, str] = {}
        self._sweeps: dict[int, list[Ending]] = {}
        self._claiming: tuple[str, ...] = ()  # the queues that are just being asked
        self._dry: set[str] = set()  # queues in which the last claim found nothing
        self._claiming_tasks: tuple[str, ...] | None = None
        self._no_company: set[str] = set()  # queues that have nothing more for the seats
        self._hungry_until: Micros = 0
        self._curious_at: Micros = 0
        self._mean: float = 0.0  # µs of one job, lately; 0: not known yet
        self._serial = 0
        self._token = 0
        self._slot = 0
        self._can_spawn = False
        self._spawn_after: Micros = 0
        self._failed_starts = 0
        self._draining_until: Micros | None = None
        self._hurried = False
        self._closed = False
        self._apart_asked = False
        self._apart_after: Micros = 0
        self._safe_until: Micros | None = None  # then others may soon take us for dead
        self._dead_by: Micros = 0

    # what the loop may ask

    def wall(self, now: Micros) -> Micros:
        return now + self.delta

    @property
    def draining(self) -> bool:
        return self._draining_until is not None

    @property
    def empty(self) -> bool:
        """Nothing is left that could be lost by leaving."""
        busy = any(hand.outstanding for hand in self._hands.values())
        piles = (self._ready, self._single, self._apart, self._shared, self._marking, self._sweeps)
        return not busy and not any(piles)

    @property
    def deserted(self) -> bool:
        """No worker is left, or there is no time to wait for one."""
        return not self._hands or self._hurried

    @property
    def busy(self) -> bool:
        return any(hand.outstanding or hand.stop for hand in self._hands.values())

    @property
    def timed(self) -> bool:
        """Something must be looked at soon: a job with a timer, or one that is being stopped."""
        return any(hand.alone or hand.stop for hand in self._hands.values())

    @property
    def weighed(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers whose use must be looked at."""
        return [(hand.slot, hand.pid) for hand in self._hands.values() if hand.weighed]

    def jobs_in_hand(self) -> list[JobId]:
        """What we have claimed and not yet let go."""
        swept = [ending.id for endings in self._sweeps.values() for ending in endings]
        return [held.job.id for held in self._held()] + swept

    def _held(self) -> Iterator[Held]:
        yield from (*self._ready, *self._single, *self._apart, *self._shared, *self._marking.values())
        for hand in self._hands.values():
            yield from hand.unfinished()

    # processes

    def on_zygote(self, now: Micros) -> list[Action]:
        """It can fork now."""
        self._can_spawn = True
        return self._flow(now)

    def on_zygote_gone(self) -> list[Action]:
        self._can_spawn = False
        return []

    def on_worker_ready(self, slot: int, pid: int, now: Micros) -> list[Action]:
        hand = self._hands.get(slot)
        if hand is None:
            return []
        hand.pid, hand.ready, hand.idle_since = pid, True, now
        self._failed_starts = 0
        return self._flow(now)

    def on_spawn_failed(self, slot: int, now: Micros) -> list[Action]:
        self._hands.pop(slot, None)
        self._back_off(now)
        return self._flow(now)

    def _back_off(self, now: Micros) -> None:
        self._failed_starts += 1
        self._spawn_after = now + min(30 * SECOND, SECOND // 10 * 2 ** min(self._failed_starts, 10))

    def on_worker_ended(
        self,
        slot: int,
        status: int | None,
        cpu: Micros,
        peak: int,
        sight: Sight,
        now: Micros,
        starved: bool = False,
        seats: Mapping[int, Sight] = _NO_SEATS,
    ) -> list[Action]:
        """A worker is dead; only what had started is touched by that."""
        hand = self._hands.pop(slot, None)
        if hand is None:
            return []
        stillborn = not hand.ready and (hand.apart or not hand.leaving)
        if stillborn:
            self._back_off(now)
        victim = hand.at(sight.place) if sight.phase == wire.RUNNING else None
        endings: list[Ending] = []
        if victim is not None:
            cause = cause_of_death(hand, sight.place, status, starved)
            ending = self._ending(victim, End(cause=cause, started=True), now)
            seen = self._last_seen(ending, hand, sight)
            endings.append(replace(seen, cpu=cpu, peak=max(peak, hand.heaviest // 1024)))
        cancelled = self._put_back([h for h in hand.unfinished() if h is not victim], now)
        for number in hand.seats:
            cancelled += self._leave_seat(self._hands.pop(number), seats[number], hand.forced, status, endings, now)
        actions: list[Action] = [Finish(cancelled)] if cancelled else []
        if hand.worked:
            self._token += 1
            self._sweeps[self._token] = endings
            actions.append(Sweep(self._token))
        if stillborn and self._helpless:
            actions += self._release_ready(now)
        return actions + self._flow(now)

    def _leave_seat(
        self, seat: Hand, sight: Sight, forced: bool, status: int | None, endings: list[Ending], now: Micros
    ) -> list[Ending]:
        """Of a dead worker.  If we had to kill it for one of its jobs, that is not the fault of the others."""
        victim = seat.at(sight.place) if sight.phase == wire.RUNNING else None
        if victim is not None:
            stopped = seat.stop is not None and seat.stop.place == sight.place
            cause = Cause.COLLATERAL if forced and not stopped else cause_of_death(seat, sight.place, status)
            endings.append(self._last_seen(self._ending(victim, End(cause=cause, started=True), now), seat, sight))
        return self._put_back([held for held in seat.unfinished() if held is not victim], now)

    @property
    def _helpless(self) -> bool:
        """Workers do not come up here: others should have the jobs."""
        return self._failed_starts > 0 and not any(hand.ready for hand in self._hands.values())

    def on_changed(self, now: Micros) -> list[Action]:
        """The app's code is another one: whoever has the old one ends what it runs, and goes."""
        actions: list[Action] = []
        for hand in self._workers():
            if hand.outstanding:
                hand.leaving = True
                actions.append(TakeBack(hand.slot))
            else:
                self._dismiss(actions, hand, now)
        return actions

    def _workers(self) -> list[Hand]:
        """Those that are processes."""
        return [hand for hand in self._hands.values() if hand.host is None]

    def _dismiss(self, actions: list[Action], hand: Hand, now: Micros) -> None:
        if hand.told_to_go is None:
            hand.leaving, hand.told_to_go = True, now
            actions.append(Dismiss(hand.slot))

    def on_swept(self, token: int, now: Micros) -> list[Action]:
        """The dead worker's whole tree is gone: now its job may be let go."""
        endings = self._sweeps.pop(token, [])
        done: list[Action] = [Finish(endings)] if endings else []
        return done + self._flow(now)

    def on_guard_died(self, sights: dict[int, Sight], now: Micros) -> list[Action]:
        """Every worker died with it, and that is nobody's fault."""
        self._can_spawn = False
        endings: list[Ending] = [ending for held in self._sweeps.values() for ending in held]
        self._sweeps.clear()
        for slot, hand in list(self._hands.items()):
            sight = sights.get(slot)
            victim = hand.at(sight.place) if sight and sight.phase == wire.RUNNING else None
            if sight and victim:
                ending = self._ending(victim, End(cause=Cause.COLLATERAL, started=True), now)
                endings.append(self._last_seen(ending, hand, sight))
            endings += self._put_back([h for h in hand.unfinished() if h is not victim], now)
            del self._hands[slot]
        done: list[Action] = [Finish(endings)] if endings else []
        return done + self._flow(now)

    def _last_seen(self, ending: Ending, hand: Hand, sight: Sight) -> Ending:
        """With what is known of an attempt that cannot tell it any more."""
        known = hand.alone or hand.seen_place == sight.place
        told = sight.noted and sight.noted[1] == sight.place
        return replace(
            ending,
            pid=hand.pid,
            started=self.wall(hand.seen_since) if known else None,
            progress=progress_text(sight.noted) if told and sight.noted else None,
            log=sight.log,
        )

    def _put_back(self, back: Sequence[Held], now: Micros) -> list[Ending]:
        """What had not started goes to the front of what is ready; who was cancelled meanwhile ends here."""
        for held in sorted(back, key=lambda h: (h.job.rank, h.job.id), reverse=True):
            if held.job.id not in self._cancelled:
                self._pile_of(held).appendleft(held)
        return [self._unstarted(held, Cause.CANCELLED, now) for held in back if held.job.id in self._cancelled]

    def _pile_of(self, held: Held) -> deque[Held]:
        if held.snapshot is None and not self.concurrency:  # as most are
            return self._single if held.job.losses else self._ready
        if held.dedicated:
            return self._apart
        if held.job.task in self.concurrency and held.sociable and self.settings.pool != "ondemand":
            return self._shared
        return self._single if held.alone else self._ready

    # jobs come

    def on_claimed(self, jobs: Sequence[Claimed], claim: int, now: Micros, *, failed: bool = False) -> list[Action]:
        if not failed:
            dry = self._dry if self._claiming_tasks is None else self._no_company
            dry |= set(self._claiming) - {job.queue for job in jobs}
        self._claiming, self._claiming_tasks = (), None
        if failed:
            self._hungry_until = now + SECOND // 2
        return self._take_in(jobs, claim, now)

    def on_claimed_dedicated(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        self._apart_asked = False
        return self._take_in(jobs, claim, now)

    def _take_in(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        unfit: list[Ending] = []
        for job in jobs:
            options = read_options(job.options)
            held = Held(job, claim, options)
            if options is UNREADABLE:
                end = End(cause=Cause.EXCEPTION, started=False, wants="hold", reason="its options cannot be read")
                unfit.append(unhappened(self._ending(held, end, now)))
            else:
                self._pile_of(held).append(held)
        done: list[Action] = [Finish(unfit)] if unfit else []
        return done + self._flow(now)

    def on_ring(self, now: Micros) -> list[Action]:
        """There may be work."""
        self._dry.clear()
        self._no_company.clear()
        return self._flow(now)

    def on_marked(self, ids: Iterable[JobId], now: Micros) -> list[Action]:
        """Their start is written: they may start."""
        back = [self._marking.pop(id) for id in ids if id in self._marking]
        for held in back:
            held.marked = True
        cancelled = self._put_back(back, now)
        done: list[Action] = [Finish(cancelled)] if cancelled else []
        return done + self._flow(now)

    def on_mark_lost(self, ids: Iterable[JobId]) -> None:
        """They are not ours any more."""
        for id in ids:
            self._marking.pop(id, None)
            self._cancelled.pop(id, None)

    def _flow(self, now: Micros) -> list[Action]:
        """Give what is ready to those who are free, and see that more of both comes; draining, give it back."""
        actions: list[Action] = []
        if self.draining:
            actions += self._release_ready(now)
            for hand in self._workers():
                if not hand.outstanding:
                    self._dismiss(actions, hand, now)
            return actions
        if self._apart:
            self._give_apart(actions, now)
        if self.concurrency or self._shared:
            self._give_seats(actions, now)
        self._give_singles(actions, now)
        self._give_bunches(actions, now)
        self._staff(actions, now)
        self._ask_for_more(actions, now)
        return actions

    def _free(self) -> Hand | None:
        for hand in self._hands.values():
            alone = not hand.seats and hand.host is None
            if alone and hand.ready and not hand.outstanding and not hand.leaving and hand.stop is None:
                return hand
        return None

    def _give_singles(self, actions: list[Action], now: Micros) -> None:
        while self._single:
            hand = self._free()
            if hand is None or self._too_late(self._single[0], now):
                return
            self._give_alone(actions, hand, self._single.popleft(), now)

    def _give_alone(self, actions: list[Action], hand: Hand, held: Held, now: Micros) -> None:
        if held.must_mark and not held.marked:
            self._marking[held.job.id] = held
            job = held.job
            actions.append(Mark([(job.id, job.attempt, held.claim, self.wall(now))], first=True))
            return
        self._give(actions, hand, [held], now)
        hand.alone, hand.weighed = True, held.weighed
        hand.heaviest, hand.cpu_before = 0, None

    def _too_late(self, held: Held, now: Micros) -> bool:
        """It must run once at most, and others may soon believe that it has not run here."""
        return held.options.at_most_once and self._safe_until is not None and now >= self._safe_until

    def _give_seats(self, actions: list[Action], now: Micros) -> None:
        """To each a seat beside others of its task, if need be in one more worker."""
        self._seat(actions, now)
        if self._make_room(actions, now) and not (self._ready or self._single):
            self._seat(actions, now)

    def _seat(self, actions: list[Action], now: Micros) -> None:
        left: list[Held] = []
        full: set[str] = set()
        while self._shared:
            held = self._shared.popleft()
            task = held.job.task
            seat = None if task in full else self._seat_for(actions, task, now)
            if seat is None:
                full.add(task)
                left.append(held)
                continue
            self._give(actions, seat, [held], now)
            seat.alone = True
        self._shared.extend(left)

    def _make_room(self, actions: list[Action], now: Micros) -> bool:
        """Others wait for a worker: a shared one is theirs as soon as its seats are empty.  True if one is."""
        hosts = [hand for hand in self._workers() if hand.seats and hand.told_to_go is None]
        seated = {hand.task for hand in self._hands.values() if hand.host is not None}
        if not (self._ready or self._single or self._in_company().keys() - seated):
            for host in hosts:
                host.closing = None
            return False
        empty = [host for host in hosts if not host.outstanding]
        for host in empty:
            self._stand_up(actions, host)
            hosts.remove(host)
        there = sum(1 for hand in self._workers() if not hand.apart)
        open_hosts = [host for host in hosts if host.closing is None]
        if there >= self.settings.slots and hosts and open_hosts == hosts and self._free() is None:
            min(hosts, key=lambda host: host.outstanding).closing = now
        return bool(empty)

    def _in_company(self) -> Counter[str]:
        return Counter(held.job.task for held in self._shared)

    def _seat_for(self, actions: list[Action], task: str, now: Micros) -> Hand | None:
        for seat in self._free_seats(task):
            return seat
        host = self._free()
        if host is None:
            return None
        first = self._slot + 1
        self._slot += self.concurrency.get(task, 1)  # a reload may have changed it
        host.seats = tuple(range(first, self._slot + 1))
        for number in host.seats:
            self._hands[number] = Hand(number, host.pid, ready=True, host=host.slot, task=task, idle_since=now)
        actions.append(Share(host.slot, host.seats))
        return self._hands[first]

    def _free_seats(self, task: str | None = None) -> Iterator[Hand]:
        for hand in self._hands.values():
            free = hand.host is not None and not hand.outstanding and task in (None, hand.task)
            host = self._hands[hand.host] if free and hand.host is not None else None
            if host is not None and not host.leaving and host.closing is None:
                yield hand

    def _stand_up(self, actions: list[Action], host: Hand) -> None:
        """One at a time again."""
        for number in host.seats:
            del self._hands[number]
        host.seats, host.closing = (), None
        actions.append(Share(host.slot, ()))

    def _give_apart(self, actions: list[Action], now: Micros) -> None:
        """To each its own worker; those for whom there is no room go back, for other nodes or for later."""
        hands = [hand for hand in self._hands.values() if hand.apart]
        for hand in hands:
            if self._apart and hand.ready and not hand.worked and hand.told_to_go is None:
                if self._too_late(self._apart[0], now):
                    return
                self._give_alone(actions, hand, self._apart.popleft(), now)
        coming = sum(1 for hand in hands if not hand.worked and hand.told_to_go is None)
        marking = sum(1 for held in self._marking.values() if held.dedicated)
        lack = len(self._apart) + marking - coming
        if lack > 0 and self._can_spawn and now >= self._spawn_after:
            room = max(0, self.settings.max_dedicated - len(hands))
            for _ in range(min(room, lack)):
                self._spawn(actions, now, apart=True)
            if lack > room:
                self._send_away(actions, lack - room, now)

    def _send_away(self, actions: list[Action], count: int, now: Micros) -> None:
        later = self.wall(now) + APART_AGAIN
        endings = []
        for _ in range(min(count, len(self._apart))):
            ending = self._unstarted(self._apart.pop(), Cause.DRAIN, now)
            if ending.state == State.WAITING:
                reason = "all workers for dedicated jobs are busy"
                ending = replace(ending, state=State.SCHEDULED, due_at=later, reason=reason)
            endings.append(ending)
        if endings:
            actions.append(Finish(endings))

    def _give_bunches(self, actions: list[Action], now: Micros) -> None:
        if not self._ready:
            return
        depth = self._depth()
        hands = [
            hand
            for hand in self._hands.values()
            if hand.ready and not (hand.alone or hand.slow or hand.leaving) and hand.stop is None
            if not hand.seats and hand.host is None
        ]
        hands.sort(key=lambda hand: hand.outstanding)
        del hands[: len(self._single)]  # these run dry first, and then take what must start alone
        for i, hand in enumerate(hands):
            room = depth - hand.outstanding
            if self.settings.recycle_jobs is not None:
                room = min(room, self.settings.recycle_jobs - hand.ended - hand.outstanding)
            if not self._ready:
                return
            if room <= 0 or (hand.outstanding and room < depth // 2):
                continue
            share = min(room, -(-len(self._ready) // (len(hands) - i)))
            while share > 0:
                size = min(share, BUNCH)
                self._give(actions, hand, [self._ready.popleft() for _ in range(size)], now)
                share -= size

    def _give(self, actions: list[Action], hand: Hand, jobs: list[Held], now: Micros) -> None:
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        hand.bunches[self._serial] = Bunch(self._serial, list(jobs), len(jobs))
        if not hand.outstanding:
            hand.given_at = hand.seen_since = hand.beat_at = now
            hand.seen_place = -1
        hand.outstanding += len(jobs)
        hand.worked = True
        if hand.host is not None:
            host = self._hands[hand.host]
            host.outstanding += 1
            host.worked = True
        if self.settings.pool == "ondemand":
            hand.leaving = True
        actions.append(Give(hand.slot, self._serial, [held.travel() for held in jobs]))

    def _depth(self) -> int:
        """How many jobs a worker may have in hand."""
        if self.settings.pool == "ondemand" or not self._mean or self._mean > WORTH / 2:
            return 1
        return max(1, min(DEEPEST, int(WORTH / self._mean)))

    def _staff(self, actions: list[Action], now: Micros) -> None:
        """As many workers as the pool's mode and the work want."""
        if not self._can_spawn or now < self._spawn_after:
            return
        s = self.settings
        there = busy = coming = 0
        for hand in self._workers():
            if not hand.apart:
                there += 1
                busy += hand.outstanding > 0
                coming += not hand.ready
        waiting = len(self._ready) + len(self._single)
        if self._shared:
            waiting += sum(-(-n // self.concurrency.get(task, 1)) for task, n in self._in_company().items())
        if s.pool == "static":
            wanted = s.min
        elif s.pool == "ondemand":
            wanted = min(s.max, busy + waiting)
        else:
            wanted = max(s.min, min(s.max, busy + waiting))
            if coming and waiting <= coming:
                wanted = min(wanted, there)
        if self._helpless:
            wanted = 1  # one tries again; nothing is claimed before it is there
        for _ in range(wanted - there):
            self._spawn(actions, now)

    def _spawn(self, actions: list[Action], now: Micros, *, apart: bool = False) -> None:
        self._slot += 1
        self._hands[self._slot] = Hand(self._slot, idle_since=now, apart=apart, leaving=apart)
        actions.append(Spawn(self._slot))

    def _ask_for_more(self, actions: list[Action], now: Micros) -> None:
        if self._claiming or now < self._hungry_until or not self._can_spawn or self._helpless or self._closed:
            return
        waiting = len(self._ready) + len(self._single) + len(self._shared) + len(self._marking)
        depth = self._depth()
        have = waiting + sum(hand.load(depth) for hand in self._workers() if not hand.apart)
        target = self.settings.slots * depth
        lack = target - have
        if lack <= 0 and now >= self._apart_after:
            self._ask_for_dedicated(actions, now)
        wants: dict[str, int] = {}
        if lack > 0 and not (target > 2 * self.settings.slots and lack < target // 2):
            wants = self._shares(lack, self._dry)
        if wants:
            self._claiming = tuple(wants)
            actions.append(Claim(wants))
        elif self.concurrency and not self._shared:
            self._ask_for_company(actions, now)

    def _ask_for_company(self, actions: list[Action], now: Micros) -> None:
        """More of the tasks that have a seat free; and now and then one of any task, which would wait for ever."""
        if now >= self._curious_at and not (self._ready or self._single):
            self._curious_at = now + CURIOUS
            wants = self._shares(1, self._dry)
            if wants:
                self._claiming = tuple(wants)
                actions.append(Claim(wants))
                return
        free = [seat.task for seat in self._free_seats() if seat.task]
        wants = self._shares(len(free), self._no_company) if free else {}
        if wants:
            self._claiming, self._claiming_tasks = tuple(wants), tuple(sorted(set(free)))
            actions.append(Claim(wants, self._claiming_tasks))

    def _ask_for_dedicated(self, actions: list[Action], now: Micros) -> None:
        """They need no slot: a node without a free one looks for them now and then."""
        there = sum(1 for hand in self._hands.values() if hand.apart)
        marking = sum(1 for held in self._marking.values() if held.dedicated)
        room = self.settings.max_dedicated - max(there, len(self._apart) + marking)
        if room > 0 and not self._apart_asked:
            self._apart_asked, self._apart_after = True, now + LOOK_FOR_DEDICATED
            actions.append(ClaimDedicated(list(self.settings.queues), room))

    def _shares(self, lack: int, dry: set[str]) -> dict[str, int]:
        """How many to claim of each queue: evenly, and no more of one than it has slots here."""
        queues = {queue: slots for queue, slots in self.settings.queues.items() if queue not in dry}
        share = max(1, lack // max(1, len(queues)))
        if all(slots is None for slots in queues.values()):
            return dict.fromkeys(queues, share)
        held = Counter(h.job.queue for h in self._held())
        room = {queue: share if slots is None else min(share, slots - held[queue]) for queue, slots in queues.items()}
        return {queue: count for queue, count in room.items() if count > 0}


    # jobs end

    def on_results(
        self,
        slot: int,
        results: Sequence[Sequence[Any]],
        now: Micros,
    ) -> list[Action]:
        hand = self._hands.get(slot)
        if hand is None:
            return []
        worker = hand if hand.host is None else self._hands[hand.host]
        fine: list[Success] = []
        other: list[Ending] = []
        skew, mean = self.skew, self._mean
        for serial, index, outcome, payload, started, ended, cpu, peak, extra in results:
            bunch = hand.bunches.get(serial)
            held = bunch.jobs[index] if bunch else None
            if bunch is None or held is None:
                continue
            bunch.jobs[index] = None
            bunch.left -= 1
            if not bunch.left:
                del hand.bunches[serial]
            hand.outstanding -= 1
            hand.slow = False
            spent = max(1, ended - started)  # the clock may have been set back
            if worker is hand:
                mean = mean + (spent - mean) * 0.05 if mean else spent
            else:
                worker.outstanding -= 1
            job = held.job
            if (
                outcome == wire.RETURNED
                and (extra is None or extra.keys() == _STRAYS)
                and not (held.snapshot and held.snapshot.explicit_outcome)
                and job.id not in self._cancelled
            ):
                fine.append(
                    Success(
                        job.id,
                        job.attempt,
                        held.claim,
                        payload,
                        job.claimed_at,
                        started + skew,
                        ended + skew,
                        hand.pid,
                        cpu,
                        peak,
                    )
                )
            elif outcome == wire.APPLIED:
                self._cancelled.pop(job.id, None)  # it has written its end itself
            else:
                result = wire.Result(serial, index, outcome, payload, started, ended, cpu, peak, extra)
                other.append(self._other_end(hand, held, result, now))
            if hand.stop is not None and hand.stop.place == wire.place(serial, index):
                hand.stop = None
        self._mean = mean
        hand.idle_since = worker.idle_since = now
        worker.ended += len(results)
        if not hand.outstanding:
            hand.alone = hand.weighed = False
        actions: list[Action] = []
        if fine:
            actions.append(Succeed(fine))
        if other:
            actions.append(Finish(other))
        self._recycle(actions, worker, results)
        if worker.leaving and not worker.outstanding:
            self._dismiss(actions, worker, now)
        return actions + self._flow(now)

    def _recycle(self, actions: list[Action], hand: Hand, results: Sequence[Sequence[Any]]) -> None:
        """A worker that has run so many jobs, or has grown so large, leaves; another one comes."""
        jobs, memory = self.settings.recycle_jobs, self.settings.recycle_memory
        if hand.leaving or (jobs is None and memory is None):
            return
        tired = jobs is not None and hand.ended >= jobs
        if tired or (memory is not None and results and results[-1][7] * 1024 >= memory):
            hand.leaving = True
            if hand.outstanding:
                actions.append(TakeBack(hand.slot))

    def _other_end(self, hand: Hand, held: Held, result: wire.Result, now: Micros) -> Ending:
        """Anything but a plain return."""
        extra = result.extra or {}
        wants, reason = extra.get("wants"), extra.get("reason")
        place = wire.place(result.serial, result.at)
        error: str | None = None
        match result.outcome:
            case wire.UNFIT:
                end = End(cause=Cause.EXCEPTION, started=True, wants="hold", reason=reason)
            case wire.STOPPED:
                cause = hand.stop.cause if hand.stop and hand.stop.place == place else Cause.DRAIN
                error = None if cause in (Cause.DRAIN, Cause.CANCELLED) else text_of(result.payload)
                end = End(cause=cause, started=True)
            case wire.RETURNED:
                if wants is None and held.options.explicit_outcome:
                    wants, reason = "hold", "panic: it returned no outcome"
                end = End(cause=Cause.RETURNED, started=True, wants=wants, reason=reason)
            case _:
                error = text_of(result.payload)
                reason = reason or headline(error)
                if extra.get("final") and wants is None and held.options.on_exception == "retry":
                    wants = "fail"
                end = End(cause=Cause.EXCEPTION, started=True, wants=wants, reason=reason)
        if wants == "retry":
            retry_at = extra["delay"] + self.skew if "delay" in extra else extra.get("at")
            end = replace(end, retry_at=retry_at, free_retry=extra.get("free", False))
        return replace(
            self._ending(held, end, now),
            error=error,
            result=result.payload if result.outcome == wire.RETURNED else None,
            progress=extra.get("progress"),
            log=extra.get("log"),
            started=result.started + self.skew,
            ended=result.ended + self.skew,
            pid=hand.pid,
            cpu=result.cpu,
            peak=result.peak,
        )

    def on_unmatched(self, lost: Sequence[Success], now: Micros) -> list[Action]:
        """Successes that the store refused: asked to stop meanwhile, or not ours any more; the fence will tell."""
        endings = [
            Ending(
                id=s.id,
                attempt=s.attempt,
                claim=s.claim,
                state="cancelled",
                cause=Cause.CANCELLED,
                reason=self._cancelled.pop(s.id, None),  # the store may know better
                started=s.started,
                ended=s.ended,
                pid=s.pid,
                cpu=s.cpu,
                peak=s.peak,
            )
            for s in lost
        ]
        return [Finish(endings)] if endings else []

    def _ending(self, held: Held, end: End, now: Micros) -> Ending:
        cancelled = self._cancelled.pop(held.job.id, None)
        if cancelled is not None:
            end = replace(end, reason=cancelled, cancel_requested=True)
        return judged(held.job, held.claim, held.options, end, self.wall(now), self._random())

    # people want something

    def on_cancel(
        self, id: JobId, how: str, reason: str | None, now: Micros, attempt: int | None = None
    ) -> list[Action]:
        """A job that we hold should not run, or not go on; None: whichever attempt it is at."""
        told = reason or "cancelled"
        if attempt is not None and attempt not in (held.job.attempt for held in self._held() if held.job.id == id):
            return []
        for pile in (self._ready, self._single, self._apart, self._shared):
            for held in pile:
                if held.job.id == id:
                    pile.remove(held)
                    self._cancelled[id] = told
                    return [Finish([self._unstarted(held, Cause.CANCELLED, now)]), *self._flow(now)]
        if id in self._marking:
            self._cancelled[id] = told  # it ends when the answer is here
        for hand in self._hands.values():
            for bunch in hand.bunches.values():
                for index, found in enumerate(bunch.jobs):
                    if found is not None and found.job.id == id and attempt in (None, found.job.attempt):
                        self._cancelled[id] = told
                        self._stop_for(hand, wire.place(bunch.serial, index), found, how, now)
                        return [TakeBack(hand.slot)]
        return []

    def _stop_for(self, hand: Hand, place: int, held: Held, how: str, now: Micros) -> None:
        """If it has started; else it comes back by its token.  To ask again never gives it more time."""
        cause, grace = (Cause.KILLED, 0) if how == "kill" else (Cause.CANCELLED, held.options.grace)
        before = hand.stop
        if before is not None and before.place == place:
            before.kill_at = min(before.kill_at, now + grace)
            if before.cause != Cause.KILLED:
                before.cause = cause
        else:
            hand.stop = Stop(place, cause, now, now + grace)

    def on_taken_back(self, slot: int, count: int, now: Micros) -> list[Action]:
        """So many tokens came back: as many of the last jobs given to this worker are ours again."""
        hand = self._hands.get(slot)
        if hand is None:
            return []
        back: list[Held] = []
        for bunch in reversed(list(hand.bunches.values())):
            for index in range(len(bunch.jobs) - 1, -1, -1):
                held = bunch.jobs[index]
                if held is not None and len(back) < count:
                    bunch.jobs[index] = None
                    bunch.left -= 1
                    back.append(held)
            if not bunch.left:
                del hand.bunches[bunch.serial]
        hand.outstanding -= len(back)
        if hand.stop is not None and hand.at(hand.stop.place) is None:
            hand.stop = None
        if not hand.outstanding:
            hand.alone = hand.weighed = False
        cancelled = self._put_back(back, now)
        actions: list[Action] = [Finish(cancelled)] if cancelled else []
        if hand.leaving and not hand.outstanding:
            self._dismiss(actions, hand, now)
        return actions + self._flow(now)

    def on_settings(self, settings: NodeSettings, now: Micros) -> list[Action]:
        """The pool has another size or another way: who is too many leaves, when it has ended what it runs."""
        self.settings = settings
        there = [hand for hand in self._hands.values() if not hand.leaving]
        there.sort(key=lambda hand: hand.outstanding)
        actions: list[Action] = []
        for hand in there[: max(0, len(there) - settings.slots)]:
            hand.leaving = True
            if hand.outstanding:
                actions.append(TakeBack(hand.slot))
            else:
                self._dismiss(actions, hand, now)
        return actions + self._flow(now)

    def on_gate(self, closed: bool, now: Micros) -> list[Action]:
        """The machine has enough to do, or can do more again."""
        self._closed = closed
        return self._flow(now)

    def on_renewed(self, sent: Micros, lease: Micros) -> None:
        """The lease is good for so long from when it was asked for."""
        self._safe_until = sent + lease * 3 // 4
        self._dead_by = sent + lease * 9 // 10

    def on_drain(self, now: Micros, *, hurry: bool = False) -> list[Action]:
        """Claim nothing more, let what runs end within the grace, give back the rest."""
        first = not self.draining
        self._hurried = self._hurried or hurry
        deadline = now if hurry else now + self.settings.grace
        self._draining_until = deadline if first else min(deadline, self._draining_until or deadline)
        actions = self._release_ready(now)
        if first:
            actions.append(DrainAll())
            actions += [TakeBack(hand.slot) for hand in self._hands.values() if hand.outstanding]
        return actions

    def _release_ready(self, now: Micros) -> list[Action]:
        held = [*self._ready, *self._single, *self._apart, *self._shared]
        for pile in (self._ready, self._single, self._apart, self._shared):
            pile.clear()
        endings = [self._unstarted(h, Cause.DRAIN, now) for h in held]
        return [Finish(endings)] if endings else []

    def _unstarted(self, held: Held, cause: str, now: Micros) -> Ending:
        return unhappened(self._ending(held, End(cause=cause, started=False), now))

    # time passes

    def on_tick(self, now: Micros, sights: dict[int, Sight]) -> list[Action]:
        """Timers: what runs too long, what has been asked to stop, who is idle."""
        actions: list[Action] = []
        for hand in list(self._hands.values()):
            sight = sights.get(hand.slot)
            if sight is not None and hand.outstanding:
                self._watch(actions, hand, sight, now)
            self._press(actions, hand, sight, now)
            if hand.told_to_go is not None and now - hand.told_to_go >= LEAVE_WITHIN:
                actions.append(Signal(hand.slot, signal.SIGKILL))
        if self._draining_until is None:
            self._shrink(actions, now)
            self._dismiss_unneeded(actions, now)
            actions += self._give_up_surplus(now)
        elif now >= self._draining_until:
            self._end_drain(sights, now)
        return actions + self._flow(now)

    def _watch(self, actions: list[Action], hand: Hand, sight: Sight, now: Micros) -> None:
        running = sight.phase == wire.RUNNING
        if (running and sight.place != hand.seen_place) or not (running or hand.alone):
            hand.seen_place, hand.seen_since = sight.place, now if not hand.alone else hand.given_at
            hand.beats, hand.beat_at = sight.beats, now
            hand.slow = False
        held = hand.at(sight.place) if running else None
        if held is None:
            return
        ran = now - hand.seen_since
        if ran >= LONG:
            hand.slow = True
            if hand.host is None:
                self._mean = max(self._mean, WORTH)  # no more in advance, while jobs are like this
            if hand.outstanding > 1:
                actions.append(TakeBack(hand.slot))
        job, options = held.job, held.options
        if ran >= MARK_AFTER and not held.marked:
            held.marked = True
            actions.append(Mark([(job.id, job.attempt, held.claim, self.wall(hand.seen_since))]))
        if sight.beats != hand.beats:
            hand.beats, hand.beat_at = sight.beats, now
        noted = sight.noted
        fresh = noted is not None and noted[1] == sight.place and noted[0] != hand.noted
        if noted and fresh and now - hand.noted_at >= options.progress_every:
            hand.noted, hand.noted_at = noted[0], now
            actions.append(Note([(job.id, job.attempt, held.claim, progress_text(noted))]))
        if sight.use is not None and not self.settings.debug:
            self._weigh(hand, held, sight.place, sight.use, now)
        if hand.stop is None and not self.settings.debug:
            if options.timeout is not None and ran >= options.timeout:
                hand.stop = Stop(sight.place, Cause.TIMEOUT, now, now + options.grace)
            elif options.stall_timeout is not None and now - hand.beat_at >= options.stall_timeout:
                hand.stop = Stop(sight.place, Cause.STALL, now, now + options.grace)
            elif self._too_late(held, now):
                hand.stop = Stop(sight.place, Cause.LEASE_LOST, now, min(now + options.grace, self._dead_by))

    def _weigh(self, hand: Hand, held: Held, place: int, use: Use, now: Micros) -> None:
        """For CPU time there is a grace as for any time; memory would be gone before that is over."""
        options = held.options
        hand.heaviest = max(hand.heaviest, use.memory)
        if hand.cpu_before is None:
            hand.cpu_before = use.cpu
        if options.memory is not None and use.memory > options.memory:
            hand.stop = Stop(place, Cause.OUT_OF_MEMORY, now, now)
        elif options.cpu is not None and use.cpu - hand.cpu_before >= options.cpu and hand.stop is None:
            hand.stop = Stop(place, Cause.CPU_LIMIT, now, now + options.grace)

    def _press(self, actions: list[Action], hand: Hand, sight: Sight | None, now: Micros) -> None:
        """Flag, then SIGTERM (at half the grace for one that looks at the flag), then SIGKILL."""
        stop = hand.stop
        if stop is None:
            return
        if not stop.flagged:
            stop.flagged = True
            actions.append(AskToStop(hand.slot, stop.place))
        if sight is None or sight.place != stop.place or sight.phase != wire.RUNNING:
            return  # its result is on the way; whoever runs now must not be hit
        term_at = (stop.asked_at + stop.kill_at) // 2 if sight.looked else stop.asked_at
        if now >= stop.kill_at:
            if hand.host is not None:
                self._hands[hand.host].forced = True
            actions.append(Signal(hand.slot if hand.host is None else hand.host, signal.SIGKILL))
        elif not stop.termed and now >= term_at:
            stop.termed = True
            seated = hand.host is not None
            actions.append(Interrupt(hand.slot, stop.place) if seated else Signal(hand.slot, signal.SIGTERM))

    def _end_drain(self, sights: dict[int, Sight], now: Micros) -> None:
        for slot, sight in sights.items():
            hand = self._hands.get(slot)
            if hand and hand.stop is None and sight.phase == wire.RUNNING and hand.at(sight.place):
                hand.stop = Stop(sight.place, Cause.DRAIN, now, now + DRAIN_KILL)

    def _give_up_surplus(self, now: Micros) -> list[Action]:
        """Everyone here is busy for long: let other nodes have what is ready."""
        there = [hand for hand in self._workers() if hand.outstanding and not hand.apart]
        long = sum(1 for hand in there if now - (hand.closing or hand.seen_since) >= LONG)
        if long < self.settings.slots or not (self._ready or self._single or self._shared):
            return []
        return self._release_ready(now)

    def _dismiss_unneeded(self, actions: list[Action], now: Micros) -> None:
        """Who has come for a dedicated job that was cancelled meanwhile."""
        if self._apart or any(held.dedicated for held in self._marking.values()):
            return
        for hand in self._hands.values():
            if hand.apart and hand.ready and not hand.outstanding:
                self._dismiss(actions, hand, now)

    def _shrink(self, actions: list[Action], now: Micros) -> None:
        """Who has been idle for long goes, unless the pool keeps it."""
        if self.settings.pool == "static":
            return
        kept = self.settings.min if self.settings.pool == "dynamic" else 0
        staying = [hand for hand in self._workers() if not hand.leaving]
        spare = len(staying) - kept
        for hand in staying:
            if spare <= 0:
                return
            if hand.ready and not hand.outstanding and now - hand.idle_since >= IDLE_FOR:
                self._dismiss(actions, hand, now)
                spare -= 1
