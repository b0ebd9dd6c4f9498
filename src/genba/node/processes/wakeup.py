"""The bell of a node in its selector; a connection that was lost and made anew brings another descriptor."""

from __future__ import annotations

import contextlib
import selectors

from genba.storage.wakeups import NodeWakeups


class WakeupSocket:
    """That has often the number of the one before, which the selector has forgotten with its end."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._fileno = -1
        self._hung = 0

    def follow(self, presence: NodeWakeups) -> None:
        """Listen where it rings now."""
        if (presence.fileno(), presence.times_connected) == (self._fileno, self._hung):
            return
        if self._fileno >= 0:
            with contextlib.suppress(
                KeyError, ValueError
            ):  # closed descriptors leave the selector by themselves
                self._selector.unregister(self._fileno)
        self._fileno, self._hung = presence.fileno(), presence.times_connected
        if self._fileno >= 0:
            self._selector.register(self._fileno, selectors.EVENT_READ, "bell")
