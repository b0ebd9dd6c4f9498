"""What a node decides: events in, actions out; no clock, no process, no database.

Times are micros of the node's own steady clock; `wall` turns one into the store's time.  The brain hears what happens
and lets its parts decide: `staffing` who is in the pool, `asking` what to claim, `giving` and `seats` who gets what,
`stopping` whose time is over, `results` how it ended.  What they all look at is the `floor`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from genba import wire
from genba.domain.states import Cause, default_stop_reason
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import (
    Action,
    RequestStopOfAll,
    SignalWorker,
    SweepLeftovers,
    TakeJobsBack,
    WriteEndings,
    WriteSuccesses,
)
from genba.node.decide.claim import ClaimPlanner
from genba.node.decide.conditions import ConditionChecks
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.endings import cause_of_death, without_attempt
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.results import end_seat, endings_of_refused, take_results
from genba.node.decide.shared_workers import SharedWorkers
from genba.node.decide.state import SECOND, NodeState
from genba.node.decide.stop import (
    DRAIN_LEAVE_US,
    end_drain,
    escalate,
    release_signalled,
    request_stop,
    stop_paused_writer,
    watch_job,
)
from genba.node.decide.worker_state import ClaimedJob, WorkerView
from genba.node.settings import NodeSettings
from genba.node.watch.counters import Counters
from genba.storage.jobs.judge import UNREADABLE_OPTIONS, read_options
from genba.storage.records import Claimed, Ending, JobId, Micros, Success

BRIEF = 200  # µs: of jobs that are shorter, many end at once
GATHER = 8_000  # µs for which others are waited for
LEAVE_WITHIN = (
    10 * SECOND
)  # for a worker that was told to go: its app may have something to put away

_looked_at = itemgetter(
    *map(Claimed._fields.index, ("task", "options", "losses"))
)  # names cost as much as the rest
_NO_SEATS: Mapping[int, WorkerView] = MappingProxyType({})


class Brain:
    def __init__(
        self, settings: NodeSettings, tasks: Iterable[str], random: Callable[[], float]
    ) -> None:
        self.tasks = sorted(tasks)
        self._floor = NodeState(settings, random)
        self._staffing = PoolSize(self._floor)
        self._giving = Dispatcher(self._floor, self._staffing)
        self._seats = SharedWorkers(self._floor, self._giving)
        self._probing = ConditionChecks(self._floor)
        self._asking = ClaimPlanner(self._floor, self._staffing, self._giving, self._seats)
        self._token = 0
        self._hurried = False

    # what the loop may know and say

    @property
    def settings(self) -> NodeSettings:
        return self._floor.settings

    @property
    def concurrency(self) -> Mapping[str, int]:
        """Of tasks that run several at a time."""
        return self._floor.concurrency

    @concurrency.setter
    def concurrency(self, seats: Mapping[str, int]) -> None:
        self._floor.concurrency, self._floor.refit = seats, True

    @property
    def workers_fork(self) -> bool:
        """A worker may fork for each job: the app can be forked, and has no lifespan that each process must enter."""
        return self._floor.workers_fork

    @workers_fork.setter
    def workers_fork(self, may: bool) -> None:
        self._floor.workers_fork = may

    @property
    def conditions(self) -> frozenset[str]:
        """Those that the app of this node has."""
        return self._probing.known

    @conditions.setter
    def conditions(self, names: Iterable[str]) -> None:
        self._probing.known = frozenset(names)

    @property
    def delta(self) -> Micros:
        """The store's wall time minus our steady clock."""
        return self._floor.delta

    @delta.setter
    def delta(self, micros: Micros) -> None:
        self._floor.delta = micros

    @property
    def skew(self) -> Micros:
        """The store's wall time minus this machine's."""
        return self._floor.skew

    @skew.setter
    def skew(self, micros: Micros) -> None:
        self._floor.skew = micros

    def count_with(self, meter: Counters) -> None:
        """Note there what was done."""
        self._floor.meter = meter

    @property
    def staff(self) -> tuple[int, int]:
        """How many workers are ready, and how many of them have work."""
        ready = [hand for hand in self._floor.workers() if hand.ready]
        return len(ready), sum(hand.outstanding > 0 for hand in ready)

    @property
    def draining(self) -> bool:
        return self._floor.draining

    @property
    def empty(self) -> bool:
        """Nothing is left that could be lost by leaving."""
        return self._floor.empty

    @property
    def busy(self) -> bool:
        return self._floor.busy

    @property
    def timed(self) -> bool:
        """Something must be looked at soon: a job with a timer, or one that is being stopped."""
        return self._floor.timed

    @property
    def weighed(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers whose use must be looked at."""
        return self._floor.weighed

    def jobs_in_hand(self) -> list[JobId]:
        """What we have claimed and not yet let go."""
        return self._floor.jobs_in_hand()

    @property
    def leave_by(self) -> Micros | None:
        """Draining: when the node must be gone, whatever is still to be done."""
        until = self._floor.draining_until
        return None if until is None else until + DRAIN_LEAVE_US

    @property
    def deserted(self) -> bool:
        """No worker is left, or there is no time to wait for one."""
        return not self._floor.hands or self._hurried

    # processes

    def on_zygote(self, now: Micros) -> list[Action]:
        """It can fork now."""
        self._staffing.can_spawn = True
        return self._flow(now)

    def on_zygote_gone(self) -> list[Action]:
        self._staffing.can_spawn = False
        return []

    def worker_at(self, slot: int) -> int:
        """Its process, if it has said that it is ready; else 0."""
        hand = self._floor.hands.get(slot)
        return 0 if hand is None else hand.pid

    def on_worker_ready(self, slot: int, pid: int, now: Micros) -> list[Action]:
        hand = self._floor.hands.get(slot)
        if hand is None:
            return []
        hand.pid, hand.ready, hand.idle_since = pid, True, now
        if hand.outstanding:  # it could not start before
            hand.given_at = hand.seen_since = hand.beat_at = now
        self._staffing.failed_starts = 0
        return self._flow(now)

    def on_spawn_failed(self, slot: int, now: Micros) -> list[Action]:
        hand = self._floor.hands.pop(slot, None)
        self._staffing.back_off(now)
        cancelled = self._floor.put_back(hand.unfinished(), now) if hand else []
        done: list[Action] = [WriteEndings(cancelled)] if cancelled else []
        return done + self._flow(now)

    def on_worker_ended(
        self,
        slot: int,
        status: int | None,
        cpu: Micros,
        peak: int,
        sight: WorkerView,
        now: Micros,
        starved: bool = False,
        seats: Mapping[int, WorkerView] = _NO_SEATS,
    ) -> list[Action]:
        """A worker is dead; only what had started is touched by that."""
        hand = self._floor.hands.pop(slot, None)
        if hand is None:
            return []
        stillborn = not hand.ready and hand.told_to_go is None
        if stillborn:
            self._staffing.back_off(now)
        victim = hand.at(sight.place) if sight.phase == wire.RUNNING else None
        endings: list[Ending] = []
        if victim is not None:
            cause = cause_of_death(hand, sight.place, status, starved)
            ending = self._floor.ending(victim, AttemptEnd(cause=cause, started=True), now)
            seen = self._floor.last_seen(ending, hand, sight)
            spent = max(0, cpu - hand.cpu_told)
            if hand.ended and seen.started is not None and seen.ended is not None:
                spent = min(
                    spent, max(0, seen.ended - seen.started)
                )  # what lay between earlier jobs is told of none
            endings.append(replace(seen, cpu=spent, peak=max(peak, hand.heaviest // 1024)))
        victims = [victim]
        for number in hand.seats:
            seat = self._floor.hands.pop(number)
            victims.append(
                end_seat(self._floor, seat, seats[number], hand.forced, status, endings, now)
            )
        cancelled = self._floor.put_back(
            [h for h in hand.unfinished() if not any(h is v for v in victims)], now
        )
        actions: list[Action] = [WriteEndings(cancelled)] if cancelled else []
        if hand.probe is not None:
            actions += self._probing.on_death(hand, status, now)
        if hand.worked:
            self._token += 1
            self._floor.sweeps[self._token] = endings
            actions.append(SweepLeftovers(self._token))
        if stillborn and self._staffing.helpless:
            actions += self._floor.release_ready(now)
        return actions + self._flow(now)

    def on_changed(self, now: Micros) -> list[Action]:
        """The app's code is another one."""
        return self._staffing.renew(now)

    def on_swept(self, token: int, now: Micros) -> list[Action]:
        """The dead worker's whole tree is gone: now its job may be let go."""
        endings = self._floor.sweeps.pop(token, [])
        done: list[Action] = [WriteEndings(endings)] if endings else []
        return done + self._flow(now)

    def on_guard_died(self, sights: dict[int, WorkerView], now: Micros) -> list[Action]:
        """Every worker died with it, and that is nobody's fault."""
        self._staffing.can_spawn = False
        endings: list[Ending] = [ending for held in self._floor.sweeps.values() for ending in held]
        self._floor.sweeps.clear()
        victims: set[JobId] = set()
        for slot, hand in self._floor.hands.items():
            sight = sights.get(slot)
            victim = hand.at(sight.place) if sight and sight.phase == wire.RUNNING else None
            if sight and victim:
                victims.add(victim.job.id)
                ending = self._floor.ending(
                    victim, AttemptEnd(cause=Cause.COLLATERAL, started=True), now
                )
                endings.append(self._floor.last_seen(ending, hand, sight))
        gone = self._floor.workers()
        self._floor.hands.clear()
        for hand in gone:
            endings += self._floor.put_back(
                [h for h in hand.unfinished() if h.job.id not in victims], now
            )
            if hand.probe is not None:
                self._probing.on_guard_died(hand, now)
        done: list[Action] = [WriteEndings(endings)] if endings else []
        return done + self._flow(now)

    # jobs come

    def on_claimed(
        self, jobs: Sequence[Claimed], claim: int, now: Micros, *, failed: bool = False
    ) -> list[Action]:
        self._asking.answered(jobs, now, failed=failed)
        return self._take_in(jobs, claim, now)

    def on_claimed_dedicated(
        self, jobs: Sequence[Claimed], claim: int, now: Micros
    ) -> list[Action]:
        self._asking.answered_dedicated()
        return self._take_in(jobs, claim, now)

    def on_found(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        """Ours, by a claim whose answer was lost."""
        return self._take_in(jobs, claim, now)

    def _take_in(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        unfit: list[Ending] = []
        floor = self._floor
        floor.weigh(jobs)
        in_company, add = floor.concurrency, floor.ready.append
        for job in jobs:
            task, options_text, losses = _looked_at(job)
            if options_text is None and not losses and task not in in_company:  # as most are
                add(ClaimedJob(job, claim, None))
                continue
            options = read_options(options_text)
            held = ClaimedJob(job, claim, options)
            if options is UNREADABLE_OPTIONS:
                end = AttemptEnd(
                    cause=Cause.EXCEPTION,
                    started=False,
                    wants="hold",
                    reason="its options cannot be read",
                )
                unfit.append(without_attempt(floor.ending(held, end, now)))
            else:
                floor.pile_of(held).append(held)
        done: list[Action] = [WriteEndings(unfit)] if unfit else []
        return done + self._flow(now)

    def on_ring(self, now: Micros) -> list[Action]:
        """There may be work."""
        self._asking.rung()
        return self._flow(now)

    def on_marked(self, ids: Iterable[JobId], now: Micros) -> list[Action]:
        """Their start is written: they may start."""
        back = [self._floor.marking.pop(id) for id in ids if id in self._floor.marking]
        for held in back:
            held.marked = True
        cancelled = self._floor.put_back(back, now)
        done: list[Action] = [WriteEndings(cancelled)] if cancelled else []
        return done + self._flow(now)

    def on_mark_lost(self, ids: Iterable[JobId]) -> None:
        """They are not ours any more."""
        for id in ids:
            self._floor.marking.pop(id, None)
            self._floor.cancelled.pop(id, None)

    def _flow(self, now: Micros) -> list[Action]:
        """Give what is ready to those who are free, and see that more of both comes; draining, give it back."""
        actions: list[Action] = []
        if self._floor.draining:
            actions += self._floor.release_ready(now)
            for hand in self._floor.workers():
                if not hand.outstanding:
                    self._floor.dismiss(actions, hand, now)
            return actions
        if self._floor.unasked:
            self._probing.ask(actions, now)
        if self._floor.apart:
            self._giving.give_apart(actions, now)
        if self._floor.concurrency or self._floor.shared or self._floor.refit:
            self._seats.give_seats(actions, now)
        self._giving.give_singles(actions, now)
        self._giving.give_bunches(actions, now)
        self._staffing.staff(actions, now)
        if self._floor.settings.pool == "ondemand":
            self._giving.give_newcomers(actions, now)
        asked: list[Action] = []
        self._asking.ask_for_more(asked, now)
        return asked + actions  # the store is at it while the loop hands out what is here

    # jobs end

    def on_results(self, slot: int, results: Sequence[Sequence[Any]], now: Micros) -> list[Action]:
        """What a worker tells."""
        hand = self._floor.hands.get(slot)
        if hand is None:
            return []
        rest: list[Action] = []
        fine, other = take_results(self._floor, rest, hand, results, now)
        self._staffing.recycle(rest, hand, results)
        if hand.leaving and not hand.outstanding:
            self._floor.dismiss(rest, hand, now)
        actions: list[Action] = []
        if fine:
            actions.append(WriteSuccesses(fine, self._patience(fine)))
        if other:
            actions.append(WriteEndings(other))
        return actions + rest + self._flow(now)

    def _patience(self, fine: Sequence[Success]) -> Micros:
        """Short jobs end by ones and twos: a commit may wait for the next, if nobody waits for what these have held."""
        mean = self._floor.mean
        if not BRIEF <= mean < GATHER:
            return 0
        more = any(hand.outstanding * mean > GATHER for hand in self._floor.workers())
        return GATHER if more and not any(one.limited for one in fine) else 0

    def on_answer(self, slot: int, answer: Sequence[Any], now: Micros) -> list[Action]:
        """What a worker says about the conditions of a job."""
        hand = self._floor.hands.get(slot)
        if hand is None:
            return []
        actions = self._probing.on_answer(hand, answer, now)
        if hand.leaving and not hand.outstanding:
            self._floor.dismiss(actions, hand, now)
        return actions + self._flow(now)

    def on_slots(self, ours: Sequence[JobId], lost: Sequence[JobId], now: Micros) -> list[Action]:
        """The slots that conditions ask for are taken, or cannot be had."""
        return self._probing.on_slots(ours, lost, now) + self._flow(now)

    def on_unmatched(self, lost: Sequence[Success], now: Micros) -> list[Action]:
        """Successes that the store refused."""
        endings = endings_of_refused(self._floor, lost)
        return [WriteEndings(endings)] if endings else []

    # people want something

    def on_cancel(
        self, id: JobId, how: str, reason: str | None, now: Micros, attempt: int | None = None
    ) -> list[Action]:
        """A job that we hold should not run, or not go on; None: whichever attempt it is at."""
        before = self._floor.cancelled.get(id)  # who asks again without a word takes none back
        told = reason or (
            before if before not in (None, Cause.CANCELLED) else default_stop_reason(how)
        )
        mine = (held.job.attempt for held in self._floor.held() if held.job.id == id)
        if attempt is not None and attempt not in mine:
            return []
        floor = self._floor
        for pile in (floor.ready, floor.single, floor.apart, floor.shared, floor.unasked):
            for held in pile:
                if held.job.id == id:
                    pile.remove(held)
                    self._floor.cancelled[id] = told
                    return [
                        WriteEndings([self._floor.unstarted(held, Cause.CANCELLED, now)]),
                        *self._flow(now),
                    ]
        if id in self._floor.marking or id in self._floor.taking:
            self._floor.cancelled[id] = told  # it ends when the answer is here
        for hand in self._floor.workers():
            if hand.probe is not None and hand.probe.held.job.id == id:
                self._floor.cancelled[id] = told
            for bunch in hand.bunches.values():
                for index, found in enumerate(bunch.jobs):
                    if (
                        found is not None
                        and found.job.id == id
                        and attempt in (None, found.job.attempt)
                    ):
                        self._floor.cancelled[id] = told
                        request_stop(hand, wire.place(bunch.serial, index), found, how, now)
                        return [TakeJobsBack(hand.slot)]
        return []

    def on_company(self, seats: Mapping[str, int], now: Micros) -> list[Action]:
        """So many jobs of these tasks run in one worker from now on; what sits there stays until it has ended."""
        self.concurrency = seats
        return self._flow(now)

    def on_disabled(self, tasks: Iterable[str], now: Micros) -> list[Action]:
        """Of these tasks nothing more starts here; what runs is told, by `should_stop`, with the next look at it."""
        self._floor.disabled = frozenset(tasks)
        actions = self._floor.release_disabled(now)
        for hand in self._floor.workers():
            if hand.outstanding > 1 and any(
                held.job.task in self._floor.disabled for held in hand.unfinished()
            ):
                actions.append(TakeJobsBack(hand.slot))
        return actions + self._flow(now)

    def on_taken_back(self, slot: int, count: int, now: Micros) -> list[Action]:
        """So many tokens came back: as many of the last jobs given to this worker are ours again."""
        hand = self._floor.hands.get(slot)
        if hand is None:
            return []
        back: list[ClaimedJob] = []
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
        for place in [place for place in hand.stops if hand.at(place) is None]:
            del hand.stops[place]
        if not hand.outstanding:
            hand.alone = hand.weighed = hand.timed = False
        cancelled = self._floor.put_back(back, now)
        actions: list[Action] = [WriteEndings(cancelled)] if cancelled else []
        if hand.leaving and not hand.outstanding:
            self._floor.dismiss(actions, hand, now)
        return actions + self._flow(now)

    def on_settings(self, settings: NodeSettings, now: Micros) -> list[Action]:
        """The pool has another size or another way."""
        return self._staffing.resize(settings, now) + self._flow(now)

    def on_gate(self, closed: bool, now: Micros) -> list[Action]:
        """The machine has enough to do, or can do more again."""
        self._asking.closed = closed
        return self._flow(now)

    def on_paused_writer(
        self, slot: int, sights: dict[int, WorkerView], now: Micros
    ) -> list[Action]:
        """This worker, or a process below it, is stopped in the middle of a write."""
        actions: list[Action] = []
        hand = self._floor.hands.get(slot)
        if hand is not None:
            stop_paused_writer(self._floor, actions, hand, sights, now)
        return actions

    def on_renewed(self, sent: Micros, lease: Micros) -> None:
        """The lease is good for so long from when it was asked for."""
        self._floor.safe_until = sent + lease * 3 // 4
        self._floor.dead_by = sent + lease * 9 // 10

    def on_drain(self, now: Micros, *, hurry: bool = False) -> list[Action]:
        """Claim nothing more, let what runs end within the grace, give back the rest."""
        first = not self._floor.draining
        self._hurried = self._hurried or hurry
        deadline = now if hurry else now + self._floor.settings.grace
        self._floor.draining_until = (
            deadline if first else min(deadline, self._floor.draining_until or deadline)
        )
        actions = self._floor.release_ready(now)
        if first:
            actions.append(RequestStopOfAll())
            actions += [
                TakeJobsBack(hand.slot) for hand in self._floor.hands.values() if hand.outstanding
            ]
        return actions

    # time passes

    def on_tick(self, now: Micros, sights: dict[int, WorkerView]) -> list[Action]:
        """Timers: what runs too long, what has been asked to stop, who is idle."""
        actions: list[Action] = []
        for hand in list(self._floor.hands.values()):
            sight = sights.get(hand.slot)
            if sight is not None and (hand.outstanding or hand.host is not None):
                watch_job(self._floor, actions, hand, sight, now)
            if sight is not None and sight.hit:
                release_signalled(self._floor, actions, hand, sights, now)
            escalate(self._floor, actions, hand, sight, now)
            if hand.told_to_go is not None and now - hand.told_to_go >= LEAVE_WITHIN:
                actions.append(SignalWorker(hand.slot, signal.SIGKILL))
        self._seats.look(actions)
        self._staffing.lend(actions, sights, now)
        self._probing.watch(actions, now)
        if self._floor.draining_until is None:
            self._staffing.shrink(actions, now)
            self._staffing.dismiss_unneeded(actions, now)
            actions += self._giving.give_up_surplus(now)
        elif now >= self._floor.draining_until:
            end_drain(self._floor, actions, sights, self._floor.draining_until, now)
        return actions + self._flow(now)
