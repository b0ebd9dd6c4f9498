"""When a node should claim nothing more, because the machine has enough to do; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SLACK = 0.1  # a gate opens again only when it is so much better: it must not swing


class LoadReading(NamedTuple):
    load: float  # per CPU
    free_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class LoadGate:
    """None: not looked at."""

    max_load: float | None = None
    min_free_memory: int | None = None

    @property
    def watched(self) -> bool:
        return self.max_load is not None or self.min_free_memory is not None

    def closed(self, reading: LoadReading, before: bool) -> str | None:
        """Why it is closed, given whether it was closed `before`; None: it is open."""
        slack = SLACK if before else 0.0
        if self.max_load is not None and reading.load > self.max_load * (1 - slack):
            return f"load per CPU {reading.load:.2f}, the limit is {self.max_load:g}"
        if self.min_free_memory is not None and reading.free_memory < self.min_free_memory * (
            1 + slack
        ):
            return f"{reading.free_memory >> 20} MB of memory free, the limit is {self.min_free_memory >> 20} MB"
        return None
