# /// script
# requires-python = ">=3.11"
# dependencies = ["rq"]
# [tool.bench]
# title = "RQ"
# on = ["redis"]
# runs = "process, forked for each job"
# settings = "the default worker, a process for each; enqueue_many"
# ///

import os
import sys

from redis import Redis
from rq import Queue

from peers.effects import URL, job

queue = Queue("bench", connection=Redis.from_url(URL))


def run(n, payload):
    job(n, payload)


def prepare():
    queue.empty()


def enqueue(n, payload):
    queue.enqueue(run, n, payload)


def enqueue_many(numbers, payload):
    for start in range(0, len(numbers), 1_000):
        part = numbers[start : start + 1_000]
        queue.enqueue_many([Queue.prepare_data(run, (n, payload)) for n in part])


def left():
    return queue.count + queue.started_job_registry.count


def workers(count):
    program = os.path.join(os.path.dirname(sys.executable), "rq")
    return [[program, "worker", "--url", URL, "--quiet", "bench"] for _ in range(count)]


ondemand = workers  # it forks for each job anyway
