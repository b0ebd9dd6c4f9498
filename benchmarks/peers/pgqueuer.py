# /// script
# requires-python = ">=3.11"
# dependencies = ["pgqueuer[asyncpg]", "uvloop"]
# [tool.bench]
# title = "PgQueuer"
# on = ["postgres"]
# runs = "in-process async"
# settings = "asyncpg, uvloop, batch_size 500, a process for each worker"
# ///

import asyncio
import signal
import sys

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from peers.effects import URL, async_job

_loop = asyncio.Runner()
_conn = None


def run(coroutine):
    return _loop.run(coroutine)


def queries():
    global _conn
    if _conn is None:
        _conn = run(asyncpg.connect(URL))
    return Queries(AsyncpgDriver(_conn))


def work():
    async def serve():
        pgq = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))

        @pgq.entrypoint("job")
        async def one(job):
            n, _, payload = job.payload.decode().partition(" ")
            await async_job(int(n), payload)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pgq.shutdown.set)
        await pgq.run(batch_size=500)

    uvloop.run(serve())


def prepare():
    run(queries().install())


def enqueue(n, payload):
    run(queries().enqueue("job", f"{n} {payload}".encode()))


def enqueue_many(numbers, payload):
    for start in range(0, len(numbers), 10_000):
        part = [f"{n} {payload}".encode() for n in numbers[start : start + 10_000]]
        run(queries().enqueue(["job"] * len(part), part, [0] * len(part)))


def left():
    queries()
    return run(_conn.fetchval("SELECT count(*) FROM pgqueuer"))


def workers(count):
    return [[sys.executable, "-c", "from peers.pgqueuer import work; work()"] for _ in range(count)]
