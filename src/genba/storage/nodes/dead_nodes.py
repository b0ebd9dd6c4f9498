"""The rule that decides when a node or a session is dead; no I/O."""

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
    """How long this process has reached the database without a break, by its own steady clock.

    No contact for longer than `gap` is a break too: a suspended process does not know whether the
    others could renew meanwhile.
    """

    gap: Micros = DATABASE_GAP_US
    since: Micros | None = None
    last: Micros = 0

    def confirm(self, now: Micros) -> None:
        if self.since is None or now - self.last > self.gap:
            self.since = now
        self.last = now

    def lose(self) -> None:
        self.since = None

    def duration(self, now: Micros) -> Micros:
        return 0 if self.since is None or now - self.last > self.gap else now - self.since


class HeartbeatRecord(Protocol):
    """The row of a node or a session; `seen_at` is the store's clock when the row was read."""

    @property
    def id(self) -> int: ...

    @property
    def beat_at(self) -> Micros: ...

    @property
    def seen_at(self) -> Micros: ...


@dataclass(frozen=True, slots=True)
class _SeenRenewal:
    """When we first saw a renewal; it is at most `gap` older than that (None: unknown)."""

    beat_at: Micros
    first: Micros
    gap: Micros | None


class HeartbeatWatch:
    """How long each node or session has been silent, even if the store's clock is set meanwhile.

    Our own steady clock bounds the difference of the store's times. Without that, all leases would
    be over when the clock is set forward by more than a lease, and none for an hour when it is set
    back by an hour.
    """

    def __init__(self) -> None:
        self._renewals: dict[int, _SeenRenewal] = {}
        self._last_look: Micros | None = None

    def silence(self, records: Sequence[HeartbeatRecord], now: Micros) -> dict[int, Micros]:
        """Return the silence by id; `now` is our steady clock.

        To be called with all living nodes or sessions, at every look.
        """
        renewals = {record.id: self._note(record, now) for record in records}
        self._renewals, self._last_look = renewals, now
        silence = {}
        for record in records:
            renewal, by_store = renewals[record.id], record.seen_at - record.beat_at
            least = now - renewal.first
            most = by_store if renewal.gap is None else least + renewal.gap
            silence[record.id] = max(least, min(by_store, most))
        return silence

    def _note(self, record: HeartbeatRecord, now: Micros) -> _SeenRenewal:
        before = self._renewals.get(record.id)
        if before is None or before.beat_at != record.beat_at:
            gap = None if self._last_look is None else min(now - self._last_look, MAX_LOOK_GAP_US)
            return _SeenRenewal(record.beat_at, now, gap)
        return before


def find_dead_nodes(
    nodes: Sequence[NodeRecord],
    suspects: Collection[int],
    me: int,
    boot_id: str | None,
    in_contact: Micros,
    gone: Collection[int] = (),
    silence: Mapping[int, Micros] | None = None,
) -> list[NodeRecord]:
    """Return the nodes to declare dead.

    A lease that is over counts only if we could reach the database for a whole lease: after an
    outage no node could have renewed. A suspect (its lock is free) counts after one missed renewal,
    if we have been in contact since before its last one, or if its process is known to be `gone`.
    `boot_id` is given if leases are counted since the machine's start. `silence` is the result of a
    HeartbeatWatch; without it the store's clock decides.
    """
    silent = {node.id: node.seen_at - node.beat_at for node in nodes} | dict(silence or {})
    dead = []
    for node in nodes:
        signs = (node.id in suspects, node.id in gone)
        if node.id != me and _is_dead(node, silent[node.id], *signs, boot_id, in_contact):
            dead.append(node)
    return dead


def _is_dead(
    node: NodeRecord,
    silent: Micros,
    suspect: bool,
    gone: bool,
    boot_id: str | None,
    in_contact: Micros,
) -> bool:
    if boot_id is not None and node.boot_id != boot_id:
        return True  # the machine was restarted since
    if silent < MIN_SILENCE_US:
        return False
    if suspect and gone:
        return True
    # The renewal interval, and its tolerance.
    renewal_overdue = node.lease // NODE_RENEWALS_PER_LEASE * 6 // 5
    if suspect and silent >= renewal_overdue and in_contact >= silent:
        return True
    return silent >= node.lease and in_contact >= node.lease
