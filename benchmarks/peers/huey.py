# /// script
# requires-python = ">=3.11"
# dependencies = ["huey", "redis"]
# [tool.bench]
# title = "Huey"
# on = ["sqlite", "redis"]
# runs = "process"
# settings = "consumer -k process, no result store; SQLite with fsync=True (synchronous FULL), polled every 10 to 50 ms"
# ///

import os
import sys

import huey as package

from peers.effects import FOLDER, ON, URL, job

if ON == "sqlite":
    huey = package.SqliteHuey(
        "bench", filename=os.path.join(FOLDER, "huey.db"), results=False, fsync=True
    )
else:
    huey = package.RedisHuey("bench", url=URL, results=False)


@huey.task()
def run(n, payload):
    job(n, payload)


def prepare():
    huey.storage.flush_all()


def enqueue(n, payload):
    run(n, payload)


def left():
    return huey.storage.queue_size()


def workers(count):
    consumer = os.path.join(os.path.dirname(sys.executable), "huey_consumer")
    often = [
        "-d",
        "0.01",
        "-m",
        "0.05",
    ]  # an idle worker looks every 10 to 50 ms, not every 0.1 to 10 s
    return [[consumer, "peers.huey.huey", "-k", "process", "-w", str(count), "-n", "-q", *often]]
