"""The keywords of `app.jobs(…)` and the like: which jobs are meant, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, TypedDict

from genba.client.connection import ClientConnection
from genba.client.current_job import RunningJob
from genba.client.job import Job
from genba.client.task import Task
from genba.domain.duration import Duration, Micros, duration
from genba.domain.states import panics_only, parse_states
from genba.errors import BadOption
from genba.options.parse import parse_job_id, parse_text
from genba.storage.jobs.search import Filter

OneOrMany = str | Iterable[str] | None
OfTasks = str | Task[..., Any, Any] | Iterable[str | Task[..., Any, Any]] | None


class JobFilters(TypedDict, total=False):
    """What a job must be: one value of a kind, or several of which one must fit."""

    # By default "open"; also "final", "any", and what the systems before genba called the states.
    state: str | Iterable[str]
    task: OfTasks
    queue: OneOrMany
    tag: OneOrMany
    key: OneOrMany
    schedule: OneOrMany
    node: OneOrMany  # on which it runs now
    parent: Job[Any] | RunningJob | int | None
    since: Duration | datetime | None  # enqueued within this time, or from this moment on
    until: Duration | datetime | None  # enqueued before that
    error: str | None  # a text in its last error


_NAMES = tuple(JobFilters.__annotations__)


def read_filter(
    connection: ClientConnection,
    filters: Mapping[str, Any],
    before: int | None = None,
    order: str = "newest",
) -> Filter:
    _check(filters, order)
    state = filters.get("state") or "open"
    names = list(state) if isinstance(state, Iterable) and not isinstance(state, str) else [state]
    states = parse_states(names)
    parent = filters.get("parent")
    return Filter(
        states=None if states == parse_states("any") else frozenset(states),
        panics_only=panics_only(names),
        tasks=_texts("task", filters),
        queues=_texts("queue", filters),
        tags=_texts("tag", filters),
        keys=_texts("key", filters),
        schedules=_texts("schedule", filters),
        nodes=_texts("node", filters),
        parents=None if parent is None else [parse_job_id("parent", parent)],
        since=_moment(connection, filters.get("since")),
        until=_moment(connection, filters.get("until")),
        error=filters.get("error"),
        last_id=None if before is None else parse_job_id("before", before),
        oldest_first=order == "oldest",
    )


def _check(filters: Mapping[str, Any], order: str) -> None:
    for name in filters:
        if name not in _NAMES:
            close = get_close_matches(name, _NAMES)
            hint = (
                f"; did you mean {' or '.join(close)}?"
                if close
                else f"; there are {', '.join(_NAMES)}"
            )
            raise BadOption(f"jobs cannot be chosen by {name!r}{hint}")
    if order not in ("newest", "oldest"):
        raise BadOption(f'order is "newest" or "oldest", not {order!r}')
    error = filters.get("error")
    if error is not None and not parse_text("error", error):
        raise BadOption("error must be a text that is not empty")


def _texts(name: str, filters: Mapping[str, Any]) -> list[str] | None:
    value = filters.get(name)
    if value is None:
        return None
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if name == "task":
        values = [one.name if isinstance(one, Task) else one for one in values]
    return [parse_text(name, one) for one in values]


def _moment(connection: ClientConnection, value: Duration | datetime | None) -> Micros | None:
    """Read a moment, or a time before the store's now."""
    if value is None:
        return None
    if isinstance(value, datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=connection.settings.zone)
        return int(zoned.astimezone(UTC).timestamp() * 1_000_000)
    return connection.store.now() - duration(value)
