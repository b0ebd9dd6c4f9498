"""What a brain can want done, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from genba import wire
from genba.storage.records import Ending, JobId, Micros, Success


@dataclass(frozen=True, slots=True)
class Spawn:
    slot: int


@dataclass(frozen=True, slots=True)
class Give:
    slot: int
    serial: int
    jobs: list[wire.Job]


@dataclass(frozen=True, slots=True)
class TakeBack:
    slot: int


@dataclass(frozen=True, slots=True)
class AskToStop:
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
class Claim:
    wants: dict[str, int]


@dataclass(frozen=True, slots=True)
class Succeed:
    ended: list[Success]


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
class Sweep:
    token: int


@dataclass(frozen=True, slots=True)
class DrainAll:
    """Tell every running job that it should come to an end."""


Action = (
    Spawn | Give | TakeBack | AskToStop | Signal | Dismiss | Claim | Succeed | Finish | Mark | Note | Sweep | DrainAll
)
