"""What a run has measured."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from statistics import median

from beside.installing import BUILD
from beside.stage import Contender
from beside.workloads import Plan

FILE = BUILD / "results.json"


@dataclass
class Results:
    plan: Plan
    peers: dict[str, tuple[Contender, str]] = field(
        default_factory=dict
    )  # by title, with the version
    absent: dict[str, str] = field(
        default_factory=dict
    )  # the reason, by title, or by title and workload
    wrong: list[str] = field(default_factory=list)
    limits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    seconds: float = 0.0
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # of the machine before the run

    def add(self, contender: Contender, figure: str, value: float) -> None:
        self.rounds[figure][contender.title].append(value)

    def is_absent(self, contender: Contender, workload: str) -> bool:
        return contender.title in self.absent or f"{contender.title}, {workload}" in self.absent

    def to_ours(self, figure: str, title: str) -> float | None:
        """Neighbours in time are compared, and the median told: on SQLite with ours there, else with PostgreSQL."""
        on = "SQLite" if self.peers[title][0].on == "sqlite" else "PostgreSQL"
        pairs = list(
            zip(
                self.rounds[figure][title],
                self.rounds[figure].get(f"genba ({on})", []),
                strict=False,
            )
        )
        return median(a / b for a, b in pairs) if pairs and all(b for _, b in pairs) else None

    def to_limit(self, figure: str, title: str) -> float | None:
        limits = self.limits.get(self.peers[title][0].on)
        return (
            median(self.rounds[figure][title]) / median(limits)
            if limits and figure.startswith("drain, ")
            else None
        )

    def store(self) -> None:
        told = {
            "plan": asdict(self.plan),
            "load": self.load,
            "versions": {title: version for title, (_, version) in self.peers.items()},
            "rounds": self.rounds,
            "limits": self.limits,
            "absent": self.absent,
            "wrong": self.wrong,
        }
        BUILD.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps(told, indent=1, ensure_ascii=False))
