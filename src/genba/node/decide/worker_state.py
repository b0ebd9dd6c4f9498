"""Workers as the brain sees them, and the claimed jobs that they were given."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from genba import wire
from genba.options.snapshot import OptionsSnapshot
from genba.storage.jobs.judge import DEFAULT_OPTIONS
from genba.storage.records import Claimed, JobId, Micros

WORK_AHEAD_US = 50_000  # measured work that a worker may have in hand

# One call of `itemgetter` for all fields: access by name costs as much as the rest of `message`.
_SENT_FIELDS = ("id", "attempt", "task", "args", "options", "retries", "crashes", "saved")
_sent_fields = itemgetter(*map(Claimed._fields.index, _SENT_FIELDS))
_new = tuple.__new__  # makes a NamedTuple without calling its Python constructor


class ResourceUse(NamedTuple):
    """What a worker and all processes below it use."""

    memory: int  # bytes
    cpu: Micros


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a worker's shared memory shows."""

    place: int
    phase: int
    beats: int
    checked_stop: bool  # the job has asked whether it should stop
    progress: tuple[int, int, float, float, str] | None
    use: ResourceUse | None = None  # only of a job whose use is limited
    log: str | None = None  # only of a dead worker
    waits: bool = False  # its job waits for another job
    awaited: tuple[JobId, ...] = ()  # the jobs that it waits for
    locked: bool = False  # the job has taken locks
    started: int = 0  # micros by this machine's wall clock; 0: not known
    pid: int = 0  # of the job's own process; 0: the job runs in the worker's process
    signalled: bool = False  # the worker got a SIGTERM that did not come from this node


@dataclass(slots=True)
class ClaimedJob:
    """A job that this node has claimed."""

    job: Claimed
    claim: int
    snapshot: OptionsSnapshot | None  # None: all options have their defaults
    marked: bool = False
    checked: bool = False  # its conditions hold

    @property
    def needs_check(self) -> bool:
        """Whether its conditions must be checked first."""
        return self.snapshot is not None and bool(self.snapshot.ready) and not self.checked

    @property
    def exclusive(self) -> bool:
        """Whether it must start as soon as it is given.

        It has a timer, or its start is written first.
        """
        s = self.snapshot
        if self.must_mark:
            return True
        timed = s is not None and (s.timeout is not None or s.stall_timeout is not None)
        return timed or self.dedicated or self.measured

    @property
    def measured(self) -> bool:
        """Whether its use of memory or CPU is limited."""
        s = self.snapshot
        return s is not None and (s.memory is not None or s.cpu is not None)

    @property
    def shareable(self) -> bool:
        """Whether it may run beside others in one worker.

        It may not if it is limited, runs at most once, or was in a worker that crashed.
        """
        return not (self.must_mark or self.measured or self.dedicated or self.job.crashes)

    @property
    def dedicated(self) -> bool:
        return self.snapshot is not None and self.snapshot.dedicated

    @property
    def must_mark(self) -> bool:
        """Whether its start must be written before it starts."""
        return self.job.losses > 0 or (self.snapshot is not None and self.snapshot.at_most_once)

    @property
    def options(self) -> OptionsSnapshot:
        return self.snapshot or DEFAULT_OPTIONS

    def message(self) -> wire.JobMessage:
        """Give what a worker needs to know of it."""
        id, attempt, task, args, options, retries, crashes, saved = _sent_fields(self.job)
        usual = options is None and not retries and not crashes and saved is None
        extra = None if usual else (options, retries, crashes, saved)
        return _new(wire.JobMessage, (id, attempt, self.claim, task, args, extra))


@dataclass(slots=True)
class StopProgress:
    """How far the stop of one job has come."""

    place: int
    cause: str
    requested_at: Micros
    kill_at: Micros
    flag_set: bool = False
    sigterm_sent: bool = False


@dataclass(slots=True)
class ConditionCheck:
    """A worker is checking whether a job may start."""

    claimed: ClaimedJob
    key: str  # equal for jobs with the same conditions, task, arguments and options
    serial: int
    since: Micros
    late: bool = False


@dataclass(slots=True)
class Bunch:
    """Jobs that went to a worker in one frame."""

    serial: int
    jobs: list[ClaimedJob | None]  # None: its result is here, or it was taken back
    left: int


@dataclass(slots=True)
class WorkerState:
    """One worker process, or one seat in a shared worker (`host` is the slot of its worker)."""

    slot: int
    pid: int = 0
    ready: bool = False
    bunches: dict[int, Bunch] = field(default_factory=dict)  # by serial
    outstanding: int = 0  # jobs without a result, and a condition check
    exclusive: bool = False  # what it runs may have no other job behind it
    slow: bool = False  # its job runs long, so that no other job should wait behind it
    given_at: Micros = 0
    idle_since: Micros = 0
    seen_place: int = -1
    seen_since: Micros = 0
    beats: int = 0
    beat_at: Micros = 0
    progress_number: int = 0
    progress_at: Micros = 0
    signalled_at: Micros | None = None  # when a SIGTERM was seen that this node did not send
    stops: dict[int, StopProgress] = field(default_factory=dict)  # by place
    leaving: bool = False
    dismissed_at: Micros | None = None
    dismissed_early: bool = False  # dismissed together with the jobs it was given last
    dedicated: bool = False
    worked: bool = False
    ended: int = 0  # jobs
    cpu_reported: Micros = 0  # by the results so far
    host: int | None = None  # of a seat: the slot of its worker
    seats: tuple[int, ...] = ()  # of a shared worker: their slots
    task: str | None = None  # of a shared worker: the only task that it runs
    closing: Micros | None = None  # since when a shared worker gets no more jobs
    timed: bool = False  # of a shared worker: one of its jobs has a timer
    killed_for_seat: bool = False  # this node killed it for the job of one seat
    measured: bool = False
    peak_memory: int = 0  # bytes
    cpu_at_start: Micros | None = None
    stop_suggested: int = -1  # the place of the job that was asked to end when it can
    lends_slot: bool = False  # its job waits for another job, and another worker uses its slot
    check: ConditionCheck | None = None

    def load(self, depth: int) -> int:
        """Give how many jobs it has, of the `depth` that it may have.

        A shared worker in use counts as full.
        """
        return max(depth, 1) if self.seats and self.outstanding else self.outstanding

    def overdue(self, now: Micros) -> bool:
        """Whether it sent no result for longer than all its jobs should take."""
        return bool(self.outstanding) and now - max(self.given_at, self.idle_since) > WORK_AHEAD_US

    def job_at(self, place: int) -> ClaimedJob | None:
        """Give the unfinished job at `place`."""
        bunch = self.bunches.get(place >> 24)
        index = place & 0xFFFFFF
        return bunch.jobs[index] if bunch and index < len(bunch.jobs) else None

    def new_seat(self, slot: int) -> WorkerState:
        """Make a seat; its view shows which of the worker's jobs it runs."""
        return WorkerState(
            slot, self.pid, ready=True, host=self.slot, bunches=self.bunches, stops=self.stops
        )

    def unfinished_jobs(self) -> list[ClaimedJob]:
        """Give its jobs in the order in which it runs them."""
        return [job for bunch in self.bunches.values() for job in bunch.jobs if job is not None]

    def clear_job_flags(self) -> None:
        """Forget how its jobs had to be treated: it has none any more."""
        self.exclusive = self.measured = self.timed = False
