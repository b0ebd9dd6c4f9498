"""What every job of every peer does: its work, and a mark that it has run.

A mark is the time in nanoseconds, 8 bytes at the job's place in a file that all processes share.  It costs about a
microsecond, the same for all, and shows from outside when each job ran, without asking the peer.
"""

import asyncio
import os
import time

URL = os.environ["BENCH_URL"]
FOLDER = os.environ["BENCH_FOLDER"]
ON = os.environ["BENCH_ON"]
WORKERS = int(os.environ["BENCH_WORKERS"])
WORK = os.environ["BENCH_WORK"]  # "nothing", "cpu" for 1 ms of it, "io" for 5 ms of waiting

_marks = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY)


def job(n: int, payload: str = "") -> int:
    if WORK == "cpu":
        _burn()
    elif WORK == "io":
        time.sleep(0.005)
    return _mark(n)


async def async_job(n: int, payload: str = "") -> int:
    if WORK == "cpu":
        _burn()
    elif WORK == "io":
        await asyncio.sleep(0.005)
    return _mark(n)


def _burn() -> None:
    until = time.thread_time_ns() + 1_000_000
    while time.thread_time_ns() < until:
        pass


def _mark(n: int) -> int:
    os.pwrite(_marks, time.time_ns().to_bytes(8, "little"), 8 * n)
    return n
