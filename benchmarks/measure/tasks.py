"""What the benchmark runs: nothing, so that all the time is genba's own."""

from __future__ import annotations

import time

from genba import Genba, Limit
from genba.enqueue.call import Call

TARGET = "measure.tasks:app"

app = Genba()


@app.task(name="bench.number")
def number(n: int) -> int:
    """Gives its number back, so that a result shows which job it came from."""
    return n


# Both have an option that is not the default, so that they differ in nothing but their history.
@app.task(name="bench.remembered", progress_every=0.6)
def remembered(n: int) -> int:
    return n


@app.task(name="bench.forgotten", progress_every=0.6, history="final")
def forgotten(n: int) -> int:
    return n


@app.task(name="bench.limited", limits=[Limit("bench:{bucket}", 5)])
def _limited(n: int, bucket: int) -> int:
    return n


class limited:  # noqa: N801  stands where a task stands
    """The same, in one of a thousand buckets with five slots each."""

    @staticmethod
    def call(n: int) -> Call[int]:
        return _limited.call(n, n % 1000)


@app.task(name="bench.alone", limits=[Limit("bench alone", 1)])
def alone(seconds: float) -> None:
    """One at a time; long enough that the others wait."""
    time.sleep(seconds)
