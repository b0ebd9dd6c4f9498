# /// script
# requires-python = ">=3.11"
# dependencies = ["dramatiq[redis,rabbitmq]"]
# [tool.bench]
# title = "Dramatiq"
# on = ["redis", "rabbitmq"]
# runs = "threads"
# settings = "8 threads in each process (the default), publisher confirms on RabbitMQ"
# ///

import os
import sys

import dramatiq

from peers.effects import ON, URL, job

NAME = os.environ.get("BENCH_QUEUE", "bench") if ON == "rabbitmq" else "bench"

if ON == "redis":
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=URL)
else:
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    broker = RabbitmqBroker(url=URL, confirm_delivery=True)
broker.middleware = [one for one in broker.middleware if type(one).__name__ != "Prometheus"]
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=NAME, actor_name="job")
def run(n, payload):
    job(n, payload)


def prepare():
    broker.declare_queue(NAME, ensure=True) if ON == "rabbitmq" else broker.flush_all()


def enqueue(n, payload):
    run.send(n, payload)


def left():
    if ON == "redis":
        return broker.do_qsize(NAME)
    return sum(broker.get_queue_message_counts(NAME)[:1])


def workers(count):
    program = os.path.join(os.path.dirname(sys.executable), "dramatiq")
    return [
        [program, "peers.dramatiq", "--processes", str(count), "--threads", "8", "--skip-logging"]
    ]


def clean():
    if ON == "rabbitmq":
        for name in (NAME, f"{NAME}.DQ", f"{NAME}.XQ"):
            broker.channel.queue_delete(name)
