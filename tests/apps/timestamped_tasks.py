"""The app of the tests that move the clock: each run is a line with its word, job, and the moment its worker saw."""

from __future__ import annotations

import os
import time
from pathlib import Path

from genba import Genba, Retry, RetryJob, Wait, current_job

app = Genba()
FOLDER = Path(__file__).parent


def write(word: str) -> None:
    fd = os.open(FOLDER / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{word} {current_job().id} {time.time():.6f}\n".encode())
    os.close(fd)


@app.task(name="minute", cron="* * * * *")
def minute() -> None:
    write("minute")


@app.task(name="second", every="1s")
def second() -> None:
    write("second")


@app.task(name="late")
def late(word: str) -> None:
    write(word)


@app.task(name="again", retry=-1)
def again() -> None:
    write("again")
    if not (FOLDER / "enough").exists():
        raise RetryJob(delay="1s")


@app.task(name="twice", retry=Retry(1, delay="10s"))
def twice() -> None:
    write("twice")
    raise ValueError("as it should")


@app.condition(name="opened")
def opened(job: object) -> bool | Wait:
    return (FOLDER / "enough").exists() or Wait("1s")


@app.task(name="asked", ready=["opened"])
def asked() -> None:
    write("asked")


@app.task(name="slowly", rate="1/s")
def slowly(n: int) -> None:
    write("slowly")


@app.task(name="stay")
def stay() -> None:
    write("stay")
    while not (FOLDER / "enough").exists():
        time.sleep(0.01)
