"""When is a node dead?  Decided from what can be seen, with patience; no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from genba.domain.liveness import (
    DATABASE_GAP_US,
    MAX_LOOK_GAP_US,
    MIN_SILENCE_US,
    NODE_RENEWALS_PER_LEASE,
)
from genba.storage.records import Micros, NodeRecord


@dataclass(slots=True)
class DatabaseContact:
    """How long this node has seen the database without a break, by its own steady clock.

    Not to have looked for longer than `gap` is a break too: who was suspended does not know what was meanwhile, and
    whether the others could renew.
    """

    gap: Micros = DATABASE_GAP_US
    since: Micros | None = None
    last: Micros = 0

    def seen(self, now: Micros) -> None:
        if self.since is None or now - self.last > self.gap:
            self.since = now
        self.last = now

    def broken(self) -> None:
        self.since = None

    def lasted(self, now: Micros) -> Micros:
        return 0 if self.since is None or now - self.last > self.gap else now - self.since


class HeartbeatRecord(Protocol):
    """Whoever renews a lease; `seen_at` is what the store's clock said when we looked."""

    @property
    def id(self) -> int: ...

    @property
    def beat_at(self) -> Micros: ...

    @property
    def seen_at(self) -> Micros: ...


@dataclass(frozen=True, slots=True)
class _Heard:
    """A beat: when we first saw it; `gap` is how long before that it may have been (None: nobody knows)."""

    beat_at: Micros
    first: Micros
    gap: Micros | None


class HeartbeatWatch:
    """How long each has been silent, though the store's clock may be set while they live.

    What we saw with our own steady clock bounds what the store's clock tells.  Without that, all leases would be over
    when it is set forward, and none for an hour when it is set back by an hour.
    """

    def __init__(self) -> None:
        self._heard: dict[int, _Heard] = {}
        self._looked: Micros | None = None

    def silence(self, ones: Sequence[HeartbeatRecord], now: Micros) -> dict[int, Micros]:
        """By id; `now` is our steady clock.  To be asked with all that live, at every look."""
        heard = {one.id: self._hear(one, now) for one in ones}
        self._heard, self._looked = heard, now
        found = {}
        for one in ones:
            mine, told = heard[one.id], one.seen_at - one.beat_at
            least = now - mine.first
            most = told if mine.gap is None else least + mine.gap
            found[one.id] = max(least, min(told, most))
        return found

    def _hear(self, one: HeartbeatRecord, now: Micros) -> _Heard:
        before = self._heard.get(one.id)
        if before is None or before.beat_at != one.beat_at:
            gap = None if self._looked is None else min(now - self._looked, MAX_LOOK_GAP_US)
            return _Heard(one.beat_at, now, gap)
        return before


def find_dead_nodes(
    nodes: Sequence[NodeRecord],
    suspects: Collection[int],
    me: int,
    boot_id: str | None,
    lasted: Micros,
    gone: Collection[int] = (),
    silence: Mapping[int, Micros] | None = None,
) -> list[NodeRecord]:
    """Nodes to be buried.

    A lease that is over counts only when we could see the database for a whole lease: after an outage nobody
    could renew.  A suspect (its lock is free) counts after one missed beat, if we have been there since before
    its last one, or if its process is known to be `gone`.  `boot_id` is given where leases are counted since the
    machine's start.  `silence` is what a Watch says; without it the store's clock is believed.
    """
    silent = {node.id: node.seen_at - node.beat_at for node in nodes} | dict(silence or {})
    found = []
    for node in nodes:
        signs = (node.id in suspects, node.id in gone)
        if node.id != me and _is_dead(node, silent[node.id], *signs, boot_id, lasted):
            found.append(node)
    return found


def _is_dead(
    node: NodeRecord, silent: Micros, suspect: bool, gone: bool, boot_id: str | None, lasted: Micros
) -> bool:
    if boot_id is not None and node.boot_id != boot_id:
        return True  # the machine has been started anew since
    if silent < MIN_SILENCE_US:
        return False
    if suspect and gone:
        return True
    if (
        suspect and silent >= node.lease // NODE_RENEWALS_PER_LEASE * 6 // 5 and lasted >= silent
    ):  # a beat, and what it may be late
        return True
    return silent >= node.lease and lasted >= node.lease
