"""The jobs that `genba demo` shows, and how each must end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from genba import Call, Genba, Retry, current_job

app = Genba()


@app.task
def add(x: int, y: int) -> int:
    """Quick."""
    return x + y


@app.task
def render(scene: str, seconds: float) -> str:
    """Slow, with progress."""
    job = current_job()
    for tile in range(40):
        job.progress(tile, 40, note=f"tile {tile + 1} of 40")
        time.sleep(seconds / 40)
    return f"{scene}.png"


@app.task
async def fetch(page: str) -> str:
    """Async, with two things at a time."""
    await asyncio.gather(asyncio.sleep(1.2), asyncio.sleep(0.8))
    return f"{page}: 200 OK"


@app.task(retry=Retry(times=3, delay="500ms", backoff=1))
def call_flaky_service() -> str:
    """Fails twice."""
    attempt = current_job().attempt
    if attempt < 3:
        raise ConnectionError(f"connection refused (attempt {attempt})")
    return "connected at last"


@app.task(retry=Retry(times=1, delay="500ms"))
def charge(customer: int) -> None:
    """Fails in every attempt."""
    raise LookupError(f"there is no customer {customer}")


@app.task(timeout="1s", grace="500ms")
def sleep_for_ever() -> None:
    """Exceeds its time."""
    time.sleep(3600)


@app.task
def exit_once() -> str:
    """Its process exits in the middle of the first attempt."""
    if current_job().attempt == 1:
        os._exit(3)
    return "the second attempt went through"


@app.task(max_crashes=2)
def die() -> None:
    """Kills its own process in every attempt."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(grace="2s")
def wait_for_godot() -> None:
    """Runs until it is asked to stop."""
    job = current_job()
    for turn in range(1, 3600):
        job.progress(turn % 100, note="waiting")
        if job.should_stop:
            return
        time.sleep(0.05)


@app.task
def report() -> str:
    """Uses the results of the jobs that it waited for."""
    return " + ".join(str(result) for _, result in sorted(current_job().deps.items()))


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and how it must end."""

    title: str
    call: Call[Any]
    state: str = "succeeded"
    causes: tuple[str, ...] = ("returned",)
    result: Any = None
    cancel_after: float | None = None  # seconds of running


def cases() -> list[Case]:
    """Return the jobs in the order in which they are enqueued."""
    quick = add.call(1, 2)
    slow = render.call("duck", 6)
    charged = charge.call(17)
    return [
        Case("quick", quick, result=3),
        Case("quick, with priority", add.using(priority=10).call(3, 4), result=7),
        Case("slow, with progress", slow, result="duck.png"),
        Case("async", fetch.call("example.org"), result="example.org: 200 OK"),
        Case(
            "fails twice, then works",
            call_flaky_service.call(),
            causes=("exception", "exception", "returned"),
            result="connected at last",
        ),
        Case("fails for good", charged, state="failed", causes=("exception", "exception")),
        Case("runs out of time", sleep_for_ever.call(), state="timed_out", causes=("timeout",)),
        Case(
            "crashes once: os._exit(3)",
            exit_once.call(),
            causes=("exit 3", "returned"),
            result="the second attempt went through",
        ),
        Case("crashes always: SIGKILL", die.call(), state="held", causes=("signal 9", "signal 9")),
        Case(
            "cancelled while it runs",
            wait_for_godot.call(),
            state="cancelled",
            causes=("cancelled",),
            cancel_after=2,
        ),
        Case("after two others", report.using(after=[quick, slow]).call(), result="3 + duck.png"),
        Case(
            "after one that fails",
            report.using(after=[charged]).call(),
            state="cancelled",
            causes=(),
        ),
        Case("scheduled in two seconds", add.using(delay="2s").call(5, 6), result=11),
    ]
