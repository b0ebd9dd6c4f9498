# /// script
# requires-python = ">=3.12"
# dependencies = ["oban"]
# [tool.bench]
# title = "Oban for Python"
# on = ["postgres"]
# runs = "in-process async"
# settings = "queue limit 100, a process for each worker"
# ///

import asyncio
import signal
import sys

from oban import Oban, worker
from oban.schema import install
from psycopg_pool import AsyncConnectionPool

from peers.effects import URL, async_job

_loop = asyncio.Runner()


@worker(queue="default")
class Run:
    async def process(self, job):
        await async_job(job.args["n"], job.args["payload"])


async def _pool():
    pool = AsyncConnectionPool(URL, min_size=1, max_size=5, open=False)
    await pool.open()
    return pool


pool = oban = None


def _open():
    global pool, oban
    if pool is None:
        pool = _loop.run(_pool())
        oban = Oban(pool=pool)


def prepare():
    _open()
    _loop.run(install(pool))


def enqueue(n, payload):
    _open()
    _loop.run(oban.enqueue(Run.new({"n": n, "payload": payload})))


def enqueue_many(numbers, payload):
    _open()
    for start in range(0, len(numbers), 1_000):
        jobs = [Run.new({"n": n, "payload": payload}) for n in numbers[start : start + 1_000]]
        _loop.run(oban.enqueue_many(jobs))


def left():
    _open()

    async def count():
        async with pool.connection() as conn:
            found = await conn.execute("SELECT count(*) FROM oban_jobs WHERE state <> 'completed'")
            return (await found.fetchone())[0]

    return _loop.run(count())


def work():
    async def serve():
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
        async with Oban(pool=await _pool(), queues={"default": 100}):
            await over.wait()

    asyncio.run(serve())


def workers(count):
    return [[sys.executable, "-c", "from peers.oban import work; work()"] for _ in range(count)]
