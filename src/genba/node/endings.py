"""From how an attempt ended to what is written about it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from genba.domain.rank import rank
from genba.domain.states import Cause
from genba.domain.verdict import End, Standing, judge
from genba.node.hands import PLAIN, Hand, read_options
from genba.options import Snapshot
from genba.storage.membership import Orphan
from genba.storage.records import Claimed, Ending, Micros


def judge_orphan(orphan: Orphan, wall: Micros, random: Callable[[], float]) -> Ending:
    """What becomes of a job whose node is gone."""
    options = read_options(orphan.options) or PLAIN
    end = End(
        cause=Cause.NODE_LOST,
        started=orphan.started_mark is not None,
        cancel_requested=orphan.cancel_requested is not None,
        reason="cancelled" if orphan.cancel_requested else None,
    )
    ending = judged(orphan, orphan.claim, options, end, wall, random())
    return ending if orphan.started_mark is not None else unhappened(ending)


def judged(job: Claimed | Orphan, claim: int, options: Snapshot, end: End, wall: Micros, jitter: float) -> Ending:
    verdict = judge(
        end,
        Standing(
            priority=job.priority,
            retries=job.retries,
            crashes=job.crashes,
            losses=job.losses,
            retry=options.retry_rule(),
            max_crashes=options.max_crashes,
            on_exception=options.on_exception,
            at_most_once=options.at_most_once,
        ),
        wall,
        jitter,
    )
    moved = verdict.due_at is not None or verdict.crashes != job.crashes
    due = verdict.due_at if verdict.due_at is not None else job.due_at
    return Ending(
        id=job.id,
        attempt=job.attempt,
        claim=claim,
        state=verdict.state,
        cause=verdict.cause,
        retries=verdict.retries,
        crashes=verdict.crashes,
        losses=verdict.losses,
        due_at=verdict.due_at,
        rank=rank(due, verdict.rank_priority) if moved and verdict.rank_priority is not None else None,
        reason=verdict.reason,
        ended=wall,
    )


def unhappened(ending: Ending) -> Ending:
    return replace(ending, happened=False)


def cause_of_death(hand: Hand, place: int, status: int | None, starved: bool = False) -> str:
    """What a dead worker died of, as far as its job is concerned; `starved`: the kernel has killed for memory."""
    if hand.stop is not None and hand.stop.place == place:
        return hand.stop.cause
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
    return f"{told.get('type')}: {str(told.get('message'))[:500]}"
