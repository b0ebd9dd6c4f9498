"""The kinds of events, their other names, and how one stored row unfolds into events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec

from genba.domain.duration import Micros, to_datetime
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.errors import BadOption

JOB_KINDS = (
    "waiting",
    "scheduled",
    "blocked",
    "running",
    "progress",
    "succeeded",
    "failed",
    "timed_out",
    "cancelled",
    "held",
    "released",
    "retrying",
    "crashed",
    "resumed",
    "requeued",
    "updated",
    "deleted",
    "stop_requested",
    "condition_failed",
    "error_after_end",
    "strays_killed",
)
OTHER_KINDS = (
    "worker_started",
    "worker_ended",
    "node_joined",
    "node_left",
    "node_lost",
    "gate_closed",
    "gate_opened",
    "schedule_created",
    "schedule_changed",
    "schedule_deleted",
    "schedule_paused",
    "schedule_resumed",
    "schedule_skipped",
    "schedule_triggered",
    "task_changed",
    "task_enabled",
    "task_disabled",
    "queue_paused",
    "queue_resumed",
    "queue_changed",
    "flushed",
    "lock_broken",
    "limit_changed",
)
KINDS = frozenset({*JOB_KINDS, *OTHER_KINDS})
# The names that the systems before genba gave to the same events.
ALIASES = MappingProxyType(
    {
        "done": "succeeded",
        "complete_success": "succeeded",
        "processing": "running",
        "working": "running",
        "postponed": "scheduled",
        "timeout": "timed_out",
        "cancel": "cancelled",
        "retry": "retrying",
        "panicked": "held",
        "workerSpawn": "worker_started",
        "workerKill": "worker_ended",
    }
)
_FULL_NAME = re.compile(r"taskscheduler\.on([A-Z]\w*)")


def kinds_of(names: str | Iterable[str] | None) -> frozenset[str] | None:
    """Return the kinds that these names stand for; None means all of them."""
    if names is None:
        return None
    kinds = {_kind(name) for name in ([names] if isinstance(names, str) else names)}
    return None if "*" in kinds else frozenset(kinds)


def _kind(name: object) -> str:
    short = name
    if isinstance(name, str) and (full := _FULL_NAME.fullmatch(name)):
        short = full[1][0].lower() + full[1][1:]
    if isinstance(short, str):
        kind = ALIASES.get(short, short)
        if kind in KINDS or kind == "*":
            return kind
    close = get_close_matches(str(name), [*KINDS, *ALIASES])
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise BadOption(f"there is no event {name!r}{hint}")


@dataclass(frozen=True, slots=True)
class JobEvent:
    """What a stored row says about one job, or about something else (`job_id` None)."""

    kind: str
    job_id: int | None
    at: Micros
    data: dict[str, Any]

    @property
    def moment(self) -> datetime:
        return to_datetime(self.at)


def unfold(kind: str, at: Micros, job_id: int | None, data: bytes | None) -> Iterator[JobEvent]:
    """Yield the events of one row, always in the same order.

    The start of a short job is stored with its end, as `started`: it becomes an event of its own
    before the end.
    """
    values = read_json(data, dict[str, Any], {"data": UNREADABLE} if data else {})
    if job_id is not None:
        yield from _of_one_job(kind, at, job_id, values)
        return
    many = read_json(data, _ManyJobs, _NO_JOBS) if "jobs" in values else _NO_JOBS
    if many is _NO_JOBS:
        yield JobEvent(kind, None, at, values)
        return
    shared = {name: value for name, value in values.items() if name not in ("jobs", "each")}
    for i, job in enumerate(many.jobs):
        own = {
            name: column[i]
            for name, column in many.each.items()
            if column[i : i + 1] not in ([], [None])
        }
        yield from _of_one_job(kind, at, job, {**shared, **own})


class _ManyJobs(msgspec.Struct):
    """An event of many jobs; `each` has a list per value that differs between them."""

    jobs: list[int] = []
    each: dict[str, list[Any]] = {}


_NO_JOBS = _ManyJobs()


def _of_one_job(kind: str, at: Micros, job: int, data: dict[str, Any]) -> Iterator[JobEvent]:
    started = data.pop("started", None)
    if isinstance(started, int) and kind != "running":
        attempt = {"attempt": data["attempt"]} if "attempt" in data else {}
        yield JobEvent("running", job, min(started, at), attempt)
    yield JobEvent(kind, job, at, data)
