"""What a brain can want done, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genba import wire
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest
from genba.storage.records import Ending, JobId, Micros, Success


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    slot: int


@dataclass(frozen=True, slots=True)
class GiveJobs:
    slot: int
    serial: int
    jobs: list[wire.JobMessage]
    each: bool = False  # in a process of its own


@dataclass(frozen=True, slots=True)
class CheckConditions:
    """Have a worker ask the conditions of a job."""

    slot: int
    serial: int
    job: wire.JobMessage
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportNotReady:
    """These must not start now."""

    answers: list[ConditionAnswer]


@dataclass(frozen=True, slots=True)
class TakeLimitSlots:
    """These may start if they have slots of some buckets."""

    wanted: list[SlotRequest]


@dataclass(frozen=True, slots=True)
class ReportConditionsHold:
    """The answer to this question is yes."""

    key: str


@dataclass(frozen=True, slots=True)
class TakeJobsBack:
    slot: int


@dataclass(frozen=True, slots=True)
class RequestStop:
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class KillJobProcess:
    """Its next signal is the death of this job, which has a process of its own."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class RefuseWait:
    """Its job waits for others, and there is no slot to lend any more."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class SignalWorker:
    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """Let an idle worker go."""

    slot: int


@dataclass(frozen=True, slots=True)
class SetSeats:
    """Let a worker run several jobs at a time, each at a seat that is like a slot; no seats: one at a time again."""

    slot: int
    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopSeat:
    """Stop the job at this seat, and leave its neighbours alone."""

    seat: int
    place: int


@dataclass(frozen=True, slots=True)
class ClaimJobs:
    """`tasks`: of these only."""

    wants: dict[str, int]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ClaimDedicated:
    """There is no free slot, but room for so many that need none."""

    queues: list[str]
    count: int


@dataclass(frozen=True, slots=True)
class WriteSuccesses:
    ended: list[Success]
    patience: Micros = 0  # so long may a commit wait for others


@dataclass(frozen=True, slots=True)
class WriteEndings:
    ended: list[Ending]


@dataclass(frozen=True, slots=True)
class MarkStarted:
    """Write that these have started; `first`: before they do."""

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
class SweepLeftovers:
    token: int


@dataclass(frozen=True, slots=True)
class RequestStopOfAll:
    """Tell every running job that it should come to an end."""


@dataclass(frozen=True, slots=True)
class SuggestStop:
    """Tell one running job that it should come to an end; nothing more is done about it."""

    slot: int
    place: int


Action = (
    SpawnWorker
    | GiveJobs
    | CheckConditions
    | ReportNotReady
    | TakeLimitSlots
    | ReportConditionsHold
    | TakeJobsBack
    | RequestStop
    | KillJobProcess
    | RefuseWait
    | SignalWorker
    | DismissWorker
    | SetSeats
    | StopSeat
    | ClaimJobs
    | ClaimDedicated
    | WriteSuccesses
    | WriteEndings
    | MarkStarted
    | WriteProgress
    | WriteEvent
    | SweepLeftovers
    | RequestStopOfAll
    | SuggestStop
)
