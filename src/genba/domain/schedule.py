"""When a schedule runs: pure rules for cron ticks and intervals; no clock, no database.

A *tick* is one due moment.  The moments of a cron rule are known in advance; the next moment of an
interval is known when the run before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

import msgspec

from genba.domain.cron import cron
from genba.domain.duration import MILLISECOND, MINUTE, SECOND, Micros, format_duration

AT_ONCE = -1  # an interval of this value means: run again as soon as the last run has ended
LEAST_GAP = 100 * MILLISECOND
LONGEST_BACKOFF = 5 * MINUTE
ON_TIME = 10 * SECOND  # a cron tick is missed if it is later than this (misfire="skip", no grace)
MOST_AT_ONCE = 100  # the most missed ticks that misfire="all" runs
MOST_COUNTED = 10_000  # more missed ticks than this are not counted

Misfire = Literal["skip", "once", "all"]
Overlap = Literal["skip", "queue", "allow"]
Reference = Literal["end", "start"]


class ScheduleRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When and how often to run, and what to do after a missed moment.  Moments are absolute."""

    cron: str | None = None
    tz: str = "UTC"
    every: Micros | None = None
    base: Micros | None = None
    reference: Reference = "end"
    misfire: Misfire = "once"
    overlap: Overlap = "allow"
    start: Micros | None = None
    until: Micros | None = None
    max_runs: int | None = None
    jitter: Micros = 0
    grace: Micros | None = None
    pause_after_failures: int | None = None

    @property
    def is_interval(self) -> bool:
        return self.cron is None

    def words(self) -> str:
        """Describe the rule for a person."""
        if self.cron is not None:
            return f"{self.cron} ({self.tz})"
        return (
            "again at once"
            if self.every == AT_ONCE
            else f"every {format_duration(self.every or 0)}"
        )

    def more(self, runs: int, moment: Micros | None) -> Micros | None:
        """Return `moment`, or None if the schedule is over by then."""
        if moment is None or (self.max_runs is not None and runs >= self.max_runs):
            return None
        return None if self.until is not None and moment > self.until else moment


@dataclass(frozen=True, slots=True)
class SkippedTicks:
    """Ticks that made no job: `count` of them from `moment` to `last` (None: not counted)."""

    moment: Micros
    last: Micros
    count: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class TickPlan:
    """The plan for due moments: those that run, those that are skipped, and the next moment."""

    runs: tuple[Micros, ...]
    skips: tuple[SkippedTicks, ...]
    next_at: Micros | None


def first_moment(rule: ScheduleRule, now: Micros, runs: int = 0) -> Micros | None:
    """Return the first moment of a schedule that begins, or is changed, now."""
    begin = now if rule.start is None else max(now, rule.start)
    if rule.cron is not None:
        # The moment `start` itself counts.  The moment `now` does not: it may have run already.
        after = begin if rule.start is None or begin > rule.start else begin - 1
        return rule.more(runs, cron(rule.cron, rule.tz).after(after))
    if rule.base is not None and rule.every is not None and rule.every > 0:
        return rule.more(runs, max(rule.base, _grid_moment(rule.base, rule.every, begin - 1)))
    return rule.more(runs, begin)


def after_run(
    rule: ScheduleRule,
    *,
    moment: Micros,
    started: Micros | None,
    ended: Micros,
    runs: int,
    failures: int,
) -> Micros | None:
    """Return when an interval runs after the run that was due at `moment`; None if it is over.

    `failures` counts the runs in a row that have failed, including this one.
    """
    every = rule.every
    assert every is not None
    # A run that was cancelled before its moment counts as ended at that moment.  A start after the
    # end means that the clock was set back.
    over = max(ended, moment) if started is None else ended
    begun = moment if started is None else min(started, ended)
    if every == AT_ONCE:
        least = LEAST_GAP * 2 ** min(failures, 20) if failures else 0
        next_moment = max(over + min(least, LONGEST_BACKOFF), begun + LEAST_GAP)
    elif rule.base is not None:
        next_moment = _grid_moment(rule.base, every, over)
    elif rule.reference == "start":
        next_moment = max(over, begun + every)
    else:
        next_moment = over + every
    return rule.more(runs, next_moment)


def latest_start(rule: ScheduleRule, moment: Micros) -> Micros | None:
    """Return when a run of an interval expires if it has not started; None means never."""
    if rule.grace is not None:
        return moment + rule.jitter + rule.grace
    if rule.misfire == "skip" and rule.every is not None:
        return moment + rule.jitter + max(rule.every, ON_TIME)
    return None


def latest_wait(rule: ScheduleRule, now: Micros) -> Micros:
    """Return the latest due moment of an interval's run; a later one means a clock set back."""
    assert rule.every is not None
    if rule.base is not None and rule.every > 0:
        return _grid_moment(rule.base, rule.every, max(now, (rule.start or now) - 1)) + rule.jitter
    wait = LONGEST_BACKOFF if rule.every == AT_ONCE else rule.every
    return max(now, rule.start or now) + wait + rule.jitter + SECOND


def waits_too_long(rule: ScheduleRule, moment: Micros, now: Micros) -> bool:
    """Return whether a run's due moment is too late for its rule; its base is never too late."""
    return moment > latest_wait(rule, now) and moment != rule.base


def plan_due_ticks(rule: ScheduleRule, next_at: Micros, now: Micros, runs: int) -> TickPlan:
    """Plan the cron ticks from `next_at` up to now."""
    assert rule.cron is not None
    moments = cron(rule.cron, rule.tz)
    end = now if rule.until is None else min(now, rule.until)
    last = moments.last(next_at - 1, end)
    following = moments.after(now)
    if last is None:
        return TickPlan((), (), rule.more(runs, following))
    cut = last if rule.misfire == "once" else _cut(rule, moments.moments(next_at - 1), end)
    candidates = tuple(islice(_through(moments.moments(cut - 1), end), MOST_AT_ONCE))
    in_time = tuple(moment for moment in candidates if now - moment <= _allowed_delay(rule))
    left = None if rule.max_runs is None else max(0, rule.max_runs - runs)
    chosen = in_time if left is None else in_time[:left]
    skips = []
    if next_at < cut:
        skips.append(_skip(rule, moments.moments(next_at - 1), cut - 1, _why(rule, last)))
    late = [moment for moment in candidates if moment not in in_time]
    if late:
        skips.append(
            SkippedTicks(
                late[0],
                late[-1],
                len(late),
                f"missed: more than {format_duration(_allowed_delay(rule))} late",
            )
        )
    return TickPlan(chosen, tuple(skips), rule.more(runs + len(chosen), following))


def skip_ticks(
    rule: ScheduleRule, next_at: Micros, now: Micros, reason: str
) -> SkippedTicks | None:
    """Skip all cron ticks from `next_at` up to now."""
    assert rule.cron is not None
    moments = cron(rule.cron, rule.tz)
    end = now if rule.until is None else min(now, rule.until)
    last = moments.last(next_at - 1, end)
    return None if last is None else _skip(rule, moments.moments(next_at - 1), last, reason)


def upcoming(rule: ScheduleRule, begin: Micros, runs: int) -> Iterator[Micros]:
    """Yield the moments from `begin` on, including it, as if every run took no time."""
    moment: Micros | None = rule.more(runs, begin)
    while moment is not None:
        yield moment
        runs += 1
        if rule.cron is not None:
            moment = rule.more(runs, cron(rule.cron, rule.tz).after(moment))
        else:
            moment = after_run(
                rule, moment=moment, started=moment, ended=moment, runs=runs, failures=0
            )


def jitter_of(rule: ScheduleRule, name: str, moment: Micros) -> Micros:
    """Return the delay of one run within the rule's jitter; every node computes the same."""
    if not rule.jitter:
        return 0
    digest = blake2b(f"{name} {moment}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (rule.jitter + 1)


def _grid_moment(base: Micros, every: Micros, after: Micros) -> Micros:
    """Return the first of base + k·every later than `after`; k may be negative."""
    return base + ((after - base) // every + 1) * every


def _allowed_delay(rule: ScheduleRule) -> Micros:
    if rule.grace is not None:
        return rule.grace
    return ON_TIME if rule.misfire == "skip" else 2**62


def _cut(rule: ScheduleRule, moments: Iterator[Micros], end: Micros) -> Micros:
    """Return the first of the latest MOST_AT_ONCE moments up to `end`."""
    recent: list[Micros] = []
    for count, moment in enumerate(_through(moments, end)):
        if count > MOST_COUNTED:
            assert rule.cron is not None
            return _last_few(rule.cron, rule.tz, end)
        recent.append(moment)
    return recent[-MOST_AT_ONCE:][0]


def _last_few(text: str, tz: str, end: Micros) -> Micros:
    """Do the same as `_cut` for a rule with very many moments, backward from the end."""
    moments, moment = cron(text, tz), end + 1
    for _ in range(MOST_AT_ONCE):
        moment = moments.last(0, moment - 1) or moment
    return moment


def _through(moments: Iterator[Micros], end: Micros) -> Iterator[Micros]:
    for moment in moments:
        if moment > end:
            return
        yield moment


def _skip(rule: ScheduleRule, moments: Iterator[Micros], end: Micros, reason: str) -> SkippedTicks:
    begin = last = 0
    count = 0
    for moment in _through(moments, end):
        if count == MOST_COUNTED:
            assert rule.cron is not None
            last = cron(rule.cron, rule.tz).last(begin, end) or last
            return SkippedTicks(begin, last, None, reason)
        begin, last, count = begin or moment, moment, count + 1
    return SkippedTicks(begin, last, count, reason)


def _why(rule: ScheduleRule, last: Micros) -> str:
    if rule.misfire == "skip":
        return f"missed: more than {format_duration(_allowed_delay(rule))} late"
    if rule.misfire == "once":
        return "missed: made up for by one later run"
    return f"missed: more than {MOST_AT_ONCE} at once"


def rule_to_json(rule: ScheduleRule) -> dict[str, Any]:
    """Return the rule as plain JSON values."""
    fields = msgspec.to_builtins(rule)
    assert isinstance(fields, dict)
    return fields
