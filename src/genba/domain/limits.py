"""Limits: the buckets that a job needs a slot of, and the assignment of free slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from string import Formatter
from typing import Any, NamedTuple

import msgspec

from genba.domain.duration import Micros
from genba.domain.untrusted_json import DECODE_ERRORS
from genba.errors import BadArguments

# At most n at a time; one at a time and in order; at most n starts per time.
LIMIT, ORDERED, RATE = 0, 1, 2
MAX_BUCKET_LENGTH = 200

_sorted = msgspec.json.Encoder(order="sorted")


class LimitRule(NamedTuple):
    """The limit of every bucket of a template."""

    template: str
    n: int
    ordered: bool = False
    per: Micros | None = None  # n starts in this time; None: n at a time
    burst: int | None = None

    @property
    def kind(self) -> int:
        return RATE if self.per is not None else ORDERED if self.ordered else LIMIT


class SlotNeed(NamedTuple):
    """A slot that a job must have to run."""

    name: str
    template: str
    kind: int


SlotNeeds = tuple[SlotNeed, ...]

_read = msgspec.json.Decoder(list[tuple[str, str, int]]).decode
_write = msgspec.json.Encoder().encode


def needs_of(rules: Iterable[LimitRule], values: Mapping[str, Any]) -> SlotNeeds:
    """Return the slots that a job with these arguments needs, one per bucket, sorted by name."""
    needs = {}
    for rule in rules:
        name = bucket_of(rule.template, values)
        needs[name] = SlotNeed(name, rule.template, rule.kind)
    return tuple(needs[name] for name in sorted(needs))


def write_needs(needs: SlotNeeds) -> str:
    return _write(needs).decode()


@lru_cache(maxsize=10_000)
def read_needs(written: str) -> SlotNeeds:
    """Decode the needs of a row; unreadable needs count as none, so that other jobs can start."""
    try:
        return tuple(SlotNeed(*one) for one in _read(written))
    except DECODE_ERRORS:
        return ()


def bucket_to_wait_for(needs: SlotNeeds, owned: bool = False) -> SlotNeed | None:
    """Return the bucket in whose line a job waits first.

    That is its ordered bucket, unless it has the turn there (`owned`); then one of the others.
    """
    ordered = next((need for need in needs if need.kind == ORDERED), None)
    if ordered is not None and not owned:
        return ordered
    return next((need for need in needs if need is not ordered), None)


def placeholders(template: str) -> list[str]:
    """Return the names of the arguments in a template."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def bucket_of(template: str, values: Mapping[str, Any]) -> str:
    """Return the bucket's name: the template with the job's arguments.

    A text is inserted as it is, any other value as JSON.  A name that is too long ends with a
    digest of the whole name.
    """
    parts = []
    for text, name, _, _ in Formatter().parse(template):
        parts.append(text)
        if name is not None:
            if name not in values:
                raise BadArguments(f"bucket {template!r} needs the argument {name!r}; pass it")
            value = values[name]
            parts.append(value if isinstance(value, str) else _sorted.encode(value).decode())
    bucket = "".join(parts)
    if len(bucket) <= MAX_BUCKET_LENGTH:
        return bucket
    return (
        f"{bucket[: MAX_BUCKET_LENGTH - 33]}#{blake2b(bucket.encode(), digest_size=16).hexdigest()}"
    )


@dataclass(slots=True)
class Bucket:
    """A bucket's row, with the changes that will be written; fields are in the query's order."""

    name: str
    template: str
    n: int
    ordered: bool
    per: Micros | None
    burst: int | None
    taken: int = 0
    owner: int | None = None
    full_at: Micros | None = None
    next_at: Micros | None = None
    _read: tuple[Any, ...] = ()

    def seen(self) -> Bucket:
        """Remember the present values, so that `changed` reports later changes."""
        self._read = self.values()
        return self

    @property
    def changed(self) -> bool:
        return self.values() != self._read

    @property
    def _step(self) -> Micros:
        """The time after which one more job may start."""
        assert self.per is not None
        return max(1, -(-self.per // self.n))

    @property
    def _burst(self) -> int:
        return self.burst or self.n

    def room(self, now: Micros) -> int:
        """Return how many more jobs may have a slot."""
        if self.per is not None:
            ahead = max(self.full_at or now, now) - now
            return max(0, (self._burst * self._step - ahead) // self._step)
        return int(self.owner is None) if self.ordered else max(0, self.n - self.taken)

    def fits(self, job: int, now: Micros) -> bool:
        """Return whether this job may have a slot."""
        return self.owner == job if self.ordered and self.owner is not None else self.room(now) > 0

    def take(self, job: int, now: Micros) -> None:
        """Give a slot to this job."""
        if self.per is not None:
            self.full_at = max(self.full_at or now, now) + self._step
        elif self.ordered:
            self.owner = job
        else:
            self.taken += 1

    def give(self, job: int) -> None:
        """Return the job's slot; a rate gets it back only if the job has not started."""
        if self.per is not None:
            self.full_at = (self.full_at or 0) - self._step
        elif self.ordered:
            self.owner = None if self.owner == job else self.owner
        else:
            self.taken = max(0, self.taken - 1)

    def ripe_at(self, now: Micros) -> Micros:
        """Return when the next job of a rate may start."""
        return max(now, (self.full_at or now) - (self._burst - 1) * self._step)

    def values(self) -> tuple[Any, ...]:
        return self.name, self.taken, self.owner, self.full_at, self.next_at


class BucketWaiter(NamedTuple):
    """A job that waits in the line of a bucket."""

    rank: int
    id: int
    line: str
    needs: SlotNeeds
    may_start: bool = True  # False: the job is held or not due yet, and keeps its place


@dataclass(slots=True)
class SlotAssignment:
    """The result of `assign_slots`.

    `grants` have all slots that they need.  `moves` must wait in the line of another bucket.
    `turns` have the turn of an ordered bucket, but cannot start yet.  `unseen` are needed buckets
    that were not passed in.
    """

    grants: list[BucketWaiter] = field(default_factory=list)
    moves: list[tuple[BucketWaiter, str]] = field(default_factory=list)
    turns: list[BucketWaiter] = field(default_factory=list)
    unseen: set[str] = field(default_factory=set)


def assign_slots(
    buckets: Mapping[str, Bucket], waiters: Sequence[BucketWaiter], now: Micros
) -> SlotAssignment:
    """Give the free slots to the waiting jobs in their order; a job gets all its slots or none.

    Changes `buckets`.
    """
    done = SlotAssignment()
    closed_lines: set[str] = set()
    for waiter in sorted(waiters):
        line = buckets[waiter.line]
        if waiter.line in closed_lines:
            continue
        # A set difference with the keys of `buckets` would walk all keys.
        unseen = [need.name for need in waiter.needs if need.name not in buckets]
        if unseen:
            done.unseen.update(unseen)
            closed_lines.add(waiter.line)
            continue
        if line.ordered:
            if not line.fits(waiter.id, now):
                closed_lines.add(waiter.line)
                continue
            line.take(waiter.id, now)  # the job keeps the turn while it waits for other slots
            if not waiter.may_start:
                done.turns.append(waiter)
                continue
        full = next(
            (need.name for need in waiter.needs if not buckets[need.name].fits(waiter.id, now)),
            None,
        )
        if full is None:
            for need in waiter.needs:
                buckets[need.name].take(waiter.id, now)
            done.grants.append(waiter)
        elif full == waiter.line:
            closed_lines.add(full)
        else:
            done.moves.append((waiter, full))
    return done
