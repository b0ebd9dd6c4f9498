"""Turn how an attempt ended into what is written about its job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import msgspec

from genba.domain.states import Cause, default_stop_reason
from genba.domain.verdict import AttemptEnd, Standing, judge
from genba.options.snapshot import OptionsSnapshot
from genba.storage.nodes.nodes import Orphan
from genba.storage.records import Claimed, Ending, Micros

DEFAULT_OPTIONS = OptionsSnapshot()
UNREADABLE_OPTIONS = OptionsSnapshot(retry={"times": 0})  # of a row changed by hand


@lru_cache(maxsize=256)  # the jobs of a task mostly have the same options
def read_options(written: str | None) -> OptionsSnapshot | None:
    """Read stored options, None if there are none; a row changed by hand must not stop a node."""
    try:
        return None if written is None else OptionsSnapshot.read(written.encode())
    except (msgspec.MsgspecError, ValueError):
        return UNREADABLE_OPTIONS


def build_ending(
    job: Claimed | Orphan,
    claim: int,
    options: OptionsSnapshot,
    end: AttemptEnd,
    wall: Micros,
    jitter: float,
) -> Ending:
    """Judge an attempt and build what is written about it."""
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
        wait=verdict.wait,
        rank_priority=verdict.rank_priority or 0,
        reason=verdict.reason,
        ended=wall,
        start_recorded=isinstance(job, Orphan) and job.started_mark is not None,
        quiet=options.history == "final",
        has_on_final=options.on_final is not None,
        task=job.task if isinstance(job, Claimed) else "",
        queue=job.queue if isinstance(job, Claimed) else "",
    )


def judge_lost_job(orphan: Orphan, wall: Micros, random: Callable[[], float]) -> Ending:
    """Judge the attempt of a job whose node is gone.

    Whether an unmarked one had started cannot be known: it counts as lost, and its number is not
    given again.
    """
    options = read_options(orphan.options) or DEFAULT_OPTIONS
    end = AttemptEnd(
        cause=Cause.NODE_LOST,
        started=orphan.started_mark is not None,
        cancel_requested=orphan.cancel_requested is not None,
        reason=default_stop_reason(orphan.cancel_requested) if orphan.cancel_requested else None,
    )
    return replace(build_ending(orphan, orphan.claim, options, end, wall, random()), locks=True)
