"""Awaited jobs: whether anything can end the waits of a node whose workers all wait."""

from __future__ import annotations

from genba.domain.states import FINAL, State
from genba.node.decide.actions import CheckAwaited
from genba.storage.jobs.claim import DEDICATED_MARK
from genba.storage.store import Store


def can_end(store: Store, node: int, look: CheckAwaited) -> bool:
    """Check whether one of the awaited jobs has ended, runs, or could run somewhere."""
    others = [other for other in store.nodes.live() if other.id != node and other.state == "live"]
    for id in look.ids:
        record = store.job(id)
        if record is None or record.state in FINAL:
            return True
        if record.state == State.RUNNING:
            if id not in look.waiting:
                return True
            continue
        dedicated = DEDICATED_MARK in (record.options or "")
        if look.dedicated_free if dedicated else look.slot_free:
            return True
        if any(record.queue in other.serves and record.task in other.knows for other in others):
            return True
    return False
