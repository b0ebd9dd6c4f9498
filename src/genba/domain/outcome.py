"""What a running attempt says about itself: the outcome it asks for, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass

from genba.domain.duration import Micros

Fence = tuple[int, int, int]  # (job id, attempt, claim): no two attempts ever have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRequest:
    """How an attempt wants to end: "succeed", "fail", "hold" or "retry"."""

    wants: str
    reason: str | None = None
    result: bytes | None = None
    at: Micros | None = None  # of a retry: this moment, or
    delay: Micros | None = None  # so long from now; neither: by the job's own rule
    free: bool = False  # takes nothing from the budget
    clones: tuple[bytes, ...] = ()  # jobs to be enqueued with the success


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """What is known of an attempt besides its outcome."""

    progress: str | None = None
    log: str | None = None
    ran: Micros = 0
    pid: int | None = None
    cpu: Micros | None = None
    peak: int | None = None  # kB
