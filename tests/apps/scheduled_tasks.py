"""Schedules of tests: some in decorators, some by recur; each run is a line in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from genba import Genba, current_job

app = Genba()
LOG = Path(__file__).with_name("runs")


def write(word: str) -> None:
    line = f"{word} {current_job().id} {time.time():.6f}\n"
    with LOG.open("a") as file:
        file.write(line)


@app.task(name="beat", every="1s")
def beat() -> None:
    write("beat")


@app.task(name="never", cron="0 0 29 2 *", tz="Pacific/Chatham", keep={"failed": "P30D"})
def never() -> None:
    write("never")


@app.task(name="line")
def line(word: str) -> None:
    write(word)


@app.task(name="crash", max_crashes=1)
def crash() -> None:
    write("crash")
    os._exit(7)


app.recur(
    "declared", line.using(queue="default", priority=3).call("declared"), every="700ms", max_runs=2
)
