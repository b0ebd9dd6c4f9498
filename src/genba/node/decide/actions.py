"""What the brain can want done: one frozen class for each action of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genba import wire
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest
from genba.storage.records import Ending, JobId, Micros, Success

# workers


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    slot: int


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """Let a worker exit when it has nothing left to do."""

    slot: int


@dataclass(frozen=True, slots=True)
class SetSeats:
    """Let a worker run several jobs at a time, each at a seat.

    Without seats it runs one at a time again.
    """

    slot: int
    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SignalWorker:
    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class SweepLeftovers:
    """Kill what dead workers have left running."""

    token: int


# jobs in workers


@dataclass(frozen=True, slots=True)
class GiveJobs:
    slot: int
    serial: int
    jobs: list[wire.JobMessage]
    each: bool = False  # in a process of its own


@dataclass(frozen=True, slots=True)
class TakeJobsBack:
    """Take back the jobs that a worker has not started."""

    slot: int


@dataclass(frozen=True, slots=True)
class CheckConditions:
    """Have a worker check the conditions of a job."""

    slot: int
    serial: int
    job: wire.JobMessage
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefuseWait:
    """Tell a job that waits for others that none of them could ever run."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class SuggestStop:
    """Tell one job that it should end when it can; nothing more happens to it."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Set the flag of one job that is being stopped."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class RequestStopOfAll:
    """Tell all jobs that the node drains."""


@dataclass(frozen=True, slots=True)
class StopSeat:
    """Stop the job at this seat, and no other job of its worker."""

    seat: int
    place: int


@dataclass(frozen=True, slots=True)
class KillJobProcess:
    """Have the worker kill the job's own process at the next signal."""

    slot: int
    place: int


# claims


@dataclass(frozen=True, slots=True)
class ClaimJobs:
    """Claim so many jobs of each queue; of these `tasks` only, if given."""

    wants: dict[str, int]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ClaimDedicated:
    """Claim jobs that need no slot, as no slot is free."""

    queues: list[str]
    count: int


@dataclass(frozen=True, slots=True)
class ClaimAwaited:
    """Claim one of these jobs of these queues, as jobs of this node wait for them."""

    queues: list[str]
    ids: tuple[JobId, ...]


@dataclass(frozen=True, slots=True)
class CheckAwaited:
    """Find out whether one of these jobs has ended, runs, or could run.

    `waiting` has the jobs of this node that wait; what is free here is in the other two.
    """

    ids: tuple[JobId, ...]
    waiting: frozenset[JobId]
    slot_free: bool
    dedicated_free: bool


@dataclass(frozen=True, slots=True)
class TakeLimitSlots:
    """Take slots of limits for jobs whose conditions ask for them."""

    wanted: list[SlotRequest]


# writes


@dataclass(frozen=True, slots=True)
class WriteSuccesses:
    ended: list[Success]
    patience: Micros = 0  # how long the commit may wait for more


@dataclass(frozen=True, slots=True)
class WriteEndings:
    ended: list[Ending]


@dataclass(frozen=True, slots=True)
class MarkStarted:
    """Write that these jobs have started; with `first`, before they do."""

    jobs: list[tuple[JobId, int, int, Micros]]
    first: bool = False


@dataclass(frozen=True, slots=True)
class WriteProgress:
    progress: list[tuple[JobId, int, int, str]]


@dataclass(frozen=True, slots=True)
class WriteEvent:
    """Write an event of a job."""

    kind: str
    job: JobId
    more: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportNotReady:
    """Write that the conditions of these jobs do not hold."""

    answers: list[ConditionAnswer]


@dataclass(frozen=True, slots=True)
class ReportConditionsHold:
    """Let other jobs with the same conditions be claimed again."""

    key: str


Action = (
    SpawnWorker
    | DismissWorker
    | SetSeats
    | SignalWorker
    | SweepLeftovers
    | GiveJobs
    | TakeJobsBack
    | CheckConditions
    | RefuseWait
    | SuggestStop
    | RequestStop
    | RequestStopOfAll
    | StopSeat
    | KillJobProcess
    | ClaimJobs
    | ClaimDedicated
    | ClaimAwaited
    | CheckAwaited
    | TakeLimitSlots
    | WriteSuccesses
    | WriteEndings
    | MarkStarted
    | WriteProgress
    | WriteEvent
    | ReportNotReady
    | ReportConditionsHold
)
