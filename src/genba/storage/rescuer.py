"""When is a node dead?  Decided from what can be seen, with patience; no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from genba.storage.records import Micros, NodeRecord

SHORTEST = 2_000_000  # µs since the last beat: a guard needs that long to end its tree


@dataclass(slots=True)
class Patience:
    """How long this node has seen the database without a break, by its own steady clock."""

    since: Micros | None = None

    def seen(self, now: Micros) -> None:
        if self.since is None:
            self.since = now

    def broken(self) -> None:
        self.since = None

    def lasted(self, now: Micros) -> Micros:
        return 0 if self.since is None else now - self.since


def dead(
    nodes: Sequence[NodeRecord],
    suspects: Collection[int],
    me: int,
    boot_id: str | None,
    lasted: Micros,
    gone: Collection[int] = (),
) -> list[NodeRecord]:
    """Nodes to be buried.

    A lease that is over counts only when we could see the database for a whole lease: after an outage nobody
    could renew.  A suspect (its lock is free) counts after one missed beat, if we have been there since before
    its last one, or if its process is known to be `gone`.  `boot_id` is given where leases are counted since the
    machine's start.
    """
    found = []
    for node in nodes:
        if node.id != me and _is_dead(node, node.id in suspects, node.id in gone, boot_id, lasted):
            found.append(node)
    return found


def _is_dead(node: NodeRecord, suspect: bool, gone: bool, boot_id: str | None, lasted: Micros) -> bool:
    if boot_id is not None and node.boot_id != boot_id:
        return True  # the machine has been started anew since
    silent = node.seen_at - node.beat_at
    if silent < SHORTEST:
        return False
    if suspect and gone:
        return True
    if suspect and silent >= node.lease // 5 * 6 // 5 and lasted >= silent:  # a beat, and what it may be late
        return True
    return node.expired and lasted >= node.lease
