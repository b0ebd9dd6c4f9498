"""What the benchmark counts, how much of everything it does, and the bar for each figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CHUNK = 10_000  # jobs of one enqueue_many
STEADY = 1.5  # rounds that differ by more than this factor say little


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    jobs: int = 100_000
    repeat: int = 3
    singles: int = 1_000
    bulk: int = CHUNK
    samples: int = 200
    idle_seconds: float = 10.0
    backlog: int = 1_000_000
    small_backlog: int = 10_000
    claims: int = 50_000
    line: int = 10_000

    @classmethod
    def quick(cls) -> Plan:
        """Enough to see that all of it works; its figures mean little."""
        return cls(
            jobs=500,
            repeat=1,
            singles=50,
            bulk=1_000,
            samples=10,
            idle_seconds=1.0,
            backlog=3_000,
            small_backlog=500,
            claims=1_000,
            line=100,
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach: a least share of its limit, or a value it must stay at or below."""

    share: float | None = None
    most: float | None = None

    def met(self, value: float, ratio: float | None) -> bool:
        if self.share is not None:
            return ratio is not None and ratio >= self.share
        return self.most is not None and value <= self.most


SINGLE = {"sqlite": Bar(share=0.85), "postgres": Bar(share=0.85)}
BULK = {"sqlite": Bar(share=0.50), "postgres": Bar(share=0.50)}
DRAIN = {"sqlite": Bar(share=0.35), "postgres": Bar(share=0.45)}  # with two workers
LIMITED = Bar(share=0.50)
FREED = Bar(most=50.0)  # ms
HISTORY = Bar(share=0.70)
BACKLOG = {"sqlite": Bar(share=0.85), "postgres": Bar(share=0.85)}
PICK_UP = (Bar(most=4.0), Bar(most=12.0))  # ms, p50 and p99
ON_TIME = Bar(most=50.0)  # ms
IDLE_CPU = Bar(most=0.5)  # % of a core
IDLE_MEMORY = Bar(most=60.0)  # MB


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, and what of it was wanted."""

    engine: str
    name: str
    unit: str
    value: float
    limit: float | None
    ratio: float | None
    bar: Bar | None
    rounds: tuple[float, ...]
    limits: tuple[float, ...] = ()
    against: str | None = None

    @property
    def met(self) -> bool | None:
        return self.bar.met(self.value, self.ratio) if self.bar else None

    @property
    def steady(self) -> bool:
        """False if the rounds differ so much that a ratio of them is no evidence."""
        return all(
            max(rounds) <= STEADY * min(rounds) for rounds in (self.rounds, self.limits) if rounds
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met, "steady": self.steady}


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must be so after a measurement, whatever the speed; `fault` says what is not."""

    engine: str
    name: str
    fault: str | None
