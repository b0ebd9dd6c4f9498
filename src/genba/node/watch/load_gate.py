"""When a node stops claiming because the machine has too much load or too little memory; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SLACK = 0.1  # a closed gate opens when the machine is better than the limit by this part


class LoadReading(NamedTuple):
    load: float  # per CPU
    free_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class LoadGate:
    """The limits of load per CPU and of free memory in bytes; None: no limit."""

    max_load: float | None = None
    min_free_memory: int | None = None

    @property
    def watched(self) -> bool:
        return self.max_load is not None or self.min_free_memory is not None

    def closed(self, reading: LoadReading, before: bool) -> str | None:
        """Give why it is closed, if it was closed `before` or not; None if it is open."""
        slack = SLACK if before else 0.0
        load, memory = reading
        if self.max_load is not None and load > self.max_load * (1 - slack):
            return f"load per CPU {load:.2f}, the limit is {self.max_load:g}"
        least = self.min_free_memory
        if least is not None and memory < least * (1 + slack):
            return f"{memory >> 20} MB of memory free, the limit is {least >> 20} MB"
        return None
