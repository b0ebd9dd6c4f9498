"""The app of `genba bench`, and what is measured with it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from genba import Genba
from genba.cli.child_node import ChildNode, signals_blocked
from genba.domain.clock import SystemClock
from genba.domain.states import FINAL
from genba.errors import GenbaError

TARGET = "genba.cli.bench_app:app"
WORKERS = 2
_CHUNK = 10_000  # jobs of one enqueue_many
_NODE_WITHIN_SECONDS = 30.0
_SLOWEST_PER_SECOND = 100  # a drain that is slower than this is given up

app = Genba()


@app.task(name="bench.number")
def number(n: int) -> int:
    """Do nothing, so that all the time is genba's own."""
    return n


class BenchResult(NamedTuple):
    enqueue_per_second: float
    bulk_per_second: float
    drain_per_second: float
    pick_up_p50_ms: float
    pick_up_p99_ms: float
    failed: int


def measure(folder: Path, jobs: int, singles: int, samples: int) -> BenchResult:
    number.enqueue(-1)  # the connection is open, and its statements are prepared
    began = time.perf_counter()
    for n in range(singles):
        number.enqueue(n)
    enqueue_seconds = time.perf_counter() - began
    began = time.perf_counter()
    last_id = 0
    for start in range(0, jobs, _CHUNK):
        numbers = range(start, min(start + _CHUNK, jobs))
        last_id = app.enqueue_many([number.call(n) for n in numbers])[-1].id
    bulk_seconds = time.perf_counter() - began

    node = ChildNode(app, TARGET, folder, min=WORKERS, max=WORKERS)
    try:
        total = 1 + singles + jobs
        drain_seconds = _drain(node, last_id, total)
        waits = sorted(_pick_up_ms() for _ in range(samples))
    finally:
        with signals_blocked():
            node.end()
    return BenchResult(
        enqueue_per_second=singles / enqueue_seconds,
        bulk_per_second=jobs / bulk_seconds,
        drain_per_second=total / drain_seconds,
        pick_up_p50_ms=median(waits),
        pick_up_p99_ms=waits[int(len(waits) * 0.99)],
        failed=total + samples - app.count(state="succeeded"),
    )


def _drain(node: ChildNode, last_id: int, total: int) -> float:
    """Wait until all jobs are final; return the seconds since the node joined.

    Both moments are by the clock of the database.
    """
    deadline = time.monotonic() + _NODE_WITHIN_SECONDS + total / _SLOWEST_PER_SECOND
    # To count is dear for the database, so it begins when the last job is final.
    while not (app.job(last_id).state in FINAL and app.count() == 0):
        node.check_alive()
        if time.monotonic() > deadline:
            raise GenbaError(f"{app.count()} of {total} jobs are still open: {node.last_words()}")
        time.sleep(0.01)
    joined_at = max(record.started_at for record in app.nodes())
    finished = max(job.finished for job in app.jobs(state="final", limit=1000) if job.finished)
    return finished.timestamp() - joined_at / 1e6


def _pick_up_ms() -> float:
    """Enqueue one job; return the time until an idle node has started it."""
    before = SystemClock().now()
    job = number.enqueue(0)
    # To poll at once would compete with the node; and the node shall be idle again.
    time.sleep(random.uniform(0.02, 0.05))  # noqa: S311
    started = job.wait(_NODE_WITHIN_SECONDS).attempts[0].started
    if started is None:
        raise GenbaError(f"job {job.id} has no start in its history")
    return started.timestamp() * 1e3 - before / 1e3
