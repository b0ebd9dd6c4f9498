"""How a node divides its claims among its queues, in proportion to their weights."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = 32  # a large claim is divided in about so many steps


class QueueWeights:
    """Weighted fair queueing over the jobs that each queue has given.

    Each queue has a virtual clock that runs slower the greater its weight; the queue with the
    lowest clock is claimed from next.  A queue that was empty for a while saves up nothing: its
    clock is never behind those of the others.
    """

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        self._time = 0.0

    def divide(
        self, lack: int, weights: Mapping[str, int], room: Mapping[str, int]
    ) -> dict[str, int]:
        """Give how many jobs to claim of each queue.

        They are `lack` in all, and no more of one queue than its `room`.
        """
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

    def record(self, queue: str, count: int, weight: int) -> None:
        """Note that a queue has given so many jobs."""
        self._clocks[queue] = max(self._clocks.get(queue, 0.0), self._time) + count / weight
