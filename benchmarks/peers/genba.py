# /// script
# requires-python = ">=3.11"
# dependencies = ["genba"]
# [tool.bench]
# title = "genba"
# on = ["sqlite", "postgres"]
# runs = "process"
# settings = "the shipped node with its default options, --min and --max the number of workers, uvloop as for PgQueuer"
# ///
"""genba itself, by its public API, measured as the others are; it runs in the environment of the benchmark."""

import subprocess
import sys
import threading
import time

from genba import Genba, Limit
from peers.effects import URL, WORK, async_job, job

GENBA = [sys.executable, "-m", "genba.cli"]

app = Genba(URL)


@app.task(name="job")
def plain(n: int, payload: str = "") -> int:
    return job(n, payload)


@app.task(name="async_job", concurrency=100)
async def waits(n: int, payload: str = "") -> int:
    return await async_job(n, payload)


@app.task(name="limited", limits=[Limit("bench:{bucket}", 5)])
def limited(n: int, bucket: int) -> int:
    return job(n)


def task():
    return waits if WORK == "io" else plain


def prepare():
    app.install()


def enqueue(n, payload):
    task().enqueue(n, payload)


def enqueue_many(numbers, payload):
    one = task()
    for start in range(0, len(numbers), 10_000):
        app.enqueue_many([one.call(n, payload) for n in numbers[start : start + 10_000]])


def enqueue_limited(numbers):
    """Each holds one of the five slots of one of a thousand buckets."""
    app.enqueue_many([limited.call(n, n % 1000) for n in numbers])


def enqueue_graph(numbers):
    """A tree: each waits for one of those before it, and two wait for each."""
    calls = []
    for i, n in enumerate(numbers):
        calls.append(plain.using(after=[calls[(i - 1) // 2]]).call(n) if i else plain.call(n))
    app.enqueue_many(calls)


_seen: set[int] = set()


def consume():
    """Read along what happens, in a thread beside the enqueues, as a program of its own would."""

    def read():
        for event in app.events(kinds=["succeeded"], block=True):
            _seen.add(event.job)

    threading.Thread(target=read, daemon=True).start()


def consumed(jobs, within):
    """How many ends were seen, when all were or time is up."""
    deadline = time.monotonic() + within
    while len(_seen) < jobs and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(_seen)


def verify(jobs):
    """Each has succeeded, and the whole history holds."""
    found = app.count(state="succeeded")
    if found != jobs:
        return f"{found} of {jobs} jobs have succeeded"
    ended = subprocess.run([*GENBA, "db", "verify", "--url", URL], capture_output=True, text=True)
    return (ended.stdout + ended.stderr).strip()[-300:] if ended.returncode else None


def left():
    return app.count(state="open")


def workers(count):
    bounds = ["--min", str(count), "--max", str(count)]
    return [[*GENBA, "node", "start", "peers.genba:app", *bounds]]


def ondemand(count):
    return [[*GENBA, "node", "start", "peers.genba:app", "--pool", "ondemand", "--max", str(count)]]
