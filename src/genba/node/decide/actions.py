"""What a brain can want done, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genba import wire
from genba.storage.jobs.conditions import Answer, Wanted
from genba.storage.records import Ending, JobId, Micros, Success


@dataclass(frozen=True, slots=True)
class Spawn:
    slot: int


@dataclass(frozen=True, slots=True)
class Give:
    slot: int
    serial: int
    jobs: list[wire.Job]
    each: bool = False  # in a process of its own


@dataclass(frozen=True, slots=True)
class Ask:
    """Have a worker ask the conditions of a job."""

    slot: int
    serial: int
    job: wire.Job
    conditions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """These must not start now."""

    answers: list[Answer]


@dataclass(frozen=True, slots=True)
class TakeSlots:
    """These may start if they have slots of some buckets."""

    wanted: list[Wanted]


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to this question is yes."""

    key: str


@dataclass(frozen=True, slots=True)
class TakeBack:
    slot: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class Doom:
    """Its next signal is the death of this job, which has a process of its own."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Its job waits for others, and there is no slot to lend any more."""

    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class Signal:
    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Let an idle worker go."""

    slot: int


@dataclass(frozen=True, slots=True)
class Share:
    """Let a worker run several jobs at a time, each at a seat that is like a slot; no seats: one at a time again."""

    slot: int
    seats: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop the job at this seat, and leave its neighbours alone."""

    seat: int
    place: int


@dataclass(frozen=True, slots=True)
class Claim:
    """`tasks`: of these only."""

    wants: dict[str, int]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ClaimDedicated:
    """There is no free slot, but room for so many that need none."""

    queues: list[str]
    count: int


@dataclass(frozen=True, slots=True)
class Succeed:
    ended: list[Success]
    patience: Micros = 0  # so long may a commit wait for others


@dataclass(frozen=True, slots=True)
class Finish:
    ended: list[Ending]


@dataclass(frozen=True, slots=True)
class Mark:
    """Write that these have started; `first`: before they do."""

    jobs: list[tuple[JobId, int, int, Micros]]
    first: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    progress: list[tuple[JobId, int, int, str]]


@dataclass(frozen=True, slots=True)
class Tell:
    """Write an event of a job."""

    kind: str
    job: JobId
    more: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    token: int


@dataclass(frozen=True, slots=True)
class DrainAll:
    """Tell every running job that it should come to an end."""


@dataclass(frozen=True, slots=True)
class BowOut:
    """Tell one running job that it should come to an end; nothing more is done about it."""

    slot: int
    place: int


Action = (
    Spawn
    | Give
    | Ask
    | Answered
    | TakeSlots
    | Opened
    | TakeBack
    | AskToStop
    | Doom
    | Refuse
    | Signal
    | Dismiss
    | Share
    | Interrupt
    | Claim
    | ClaimDedicated
    | Succeed
    | Finish
    | Mark
    | Note
    | Tell
    | Sweep
    | DrainAll
    | BowOut
)
