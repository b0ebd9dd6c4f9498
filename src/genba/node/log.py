"""What a node logs: its own lines, failed attempts of jobs, and with `--debug` each action."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from genba.domain.duration import SECOND
from genba.domain.states import Cause
from genba.log_lines import JOB_LOG_VARIABLE, LineFormatter, LineHandler
from genba.node.decide import actions as do
from genba.node.settings import NodeSettings
from genba.storage.records import Ending

log = logging.getLogger("genba.node")

_BAD_STATES = ("failed", "timed_out", "held")
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
    line = LineFormatter(_format(settings), {"node": settings.name})
    logging.basicConfig(level=level, handlers=[LineHandler(sys.stderr.fileno(), line)])


def log_environ(settings: NodeSettings) -> dict[str, str]:
    """Give the environment in which workers log as the node does."""
    return {JOB_LOG_VARIABLE: f"{_format(settings)} {settings.name}"} if settings.log_jobs else {}


def _format(settings: NodeSettings) -> str:
    return settings.log_format or ("pretty" if sys.stderr.isatty() else "json")


def log_endings(endings: Iterable[Ending]) -> None:
    """Log a line for each attempt that did not go well."""
    for ending in endings:
        bad = ending.state in _BAD_STATES
        if not ending.happened or (not bad and ending.cause in _NO_NEWS):
            continue
        details: dict[str, Any] = {
            "job": ending.id,
            "task": ending.task,
            "attempt": ending.attempt,
        }
        if ending.error is not None:
            details["error"] = _error(ending.error)
        log.log(
            logging.WARNING if bad else logging.INFO,
            "job %s (%s), attempt %s: %s, now %s%s",
            ending.id,
            ending.task,
            ending.attempt,
            ending.cause,
            ending.state,
            f": {ending.reason}" if ending.reason else "",
            extra=details,
        )


def _error(text: str) -> dict[str, Any]:
    """Decode an error that a worker has described, without empty values."""
    error = msgspec.json.decode(text, type=dict[str, Any])
    error["causes"] = [
        f"{cause.get('type')}: {cause.get('message')}" for cause in error.get("causes", ())
    ]
    return {name: value for name, value in error.items() if value}


def describe_action(action: do.Action) -> Iterator[str]:
    """Give one line for each job that the action is about."""
    match action:
        case do.GiveJobs(slot, _, jobs):
            for job in jobs:
                yield f"job {job.id} ({job.task}), attempt {job.attempt}: given to worker {slot}"
        case do.WriteSuccesses(successes):
            for success in successes:
                spent = ""
                if success.started is not None and success.ended is not None:
                    spent = f" in {(success.ended - success.started) / SECOND:.3f} s"
                yield f"job {success.id}, attempt {success.attempt}: succeeded{spent}"
        case do.WriteEndings(endings):
            for end in endings:
                why = f" ({end.reason})" if end.reason else ""
                yield f"job {end.id}, attempt {end.attempt}: {end.cause}, now {end.state}{why}"
        case do.SpawnWorker(slot):
            yield f"worker {slot}: started"
        case do.DismissWorker(slot):
            yield f"worker {slot}: dismissed"
        case do.SignalWorker(slot, number):
            yield f"worker {slot}: signal {number}"
