"""The node's wake-up socket in its selector."""

from __future__ import annotations

import contextlib
import selectors

from genba.storage.wakeups import NodeWakeups


class WakeupSocket:
    """It follows the descriptor by which wake-ups come, which is another one after a reconnect.

    The new descriptor often reuses the old number, which the selector has forgotten, so the count
    of connections is compared too.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._fileno = -1
        self._times_connected = 0

    def follow(self, wakeups: NodeWakeups) -> None:
        """Register the current descriptor."""
        current = (wakeups.fileno(), wakeups.times_connected)
        if current == (self._fileno, self._times_connected):
            return
        if self._fileno >= 0:
            # A closed descriptor has left the selector already.
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._fileno)
        self._fileno, self._times_connected = current
        if self._fileno >= 0:
            self._selector.register(self._fileno, selectors.EVENT_READ, "wakeup")
