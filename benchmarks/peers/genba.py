# /// script
# requires-python = ">=3.11"
# dependencies = ["genba"]
# [tool.bench]
# title = "genba"
# on = ["sqlite", "postgres"]
# runs = "process"
# settings = "the shipped node with its default options, --min and --max the number of workers"
# ///
"""genba itself, by its public API, measured as the others are; it runs in the environment of the benchmark."""

import sys

from genba import Genba
from peers.effects import URL, async_job, job

app = Genba(URL)


@app.task(name="job")
def plain(n: int, payload: str = "") -> int:
    return job(n, payload)


@app.task(name="async_job", concurrency=100)
async def waits(n: int, payload: str = "") -> int:
    return await async_job(n, payload)


def task():
    from peers.effects import WORK

    return waits if WORK == "io" else plain


def prepare():
    app.install()


def enqueue(n, payload):
    task().enqueue(n, payload)


def enqueue_many(numbers, payload):
    one = task()
    for start in range(0, len(numbers), 10_000):
        app.enqueue_many([one.call(n, payload) for n in numbers[start : start + 10_000]])


def left():
    return app.count(state="open")


def workers(count):
    bounds = ["--min", str(count), "--max", str(count)]
    return [[sys.executable, "-m", "genba.cli", "node", "start", "peers.genba:app", *bounds]]
