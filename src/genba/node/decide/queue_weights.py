"""How a node divides what it asks for among its queues: each gets turns by its weight."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = 32  # a large wish is divided in about so many


class QueueWeights:
    """Each queue has a clock that runs slower the greater its weight; the one that shows least is asked next.

    What counts is what a queue has given, not what it was asked for.  A queue that had nothing for a while has saved
    up nothing: its clock is never behind the time of those that were asked meanwhile.
    """

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        self._time = 0.0

    def divide(
        self, lack: int, weights: Mapping[str, int], room: Mapping[str, int]
    ) -> dict[str, int]:
        """How many of each queue, `lack` in all, and no more of one than it has room for."""
        clocks = {
            queue: max(self._clocks.get(queue, 0.0), self._time)
            for queue in weights
            if room[queue] > 0
        }
        if not clocks:
            return {}
        self._time = min(clocks.values())
        wants: dict[str, int] = {}
        step = max(1, lack // STEPS)
        while lack > 0 and clocks:
            queue = min(clocks, key=lambda name: clocks[name])
            count = min(step, lack, room[queue] - wants.get(queue, 0))
            wants[queue] = wants.get(queue, 0) + count
            clocks[queue] += count / weights[queue]
            lack -= count
            if wants[queue] >= room[queue]:
                del clocks[queue]
        return wants

    def gave(self, queue: str, count: int, weight: int) -> None:
        self._clocks[queue] = max(self._clocks.get(queue, 0.0), self._time) + count / weight
