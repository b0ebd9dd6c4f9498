"""The order of a queue, as one number per job."""

from __future__ import annotations

from genba.domain.duration import HOUR, Micros

AGE_STEP: Micros = HOUR  # unless the app says otherwise

MAX_BOOST = (
    2**63 - 2**60
)  # that a priority is worth: with a moment on top it fits a signed 64-bit column
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


def boost(priority: int, age_step: Micros) -> Micros:
    """How much waiting this priority is worth; `{boost}` in the queries says the same."""
    worth = priority * age_step
    return worth if -MAX_BOOST <= worth <= MAX_BOOST else MAX_BOOST if worth > 0 else -MAX_BOOST


def rank(due_at: Micros, priority: int, age_step: Micros) -> int:
    """The place in the queue, smaller first: one priority is worth `age_step` of waiting.

    It never changes while the job waits, so an old job overtakes every newer one in the
    end.  Always fits a signed 64-bit column.
    """
    return max(_LOWEST, min(_HIGHEST, due_at - boost(priority, age_step)))
