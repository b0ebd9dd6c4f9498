"""Claims whose answer was lost: what they have taken, if they have, is ours, and nobody here knows of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from genba.domain.clock import Clock
from genba.storage.records import Claimed, JobId, Micros

# A statement that nobody waits for any more may still be carried out; the server gives it ten seconds.
LASTING: Micros = 30_000_000


class LostClaims:
    """Desks note them, the keeper looks what has become of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Micros, set[JobId]]] = {}
        self._looking: Micros = 0  # when the look began that is under way

    def note(self, claim: int) -> None:
        with self._lock:
            self._open[claim] = (self._clock.boot() + LASTING, set())

    def open(self) -> list[int]:
        """Those that are worth a look."""
        with self._lock:
            self._looking = self._clock.boot()
            return list(self._open)

    def found(self, claim: int, jobs: Sequence[Claimed]) -> list[Claimed]:
        """Those of them that were not found before.

        A look that came late enough was the last one: not time alone, in which the database may have been away.
        """
        with self._lock:
            until, known = self._open.get(claim, (0, set()))
            new = [job for job in jobs if job.id not in known]
            known.update(job.id for job in new)
            if self._looking >= until:
                self._open.pop(claim, None)
            return new
