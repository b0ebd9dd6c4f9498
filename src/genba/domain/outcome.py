"""The report of a running attempt: the outcome that it requests, and its measurements."""

from __future__ import annotations

from dataclasses import dataclass

from genba.domain.duration import Micros

Fence = tuple[int, int, int]  # (job id, attempt, claim id): unique for each attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRequest:
    """How an attempt wants to end: "succeed", "fail", "hold" or "retry".

    A retry happens at the moment `at`, or `delay` from now; without both, the job's retry rule
    decides.
    """

    wants: str
    reason: str | None = None
    result: bytes | None = None
    at: Micros | None = None
    delay: Micros | None = None
    free: bool = False  # does not count against the retry budget
    clones: tuple[bytes, ...] = ()  # jobs to be enqueued with the success


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """The measurements of an attempt, besides its outcome."""

    progress: str | None = None
    log: str | None = None
    ran: Micros = 0
    pid: int | None = None
    cpu: Micros | None = None
    peak: int | None = None  # memory in kB
