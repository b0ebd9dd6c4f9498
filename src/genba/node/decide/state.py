"""What a node has at one moment: workers, the jobs in their hands and beside them, and what time it is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from genba.domain.states import Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import Action, DismissWorker, WriteEndings
from genba.node.decide.endings import progress_text, without_attempt
from genba.node.decide.worker_state import ClaimedJob, WorkerState, WorkerView
from genba.node.settings import NodeSettings
from genba.node.watch.counters import Counters
from genba.storage.jobs.judge import build_ending
from genba.storage.records import Claimed, Ending, JobId, Micros

_args = itemgetter(Claimed._fields.index("args"))
SECOND = 1_000_000
LONG_JOB_US = 250_000  # µs after which a running job is long: what was given with it goes to others


class NodeState:
    """All parts of the brain look at it and change it; what only one of them needs to know is not here."""

    def __init__(self, settings: NodeSettings, random: Callable[[], float]) -> None:
        self.settings = settings
        self.concurrency: Mapping[str, int] = {}  # of tasks that run several at a time
        self.refit = False  # it has changed, and workers may still have the seats of before
        self.workers_fork = False  # for each job, if it needs a process of its own
        self.delta: Micros = 0  # store's wall time minus our steady clock
        self.skew: Micros = 0  # store's wall time minus this machine's
        self._random = random
        self.hands: dict[int, WorkerState] = {}
        self.slot = 0  # the last number that a worker or a seat was given
        self.ready: deque[ClaimedJob] = deque()
        self.single: deque[ClaimedJob] = deque()
        self.apart: deque[ClaimedJob] = deque()  # each gets a worker of its own, outside the slots
        self.shared: deque[ClaimedJob] = deque()  # each gets a seat beside others of its task
        self.unasked: deque[ClaimedJob] = deque()  # their conditions must hold first
        self.taking: dict[
            JobId, ClaimedJob
        ] = {}  # they may start when they have slots of some buckets
        self.marking: dict[JobId, ClaimedJob] = {}
        self.cancelled: dict[JobId, str] = {}
        self.hits: Counter[JobId] = Counter()  # how often its worker was told by others to go
        self.disabled: frozenset[str] = frozenset()  # tasks that operators have switched off
        self.sweeps: dict[int, list[Ending]] = {}
        self.mean: float = 0.0  # µs of one job, lately; 0: not known yet
        self.paces: dict[
            str, float
        ] = {}  # the same of tasks that run several at a time, each with its waits
        self.heft: float = 0.0  # bytes of the arguments of one job, lately
        self.draining_until: Micros | None = None
        self.safe_until: Micros | None = None  # then others may soon take us for dead
        self.dead_by: Micros = 0
        self.meter: Counters | None = None  # somebody may ask how much was done

    def wall(self, now: Micros) -> Micros:
        return now + self.delta

    @property
    def draining(self) -> bool:
        return self.draining_until is not None

    @property
    def slots(self) -> int:
        """How many workers there may be: one more for each that lends its slot."""
        return self.settings.slots + sum(hand.lends for hand in self.hands.values())

    @property
    def empty(self) -> bool:
        """Nothing is left that could be lost by leaving."""
        busy = any(hand.outstanding for hand in self.hands.values())
        piles = (
            self.ready,
            self.single,
            self.apart,
            self.shared,
            self.unasked,
            self.taking,
            self.marking,
            self.sweeps,
        )
        return not busy and not any(piles)

    @property
    def busy(self) -> bool:
        return any(hand.outstanding or hand.stops for hand in self.hands.values())

    @property
    def timed(self) -> bool:
        """Something must be looked at soon: a job with a timer, or one that is being stopped."""
        return any(hand.alone or hand.timed or hand.stops for hand in self.hands.values())

    @property
    def weighed(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers whose use must be looked at."""
        return [(hand.slot, hand.pid) for hand in self.hands.values() if hand.weighed]

    def jobs_in_hand(self) -> list[JobId]:
        """What we have claimed and not yet let go."""
        swept = [ending.id for endings in self.sweeps.values() for ending in endings]
        return [held.job.id for held in self.held()] + swept

    def held(self) -> Iterator[ClaimedJob]:
        yield from (*self.ready, *self.single, *self.apart, *self.shared, *self.unasked)
        yield from (*self.taking.values(), *self.marking.values())
        for hand in self.workers():
            if hand.probe is not None:
                yield hand.probe.held
            yield from hand.unfinished()

    def workers(self) -> list[WorkerState]:
        """Those that are processes."""
        return [hand for hand in self.hands.values() if hand.host is None]

    def free(self) -> WorkerState | None:
        for hand in self.hands.values():
            alone = not hand.seats and hand.host is None
            if alone and hand.ready and not hand.outstanding and not (hand.leaving or hand.stops):
                return hand
        return None

    @property
    def probes(self) -> int:
        """How many workers may be asked about conditions at a time."""
        return max(1, self.settings.slots // 10)

    @property
    def alone_next(self) -> int:
        """How many wait for a worker that has nothing in hand."""
        return len(self.single) + min(len(self.unasked), self.probes)

    def in_company(self) -> Counter[str]:
        return Counter(held.job.task for held in self.shared)

    def weigh(self, jobs: Sequence[Claimed]) -> None:
        """So much memory do jobs take that are held here; what has become heavy counts at once."""
        if jobs:
            heft = sum(map(len, map(_args, jobs))) / len(jobs)
            self.heft = heft if heft > self.heft else (heft + self.heft) / 2

    def put_back(self, back: Sequence[ClaimedJob], now: Micros) -> list[Ending]:
        """What had not started goes to the front of what is ready; whose job was cancelled or
        whose task was disabled meanwhile ends here."""
        ended: list[Ending] = []
        for held in sorted(back, key=lambda h: (h.job.rank, h.job.id), reverse=True):
            if held.job.id in self.cancelled:
                ended.append(self.unstarted(held, Cause.CANCELLED, now))
            elif held.job.task in self.disabled:
                ended.append(self.unstarted(held, Cause.DRAIN, now))
            else:
                self.pile_of(held).appendleft(held)
        return ended

    def release_disabled(self, now: Micros) -> list[Action]:
        """What is ready of a task that an operator has disabled goes back."""
        gone: list[ClaimedJob] = []
        for pile in (self.ready, self.single, self.apart, self.shared):
            gone += [held for held in pile if held.job.task in self.disabled]
            kept = [held for held in pile if held.job.task not in self.disabled]
            pile.clear()
            pile.extend(kept)
        endings = [self.unstarted(held, Cause.DRAIN, now) for held in gone]
        return [WriteEndings(endings)] if endings else []

    def pile_of(self, held: ClaimedJob) -> deque[ClaimedJob]:
        if held.curious:
            return self.unasked
        if held.dedicated:
            return self.apart
        if held.job.task in self.concurrency and held.sociable and self.settings.pool != "ondemand":
            return self.shared
        return self.single if held.alone else self.ready

    def release_ready(self, now: Micros) -> list[Action]:
        held = [*self.ready, *self.single, *self.apart, *self.shared, *self.unasked]
        for pile in (self.ready, self.single, self.apart, self.shared, self.unasked):
            pile.clear()
        endings = [self.unstarted(h, Cause.DRAIN, now) for h in held]
        return [WriteEndings(endings)] if endings else []

    def unstarted(self, held: ClaimedJob, cause: str, now: Micros) -> Ending:
        return without_attempt(self.ending(held, AttemptEnd(cause=cause, started=False), now))

    def ending(self, held: ClaimedJob, end: AttemptEnd, now: Micros) -> Ending:
        cancelled = self.cancelled.pop(held.job.id, None)
        if cancelled is not None:
            end = replace(end, reason=cancelled, cancel_requested=True)
        return build_ending(held.job, held.claim, held.options, end, self.wall(now), self._random())

    def last_seen(self, ending: Ending, hand: WorkerState, sight: WorkerView) -> Ending:
        """With what is known of an attempt that cannot tell it any more."""
        seen = self.wall(hand.seen_since) if hand.alone or hand.seen_place == sight.place else None
        told = sight.noted and sight.noted[1] == sight.place
        started = sight.started + self.skew if sight.started else seen
        ended = ending.ended
        if started is not None and ended is not None:
            ended = max(
                started, ended
            )  # by our clock, which the journey of the store's time keeps a little behind
        return replace(
            ending,
            pid=sight.pid or hand.pid,
            started=started,
            ended=ended,
            progress=progress_text(sight.noted) if told and sight.noted else None,
            log=sight.log,
            locks=sight.locked,
        )

    def too_late(self, held: ClaimedJob, now: Micros, locked: bool = False) -> bool:
        """It must run once at most, or has a slot or a lock, and others may soon believe that it does not run here."""
        alone = locked or held.options.at_most_once or held.job.buckets is not None
        return alone and self.safe_until is not None and now >= self.safe_until

    def dismiss(self, actions: list[Action], hand: WorkerState, now: Micros) -> None:
        if hand.told_to_go is None:
            hand.leaving, hand.told_to_go = True, now
            if not hand.farewell:
                actions.append(DismissWorker(hand.slot))
