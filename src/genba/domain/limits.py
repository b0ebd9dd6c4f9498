"""Limits: the buckets that a job belongs to, and who may have a slot of them."""

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

LIMIT, ORDERED, RATE = (
    0,
    1,
    2,
)  # at most n at a time; one at a time and in order; at most n starts in some time
MAX_BUCKET_LENGTH = 200

_sorted = msgspec.json.Encoder(order="sorted")


class LimitRule(NamedTuple):
    """What holds for every bucket of a template."""

    template: str
    n: int
    ordered: bool = False
    per: Micros | None = None  # n starts in so much time; None: n at a time
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
    """The slots that a job with these arguments needs, by name; one of each bucket."""
    found = {}
    for rule in rules:
        name = bucket_of(rule.template, values)
        found[name] = SlotNeed(name, rule.template, rule.kind)
    return tuple(found[name] for name in sorted(found))


def write_needs(needs: SlotNeeds) -> str:
    return _write(needs).decode()


@lru_cache(maxsize=10_000)
def read_needs(written: str) -> SlotNeeds:
    """What cannot be read needs nothing: others must not wait for it."""
    try:
        return tuple(SlotNeed(*one) for one in _read(written))
    except DECODE_ERRORS:
        return ()


def bucket_to_wait_for(needs: SlotNeeds, owned: bool = False) -> SlotNeed | None:
    """Where a job waits first: for its turn if it needs one and has it not (`owned`), else for one of the rest."""
    stripe = next((need for need in needs if need.kind == ORDERED), None)
    if stripe is not None and not owned:
        return stripe
    return next((need for need in needs if need is not stripe), None)


def placeholders(template: str) -> list[str]:
    """The names of the arguments that a template speaks of."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def bucket_of(template: str, values: Mapping[str, Any]) -> str:
    """The bucket's name: the template with the arguments in their places.

    A text stands as it is, everything else as JSON.  What would be too long ends in a digest of the whole.
    """
    parts = []
    for text, name, _, _ in Formatter().parse(template):
        parts.append(text)
        if name is not None:
            if name not in values:
                raise BadArguments(f"bucket {template!r}: the job has no argument {name!r}")
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
    """A bucket as its row says, and as it will be written (the order is that of the query)."""

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
        """From here on, `changed` tells whether its row must be written."""
        self._read = self.values()
        return self

    @property
    def changed(self) -> bool:
        return self.values() != self._read

    @property
    def _step(self) -> Micros:
        """The time in which one more may start."""
        assert self.per is not None
        return max(1, -(-self.per // self.n))

    @property
    def _most(self) -> int:
        return self.burst or self.n

    def room(self, now: Micros) -> int:
        """How many more may have a slot."""
        if self.per is not None:
            ahead = max(self.full_at or now, now) - now
            return max(0, (self._most * self._step - ahead) // self._step)
        return int(self.owner is None) if self.ordered else max(0, self.n - self.taken)

    def fits(self, job: int, now: Micros) -> bool:
        return self.owner == job if self.ordered and self.owner is not None else self.room(now) > 0

    def take(self, job: int, now: Micros) -> None:
        if self.per is not None:
            self.full_at = max(self.full_at or now, now) + self._step
        elif self.ordered:
            self.owner = job
        else:
            self.taken += 1

    def give(self, job: int) -> None:
        """A slot comes back; of a rate, because the job has not started after all."""
        if self.per is not None:
            self.full_at = (self.full_at or 0) - self._step
        elif self.ordered:
            self.owner = None if self.owner == job else self.owner
        else:
            self.taken = max(0, self.taken - 1)

    def ripe_at(self, now: Micros) -> Micros:
        """Of a rate: when the next one may start."""
        return max(now, (self.full_at or now) - (self._most - 1) * self._step)

    def values(self) -> tuple[Any, ...]:
        return self.name, self.taken, self.owner, self.full_at, self.next_at


class BucketWaiter(NamedTuple):
    """A job in the line of a bucket."""

    rank: int
    id: int
    line: str
    needs: SlotNeeds
    may_start: bool = True  # False: it is held, or waits for its moment, and keeps its place


@dataclass(slots=True)
class SlotAssignment:
    """Who gets what; `moves` are those who must wait for another bucket than the one whose line they stood in."""

    grants: list[BucketWaiter] = field(default_factory=list)
    moves: list[tuple[BucketWaiter, str]] = field(default_factory=list)
    turns: list[BucketWaiter] = field(
        default_factory=list
    )  # it is their turn, and they cannot start yet
    unseen: set[str] = field(
        default_factory=set
    )  # buckets that somebody needs, and that were not given


def assign_slots(
    buckets: Mapping[str, Bucket], waiters: Sequence[BucketWaiter], now: Micros
) -> SlotAssignment:
    """Give the free slots to those who wait, in their order; all that a job needs, or none.  Changes `buckets`."""
    done = SlotAssignment()
    over: set[str] = set()
    for waiter in sorted(waiters):
        line = buckets[waiter.line]
        if waiter.line in over:
            continue
        unseen = [
            need.name for need in waiter.needs if need.name not in buckets
        ]  # a set less all keys walks the keys
        if unseen:
            done.unseen.update(unseen)
            over.add(waiter.line)
            continue
        if line.ordered:
            if not line.fits(waiter.id, now):
                over.add(waiter.line)
                continue
            line.take(
                waiter.id, now
            )  # from here on it is its turn, whatever else it has to wait for
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
            over.add(full)
        else:
            done.moves.append((waiter, full))
    return done
