"""From how an attempt ended to what is written about it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import msgspec

from genba.domain.states import Cause
from genba.node.decide.worker_state import WorkerState
from genba.storage.records import Ending


def without_attempt(ending: Ending) -> Ending:
    return replace(ending, happened=False)


def cause_of_death(hand: WorkerState, place: int, status: int | None, starved: bool = False) -> str:
    """What a dead worker died of, as far as its job is concerned; `starved`: the kernel has killed for memory."""
    stop = hand.stops.get(place)
    if stop is not None:
        return stop.cause
    if status is None:
        return Cause.COLLATERAL
    if starved and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Cause.OUT_OF_MEMORY
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Cause.CPU_LIMIT
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit {os.WEXITSTATUS(status)}"


def progress_text(noted: tuple[int, int, float, float, str]) -> str:
    return msgspec.json.encode(noted[2:]).decode()


def text_of(payload: bytes | None) -> str | None:
    return None if payload is None else payload.decode()


def headline(error: str | None) -> str | None:
    if error is None:
        return None
    told = msgspec.json.decode(error, type=dict[str, Any])
    message = str(told.get("message"))[:500]
    return f"{told.get('type')}: {message}" if message else str(told.get("type"))
