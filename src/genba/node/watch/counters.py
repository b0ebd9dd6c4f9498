"""What a node counts of its own work, in memory, if the metrics server runs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from genba import wire
from genba.domain.duration import SECOND
from genba.storage.records import Claimed, Ending, Micros

LONG_BOUNDS_SECONDS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.5),
    *(1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0),
)
SHORT_BOUNDS_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Histogram:
    """How many durations were at most each of the bounds; the last count is for longer ones."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # seconds

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class Counters:
    """The loop and the writers each write their own part; the metrics server reads all of it."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], Histogram] = {}  # (queue, task)
        self.waits: dict[str, Histogram] = {}  # queue
        self.claims = Histogram(SHORT_BOUNDS_SECONDS)
        self.claimed = 0
        self.ends: Counter[tuple[str, str, str]] = Counter()  # (queue, task, the job's state)
        self.deaths: Counter[str] = Counter()  # causes of attempts that did not end by themselves

    def count_run(
        self, job: Claimed, started: Micros, spent: Micros, outcome: int, succeeded: bool
    ) -> None:
        """Count a call that has returned; `count_endings` counts what becomes of the job later."""
        key = (job.queue, job.task)
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = Histogram(LONG_BOUNDS_SECONDS)
        run.add(spent / SECOND)
        wait = self.waits.get(job.queue)
        if wait is None:
            wait = self.waits[job.queue] = Histogram(LONG_BOUNDS_SECONDS)
        wait.add(max(0, started - job.due_at) / SECOND)
        if succeeded:
            self.ends[*key, "succeeded"] += 1
        elif outcome == wire.APPLIED:
            self.ends[*key, "ended_itself"] += 1

    def count_endings(self, endings: Iterable[Ending]) -> None:
        for ending in endings:
            if ending.happened:
                self.ends[ending.queue, ending.task, ending.state] += 1
                if ending.cause not in ("returned", "exception"):
                    self.deaths[ending.cause] += 1

    def count_claim(self, seconds: float, jobs: int) -> None:
        """Count a claim, with what was finished in the same commit."""
        self.claims.add(seconds)
        self.claimed += jobs
