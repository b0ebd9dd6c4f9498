"""The workloads: genba through its public API and its shipped node, each beside its limit, in turns.

A ratio compares two neighbours in time, and what is told is the median of the rounds, since a machine is rarely
alone.  What comes just before a measurement changes it (a database still writes what the last one left, which can
halve the next): so before everything that counts, ours or the limit, comes a pass of the limit that does not.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from genba.client.job import Job
from genba.domain.clock import SystemClock
from genba.errors import GenbaError
from measure.databases import Databases
from measure.figures import (
    BACKLOG,
    BULK,
    CHUNK,
    DRAIN,
    FREED,
    HISTORY,
    IDLE_CPU,
    IDLE_MEMORY,
    LIMITED,
    ON_TIME,
    PICK_UP,
    SINGLE,
    Bar,
    Check,
    Figure,
    Plan,
)
from measure.limits import Raw, Seen, raw
from measure.node import READY_WITHIN, Node, started
from measure.tasks import alone, app, forgotten, limited, number, remembered

LIMIT_SECONDS = 1.0  # a shorter look at a limit shows the noise of the machine
SLOWEST = 100  # jobs a second; a drain that is slower than this is given up


@dataclass
class Bench:
    """One engine's measurements; `say` is told what is going on."""

    engine: str
    fresh: Databases
    plan: Plan
    namespace: str = "bench"
    say: Callable[[str], None] = lambda text: None
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    version: str = ""

    def run(self) -> None:
        self.enqueue_singly()
        self.enqueue_in_bulk()
        self.drain()
        self.drain_with_limits()
        self.free_a_slot()
        self.take_a_lock()
        self.drain_with_history()
        if self.plan.backlog:
            self.drain_a_backlog()
        self.idle()

    # jobs come in

    def enqueue_singly(self) -> None:
        count = self.plan.singles
        ours, bare = [], []
        with self._database() as plain:
            app.enqueue_many([number.call(-1)])  # connected, and its statements prepared
            for turn in self._rounds("enqueue one by one"):
                began = time.perf_counter()
                for n in range(count):
                    number.enqueue(n)
                ours.append(count / (time.perf_counter() - began))
                plain.commit_again(count)
                bare.append(plain.commit_again(count))
                self._check_waiting(f"enqueue one by one, round {turn}", plain, 1 + turn * count)
        self._tell(
            "enqueue, one by one", "jobs/s", ours, bare, SINGLE[self.engine], against="bare commits"
        )

    def enqueue_in_bulk(self) -> None:
        count = self.plan.bulk
        ours, bare = [], []
        with self._database() as plain:
            app.enqueue_many([number.call(-1)])
            for turn in self._rounds("enqueue in bulk"):
                began = time.perf_counter()
                app.enqueue_many([number.call(n) for n in range(count)])
                ours.append(count / (time.perf_counter() - began))
                plain.copy_again(count)
                bare.append(plain.copy_again(count))
                self._check_waiting(f"enqueue in bulk, round {turn}", plain, 1 + turn * count)
        against = (
            "COPY of the same rows"
            if self.engine == "postgres"
            else "one executemany of the same rows"
        )
        self._tell(
            f"enqueue, bulk of {count:,}", "jobs/s", ours, bare, BULK[self.engine], against=against
        )

    # jobs are run

    def drain(self) -> None:
        """From the node's joining to the last finish, both by the database's clock."""
        jobs = self.plan.jobs
        rates: dict[int, list[float]] = {1: [], 2: []}
        bare: dict[int, list[float]] = {1: [], 2: []}
        for turn in self._rounds("drain"):
            for workers in (1, 2):
                bare[workers].append(self._limit(jobs))
                rates[workers].append(self._drain_once(jobs, workers, turn))
        against = "raw claim + finish, batch 100"
        self._tell("drain, 1 worker", "jobs/s", rates[1], bare[1], None, against=against)
        self._tell(
            "drain, 2 workers", "jobs/s", rates[2], bare[2], DRAIN[self.engine], against=against
        )

    def _limit(self, jobs: int) -> float:
        """Of many passes the median; the first does not count."""
        passes: list[float] = []
        with self.fresh() as url, raw(url) as plain:
            plain.drain(jobs)
            began = time.perf_counter()
            while len(passes) < 3 or time.perf_counter() - began < LIMIT_SECONDS:
                passes.append(plain.drain(jobs))
        return median(passes)

    def drain_with_limits(self) -> None:
        """A slot of one of a thousand buckets for every job, beside the same jobs without."""
        jobs, slots, bare = self.plan.jobs, [], []
        for turn in self._rounds("drain with limits"):
            bare.append(self._drain_once(jobs, 2, turn, "drain without limits"))
            slots.append(self._drain_once(jobs, 2, turn, "drain with limits", limited))
        self._tell(
            "drain, each job limited",
            "jobs/s",
            slots,
            bare,
            LIMITED,
            against="the same without limits",
        )

    def free_a_slot(self) -> None:
        """From the end of a job to the start of the next one of its bucket, with a long line behind it."""
        gaps = []
        with self._database("a slot is freed"):
            ids = [job.id for job in app.enqueue_many([alone.call(0.01)] * self.plan.line)]
            with started(2) as node:
                node.join()
                for turn in self._rounds("a slot is freed"):
                    mine = [
                        app.job(id)
                        for id in ids[(turn - 1) * self.plan.samples : turn * self.plan.samples]
                    ]
                    app.wait(mine, timeout=READY_WITHIN + self.plan.samples)
                    gaps.append(median(_gaps(mine)))
            self._check_end("a slot is freed", node)
        self._tell(
            f"a slot freed to the next start, p50, {self.plan.line:,} in line",
            "ms",
            gaps,
            None,
            FREED,
        )

    def take_a_lock(self) -> None:
        """A mutex that nobody else wants: two commits, one to take it and one to give it back."""
        count = self.plan.singles
        ours, bare = [], []
        with self._database() as plain:
            app.enqueue_many([number.call(n) for n in range(count)])
            for _ in self._rounds("an uncontended lock"):
                with app.mutex("bench"):
                    pass  # connected, and its session is open
                began = time.perf_counter()
                for n in range(count):
                    with app.mutex(f"bench/{n % 10}"):
                        pass
                ours.append(count / (time.perf_counter() - began))
                app.close()  # its session would want to be renewed, and commits without a pause let nobody in on SQLite
                plain.commit_again(count)
                bare.append(plain.commit_again(count) / 2)
        self._tell(
            "mutex, taken and given back",
            "locks/s",
            ours,
            bare,
            None,
            against="two bare commits each",
        )

    def drain_with_history(self) -> None:
        """Every attempt and move on record, beside the same jobs of which final states are kept only."""
        jobs, kept, bare = self.plan.jobs, [], []
        for turn in self._rounds("drain with history"):
            bare.append(self._drain_once(jobs, 2, turn, "drain without history", forgotten))
            kept.append(self._drain_once(jobs, 2, turn, "drain with history", remembered))
        self._tell(
            "drain, all history kept",
            "jobs/s",
            kept,
            bare,
            HISTORY,
            against="the same, final states only",
        )

    def _drain_once(
        self, jobs: int, workers: int, turn: int, what: str = "drain", task: Any = number
    ) -> float:
        name = f"{what}, {workers} worker{'s' * (workers > 1)}, round {turn}"
        with self._database(name) as plain:
            ids = _enqueue(jobs, task)
            with started(workers) as node:
                pids = self._finish(node, plain, ids[-1], jobs)
            rows = plain.seen()
            self._check_jobs(
                name, rows, plain, set(range(jobs)), None if task is forgotten else pids
            )
            self._check_end(name, node)
            return jobs * 1e6 / (max(row.finished_at or 0 for row in rows) - node.joined_at)

    def drain_a_backlog(self) -> None:
        """A fixed number of jobs out of a great backlog, beside a small one that is drained whole.

        Both by the history: the first fifth is left out, because starting up weighs more on the small one.
        """
        plan = self.plan
        claims = min(plan.claims, plan.backlog // max(1, plan.repeat))
        great, small = [], []
        with self._database(f"backlog of {plan.backlog:,}") as plain:
            self.say(f"{self.engine}: filling a backlog of {plan.backlog:,}")
            ids = _enqueue(plan.backlog)
            os.sync()  # what it was to write them is not what it is to drain them
            pids: set[int] = set()
            done = 0
            for turn in self._rounds(f"drain over a backlog of {plan.backlog:,}"):
                with started(2) as node:
                    pids |= self._finish(
                        node, plain, ids[min(done + claims, len(ids)) - 1], done + claims
                    )
                self._check_end(f"backlog of {plan.backlog:,}, round {turn}", node)
                rows = plain.seen()
                great.append(
                    _pace((row for row in rows if (row.claimed_at or 0) >= node.joined_at), claims)
                )
                done = len(rows)
                with self._beside():
                    small.append(self._pace_of_small(turn))
            self._check_jobs(
                f"backlog of {plan.backlog:,}", plain.seen(), plain, set(range(plan.backlog)), pids
            )
        against = f"the same, {plan.small_backlog:,}"
        name = f"drain, backlog of {plan.backlog:,}"
        self._tell(name, "jobs/s", great, small, BACKLOG[self.engine], against=against)

    def _pace_of_small(self, turn: int) -> float:
        jobs = self.plan.small_backlog
        with self._database(f"backlog of {jobs:,}, round {turn}") as plain:
            ids = _enqueue(jobs)
            with started(2) as node:
                pids = self._finish(node, plain, ids[-1], jobs)
            rows = plain.seen()
            self._check_jobs(
                f"backlog of {jobs:,}, round {turn}", rows, plain, set(range(jobs)), pids
            )
            return _pace(rows, jobs)

    def idle(self) -> None:
        """How soon an idle node starts a job, and what it costs when there is none."""
        plan = self.plan
        halves, tails = [], []
        with self._database("idle pick-up") as plain:
            with started(2) as node:
                node.join()
                time.sleep(1.0)
                for turn in self._rounds("idle pick-up"):
                    waits = sorted(
                        _pick_up((turn - 1) * plan.samples + i) for i in range(plan.samples)
                    )
                    halves.append(median(waits))
                    tails.append(waits[min(len(waits) - 1, int(len(waits) * 0.99))])
                first = plan.samples * plan.repeat
                self.say(f"{self.engine}: jobs for a moment")
                late = _start_at(range(first, first + plan.samples))
                pids = node.workers()
                self.say(f"{self.engine}: idle for {plan.idle_seconds:g} s")
                time.sleep(1.0)
                share = node.busy(plan.idle_seconds)
                memory = node.memory()
            numbers = set(range(first + plan.samples))
            self._check_jobs("idle pick-up", plain.seen(), plain, numbers, pids)
            self._check_end("idle pick-up", node)
        self._tell("idle pick-up, p50", "ms", halves, None, PICK_UP[0])
        self._tell("idle pick-up, p99", "ms", tails, None, PICK_UP[1])
        self._tell("start after its moment, p50", "ms", [median(late)], None, None)
        self._tell(
            "start after its moment, p99", "ms", [late[int(len(late) * 0.99)]], None, ON_TIME
        )
        self._tell("idle node, all processes", "% of a core", [share], None, IDLE_CPU)
        self._tell("idle node, supervisor", "MB", [memory], None, IDLE_MEMORY)

    # the frame

    @contextmanager
    def _database(self, verified: str = "") -> Iterator[Raw]:
        """A fresh database, installed, that the app is set to; and a plain connection to it.

        Under the name `verified`, its history is replayed in the end; not where a limit puts rows among ours,
        of which no history tells.
        """
        with self.fresh() as url:
            app.settings = replace(app.settings, url=url, namespace=self.namespace)
            try:
                app.install()
                with raw(url) as plain:
                    self.version = plain.version
                    yield plain
                if verified:
                    self._check_history(verified)
            finally:
                app.close()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Another database for a while; then the app is set to the first one again."""
        settings = app.settings
        app.close()
        try:
            yield
        finally:
            app.settings = settings

    def _rounds(self, name: str) -> Iterator[int]:
        for turn in range(1, self.plan.repeat + 1):
            self.say(f"{self.engine}: {name}, round {turn} of {self.plan.repeat}")
            yield turn

    def _finish(self, node: Node, plain: Raw, last: int, count: int) -> set[int]:
        """Until `count` jobs have ended; gives the node's workers.

        Looks at one row, by its key, and counts only when that one is final: counting would slow the node down.
        """
        node.join()
        pids = node.workers()
        deadline = time.monotonic() + READY_WITHIN + count / SLOWEST
        while not (plain.is_final(last) and plain.ended() >= count):
            node.must_live()
            if time.monotonic() > deadline:
                raise GenbaError(
                    f"{plain.ended()} of {count} jobs have ended in time: {node.last_words()}"
                )
            time.sleep(0.01)
        return pids | node.workers()

    def _tell(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        limits: Sequence[float] | None,
        bar: Bar | None,
        *,
        against: str | None = None,
    ) -> None:
        ratio = median(v / x for v, x in zip(values, limits, strict=True)) if limits else None
        limit = median(limits) if limits else None
        rounds = (tuple(values), tuple(limits or ()))
        self.figures.append(
            Figure(self.engine, name, unit, median(values), limit, ratio, bar, *rounds, against)
        )

    # afterwards

    def _check_waiting(self, name: str, plain: Raw, expected: int) -> None:
        found = plain.waiting()
        fault = None if found == expected else f"{found} jobs are waiting, not {expected}"
        self.checks.append(Check(self.engine, name, fault))

    def _check_jobs(
        self, name: str, rows: Sequence[Seen], plain: Raw, numbers: set[int], pids: set[int] | None
    ) -> None:
        self.checks.append(Check(self.engine, name, _fault(rows, plain, numbers, pids)))

    def _check_history(self, name: str) -> None:
        faults = app.verify().faults
        told = (
            f"{len(faults)} faults, the first: {faults[0].which}: {faults[0].words}"
            if faults
            else None
        )
        self.checks.append(Check(self.engine, f"{name}: verify", told))

    def _check_end(self, name: str, node: Node) -> None:
        fault = None
        if node.code or node.left_behind:
            fault = f"exit code {node.code}, {node.left_behind} processes left behind: {node.words}"
        self.checks.append(Check(self.engine, f"{name}: the node's end", fault))


def _fault(
    rows: Sequence[Seen], plain: Raw, numbers: set[int], pids: set[int] | None
) -> str | None:
    """What is wrong with these jobs: each ended once, well, with its own number, in a worker of the node.

    Without `pids`, they are of a task that leaves no attempts of what ended well.
    """
    seen: set[int] = set()
    for row in rows:
        wanted = json.loads(row.args)["n"]
        if row.state != "succeeded" or row.result is None or json.loads(row.result) != wanted:
            return f"job {row.id}, number {wanted}, is {row.state} with {row.result!r}"
        if pids is None and row.tries:
            return f"job {row.id} has {row.tries} attempts in its history, and should have none"
        if pids is not None and (row.tries != 1 or row.cause != "returned"):
            return f"job {row.id} has {row.tries} attempts in its history, the first ended by {row.cause}"
        if pids is not None and row.pid not in pids:
            return f"job {row.id} ran in process {row.pid}, which is none of the workers {sorted(pids)}"
        seen.add(wanted)
    history, waiting = plain.finished(), plain.waiting()
    if not seen <= numbers or len(seen) != len(rows) or len(rows) + waiting != len(numbers):
        return f"of {len(numbers)} jobs {len(rows)} have ended with {len(seen)} results, {waiting} are waiting"
    if pids is not None and history != len(rows):
        return f"{len(rows)} jobs have ended, and {history} attempts are in the history"
    return None


def _enqueue(count: int, task: Any = number) -> list[int]:
    ids: list[int] = []
    for start in range(0, count, CHUNK):
        chunk = range(start, min(start + CHUNK, count))
        ids += [job.id for job in app.enqueue_many([task.call(n) for n in chunk])]
    return ids


def _start_at(numbers: Sequence[int]) -> list[float]:
    """Jobs for moments that are 50 ms apart; how many ms after its moment each was begun, sorted."""
    begin = SystemClock().now() + 500_000
    calls = [number.using(at=(begin + 50_000 * i) / 1e6).call(n) for i, n in enumerate(numbers)]
    jobs = app.wait(app.enqueue_many(calls), timeout=READY_WITHIN + len(calls) * 0.05)
    starts = [(job.attempts[-1].started, job.due) for job in jobs]
    return sorted(
        (started - due).total_seconds() * 1000 for started, due in starts if started is not None
    )


def _pick_up(n: int) -> float:
    """Milliseconds from before the enqueue to the start that the job's history has."""
    before = SystemClock().now()
    job = number.enqueue(n)
    # Asked about only later: to poll for it would compete with what is measured, and the node is to be idle again.
    time.sleep(random.uniform(0.02, 0.05))
    (attempt,) = job.wait(READY_WITHIN).attempts
    if attempt.started is None:
        raise GenbaError(f"job {job.id} has no start in its history")
    return attempt.started.timestamp() * 1e3 - before / 1e3


def _gaps(jobs: Sequence[Job[Any]]) -> Iterator[float]:
    """Milliseconds from the end of each to the start of the one that came after it."""
    tries = sorted((job.refresh().attempts[0] for job in jobs), key=lambda one: one.ended)
    for one, other in pairwise(tries):
        if other.started is None:
            raise GenbaError("a job has no start in its history")
        yield (other.started - one.ended).total_seconds() * 1e3


def _pace(rows: Iterable[Seen], count: int) -> float:
    ends = sorted(row.ended_at or 0 for row in rows)[:count]
    first = len(ends) // 5
    return (len(ends) - 1 - first) * 1e6 / max(1, ends[-1] - ends[first])
