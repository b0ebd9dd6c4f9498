"""When a schedule runs: pure rules for cron ticks and intervals; no clock, no database.

A *tick* is one due moment.  Of a cron rule the moments are known beforehand; of an interval the next one is known when
the run before it has ended.
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

AT_ONCE = -1  # the interval that means: again, as soon as it has ended
LEAST_GAP = 100 * MILLISECOND
LONGEST_BACKOFF = 5 * MINUTE
ON_TIME = 10 * SECOND  # later than this, a cron tick was missed (misfire="skip" without grace)
MOST_AT_ONCE = 100  # runs that misfire="all" makes up for
MOST_COUNTED = 10_000  # of more missed ticks than this it is only told that there were more

Misfire = Literal["skip", "once", "all"]
Overlap = Literal["skip", "queue", "allow"]
Reference = Literal["end", "start"]


class ScheduleRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When, how often, and what to do if a moment was missed.  Moments are absolute."""

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
        if self.cron is not None:
            return f"{self.cron} ({self.tz})"
        return (
            "again at once"
            if self.every == AT_ONCE
            else f"every {format_duration(self.every or 0)}"
        )

    def more(self, runs: int, moment: Micros | None) -> Micros | None:
        """`moment`, unless the schedule is over by then."""
        if moment is None or (self.max_runs is not None and runs >= self.max_runs):
            return None
        return None if self.until is not None and moment > self.until else moment


@dataclass(frozen=True, slots=True)
class SkippedTicks:
    """Ticks that made no job: from `moment` through `last`, `count` of them (None: more than anybody counts)."""

    moment: Micros
    last: Micros
    count: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class TickPlan:
    """What to do about the moments that are due: those that run, those that do not, and when to look again."""

    runs: tuple[Micros, ...]
    skips: tuple[SkippedTicks, ...]
    next_at: Micros | None


def first_moment(rule: ScheduleRule, now: Micros, runs: int = 0) -> Micros | None:
    """The first moment of a schedule that begins, or is changed, now."""
    begin = now if rule.start is None else max(now, rule.start)
    if rule.cron is not None:
        # A moment that is `start` itself counts, one that is now does not: it may have happened already.
        after = begin if rule.start is None or begin > rule.start else begin - 1
        return rule.more(runs, cron(rule.cron, rule.tz).after(after))
    if rule.base is not None and rule.every is not None and rule.every > 0:
        return rule.more(runs, max(rule.base, _slot(rule.base, rule.every, begin - 1)))
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
    """When an interval runs next, after a run that was due at `moment`; None if that was the last.

    `failures` is how many runs in a row have failed, this one included.
    """
    every = rule.every
    assert every is not None
    # One that was cancelled before its moment stands for that moment.  One that has run may lie ahead of its end:
    # then the clock was set back.
    over = max(ended, moment) if started is None else ended
    begun = moment if started is None else min(started, ended)
    if every == AT_ONCE:
        least = LEAST_GAP * 2 ** min(failures, 20) if failures else 0
        found = max(over + min(least, LONGEST_BACKOFF), begun + LEAST_GAP)
    elif rule.base is not None:
        found = _slot(rule.base, every, over)
    elif rule.reference == "start":
        found = max(over, begun + every)
    else:
        found = over + every
    return rule.more(runs, found)


def latest_start(rule: ScheduleRule, moment: Micros) -> Micros | None:
    """The moment from which a run of an interval is given up, if it has not started; None: never."""
    if rule.grace is not None:
        return moment + rule.jitter + rule.grace
    if rule.misfire == "skip" and rule.every is not None:
        return moment + rule.jitter + max(rule.every, ON_TIME)
    return None


def latest_wait(rule: ScheduleRule, now: Micros) -> Micros:
    """No run of an interval may be due later than this, or the clock has been set back."""
    assert rule.every is not None
    if rule.base is not None and rule.every > 0:
        return _slot(rule.base, rule.every, max(now, (rule.start or now) - 1)) + rule.jitter
    wait = LONGEST_BACKOFF if rule.every == AT_ONCE else rule.every
    return max(now, rule.start or now) + wait + rule.jitter + SECOND


def waits_too_long(rule: ScheduleRule, moment: Micros, now: Micros) -> bool:
    """Whether a run of an interval, due at `moment`, would not be planned so now; one that waits for its base may."""
    return moment > latest_wait(rule, now) and moment != rule.base


def plan_due_ticks(rule: ScheduleRule, next_at: Micros, now: Micros, runs: int) -> TickPlan:
    """What becomes of the cron ticks from `next_at` up to now."""
    assert rule.cron is not None
    moments = cron(rule.cron, rule.tz)
    end = now if rule.until is None else min(now, rule.until)
    last = moments.last(next_at - 1, end)
    following = moments.after(now)
    if last is None:
        return TickPlan((), (), rule.more(runs, following))
    cut = last if rule.misfire == "once" else _cut(rule, moments.moments(next_at - 1), end)
    taken = tuple(islice(_through(moments.moments(cut - 1), end), MOST_AT_ONCE))
    ripe = tuple(moment for moment in taken if now - moment <= _patience(rule))
    left = None if rule.max_runs is None else max(0, rule.max_runs - runs)
    chosen = ripe if left is None else ripe[:left]
    skips = []
    if next_at < cut:
        skips.append(_skip(rule, moments.moments(next_at - 1), cut - 1, _why(rule, last)))
    late = [moment for moment in taken if moment not in ripe]
    if late:
        skips.append(
            SkippedTicks(
                late[0],
                late[-1],
                len(late),
                f"missed: more than {format_duration(_patience(rule))} late",
            )
        )
    return TickPlan(chosen, tuple(skips), rule.more(runs + len(chosen), following))


def skip_ticks(
    rule: ScheduleRule, next_at: Micros, now: Micros, reason: str
) -> SkippedTicks | None:
    """The cron ticks from `next_at` up to now, none of which ran."""
    assert rule.cron is not None
    moments = cron(rule.cron, rule.tz)
    end = now if rule.until is None else min(now, rule.until)
    last = moments.last(next_at - 1, end)
    return None if last is None else _skip(rule, moments.moments(next_at - 1), last, reason)


def upcoming(rule: ScheduleRule, begin: Micros, runs: int) -> Iterator[Micros]:
    """The moments from `begin` on (itself one of them), as they come if every run ends at once."""
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
    """How much later than its moment a run starts: within the jitter, the same whoever computes it."""
    if not rule.jitter:
        return 0
    digest = blake2b(f"{name} {moment}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (rule.jitter + 1)


def _slot(base: Micros, every: Micros, after: Micros) -> Micros:
    """The first of base + k·every later than `after`; k may be negative."""
    return base + ((after - base) // every + 1) * every


def _patience(rule: ScheduleRule) -> Micros:
    if rule.grace is not None:
        return rule.grace
    return ON_TIME if rule.misfire == "skip" else 2**62


def _cut(rule: ScheduleRule, moments: Iterator[Micros], end: Micros) -> Micros:
    """The first of the latest MOST_AT_ONCE moments up to `end`."""
    recent: list[Micros] = []
    for count, moment in enumerate(_through(moments, end)):
        if count > MOST_COUNTED:
            assert rule.cron is not None
            return _last_few(rule.cron, rule.tz, end)
        recent.append(moment)
    return recent[-MOST_AT_ONCE:][0]


def _last_few(text: str, tz: str, end: Micros) -> Micros:
    """As `_cut`, of a rule with very many moments: from the end backward."""
    moments, found = cron(text, tz), end + 1
    for _ in range(MOST_AT_ONCE):
        found = moments.last(0, found - 1) or found
    return found


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
        return f"missed: more than {format_duration(_patience(rule))} late"
    if rule.misfire == "once":
        return "missed: made up for by one later run"
    return f"missed: more than {MOST_AT_ONCE} at once"


def rule_to_json(rule: ScheduleRule) -> dict[str, Any]:
    """For JSON and for the wire."""
    found = msgspec.to_builtins(rule)
    assert isinstance(found, dict)
    return found
