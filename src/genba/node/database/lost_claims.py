"""Claims whose answer was lost.

The jobs that they have taken, if any, are this node's, and it must find them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from genba.domain.clock import Clock
from genba.node.timing import LOST_CLAIM_US
from genba.storage.records import Claimed, JobId, Micros


class LostClaims:
    """Writers note them, and maintenance looks for their jobs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Micros, set[JobId]]] = {}  # by claim: until when, found jobs
        self._looked_at: Micros = 0  # when the current look began

    def note(self, claim: int) -> None:
        with self._lock:
            self._open[claim] = (self._clock.boot() + LOST_CLAIM_US, set())

    def open(self) -> list[int]:
        """Begin a look: give the claims to look for."""
        with self._lock:
            self._looked_at = self._clock.boot()
            return list(self._open)

    def found(self, claim: int, jobs: Sequence[Claimed]) -> list[Claimed]:
        """Give those of a claim's jobs that were not found before.

        The claim is closed by a look that began late enough, not by time alone, in which the
        database may have been away.
        """
        with self._lock:
            until, known = self._open.get(claim, (0, set()))
            new = [job for job in jobs if job.id not in known]
            known.update(job.id for job in new)
            if self._looked_at >= until:
                self._open.pop(claim, None)
            return new
