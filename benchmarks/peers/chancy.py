# /// script
# requires-python = ">=3.11"
# dependencies = ["chancy[cli]"]
# [tool.bench]
# title = "Chancy"
# on = ["postgres"]
# runs = "in-process async"
# settings = "AsyncExecutor, concurrency 500, eager polling, a process for each worker"
# ///

import asyncio
import os
import sys

from chancy import Chancy, Job, Queue

from peers.effects import URL, async_job

app = Chancy(URL)
_loop = asyncio.Runner()
_open = False


async def run(*, n, payload):
    await async_job(n, payload)


def one(n, payload):
    return Job(func="peers.chancy.run", kwargs={"n": n, "payload": payload})


async def _prepare():
    await app.migrate()
    executor = "chancy.executors.asyncex.AsyncExecutor"
    queue = Queue(
        "default", concurrency=500, executor=executor, polling_interval=1, eager_polling=True
    )
    await app.declare(queue, upsert=True)


def done(coroutine):
    global _open
    if not _open:
        _open = True
        _loop.run(app.__aenter__())
    return _loop.run(coroutine)


def prepare():
    done(_prepare())


def enqueue(n, payload):
    done(app.push(one(n, payload)))


def enqueue_many(numbers, payload):
    async def push():
        async for _ in app.push_many([one(n, payload) for n in numbers]):
            pass

    done(push())


def left():
    async def count():
        async with app.pool.connection() as conn, conn.cursor() as cursor:
            await cursor.execute(
                "SELECT count(*) FROM chancy_jobs WHERE state NOT IN ('succeeded', 'failed')"
            )
            return (await cursor.fetchone())[0]

    return done(count())


def workers(count):
    program = os.path.join(os.path.dirname(sys.executable), "chancy")
    return [[program, "--app", "peers.chancy.app", "worker", "start"] for _ in range(count)]
