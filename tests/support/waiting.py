"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

# A shared machine may be so much slower than a quiet one. A promise in seconds is printed by its
# test, and asserted times this; it has to stay below what the failure would take.
PATIENCE = 4

AT_REST = ("succeeded", "failed", "timed_out", "cancelled", "held")


def eventually(ask: Callable[[], T], within: float = 5.0, every: float = 0.01) -> T:
    """Return the first true answer of `ask`.

    AssertionError with the last answer when PATIENCE times `within` seconds have passed.
    """
    within *= PATIENCE
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within} s; the last answer was {answer!r}")
        time.sleep(every)


def ended(job: Any, within: float = 30) -> Any:
    """Wait until `job` is final or held, and return it."""
    return eventually(lambda: job if job.refresh().state in AT_REST else None, within=within)


def gone(*pids: int | str) -> bool:
    """Say whether none of these processes runs any more; a zombie does not."""
    return not any(_runs(int(pid)) for pid in pids)


def reaped(*pids: int | str) -> bool:
    """Say whether none of these processes exists, not even as a zombie."""
    return not any(psutil.pid_exists(int(pid)) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
