"""Claims whose answer was lost: what they have taken, if they have, is ours, and nobody here knows of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from genba.domain.clock import Clock
from genba.storage.records import Claimed, JobId, Micros

# A statement that nobody waits for any more may still be carried out; the server gives it ten seconds.
LASTING: Micros = 30_000_000


class Doubts:
    """Desks note them, the keeper looks what has become of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Micros, set[JobId]]] = {}

    def note(self, claim: int) -> None:
        with self._lock:
            self._open[claim] = (self._clock.boot() + LASTING, set())

    def open(self) -> list[int]:
        """Those that are worth a look."""
        now = self._clock.boot()
        with self._lock:
            self._open = {claim: one for claim, one in self._open.items() if one[0] > now}
            return list(self._open)

    def found(self, claim: int, jobs: Sequence[Claimed]) -> list[Claimed]:
        """Those of them that were not found before."""
        with self._lock:
            _, known = self._open.get(claim, (0, set()))
            new = [job for job in jobs if job.id not in known]
            known.update(job.id for job in new)
            return new
