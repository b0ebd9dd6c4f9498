# /// script
# requires-python = ">=3.11"
# dependencies = ["procrastinate"]
# [tool.bench]
# title = "Procrastinate"
# on = ["postgres"]
# runs = "in-process async"
# settings = "async tasks, --concurrency 100, a process for each worker"
# ///

import asyncio
import os
import sys

import procrastinate

from peers.effects import URL, async_job

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))
_loop = asyncio.Runner()
_open = False


@app.task(name="job")
async def run(n, payload):
    await async_job(n, payload)


def done(coroutine):
    global _open
    if not _open:
        _open = True
        _loop.run(_opened())
    return _loop.run(coroutine)


async def _opened():
    await app.open_async()


def prepare():
    done(app.schema_manager.apply_schema_async())


def enqueue(n, payload):
    done(run.defer_async(n=n, payload=payload))


def enqueue_many(numbers, payload):
    for start in range(0, len(numbers), 5_000):
        part = [{"n": n, "payload": payload} for n in numbers[start : start + 5_000]]
        done(run.batch_defer_async(*part))


def left():
    text = "SELECT count(*) AS left FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
    return done(app.connector.execute_query_one_async(text))["left"]


def workers(count):
    program = os.path.join(os.path.dirname(sys.executable), "procrastinate")
    return [
        [program, "--app", "peers.procrastinate.app", "worker", "--concurrency", "100"]
        for _ in range(count)
    ]
