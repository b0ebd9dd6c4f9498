"""The order of a queue: one number per job."""

from __future__ import annotations

from genba.domain.duration import HOUR, Micros

AGE_STEP: Micros = HOUR  # the default of the app setting `age_step`

MAX_BOOST: Micros = 2**63 - 2**60  # boost plus any moment still fits a signed 64-bit column
_MIN_RANK, _MAX_RANK = -(2**63), 2**63 - 1


def boost(priority: int, age_step: Micros) -> Micros:
    """Return the waiting time that this priority is worth; `{boost}` in SQL computes the same."""
    worth = priority * age_step
    return max(-MAX_BOOST, min(MAX_BOOST, worth))


def rank(due_at: Micros, priority: int, age_step: Micros) -> int:
    """Return the place in the queue, smaller first: one priority is worth `age_step` of waiting.

    The rank does not change while the job waits, so an old job overtakes every newer one in the
    end.  It always fits a signed 64-bit column.
    """
    return max(_MIN_RANK, min(_MAX_RANK, due_at - boost(priority, age_step)))
