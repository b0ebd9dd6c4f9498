"""What a node says: its log, the ends of jobs that are worth a line, and with `--debug` all that it does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from genba.domain.states import Cause
from genba.log_lines import JOB_LOG_VARIABLE, LineFormatter, LineHandler
from genba.node.decide import actions as do
from genba.node.settings import NodeSettings
from genba.storage.records import Ending

log = logging.getLogger("genba.node")

_BAD = ("failed", "timed_out", "held")
_NO_NEWS = (
    Cause.DRAIN,
    Cause.COLLATERAL,
    Cause.CANCELLED,
    Cause.KILLED,
    Cause.NOT_READY,
    Cause.RETURNED,
)


def set_up_log(settings: NodeSettings) -> None:
    level = logging.DEBUG if settings.debug else logging.INFO
    line = LineFormatter(_form(settings), {"node": settings.name})
    logging.basicConfig(level=level, handlers=[LineHandler(sys.stderr.fileno(), line)])


def log_environ(settings: NodeSettings) -> dict[str, str]:
    """How workers learn that their jobs' lines belong into the node's log."""
    return {JOB_LOG_VARIABLE: f"{_form(settings)} {settings.name}"} if settings.log_jobs else {}


def _form(settings: NodeSettings) -> str:
    return settings.log_format or ("pretty" if sys.stderr.isatty() else "json")


def log_endings(endings: Iterable[Ending]) -> None:
    """A line for each attempt that did not go well."""
    for end in endings:
        if not end.happened or (end.state not in _BAD and end.cause in _NO_NEWS):
            continue
        level = logging.WARNING if end.state in _BAD else logging.INFO
        more: dict[str, Any] = {"job": end.id, "task": end.task, "attempt": end.attempt}
        if end.error is not None:
            more["error"] = _error(end.error)
        why = f": {end.reason}" if end.reason else ""
        named = (end.id, end.task, end.attempt)
        log.log(
            level,
            "job %s (%s), attempt %s: %s, now %s%s",
            *named,
            end.cause,
            end.state,
            why,
            extra=more,
        )


def _error(written: str) -> dict[str, Any]:
    """As a worker has described it."""
    told = msgspec.json.decode(written, type=dict[str, Any])
    told["causes"] = [f"{one.get('type')}: {one.get('message')}" for one in told.get("causes", ())]
    return {name: value for name, value in told.items() if value}


def describe_action(action: do.Action) -> Iterator[str]:
    """One line for each job that the action is about."""
    match action:
        case do.GiveJobs(slot, _, jobs):
            for job in jobs:
                yield f"job {job.id} ({job.task}), attempt {job.attempt}: given to worker {slot}"
        case do.WriteSuccesses(ended):
            for one in ended:
                spent = ""
                if one.started is not None and one.ended is not None:
                    spent = f" in {(one.ended - one.started) / 1_000_000:.3f} s"
                yield f"job {one.id}, attempt {one.attempt}: succeeded{spent}"
        case do.WriteEndings(endings):
            for end in endings:
                why = f" ({end.reason})" if end.reason else ""
                yield f"job {end.id}, attempt {end.attempt}: {end.cause}, now {end.state}{why}"
        case do.SpawnWorker(slot):
            yield f"worker {slot}: asked for"
        case do.DismissWorker(slot):
            yield f"worker {slot}: told to go"
        case do.SignalWorker(slot, number):
            yield f"worker {slot}: signal {number}"
