"""Fair queues: each key has a virtual clock; the job with the smallest virtual start runs first.

The virtual start of a job is one turn after the last job of its key, but never before the queue's
own time `V`, which is the virtual start of the job that was claimed last.  So a new key is served
at once, turn by turn with the others, and a key without jobs does not save up turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from genba.domain.duration import SECOND, Micros
from genba.domain.rank import rank

# One job moves the virtual clock of its key by one turn; one priority is worth one age step.
TURN: Micros = SECOND
UNRANKED = 2**63 - 1  # the rank of a waiting job that has no place yet: behind all others


def starts(last: Micros, count: int) -> range:
    """Return the virtual starts of `count` jobs of a key, of which the last one is `last`."""
    return range(last - (count - 1) * TURN, last + 1, TURN)


def fair_rank(start: Micros, priority: int, age_step: Micros) -> int:
    """Return the rank of a job with this virtual start."""
    return min(UNRANKED - 1, rank(start, priority, age_step))


def start_of(place: int, priority: int, age_step: Micros) -> Micros:
    """Return the virtual start of a job with this rank."""
    return place - rank(0, priority, age_step)


def names_in(fair_by: str) -> list[str]:
    """Return the arguments that form the key: `tenant`, or those of `{tenant}/{region}`."""
    if "{" not in fair_by:
        return [fair_by]
    return [name for _, name, _, _ in Formatter().parse(fair_by) if name is not None]


def key_of(fair_by: str, args: Mapping[str, Any]) -> str | None:
    """Return the key of a job with these arguments, or None if one of them is missing."""
    if any(name not in args for name in names_in(fair_by)):
        return None
    return fair_by.format(**args) if "{" in fair_by else str(args[fair_by])
