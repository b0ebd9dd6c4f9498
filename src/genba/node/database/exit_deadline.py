"""The end of a draining node at its deadline, even if the database or a process hangs."""

from __future__ import annotations

import logging
import os
import threading

from genba.domain.clock import Clock
from genba.domain.duration import SECOND
from genba.storage.records import Micros

log = logging.getLogger("genba.node")

EXIT_UNDONE = 1


class ExitDeadline(threading.Thread):
    """A thread that ends this process at the deadline, whatever the other threads wait for.

    What is not written by then is found by other nodes: they see that this node's lock is free.
    The guard ends what is left running.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(name="genba-exit-deadline", daemon=True)
        self._clock = clock
        self._deadline: Micros | None = None
        self._changed = threading.Condition()
        self._cancelled = False

    def set(self, deadline: Micros) -> None:
        """Exit at this moment of the steady clock at the latest."""
        with self._changed:
            first, self._deadline = self._deadline is None, deadline
            self._changed.notify()
        if first:
            self.start()

    def cancel(self) -> None:
        """Forget the deadline: everything is given back."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        with self._changed:
            while not self._cancelled and (left := self._left()) > 0:
                self._changed.wait(left / SECOND)
            if self._cancelled:
                return
            log.error(
                "exiting at the deadline: not everything is written or ended; other nodes take over"
            )
            os._exit(EXIT_UNDONE)  # not sys.exit, which would wait for threads that are stuck

    def _left(self) -> Micros:
        assert self._deadline is not None
        return self._deadline - self._clock.boot()
