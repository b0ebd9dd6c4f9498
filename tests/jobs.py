"""The tasks that tests run.  A node gets a copy of this file in its own folder; tests load it by the fixture `jobs`.

Each task does one thing that can be seen from outside: what it returns, or a file.  Files are written by O_APPEND,
one line in one write, so that no death of a process and no other writer can hide what has run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

from genba import FailJob, Genba, RetryJob, current_job

app = Genba()


@dataclass
class Order:
    number: int
    price: Decimal
    at: datetime


def tell(path: str, *words: object) -> None:
    """One line that is there whatever happens next."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(str(word).replace(" ", "") for word in words) + "\n").encode())
    os.close(fd)


# what can be run


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task
async def add_later(x: int, y: int = 1) -> int:
    await asyncio.sleep(0)
    return x + y


@app.task
class Greet:
    """A class with `run`."""

    def __init__(self) -> None:
        self.word = "hello"

    def run(self, name: str) -> str:
        return f"{self.word} {name}"


class Counter:
    def __init__(self) -> None:
        self.start = 10

    @app.task
    def up(self, by: int) -> int:
        return self.start + by

    @app.task
    async def up_later(self, by: int) -> int:
        return self.start + by


@app.task
def typed(order: Order, ids: tuple[UUID, ...], tags: set[str]) -> Order:
    assert all(isinstance(id, UUID) for id in ids)
    assert isinstance(tags, set)
    return Order(order.number + 1, order.price * 2, order.at)


@app.task
def where() -> int:
    return os.getpid()


@app.task
def sum_of_deps() -> int:
    return sum(current_job().deps.values())


@app.task
def about_me() -> dict[str, object]:
    job = current_job()
    return {"id": job.id, "attempt": job.attempt, "task": job.task, "retries": job.retries, "crashes": job.crashes}


@app.task
def write(path: str, word: str) -> None:
    """An effect: which job, which attempt, which process."""
    job = current_job()
    tell(path, word, job.id, job.attempt, os.getpid())


@app.task
def write_slowly(path: str, word: str, pause: float) -> None:
    job = current_job()
    tell(path, word, job.id, job.attempt, os.getpid(), os.getppid(), job.fence)
    time.sleep(pause)


# how it can end


@app.task
def fail(text: str) -> None:
    try:
        raise KeyError("the root")
    except KeyError as root:
        raise ValueError(text) from root


@app.task
def fail_for_good(text: str) -> None:
    raise FailJob(text)


@app.task
def fail_at_first(times: int) -> int:
    attempt = current_job().attempt
    if attempt <= times:
        raise RuntimeError(f"attempt {attempt}")
    return attempt


@app.task
def ask_for_retry(times: int, delay: float | str | None = None) -> int:
    attempt = current_job().attempt
    if attempt <= times:
        raise RetryJob("not yet", delay=delay)
    return attempt


@app.task
def return_what_cannot_be_kept() -> object:
    return object()


@app.task(max_crashes=2)
def exit_with(code: int) -> None:
    os._exit(code)


@app.task(max_crashes=1)
def die_of(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


@app.task
def die_at_first(path: str) -> int:
    job = current_job()
    tell(path, "run", job.id, job.attempt, os.getpid())
    if job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.attempt


@app.task(at_most_once=True)
def once_only(path: str) -> None:
    tell(path, "run", current_job().attempt)
    os._exit(1)


# what takes its time


@app.task
def wait_for(path: str) -> str:
    """Runs until `path` exists; says in `path`.started that it runs."""
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.005)
    return "opened"


@app.task
async def wait_for_later(path: str) -> str:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        await asyncio.sleep(0.005)
    return "opened"


@app.task
def stop_when_asked(path: str) -> str:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not job.should_stop:
        time.sleep(0.005)
    tell(f"{path}.stopped", job.id, job.attempt, job.cancel_requested)
    return "stopped"


@app.task
def count_to(path: str, total: int) -> None:
    """Tells its progress up to a half, and the rest once `path` exists."""
    job = current_job()
    for i in range(total // 2):
        job.progress(i + 1, total, note=f"step {i + 1}")
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.005)
    job.progress(total, total)


@app.task
def ignore_sigterm(path: str) -> None:
    """Deaf, and with a child that has left the session, and a grandchild that has lost its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _leave_children(path)
    tell(f"{path}.started", current_job().id, current_job().attempt, os.getpid())
    while True:
        time.sleep(1)


@app.task
def leave_children(path: str) -> str:
    _leave_children(path)
    return "returned"


_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""


def _leave_children(path: str) -> None:
    """Two processes, whose pids stand in `path`.children when this returns."""
    file = f"{path}.children"
    subprocess.Popen([sys.executable, "-S", "-c", _CHILD, file])
    while not os.path.exists(file) or len(Path(file).read_text().split()) < 2:
        time.sleep(0.005)
