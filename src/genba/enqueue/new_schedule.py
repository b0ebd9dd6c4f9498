"""A new schedule: its name, its rule, and the job that it enqueues again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from genba.domain.duration import Micros
from genba.errors import BadOption
from genba.options.merge import task_schedule
from genba.options.parse import NAME_PATTERN
from genba.options.schedule_rule import read_rule
from genba.options.table import SCHEDULE_OPTIONS, Options
from genba.storage.records import NewJob
from genba.storage.schedules.rows import NewSchedule


def check_schedule(name: str, options: Options) -> None:
    """Refuse a bad name, and job options that make no sense for jobs of a schedule."""
    if NAME_PATTERN.fullmatch(str(name)) is None:
        raise BadOption(
            f"{name!r} is not a valid name of a schedule: "
            "use a letter or _, then letters, digits, _ . : # - (up to 200)"
        )
    for option, value, reason in (
        ("at", options.at, "the schedule says when; start= is its begin"),
        ("after", options.after or None, "it names one job, a schedule makes many; use ready="),
        ("parent", options.parent, "the jobs of a schedule have none"),
        ("conn", options.conn, "recur has a transaction of its own"),
    ):
        if value is not None:
            raise BadOption(f"schedule {name!r}: {option} does not go with recur: {reason}")


def new_schedule(
    name: str, job: NewJob, rule_options: Mapping[str, Any], now: Micros, zone: ZoneInfo
) -> NewSchedule:
    """Build the schedule `name` that enqueues such jobs."""
    said = msgspec.json.encode(dict(rule_options), enc_hook=str, order="deterministic").decode()
    return NewSchedule(name=name, rule=read_rule(rule_options, now, zone), job=job, said=said)


def apply_overrides(
    declared: Sequence[NewSchedule], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[list[NewSchedule], list[str]]:
    """Apply what operators changed about the tasks to the schedules in code.

    Returns the schedules that hold, and the names of those that operators switched off.
    """
    active: list[NewSchedule] = []
    removed: list[str] = []
    for schedule in declared:
        changes = overrides.get(schedule.name, {})
        if schedule.own is None or not changes.keys() & set(SCHEDULE_OPTIONS):
            active.append(schedule)
            continue
        rule_options = task_schedule(schedule.own, changes)
        if rule_options is None:
            removed.append(schedule.name)
            continue
        try:
            utc = ZoneInfo("UTC")
            active.append(new_schedule(schedule.name, schedule.job, rule_options, 0, utc))
        except BadOption:
            # This machine does not know the time zone: rather as the code says than never.
            active.append(schedule)
    return active, removed
