"""Fair queues: each key has a virtual clock, and the job whose clock shows least starts first.

The start of a job is one turn after the last one of its key, but never before the queue's own time `V`, which is the
start of the job that was claimed last.  So a key that comes late is served at once, turn by turn with the others, and
one that was away has saved up nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from genba.domain.duration import SECOND, Micros
from genba.domain.rank import rank

TURN: Micros = SECOND  # of virtual time: what one job moves the clock of its key; a priority is worth an age step of it
UNRANKED = (
    2**63 - 1
)  # it has become waiting, and nobody has given it a place yet: behind all others


def starts(last: Micros, count: int) -> range:
    """The starts of `count` jobs of a key whose clock shows `last` after them."""
    return range(last - (count - 1) * TURN, last + 1, TURN)


def fair_rank(start: Micros, priority: int, age_step: Micros) -> int:
    return min(UNRANKED - 1, rank(start, priority, age_step))


def start_of(place: int, priority: int, age_step: Micros) -> Micros:
    """The virtual start of a job of this rank."""
    return place - rank(0, priority, age_step)


def names_in(fair_by: str) -> list[str]:
    """The arguments that make the key: `tenant`, or those between braces in `{tenant}/{region}`."""
    if "{" not in fair_by:
        return [fair_by]
    return [name for _, name, _, _ in Formatter().parse(fair_by) if name is not None]


def key_of(fair_by: str, args: Mapping[str, Any]) -> str | None:
    """The key of a job with these arguments; None if it lacks one."""
    if any(name not in args for name in names_in(fair_by)):
        return None
    return fair_by.format(**args) if "{" in fair_by else str(args[fair_by])
