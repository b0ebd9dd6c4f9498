"""What a node is told when it starts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from genba.domain.duration import Micros
from genba.errors import BadOption

POOLS = ("dynamic", "static", "ondemand")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """`queues` maps a queue to its slots (None: as many as the node has).

    `url`, `namespace` and `lease` are None when the app that the zygote imports is to say them.
    """

    target: str
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    queues: dict[str, int | None] = field(default_factory=lambda: {"default": None})
    pool: str = "dynamic"
    min: int = 1
    max: int = field(default_factory=lambda: max(2, os.cpu_count() or 1))
    grace: Micros = 30_000_000
    poll: Micros = 1_000_000

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise BadOption(f"pool must be one of {', '.join(POOLS)}, not {self.pool!r}")
        if self.min < 0 or self.max < 1:
            raise BadOption(f"a pool has at least 0 (min) and 1 (max) workers, not {self.min} and {self.max}")
        if self.pool == "static" and self.min < 1:
            raise BadOption("a static pool runs min workers: min must be at least 1")
        if self.pool == "dynamic" and self.min > self.max:
            raise BadOption(f"min ({self.min}) is greater than max ({self.max})")
        if not self.queues:
            raise BadOption("a node serves at least one queue")

    @property
    def slots(self) -> int:
        """How many workers it may have."""
        return self.min if self.pool == "static" else self.max
