"""What happened, as values; what the kinds are called, here and by the ancestors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from genba.domain import untrusted_json
from genba.domain.duration import Micros, to_datetime
from genba.errors import BadOption

OF_JOBS = (
    *(
        "waiting",
        "scheduled",
        "blocked",
        "running",
        "progress",
        "succeeded",
        "failed",
        "timed_out",
        "cancelled",
    ),
    *(
        "held",
        "released",
        "retrying",
        "crashed",
        "resumed",
        "requeued",
        "updated",
        "deleted",
        "stop_requested",
    ),
    *("condition_failed", "error_after_end", "strays_killed"),
)
OF_OTHERS = (
    *(
        "worker_started",
        "worker_ended",
        "node_joined",
        "node_left",
        "node_lost",
        "gate_closed",
        "gate_opened",
    ),
    *(
        "schedule_created",
        "schedule_changed",
        "schedule_deleted",
        "schedule_paused",
        "schedule_resumed",
    ),
    *("schedule_skipped", "schedule_triggered"),
    *(
        "task_changed",
        "task_enabled",
        "task_disabled",
        "queue_paused",
        "queue_resumed",
        "queue_changed",
        "flushed",
    ),
    *("lock_broken", "limit_changed"),
)
KINDS = frozenset({*OF_JOBS, *OF_OTHERS})
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
_FULL = re.compile(r"taskscheduler\.on([A-Z]\w*)")


def kinds_of(names: str | Iterable[str] | None) -> frozenset[str] | None:
    """The kinds that these names stand for; None for all of them."""
    if names is None:
        return None
    found = {_kind(name) for name in ([names] if isinstance(names, str) else names)}
    return None if "*" in found else frozenset(found)


def _kind(name: object) -> str:
    short = name
    if isinstance(name, str) and (full := _FULL.fullmatch(name)):
        short = full[1][0].lower() + full[1][1:]
    if isinstance(short, str):
        kind = ALIASES.get(short, short)
        if kind in KINDS or kind == "*":
            return kind
    close = get_close_matches(str(name), [*KINDS, *ALIASES])
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    raise BadOption(f"there is no event {name!r}{meant}")


class EventCursor(Protocol):
    """Where a reader stands."""

    @property
    def cursor(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, to a job or to something else."""

    kind: str
    job_id: int | None
    at: datetime
    data: dict[str, Any]
    node: int | None  # whose doing it was; None: a client's
    place: EventCursor = field(repr=False, compare=False)
    _handle: Any = field(default=None, repr=False, compare=False)

    @property
    def cursor(self) -> str:
        """Give it to `events(after=…)`, now or in another process: what comes then came after this."""
        return self.place.cursor

    @property
    def job(self) -> Any:
        """The handle of the job, as it is when you ask it; None if this event is of no job."""
        return None if self.job_id is None else self._handle(self.job_id)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """What one row says of one job, or of something else."""

    kind: str
    job_id: int | None
    at: Micros
    data: dict[str, Any]

    @property
    def moment(self) -> datetime:
        return to_datetime(self.at)


def unfold(kind: str, at: Micros, job_id: int | None, data: bytes | None) -> Iterator[JobEvent]:
    """The events of one row, always in the same order.

    A short job's start is written with its end, as `started`: it is an event of its own, before the end.
    """
    more = untrusted_json.read_json(
        data, dict[str, Any], {"data": untrusted_json.UNREADABLE} if data else {}
    )
    if job_id is not None:
        yield from _of_one(kind, at, job_id, more)
        return
    many = untrusted_json.read_json(data, _Many, _NONE) if "jobs" in more else _NONE
    if many is _NONE:
        yield JobEvent(kind, None, at, more)
        return
    rest = {name: value for name, value in more.items() if name not in ("jobs", "each")}
    for i, job in enumerate(many.jobs):
        own = {
            name: values[i]
            for name, values in many.each.items()
            if values[i : i + 1] not in ([], [None])
        }
        yield from _of_one(kind, at, job, {**rest, **own})


class _Many(msgspec.Struct):
    """An event of many jobs, and what each of them has of its own."""

    jobs: list[int] = []
    each: dict[str, list[Any]] = {}


_NONE = _Many()


def _of_one(kind: str, at: Micros, job: int, data: dict[str, Any]) -> Iterator[JobEvent]:
    started = data.pop("started", None)
    if isinstance(started, int) and kind != "running":
        attempt = {"attempt": data["attempt"]} if "attempt" in data else {}
        yield JobEvent("running", job, min(started, at), attempt)
    yield JobEvent(kind, job, at, data)
