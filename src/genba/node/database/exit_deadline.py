"""How a node leaves: within a time, also when the database does not answer or a process does not die."""

from __future__ import annotations

import logging
import os
import threading

from genba.domain.clock import Clock
from genba.storage.records import Micros

log = logging.getLogger("genba.node")

EXIT_UNDONE = 1


class ExitDeadline(threading.Thread):
    """Ends this process at its moment, whatever the other threads wait for.

    What is not written then is lost here and found by others: they see that the node's lock is free, and its guard
    ends what it has left running.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(name="genba-departure", daemon=True)
        self._clock = clock
        self._moment: Micros | None = None
        self._changed = threading.Condition()
        self._over = False

    def by(self, moment: Micros) -> None:
        """At this moment at the latest."""
        with self._changed:
            begin, self._moment = self._moment is None, moment
            self._changed.notify()
        if begin:
            self.start()

    def over(self) -> None:
        """All is given back: nothing is left to be cut short."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        with self._changed:
            while not self._over and (left := self._left()) > 0:
                self._changed.wait(left / 1_000_000)
            if self._over:
                return
            log.error(
                "its time is over, and not all is written or ended: others take over what is left"
            )
            os._exit(EXIT_UNDONE)  # not sys.exit, which would wait for whoever is stuck

    def _left(self) -> Micros:
        assert self._moment is not None
        return self._moment - self._clock.boot()
