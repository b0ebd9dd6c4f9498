"""The options of a job that is enqueued: read from its row, and changed before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from genba.domain.duration import Micros, to_datetime
from genba.domain.untrusted_json import read_json
from genba.options.merge import parse_update
from genba.options.snapshot import OptionsSnapshot
from genba.options.table import DEFAULT_OPTIONS, Options, changed_options
from genba.options.values import Limit, Rate
from genba.storage.jobs.bulk import merge_options
from genba.storage.records import EXACT_MOMENT, JobRecord
from genba.storage.store import Store


def options_of(record: JobRecord, limits: tuple[Limit | Rate, ...]) -> dict[str, Any]:
    """Return what `current_job().options` shows; `limits` are those of the task."""
    options = stored_options(record, replace(DEFAULT_OPTIONS, limits=limits))
    expires = None if record.expires_at is None else to_datetime(record.expires_at)
    return {
        "queue": record.queue,
        "priority": record.priority,
        **changed_options(replace(options, expires=expires)),
    }


def stored_options(record: JobRecord, base: Options) -> Options:
    """Return the options that the row has; the others are those of `base`."""
    snapshot = OptionsSnapshot.read(record.options.encode() if record.options else None)
    return replace(
        snapshot.onto(base),
        queue=record.queue,
        priority=record.priority,
        key=record.key,
        tags=tuple(read_json(record.tags, list[str], [])),
        parent=record.parent_id,
    )


def update_options(store: Store, id: int, changes: Mapping[str, Any], zone: ZoneInfo) -> bool:
    """Change options of a job that has not started; False if it has."""
    options, stored = parse_update(changes)
    columns = {name: getattr(options, name) for name in ("queue", "priority") if name in changes}
    if "nice" in changes:
        columns["priority"] = options.priority
    now = store.now()
    if "at" in changes or "delay" in changes:
        columns |= _due_columns(options, now, zone)
    if "expires" in changes:
        columns["expires_at"] = options.expires_at(now, zone)
    return store.bulk.change(id, columns, lambda old: merge_options(old, stored))


def _due_columns(options: Options, now: Micros, zone: ZoneInfo) -> dict[str, Micros]:
    due = options.due_at(now, zone)
    # A moment that does not move with the clock was named, and is not a delay from now.
    exact = due is not None and due > now and due == options.due_at(now + 1, zone)
    return {"due_at": max(now, due or now), "due_from": EXACT_MOMENT if exact else now}
