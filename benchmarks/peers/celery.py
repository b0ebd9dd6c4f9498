# /// script
# requires-python = ">=3.11"
# dependencies = ["celery[redis]"]
# [tool.bench]
# title = "Celery"
# on = ["redis", "rabbitmq"]
# runs = "process"
# settings = "prefork, acks_late (no job is lost with its worker), no results, prefetch 64 a process, confirms"
# ///

import os
import sys

import celery

from peers.effects import ON, URL, job

NAME = os.environ.get("BENCH_QUEUE", "bench") if ON == "rabbitmq" else "bench"

app = celery.Celery("bench", broker=URL)
app.conf.update(
    task_default_queue=NAME,
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_transport_options={"confirm_publish": True} if ON == "rabbitmq" else {},
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)


@app.task(name="job")
def run(n, payload):
    job(n, payload)


def prepare():
    with app.connection_for_write() as conn:
        app.amqp.queues[NAME](conn.default_channel).declare()


def enqueue(n, payload):
    run.delay(n, payload)


def left():
    with app.connection_for_read() as conn:
        channel = conn.default_channel
        if ON == "redis":
            return channel.client.llen(NAME) + channel.client.hlen("unacked")
        return channel.queue_declare(NAME, passive=True).message_count


def workers(count):
    program = os.path.join(os.path.dirname(sys.executable), "celery")
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR"]
    return [[program, "-A", "peers.celery", "worker", "-P", "prefork", "-c", str(count), *quiet]]


def clean():
    if ON == "rabbitmq":
        with app.connection_for_write() as conn:
            conn.default_channel.queue_delete(NAME)
