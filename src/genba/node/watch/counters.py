"""What a node counts of its own work, for those who watch; in memory only, and only if somebody may ask."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from genba import wire
from genba.storage.records import Claimed, Ending, Micros

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)
SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Histogram:
    """How many were at most so long, for each of some lengths; the last place is for longer ones."""

    __slots__ = ("bounds", "places", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.places = [0] * (len(bounds) + 1)
        self.total = 0.0  # seconds

    def add(self, seconds: float) -> None:
        self.places[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class Counters:
    """Written by the loop and the desks, each its own part, and read by whoever is asked."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], Histogram] = {}  # (queue, task)
        self.waits: dict[str, Histogram] = {}
        self.claims = Histogram(SHORT)
        self.claimed = 0
        self.ends: Counter[tuple[str, str, str]] = Counter()  # (queue, task, what the job came to)
        self.deaths: Counter[str] = Counter()  # causes of attempts that did not end by themselves

    def ran(self, job: Claimed, started: Micros, spent: Micros, outcome: int, fine: bool) -> None:
        """A call has come back; what becomes of the job is told by `ended`, unless it is known now."""
        key = (job.queue, job.task)
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = Histogram(SECONDS)
        run.add(spent / 1_000_000)
        wait = self.waits.get(job.queue)
        if wait is None:
            wait = self.waits[job.queue] = Histogram(SECONDS)
        wait.add(max(0, started - job.due_at) / 1_000_000)
        if fine:
            self.ends[*key, "succeeded"] += 1
        elif outcome == wire.APPLIED:
            self.ends[*key, "ended_itself"] += 1

    def ended(self, endings: Iterable[Ending]) -> None:
        for one in endings:
            if one.happened:
                self.ends[one.queue, one.task, one.state] += 1
                if one.cause not in ("returned", "exception"):
                    self.deaths[one.cause] += 1

    def took(self, seconds: float, jobs: int) -> None:
        """A claim, with what was finished in the same commit."""
        self.claims.add(seconds)
        self.claimed += jobs
