"""What a node decides: events in, actions out; no clock, no process, no database.

Times are micros of the node's own steady clock; `wall` turns one into the store's time.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from genba import wire
from genba.domain.states import Cause
from genba.domain.verdict import End
from genba.node.actions import (
    Action,
    AskToStop,
    Claim,
    Dismiss,
    DrainAll,
    Finish,
    Give,
    Mark,
    Note,
    Signal,
    Spawn,
    Succeed,
    Sweep,
    TakeBack,
)
from genba.node.endings import cause_of_death, headline, judged, progress_text, text_of, unhappened
from genba.node.hands import UNREADABLE, Bunch, Hand, Held, Sight, Stop, read_options
from genba.node.settings import NodeSettings
from genba.storage.records import Claimed, Ending, JobId, Micros, Success

SECOND = 1_000_000
WORTH = 50_000  # µs of measured work that a worker may have in hand
BUNCH = 64  # jobs in one frame
DEEPEST = 512
LONG = 250_000  # µs after which a running job is long: what was given with it goes to others
MARK_AFTER = 1 * SECOND
PROGRESS_EVERY = SECOND // 2
IDLE_FOR = 10 * SECOND
DRAIN_KILL = 2 * SECOND
LEAVE_WITHIN = 10 * SECOND  # for a worker that was told to go: its app may have something to put away

_STRAYS = {"strays"}  # all that is told of a call that ended well and left processes behind


class Brain:
    def __init__(self, settings: NodeSettings, tasks: Iterable[str], random: Callable[[], float]) -> None:
        self.settings = settings
        self.tasks = sorted(tasks)
        self.delta: Micros = 0  # store's wall time minus our steady clock
        self.skew: Micros = 0  # store's wall time minus this machine's
        self._random = random
        self._hands: dict[int, Hand] = {}
        self._ready: deque[Held] = deque()
        self._single: deque[Held] = deque()
        self._marking: dict[JobId, Held] = {}
        self._cancelled: dict[JobId, str] = {}
        self._sweeps: dict[int, list[Ending]] = {}
        self._claiming: tuple[str, ...] = ()  # the queues that are just being asked
        self._dry: set[str] = set()  # queues in which the last claim found nothing
        self._hungry_until: Micros = 0
        self._mean: float = 0.0  # µs of one job, lately; 0: not known yet
        self._serial = 0
        self._token = 0
        self._slot = 0
        self._can_spawn = False
        self._spawn_after: Micros = 0
        self._failed_starts = 0
        self._draining_until: Micros | None = None

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
        return not (busy or self._ready or self._single or self._marking or self._sweeps)

    @property
    def deserted(self) -> bool:
        """No worker is left, or there is no time to wait for one."""
        return not self._hands

    @property
    def busy(self) -> bool:
        return any(hand.outstanding or hand.stop for hand in self._hands.values())

    @property
    def timed(self) -> bool:
        """Something must be looked at soon: a job with a timer, or one that is being stopped."""
        return any(hand.alone or hand.stop for hand in self._hands.values())

    def jobs_in_hand(self) -> list[JobId]:
        """What we have claimed and not yet let go."""
        swept = [ending.id for endings in self._sweeps.values() for ending in endings]
        return [held.job.id for held in self._held()] + swept

    def _held(self) -> Iterator[Held]:
        yield from (*self._ready, *self._single, *self._marking.values())
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
        self, slot: int, status: int | None, cpu: Micros, peak: int, sight: Sight, now: Micros
    ) -> list[Action]:
        """A worker is dead; only the job that had started is touched by that."""
        hand = self._hands.pop(slot, None)
        if hand is None:
            return []
        stillborn = not hand.ready and not hand.leaving
        if stillborn:
            self._back_off(now)
        victim = hand.at(sight.place) if sight.phase == wire.RUNNING else None
        endings: list[Ending] = []
        if victim is not None:
            ending = self._ending(victim, End(cause=cause_of_death(hand, sight.place, status), started=True), now)
            endings.append(replace(self._last_seen(ending, hand, sight), cpu=cpu, peak=peak))
        cancelled = self._put_back([h for h in hand.unfinished() if h is not victim], now)
        actions: list[Action] = [Finish(cancelled)] if cancelled else []
        if hand.worked:
            self._token += 1
            self._sweeps[self._token] = endings
            actions.append(Sweep(self._token))
        if stillborn and self._helpless:
            actions += self._release_ready(now)
        return actions + self._flow(now)

    @property
    def _helpless(self) -> bool:
        """Workers do not come up here: others should have the jobs."""
        return self._failed_starts > 0 and not any(hand.ready for hand in self._hands.values())

    def on_changed(self, now: Micros) -> list[Action]:
        """The app's code is another one: whoever has the old one ends what it runs, and goes."""
        actions: list[Action] = []
        for hand in self._hands.values():
            if hand.outstanding:
                hand.leaving = True
                actions.append(TakeBack(hand.slot))
            else:
                self._dismiss(actions, hand, now)
        return actions

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
        )

    def _put_back(self, back: Sequence[Held], now: Micros) -> list[Ending]:
        """What had not started goes to the front of what is ready; who was cancelled meanwhile ends here."""
        for held in sorted(back, key=lambda h: (h.job.rank, h.job.id), reverse=True):
            if held.job.id not in self._cancelled:
                (self._single if held.alone else self._ready).appendleft(held)
        return [self._unstarted(held, Cause.CANCELLED, now) for held in back if held.job.id in self._cancelled]

    # jobs come

    def on_claimed(self, jobs: Sequence[Claimed], claim: int, now: Micros, *, failed: bool = False) -> list[Action]:
        if not failed:
            self._dry |= set(self._claiming) - {job.queue for job in jobs}
        self._claiming = ()
        if failed:
            self._hungry_until = now + SECOND // 2
        unfit: list[Ending] = []
        for job in jobs:
            options = read_options(job.options)
            held = Held(job, claim, options)
            if options is UNREADABLE:
                end = End(cause=Cause.EXCEPTION, started=False, wants="hold", reason="its options cannot be read")
                unfit.append(unhappened(self._ending(held, end, now)))
            elif held.alone:
                self._single.append(held)
            else:
                self._ready.append(held)
        done: list[Action] = [Finish(unfit)] if unfit else []
        return done + self._flow(now)

    def on_ring(self, now: Micros) -> list[Action]:
        """There may be work."""
        self._dry.clear()
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
            for hand in self._hands.values():
                if not hand.outstanding:
                    self._dismiss(actions, hand, now)
            return actions
        self._give_singles(actions, now)
        self._give_bunches(actions, now)
        self._staff(actions, now)
        self._ask_for_more(actions, now)
        return actions

    def _free(self) -> Hand | None:
        for hand in self._hands.values():
            if hand.ready and not hand.outstanding and not hand.leaving and hand.stop is None:
                return hand
        return None

    def _give_singles(self, actions: list[Action], now: Micros) -> None:
        while self._single:
            hand = self._free()
            if hand is None:
                return
            held = self._single.popleft()
            if held.must_mark and not held.marked:
                self._marking[held.job.id] = held
                job = held.job
                actions.append(Mark([(job.id, job.attempt, held.claim, self.wall(now))], first=True))
                continue
            self._give(actions, hand, [held], now)
            hand.alone = True

    def _give_bunches(self, actions: list[Action], now: Micros) -> None:
        if not self._ready:
            return
        depth = self._depth()
        hands = [
            hand
            for hand in self._hands.values()
            if hand.ready and not (hand.alone or hand.slow or hand.leaving) and hand.stop is None
        ]
        hands.sort(key=lambda hand: hand.outstanding)
        del hands[: len(self._single)]  # these run dry first, and then take what must start alone
        for i, hand in enumerate(hands):
            room = depth - hand.outstanding
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
        waiting = len(self._ready) + len(self._single)
        coming = sum(1 for hand in self._hands.values() if not hand.ready)
        if s.pool == "static":
            wanted = s.min
        elif s.pool == "ondemand":
            wanted = min(s.max, sum(1 for h in self._hands.values() if h.outstanding) + waiting)
        else:
            busy = sum(1 for hand in self._hands.values() if hand.outstanding)
            wanted = max(s.min, min(s.max, busy + waiting))
            if coming and waiting <= coming:
                wanted = min(wanted, len(self._hands))
        if self._helpless:
            wanted = 1  # one tries again; nothing is claimed before it is there
        for _ in range(wanted - len(self._hands)):
            self._slot += 1
            self._hands[self._slot] = Hand(self._slot, idle_since=now)
            actions.append(Spawn(self._slot))

    def _ask_for_more(self, actions: list[Action], now: Micros) -> None:
        if self._claiming or now < self._hungry_until or not self._can_spawn or self._helpless:
            return
        waiting = len(self._ready) + len(self._single) + len(self._marking)
        have = waiting + sum(hand.outstanding for hand in self._hands.values())
        target = self.settings.slots * self._depth()
        lack = target - have
        if lack <= 0 or (target > 2 * self.settings.slots and lack < target // 2):
            return
        wants = self._shares(lack)
        if wants:
            self._claiming = tuple(wants)
            actions.append(Claim(wants))

    def _shares(self, lack: int) -> dict[str, int]:
        """How many to claim of each queue: evenly, and no more of one than it has slots here."""
        queues = {queue: slots for queue, slots in self.settings.queues.items() if queue not in self._dry}
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
        noted: tuple[int, int, float, float, str] | None = None,
    ) -> list[Action]:
        hand = self._hands.get(slot)
        if hand is None:
            return []
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
            mean = mean + (spent - mean) * 0.05 if mean else spent
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
            else:
                result = wire.Result(serial, index, outcome, payload, started, ended, cpu, peak, extra)
                ending = self._other_end(hand, held, result, now)
                told = noted is not None and noted[1] == wire.place(serial, index)
                other.append(replace(ending, progress=progress_text(noted)) if told and noted else ending)
            if hand.stop is not None and hand.stop.place == wire.place(serial, index):
                hand.stop = None
        self._mean = mean
        hand.idle_since = now
        if not hand.outstanding:
            hand.alone = False
        actions: list[Action] = []
        if fine:
            actions.append(Succeed(fine))
        if other:
            actions.append(Finish(other))
        if hand.leaving and not hand.outstanding:
            self._dismiss(actions, hand, now)
        return actions + self._flow(now)

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
                retry_at = extra.get("at", extra.get("delay"))
                reason = reason or headline(error)
                end = End(cause=Cause.EXCEPTION, started=True, wants=wants, reason=reason, retry_at=retry_at)
        return replace(
            self._ending(held, end, now),
            error=error,
            result=result.payload if result.outcome == wire.RETURNED else None,
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
        for pile in (self._ready, self._single):
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
                    if found is not None and found.job.id == id:
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
            hand.alone = False
        cancelled = self._put_back(back, now)
        actions: list[Action] = [Finish(cancelled)] if cancelled else []
        if hand.leaving and not hand.outstanding:
            self._dismiss(actions, hand, now)
        return actions + self._flow(now)

    def on_drain(self, now: Micros, *, hurry: bool = False) -> list[Action]:
        """Claim nothing more, let what runs end within the grace, give back the rest."""
        first = not self.draining
        deadline = now if hurry else now + self.settings.grace
        self._draining_until = deadline if first else min(deadline, self._draining_until or deadline)
        actions = self._release_ready(now)
        if first:
            actions.append(DrainAll())
            actions += [TakeBack(hand.slot) for hand in self._hands.values() if hand.outstanding]
        return actions

    def _release_ready(self, now: Micros) -> list[Action]:
        held = [*self._ready, *self._single]
        self._ready.clear()
        self._single.clear()
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
        if noted and noted[1] == sight.place and noted[0] != hand.noted and now - hand.noted_at >= PROGRESS_EVERY:
            hand.noted, hand.noted_at = noted[0], now
            actions.append(Note([(job.id, job.attempt, held.claim, progress_text(noted))]))
        if hand.stop is None and not self.settings.debug:
            if options.timeout is not None and ran >= options.timeout:
                hand.stop = Stop(sight.place, Cause.TIMEOUT, now, now + options.grace)
            elif options.stall_timeout is not None and now - hand.beat_at >= options.stall_timeout:
                hand.stop = Stop(sight.place, Cause.STALL, now, now + options.grace)

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
            actions.append(Signal(hand.slot, signal.SIGKILL))
        elif not stop.termed and now >= term_at:
            stop.termed = True
            actions.append(Signal(hand.slot, signal.SIGTERM))

    def _end_drain(self, sights: dict[int, Sight], now: Micros) -> None:
        for slot, sight in sights.items():
            hand = self._hands.get(slot)
            if hand and hand.stop is None and sight.phase == wire.RUNNING and hand.at(sight.place):
                hand.stop = Stop(sight.place, Cause.DRAIN, now, now + DRAIN_KILL)

    def _give_up_surplus(self, now: Micros) -> list[Action]:
        """Everyone here is busy for long: let other nodes have what is ready."""
        long = sum(1 for hand in self._hands.values() if hand.outstanding and now - hand.seen_since >= LONG)
        if long < self.settings.slots or not (self._ready or self._single):
            return []
        return self._release_ready(now)

    def _shrink(self, actions: list[Action], now: Micros) -> None:
        """Who has been idle for long goes, unless the pool keeps it."""
        if self.settings.pool == "static":
            return
        kept = self.settings.min if self.settings.pool == "dynamic" else 0
        staying = [hand for hand in self._hands.values() if not hand.leaving]
        spare = len(staying) - kept
        for hand in staying:
            if spare <= 0:
                return
            if hand.ready and not hand.outstanding and now - hand.idle_since >= IDLE_FOR:
                self._dismiss(actions, hand, now)
                spare -= 1
