"""Tasks with limits; as jobs.py, a node gets a copy of this file.

Each tries the limit with locks of the kernel, which a death frees at once: a job that finds no free lock of its bucket
has seen more at a time than there may be, and says so.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from genba import Genba, Limit, Rate, TaskFull, current_job

app = Genba()


def tell(path: str, *words: object) -> None:
    """One line that is there whatever happens next."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


class Room:
    """One of n places of a bucket."""

    def __init__(self, folder: str, bucket: str, n: int) -> None:
        for place in range(n):
            self.fd = os.open(f"{folder}/{bucket}.{place}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(self.fd)
        tell(f"{folder}/broken", bucket, n, current_job().id)
        self.fd = -1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@app.task(limits=[Limit("tenant:{tenant}", 2)])
def serve(tenant: str, path: str) -> str:
    tell(f"{path}.started", tenant, current_job().id)
    while not Path(path).exists():
        time.sleep(0.005)
    return tenant


@app.task(max_running=2)
def few(path: str) -> None:
    tell(f"{path}.started", current_job().id)
    while not Path(path).exists():
        time.sleep(0.005)


@app.task(exclusive=True)
def lone(path: str) -> None:
    tell(f"{path}.started", current_job().id)
    while not Path(path).exists():
        time.sleep(0.005)


@app.task(rate=Rate("partner:{partner}", "10/s", burst=2))
def ask(partner: str, path: str) -> None:
    tell(path, time.time(), partner)


@app.task(max_waiting=3, queue="units")
def unit(number: int, path: str) -> None:
    tell(path, number)


@app.task(exclusive=True)
def delegate(count: int, path: str) -> int:
    """Hands out as much as may wait, and bows out until there is room again."""
    done = current_job().saved or 0
    try:
        while done < count:
            unit.enqueue(done, path)
            done += 1
    except TaskFull:
        current_job().save(done)
        current_job().retry(delay="50ms")
    return done


def crowded(n: int) -> None:
    @app.task(
        name=f"limited_tasks.crowd{n}", limits=[Limit(f"crowd{n}:{{bucket}}", n)], max_crashes=1000
    )
    def crowd(folder: str, bucket: int, seconds: float) -> None:
        with Room(folder, f"{n}-{bucket}", n):
            time.sleep(seconds)


for most in range(1, 6):
    crowded(most)


@app.task(limits=[Limit("solo", 1)], max_crashes=1000)
def solo(folder: str, path: str) -> int:
    """Alone until the file is there."""
    with Room(folder, "solo", 1):
        tell(f"{path}.started", current_job().id, current_job().attempt, os.getpid())
        while not Path(path).exists():
            time.sleep(0.005)
    return current_job().attempt
