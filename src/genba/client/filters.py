"""Which jobs somebody means: filters as users write them, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict

from genba.client.task import Task
from genba.domain.duration import Duration, duration
from genba.domain.states import panics_only, parse_states
from genba.errors import BadOption
from genba.options.parse import parse_job_id, parse_text
from genba.storage.jobs.search import Filter

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.client.current_job import RunningJob
    from genba.client.job import Job

OneOrMany = str | Iterable[str] | None
OfTasks = str | Task[..., Any, Any] | Iterable[str | Task[..., Any, Any]] | None


class JobFilters(TypedDict, total=False):
    """What a job must be; one value of a kind, or several of which one must fit."""

    state: (
        str | Iterable[str]
    )  # "open" unless it is said; also "final", "any", and the names of the ancestors
    task: OfTasks
    queue: OneOrMany
    tag: OneOrMany
    key: OneOrMany
    schedule: OneOrMany
    node: OneOrMany  # that runs it now
    parent: Job[Any] | RunningJob | int | None
    since: Duration | datetime | None  # enqueued in this last time, or from this moment on
    until: Duration | datetime | None  # enqueued before that
    error: str | None  # a text in its last error


_NAMES = tuple(JobFilters.__annotations__)


def read_filter(
    app: Client, wanted: Mapping[str, Any], before: int | None = None, order: str = "newest"
) -> Filter:
    for name in wanted:
        if name not in _NAMES:
            close = get_close_matches(name, _NAMES)
            meant = (
                f"; did you mean {' or '.join(close)}?"
                if close
                else f"; there are {', '.join(_NAMES)}"
            )
            raise BadOption(f"jobs cannot be chosen by {name!r}{meant}")
    if order not in ("newest", "oldest"):
        raise BadOption(f'order is "newest" or "oldest", not {order!r}')
    error = wanted.get("error")
    if error is not None and not parse_text("error", error):
        raise BadOption("error must be a text that is not empty")
    named = wanted.get("state") or "open"
    names = list(named) if isinstance(named, Iterable) and not isinstance(named, str) else [named]
    states = parse_states(names)
    parent = wanted.get("parent")
    return Filter(
        states=None if states == parse_states("any") else frozenset(states),
        panics_only=panics_only(names),
        tasks=_several("task", wanted),
        queues=_several("queue", wanted),
        tags=_several("tag", wanted),
        keys=_several("key", wanted),
        schedules=_several("schedule", wanted),
        nodes=_several("node", wanted),
        parents=None if parent is None else [parse_job_id("parent", parent)],
        since=_moment(app, wanted.get("since")),
        until=_moment(app, wanted.get("until")),
        error=error,
        last_id=None if before is None else parse_job_id("before", before),
        oldest_first=order == "oldest",
    )


def _several(name: str, wanted: Mapping[str, Any]) -> list[str] | None:
    value = wanted.get(name)
    if value is None:
        return None
    listed = (
        [value]
        if isinstance(value, str)
        else list(value)
        if isinstance(value, Iterable)
        else [value]
    )
    if name == "task":
        listed = [one.name if isinstance(one, Task) else one for one in listed]
    return [parse_text(name, one) for one in listed]


def _moment(app: Client, value: Duration | datetime | None) -> int | None:
    """A moment, or so long ago by the store's clock."""
    if value is None:
        return None
    if isinstance(value, datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=app.settings.zone)
        return int(zoned.astimezone(UTC).timestamp() * 1_000_000)
    return app.store.now() - duration(value)
