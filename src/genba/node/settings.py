"""The settings that a node starts with."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from genba.domain.duration import SECOND, Micros
from genba.domain.pool_settings import CHANGEABLE_SETTINGS, check_changes, check_pool
from genba.errors import BadOption
from genba.log_lines import FORMATS
from genba.node.watch.load_gate import LoadGate

SPAWNS = ("fork", "exec")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """`queues` maps a queue to its slots (None: as many as the node has).

    With `more_queues`, the queues that the app's tasks and schedules name are served too.  `reload`
    imports the app again when one of its files changes.  With `debug`, no job runs out of time.
    `log_jobs` writes the log lines of jobs among the node's own.
    """

    target: str
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    queues: dict[str, int | None] = field(default_factory=lambda: {"default": None})
    more_queues: bool = False
    pool: str = "dynamic"
    min: int = 1
    max: int = field(default_factory=lambda: max(2, os.cpu_count() or 1))
    grace: Micros = 30 * SECOND
    poll: Micros = SECOND
    max_dedicated: int = 8
    gate: LoadGate = field(default_factory=LoadGate)
    recycle_jobs: int | None = None
    recycle_memory: int | None = None  # bytes
    spawn: str | None = None  # None: fork, unless the app cannot be forked
    reload: bool = False
    debug: bool = False
    metrics: tuple[str, int] | None = None  # where they are served, with /livez and /readyz
    log_format: str | None = None  # None: pretty on a terminal, json elsewhere
    log_jobs: bool = False

    def __post_init__(self) -> None:
        check_pool(self.pool, self.min, self.max)
        if self.spawn not in (None, *SPAWNS):
            raise BadOption(f"spawn must be one of {', '.join(SPAWNS)}, not {self.spawn!r}")
        if self.log_format not in (None, *FORMATS):
            raise BadOption(
                f"log_format must be one of {', '.join(FORMATS)}, not {self.log_format!r}"
            )
        if not self.queues:
            raise BadOption("a node serves at least one queue; name one")
        if self.max_dedicated < 0:
            raise BadOption(f"max_dedicated must be at least 0, not {self.max_dedicated}")
        if self.recycle_jobs is not None and self.recycle_jobs < 1:
            raise BadOption(
                f"a worker must run at least 1 job before it is recycled, not {self.recycle_jobs}"
            )
        if self.gate.max_load is not None and not self.gate.max_load > 0:
            raise BadOption(f"max_load must be greater than 0, not {self.gate.max_load}")

    def changed(self, **changes: Any) -> NodeSettings:
        """Give the settings with these changes; BadOption if they make no sense."""
        check_changes(changes)
        return replace(self, **changes)

    def serving(self, named: Iterable[str]) -> NodeSettings:
        """Give the settings for an app that names these queues."""
        more = dict.fromkeys(sorted(set(named) - self.queues.keys())) if self.more_queues else {}
        return replace(self, queues={**self.queues, **more}) if more else self

    @property
    def pool_settings(self) -> dict[str, Any]:
        """The settings that may change while the node runs, as other processes see them."""
        return {name: getattr(self, name) for name in CHANGEABLE_SETTINGS}

    @property
    def slots(self) -> int:
        """How many workers the node may have, without those for dedicated jobs."""
        return self.min if self.pool == "static" else self.max
