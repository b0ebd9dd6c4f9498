"""Schedule: the handle of a rule that makes jobs, and how one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict
from zoneinfo import ZoneInfo

import msgspec
from typing_extensions import Unpack

from genba.client.async_methods import handle_twin
from genba.domain.cron import cron as read_cron
from genba.domain.duration import Duration, Micros, Moment, duration, moment, to_datetime
from genba.domain.schedule import (
    AT_ONCE,
    Misfire,
    Overlap,
    Reference,
    ScheduleRule,
    after_run,
    first_moment,
    rule_to_json,
    upcoming,
)
from genba.errors import BadOption
from genba.options.merge import task_schedule
from genba.options.parse import NAME_PATTERN, parse_every, parse_reason, parse_zone
from genba.options.table import SCHEDULE_OPTIONS, Options
from genba.storage.records import NewJob
from genba.storage.schedules.rows import NewSchedule, ScheduleRecord

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.client.job import Job


class When(TypedDict, total=False):
    """When a schedule runs: `cron` (with `tz`) or `every` (with `base`, `reference`), and what is true of both."""

    cron: str | None
    tz: str | None
    every: Duration | None
    base: Moment | None
    reference: Reference
    misfire: Misfire
    overlap: Overlap | None
    start: Moment | None
    until: Moment | None
    max_runs: int | None
    jitter: Duration | None
    grace: Duration | None
    pause_after_failures: int | None


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "reference": ("end", "start"),
    "misfire": ("skip", "once", "all"),
    "overlap": ("skip", "queue", "allow"),
}


def read_rule(when: Mapping[str, Any], now: Micros, zone: ZoneInfo) -> ScheduleRule:
    """The rule that these words say; BadOption for what is unknown, ill-typed or contradictory."""
    given = {name: value for name, value in when.items() if value is not None}
    for name in given:
        if name not in When.__annotations__:
            raise BadOption(
                f"a schedule has no option {name!r}; there are {', '.join(When.__annotations__)}"
            )
    for name, allowed in _CHOICES.items():
        if name in given and given[name] not in allowed:
            raise BadOption(
                f"{name} must be one of {', '.join(map(repr, allowed))}, not {given[name]!r}"
            )
    every = parse_every("every", given.get("every"))
    if ("cron" in given) == (every is not None):
        raise BadOption(
            "a schedule needs cron= or every= (longer than 0, or -1 for again at once), and not both"
        )
    wrong = [
        name for name in (("base", "reference") if "cron" in given else ("tz",)) if name in given
    ]
    if wrong:
        raise BadOption(f"{wrong[0]} belongs to {'every=' if 'cron' in given else 'cron='}")
    if every == AT_ONCE and "base" in given:
        raise BadOption("every=-1 has no base: it runs again at once")
    rule = ScheduleRule(
        cron=None
        if "cron" not in given
        else _expression(given["cron"], parse_zone("tz", given.get("tz")) or "UTC"),
        tz=parse_zone("tz", given.get("tz")) or "UTC",
        every=every,
        base=_moment("base", given, now, zone),
        reference=given.get("reference", "end"),
        misfire=given.get("misfire", "once"),
        overlap=given.get("overlap") or ("allow" if "cron" in given else "skip"),
        start=_moment("start", given, now, zone),
        until=_moment("until", given, now, zone),
        max_runs=_count("max_runs", given),
        jitter=_length("jitter", given) or 0,
        grace=_length("grace", given),
        pause_after_failures=_count("pause_after_failures", given),
    )
    if rule.until is not None and rule.start is not None and rule.until < rule.start:
        raise BadOption("until lies before start: it would never run")
    return rule


def changed_rule(
    rule: ScheduleRule, changes: Mapping[str, Any], now: Micros, zone: ZoneInfo
) -> ScheduleRule:
    """The rule with these options instead; None: as if it had not been said.  cron= ends every=, and the other way."""
    ended: tuple[str, ...] = ()
    if rule.is_interval and changes.get("cron") is not None:
        ended = ("every", "base", "reference", "overlap")
    elif not rule.is_interval and changes.get("every") is not None:
        ended = ("cron", "tz", "overlap")
    kept = {name: value for name, value in _said(rule).items() if name not in ended}
    return read_rule({**kept, **changes}, now, zone)


def _said(rule: ScheduleRule) -> dict[str, Any]:
    """The options that say this rule."""
    found = {**rule_to_json(rule), "overlap": rule.overlap}
    for name in ("base", "start", "until"):
        if name in found:
            found[name] = to_datetime(found[name])
    for name in ("every", "jitter", "grace"):
        if name in found and found[name] != AT_ONCE:
            found[name] = timedelta(microseconds=found[name])
    return found


def _expression(text: Any, tz: str) -> str:
    if not isinstance(text, str) or len(text) > 200:
        raise BadOption(f"cron must be a text like '0 3 * * *', not {text!r}")
    read_cron(text, tz)
    return text


def _moment(name: str, given: Mapping[str, Any], now: Micros, zone: ZoneInfo) -> Micros | None:
    try:
        return moment(given[name], now, zone) if name in given else None
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None


def _length(name: str, given: Mapping[str, Any]) -> Micros | None:
    try:
        return duration(given[name]) if name in given else None
    except BadOption as error:
        raise BadOption(f"{name}: {error}") from None


def _count(name: str, given: Mapping[str, Any]) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadOption(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


def check_schedule(name: str, options: Options) -> None:
    """BadOption for a name that is none, and for job options that make no sense again and again."""
    if NAME_PATTERN.fullmatch(str(name)) is None:
        raise BadOption(
            f"{name!r} names no schedule: a letter or _, then letters, digits, _ . : # - (up to 200)"
        )
    for option, given, instead in (
        ("at", options.at, "the schedule says when; start= is its begin"),
        ("after", options.after or None, "it names one job, a schedule makes many; use ready="),
        ("parent", options.parent, "the jobs of a schedule have none"),
        ("conn", options.conn, "recur has a transaction of its own"),
    ):
        if given is not None:
            raise BadOption(f"schedule {name!r}: {option} does not go with recur: {instead}")


def wanted(
    name: str, job: NewJob, when: Mapping[str, Any], now: Micros, zone: ZoneInfo
) -> NewSchedule:
    """The schedule `name` that makes such jobs."""
    said = msgspec.json.encode(dict(when), enc_hook=str, order="deterministic").decode()
    return NewSchedule(name=name, rule=read_rule(when, now, zone), job=job, said=said)


def apply_overrides(
    declared: Sequence[NewSchedule], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[list[NewSchedule], list[str]]:
    """What holds of the schedules in code, by what operators say of the tasks; and the names of those that do not."""
    holds, gone = [], []
    for one in declared:
        changes = overrides.get(one.name, {})
        when = task_schedule(one.own, changes) if one.own is not None else {}
        if one.own is None or not changes.keys() & set(SCHEDULE_OPTIONS):
            holds.append(one)
        elif when is None:
            gone.append(one.name)
        else:
            try:
                holds.append(wanted(one.name, one.job, when, 0, ZoneInfo("UTC")))
            except (
                BadOption
            ):  # a zone that is not known on this machine: as the code says, rather than never
                holds.append(one)
    return holds, gone


@dataclass(frozen=True, slots=True)
class Tick:
    """One due moment and what came of it: a job, or a reason; `count` moments up to `last` if they were many."""

    moment: datetime
    job_id: int | None
    skipped: str | None
    last: datetime
    count: int | None
    at: datetime


class Schedule:
    """A rule that makes jobs.  What it tells is what was last seen; `refresh()` looks again."""

    def __init__(self, app: Client, name: str, record: ScheduleRecord | None = None) -> None:
        self._app = app
        self.name = name
        self._record = record

    def __repr__(self) -> str:
        return f"<Schedule {self.name}>"

    @property
    def record(self) -> ScheduleRecord:
        if self._record is None:
            self.refresh()
        assert self._record is not None
        return self._record

    @property
    def rule(self) -> ScheduleRule:
        return self.record.rule

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def queue(self) -> str:
        return self.record.job.queue

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of its jobs by name, as plain JSON values."""
        return self._app.by_name(self.record.task, self.record.args)

    @property
    def fault(self) -> str | None:
        """Why nobody can tell when it runs, or what; None: it is well."""
        return self.record.fault()

    @property
    def paused(self) -> bool:
        return bool(self.record.paused)

    @property
    def reason(self) -> str | None:
        """Why it is paused."""
        return self.record.reason

    @property
    def runs(self) -> int:
        """How many jobs it has made."""
        return self.record.runs

    @property
    def failures(self) -> int:
        """How many of its runs have failed in a row."""
        return self.record.failures

    @property
    def by_hand(self) -> bool:
        """False if code declares it, and may change it."""
        return self.record.owner is None

    def refresh(self) -> Schedule:
        """Look again; ScheduleNotFound if it was deleted."""
        self._app.store.install()
        self._record = self._app.store.schedules.named(self.name)
        return self

    arefresh = handle_twin(refresh)

    def next(self, n: int = 1) -> list[datetime]:
        """Its next moments, in its zone; of an interval, as they come if every run ends at once."""
        if type(n) is not int or n < 0:
            raise BadOption(f"next takes how many moments, not {n!r}")
        row = self.refresh().record
        begin = self._next_moment(row)
        rule = row.rule
        zone = UTC if rule.is_interval else ZoneInfo(rule.tz)
        pending = 1 if rule.is_interval and row.next_at is None and begin is not None else 0
        found = [] if begin is None else islice(upcoming(rule, begin, row.runs - pending), n)
        return [to_datetime(each).astimezone(zone) for each in found]

    anext = handle_twin(next)

    def _next_moment(self, row: ScheduleRecord) -> Micros | None:
        rule, now = row.rule, self._app.store.now()
        if not rule.is_interval:
            if row.next_at is not None and row.next_at > now and not row.paused:
                return row.next_at
            return first_moment(rule, now, row.runs)
        if row.next_at is not None:
            return max(row.next_at, now)
        runs = [run for run in self._app.store.schedules.open_runs(row.id) if run.state != "held"]
        waiting = [run.moment for run in runs if run.state in ("scheduled", "blocked", "waiting")]
        if waiting:
            return waiting[0]
        if runs:  # under way: if it ended now
            return after_run(
                rule, moment=runs[0].moment, started=None, ended=now, runs=row.runs - 1, failures=0
            )
        return None

    def pause(self, reason: str | None = None) -> bool:
        """No run starts until `resume`; one that runs, runs on.  False if it was paused already."""
        return self._app.store.schedules.pause(self.name, parse_reason(reason))

    apause = handle_twin(pause)

    def resume(self) -> bool:
        """Go on with the next moment; False if it was not paused."""
        done = self._app.store.schedules.resume(self.name)
        self._app.wake()
        return done

    aresume = handle_twin(resume)

    def trigger(self) -> Job[Any] | None:
        """One run now, also of a paused one; the rhythm stays.  None if `overlap` does not allow it.

        TaskDisabled if an operator has switched its task off.
        """
        made = self._app.store.schedules.trigger(self.name)
        self._app.wake()
        return None if made is None else self._app.job(made)

    atrigger = handle_twin(trigger)

    def set(self, **changes: Unpack[When]) -> Schedule:
        """Other words for what comes, by hand: code that declares it does not change it back.  None takes one away."""
        self._app.store.install()
        row = self.refresh().record
        rule = changed_rule(row.rule, changes, self._app.store.now(), self._app.settings.zone)
        said = "set " + msgspec.json.encode(rule_to_json(rule), order="deterministic").decode()
        self._app.store.schedules.put(
            NewSchedule(name=self.name, rule=rule, job=row.job, said=said)
        )
        self._app.wake()
        return self.refresh()

    aset = handle_twin(set)

    def delete(self) -> None:
        """It makes no more jobs; one that runs, runs on.  What code declares comes back when a node starts."""
        self._app.store.schedules.delete(self.name)

    adelete = handle_twin(delete)

    def ticks(self, limit: int = 20) -> list[Tick]:
        """What came of its moments, the latest first."""
        rows = self._app.store.schedules.ticks(self.record.id, limit)
        return [
            Tick(
                to_datetime(row.moment),
                row.job_id,
                row.skipped,
                to_datetime(row.moment if row.last_moment is None else row.last_moment),
                1 if row.last_moment is None else row.count,
                to_datetime(row.at),
            )
            for row in rows
        ]

    aticks = handle_twin(ticks)
