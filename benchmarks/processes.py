"""What a process per job costs, and what jobs that kill their workers cost the others.

    .venv/bin/python benchmarks/processes.py ondemand   the pool `ondemand` beside RQ, which forks for each job
    .venv/bin/python benchmarks/processes.py poison     10 jobs that segfault among 1,000 of 20 ms, beside none
    .venv/bin/python benchmarks/processes.py forks      how long it takes until a worker is ready

Rounds are run in turns, and medians are told, with their checks; the exit code is 1 if a bar is missed.
RQ is installed into build/rq; it needs a Redis (REDIS_URL, redis://127.0.0.1:6379/9 unless set).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/9")
RQ = ROOT / "build" / "rq"
WITHIN = 120.0  # seconds for one drain

TASKS = """
import ctypes, time
from genba import Genba

app = Genba()

@app.task
def nothing() -> None:
    pass

@app.task
def brief(n: int) -> int:
    time.sleep(0.02)
    return n

@app.task
def segfault(n: int) -> None:
    ctypes.string_at(0)
"""

RQ_SIDE = """
import sys, time, uuid
from redis import Redis
from rq import Queue
from rq.job import Job

redis, name, count = Redis.from_url(sys.argv[1]), sys.argv[2], int(sys.argv[3])
queue = Queue(name, connection=redis)
jobs = [queue.enqueue_call("time.sleep", args=(0,), result_ttl=300) for _ in range(count)]
ids = [job.id for job in jobs]
print("ready", flush=True)
sys.stdin.readline()
deadline = time.monotonic() + float(sys.argv[4])
while queue.finished_job_registry.count < count and time.monotonic() < deadline:
    time.sleep(0.05)
done = [job for job in Job.fetch_many(ids, connection=redis) if job and job.ended_at]
begun = min(job.started_at for job in done)
print(len(done), (max(job.ended_at for job in done) - begun).total_seconds())
queue.delete(delete_jobs=True)
"""


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Place:
    """A fresh database with the tasks above and a client of it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        (folder / "bench_tasks.py").write_text(TASKS)
        os.environ["GENBA_URL"] = url
        sys.modules.pop("bench_tasks", None)
        sys.path.insert(0, str(folder))
        try:
            import bench_tasks  # type: ignore[import-not-found]
        finally:
            sys.path.remove(str(folder))
        self.tasks: Any = bench_tasks
        self.app: Any = bench_tasks.app

    @contextmanager
    def node(self, *options: str) -> Iterator[None]:
        command = [sys.executable, "-m", "genba.cli", "node", "start", "bench_tasks:app", *options]
        with (self.folder / "node.log").open("w") as log:
            node = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
                start_new_session=True,
            )
        try:
            yield
        finally:
            node.terminate()
            node.wait(30)

    def drain(self, jobs: Sequence[Any], *options: str) -> list[Any]:
        """The last attempt of each, when all are final or held."""
        with self.node(*options):
            deadline = time.monotonic() + WITHIN
            while self.app.count(state="final") + self.app.count(state="held") < len(jobs):
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"not drained in {WITHIN} s:\n{(self.folder / 'node.log').read_text()}"
                    )
                time.sleep(0.05)
        return [job.attempts for job in jobs]


def pace(attempts: Sequence[Sequence[Any]]) -> float:
    """Jobs a second, from the first start to the last end."""
    spent = max(a[-1].ended for a in attempts) - min(a[0].started or a[0].claimed for a in attempts)
    return len(attempts) / spent.total_seconds()


@contextmanager
def places(engine: str) -> Iterator[Callable[[], Any]]:
    from measure.databases import postgres_databases, sqlite_databases

    with postgres_databases(None) if engine == "postgres" else sqlite_databases() as fresh:

        @contextmanager
        def place() -> Iterator[Place]:
            with fresh() as url, tempfile.TemporaryDirectory() as folder:
                made = Place(url, Path(folder))
                try:
                    yield made
                finally:
                    made.app.close()

        yield place


# a process per job


def ondemand(engine: str, jobs: int, rounds: int) -> bool:
    ours, theirs = [], []
    version = install_rq()
    with places(engine) as fresh:
        for _ in range(rounds):
            theirs.append(rq_drain(jobs))
            with fresh() as place:
                given = place.app.enqueue_many([place.tasks.nothing.call() for _ in range(jobs)])
                attempts = place.drain(given, "--pool", "ondemand", "--max", "2")
                pids = {each[0].pid for each in attempts}
                assert all(each[0].cause == "returned" for each in attempts)
                assert len(pids) == jobs, f"{len(pids)} processes for {jobs} jobs"
                ours.append(pace(attempts))
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"{'':12}{'jobs/s':>10}   rounds")
    print(f"{f'RQ {version}':12}{median(theirs):>10,.0f}   {shown(theirs)}")
    print(f"{'genba':12}{median(ours):>10,.0f}   {shown(ours)}   {engine}, --pool ondemand")
    print(f"{'ratio':12}{ratio:>10.1f}   bar: 5")
    print(
        f"{jobs} no-op jobs, 2 processes at a time, a fork for each job; from the first start to the last end"
    )
    return ratio >= 5


def install_rq() -> str:
    python = RQ / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(RQ)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "rq"], check=True)
    asked = [str(python), "-c", "import rq; print(rq.__version__)"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def rq_drain(jobs: int) -> float:
    name = f"genba-bench-{uuid.uuid4().hex}"
    side = subprocess.Popen(
        [str(RQ / "bin" / "python"), "-c", RQ_SIDE, REDIS, name, str(jobs), str(WITHIN)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )
    assert side.stdin
    assert side.stdout
    assert side.stdout.readline() == "ready\n"
    worker = [str(RQ / "bin" / "rq"), "worker", "--url", REDIS, "--quiet", "--burst", name]
    workers = [subprocess.Popen(worker, preexec_fn=end_with_parent) for _ in range(2)]
    side.stdin.write("\n")
    side.stdin.flush()
    done, seconds = side.stdout.readline().split()
    for each in workers:
        each.terminate()
        each.wait()
    side.wait()
    assert int(done) == jobs, f"RQ has finished {done} of {jobs}"
    return jobs / float(seconds)


# poison


def poison(engine: str, jobs: int, rounds: int) -> bool:
    clean, poisoned = [], []
    with places(engine) as fresh:
        for turn in range(rounds):
            pair = [(0, clean), (max(1, jobs // 100), poisoned)]
            for bad, into in pair if turn % 2 else reversed(pair):
                with fresh() as place:
                    into.append(poison_drain(place, jobs, bad, turn))
    ratio = median(a / b for a, b in zip(poisoned, clean, strict=True))
    print(f"{'':12}{'jobs/s':>10}   rounds")
    print(f"{'clean':12}{median(clean):>10,.1f}   {shown(clean)}")
    print(f"{'poisoned':12}{median(poisoned):>10,.1f}   {shown(poisoned)}")
    print(f"{'ratio':12}{ratio:>10.0%}   bar: 70 %")
    print(
        f"{engine}; {jobs} jobs of 20 ms, 2 workers; poisoned: {max(1, jobs // 100)} more that segfault"
    )
    return ratio >= 0.7


def poison_drain(place: Place, jobs: int, bad: int, seed: int) -> float:
    calls = [place.tasks.brief.call(n) for n in range(jobs)] + [
        place.tasks.segfault.call(n) for n in range(bad)
    ]
    random.Random(seed).shuffle(calls)
    given = place.app.enqueue_many(calls)
    attempts = place.drain(given, "--max", "2")
    good = [
        each
        for job, each in zip(given, attempts, strict=True)
        if job.refresh().task.endswith("brief")
    ]
    for job, each in zip(given, attempts, strict=True):
        causes = [attempt.cause for attempt in each]
        if job.task.endswith("brief"):
            assert causes == ["returned"], causes
        else:
            assert (job.state, causes) == ("held", ["signal 11"] * 3), (job.state, causes)
    return pace(good)


def shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:,.1f}" for value in values)


# forks


def forks(count: int) -> bool:
    sys.path.insert(0, str(ROOT))
    from tests.worker.test_spawn import LARGE, SMALL, starter

    kinds = [
        ("fork, small app", SMALL, True, 10),
        ("fork, 200 MB", LARGE, True, 30),
        ("exec, small app", SMALL, False, None),
    ]
    fine = True
    print(f"{'until ready':18}{'p50 ms':>10}{'p99 ms':>10}   bar for p99")
    for name, text, forked, bar in kinds:
        with (
            tempfile.TemporaryDirectory() as folder,
            starter(Path(folder), text, forked) as started,
        ):
            rounds = count if forked else max(1, count // 20)
            times = sorted(started.round(slot) * 1000 for slot in range(rounds))
        late = times[int(len(times) * 0.99)]
        print(
            f"{name:18}{times[len(times) // 2]:>10.1f}{late:>10.1f}   {bar or '-'}   {rounds} starts"
        )
        fine = fine and (bar is None or late < bar)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["ondemand", "poison", "forks"])
    parser.add_argument("--engine", choices=["sqlite", "postgres"], default="postgres")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--rounds", type=int)
    asked = parser.parse_args()
    if asked.what == "forks":
        return not forks(asked.jobs or 200)
    if asked.what == "ondemand":
        return not ondemand(asked.engine, asked.jobs or 800, asked.rounds or 3)
    return not poison(asked.engine, asked.jobs or 1000, asked.rounds or 5)


if __name__ == "__main__":
    sys.exit(main())
