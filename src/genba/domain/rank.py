"""The order of a queue, as one number per job."""

from __future__ import annotations

from genba.domain.duration import HOUR, Micros

AGE_STEP: Micros = HOUR

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def rank(due_at: Micros, priority: int, age_step: Micros = AGE_STEP) -> int:
    """The place in the queue, smaller first: one priority is worth `age_step` of waiting.

    It never changes while the job waits, so an old job overtakes every newer one in the
    end.  Always fits a signed 64-bit column.
    """
    return max(_LOWEST, min(_HIGHEST, due_at - priority * age_step))
