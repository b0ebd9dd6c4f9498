"""Who has what: workers as the brain sees them, and the claimed jobs in their hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from genba import wire
from genba.options.snapshot import OptionsSnapshot
from genba.storage.jobs.judge import DEFAULT_OPTIONS
from genba.storage.records import Claimed, Micros

WORK_AHEAD_US = 50_000  # µs of measured work that a worker may have in hand
_new = tuple.__new__  # a NamedTuple without a call of its Python constructor
_TRAVELS = ("id", "attempt", "task", "args", "options", "retries", "crashes", "saved")
_of_interest = itemgetter(
    *map(Claimed._fields.index, _TRAVELS)
)  # all at once: a name costs as much as the rest


class ResourceUse(NamedTuple):
    """What a worker and all below it take."""

    memory: int  # bytes
    cpu: Micros


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a worker's shared memory shows."""

    place: int
    phase: int
    beats: int
    looked: bool  # the job has asked whether it should stop
    noted: tuple[int, int, float, float, str] | None
    use: ResourceUse | None = None  # only of a job whose use is limited
    log: str | None = None  # only of a worker that is dead
    waits: bool = False  # its job waits for another one
    locked: bool = False  # the job has taken locks
    started: int = 0  # micros by this machine's wall clock; 0: not known
    pid: int = 0  # of the job's own process; 0: it is the worker's
    hit: bool = False  # somebody else has told the worker to go


@dataclass(slots=True)
class ClaimedJob:
    """A claimed job in our hands."""

    job: Claimed
    claim: int
    snapshot: OptionsSnapshot | None  # None: all as usual
    marked: bool = False
    asked: bool = False  # its conditions hold

    @property
    def curious(self) -> bool:
        """It must be asked for first."""
        return self.snapshot is not None and bool(self.snapshot.ready) and not self.asked

    @property
    def alone(self) -> bool:
        """It must start the moment it is given: it is watched, or its start is written down first."""
        s = self.snapshot
        return self.must_mark or (
            s is not None
            and (
                s.timeout is not None or s.stall_timeout is not None or s.dedicated or self.weighed
            )
        )

    @property
    def weighed(self) -> bool:
        """What it uses is limited."""
        s = self.snapshot
        return s is not None and (s.memory is not None or s.cpu is not None)

    @property
    def sociable(self) -> bool:
        """It may run beside others: what is limited, must run once at most, or may have crashed a worker does not."""
        return not (self.must_mark or self.weighed or self.dedicated or self.job.crashes)

    @property
    def dedicated(self) -> bool:
        return self.snapshot is not None and self.snapshot.dedicated

    @property
    def must_mark(self) -> bool:
        return self.job.losses > 0 or (self.snapshot is not None and self.snapshot.at_most_once)

    @property
    def options(self) -> OptionsSnapshot:
        return self.snapshot or DEFAULT_OPTIONS

    def travel(self) -> wire.JobMessage:
        id, attempt, task, args, options, retries, crashes, saved = _of_interest(self.job)
        usual = options is None and not retries and not crashes and saved is None
        extra = None if usual else (options, retries, crashes, saved)
        return _new(wire.JobMessage, (id, attempt, self.claim, task, args, extra))


@dataclass(slots=True)
class StopProgress:
    """One job is being stopped."""

    place: int
    cause: str
    asked_at: Micros
    kill_at: Micros
    flagged: bool = False
    termed: bool = False


@dataclass(slots=True)
class RunningCheck:
    """A worker is being asked whether a job may start."""

    held: ClaimedJob
    key: str  # of the question
    serial: int
    since: Micros
    late: bool = False


@dataclass(slots=True)
class Bunch:
    serial: int
    jobs: list[ClaimedJob | None]  # None: its result is here, or it was taken back
    left: int


@dataclass(slots=True)
class WorkerState:
    """One worker."""

    slot: int
    pid: int = 0
    ready: bool = False
    bunches: dict[int, Bunch] = field(default_factory=dict)
    outstanding: int = 0
    alone: bool = False
    slow: bool = False  # what it runs is long: nothing should wait behind it
    given_at: Micros = 0
    idle_since: Micros = 0
    seen_place: int = -1
    seen_since: Micros = 0
    beats: int = 0
    beat_at: Micros = 0
    noted: int = 0
    noted_at: Micros = 0
    hit_at: Micros | None = None  # when it was seen that somebody else has told it to go
    stops: dict[int, StopProgress] = field(default_factory=dict)  # by place
    leaving: bool = False
    told_to_go: Micros | None = None
    farewell: bool = False  # it was told with what it was given to go after it
    worked: bool = False
    ended: int = 0  # jobs
    cpu_told: Micros = 0  # CPU time that the results of these jobs account for
    apart: bool = False  # outside the slots, for one dedicated job
    seats: tuple[
        int, ...
    ] = ()  # of a worker that runs several jobs at a time: what shows the one that runs there
    host: int | None = None  # of a seat: the worker it is in, which has the jobs in hand
    task: str | None = None  # of a worker with seats: what it runs
    timed: bool = False  # ... and some of that is watched
    closing: Micros | None = (
        None  # no seat here is given any more, since then: others need the worker
    )
    forced: bool = False  # we have killed it for one of its seats
    weighed: bool = False
    heaviest: int = 0  # bytes
    cpu_before: Micros | None = None
    bowing: int = -1  # the place of the job that was told to come to an end
    lends: bool = False  # its job waits for another one, and somebody else has its slot
    probe: RunningCheck | None = None

    def load(self, depth: int) -> int:
        """How many of the jobs that a worker may have in hand it has; one with company has no room for others."""
        return max(depth, 1) if self.seats and self.outstanding else self.outstanding

    def overdue(self, now: Micros) -> bool:
        """No word from it for longer than all that it may have in hand should take: what it runs is not so short."""
        return bool(self.outstanding) and now - max(self.given_at, self.idle_since) > WORK_AHEAD_US

    def at(self, place: int) -> ClaimedJob | None:
        """The unfinished job at `place`."""
        bunch = self.bunches.get(place >> 24)
        index = place & 0xFFFFFF
        return bunch.jobs[index] if bunch and index < len(bunch.jobs) else None

    def seat(self, number: int) -> WorkerState:
        """Where one of its jobs runs; which one, it shows itself."""
        return WorkerState(
            number, self.pid, ready=True, host=self.slot, bunches=self.bunches, stops=self.stops
        )

    def unfinished(self) -> list[ClaimedJob]:
        """In the order in which it runs them."""
        return [held for bunch in self.bunches.values() for held in bunch.jobs if held is not None]
