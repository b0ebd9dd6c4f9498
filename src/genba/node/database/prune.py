"""Pruning: deletes old jobs, events, messages and records of dead nodes, a little at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from genba.node.timing import KEEP_EVENTS_US, KEEP_TOPICS_US, PRUNE_STEP_SECONDS
from genba.options.parse import KeepTimes
from genba.storage.records import Micros
from genba.storage.store import Store


class Pruning:
    def __init__(
        self, store: Store, keep_events: Micros, max_events: int, ended: Callable[[], bool]
    ) -> None:
        self._store = store
        self._keep_events = keep_events
        self._max_events = max_events
        self._ended = ended

    def begin(self, keeps: Mapping[str, KeepTimes]) -> None:
        """Delete old events and the like, and begin anew with jobs; `keeps` has times by task."""
        store, now = self._store, self._store.now()
        store.pruner.begin(keeps, now)
        while store.ticks.prune_ticks() >= 500 and not self._ended():
            pass
        oldest = now - self._keep_events
        while store.events.prune(oldest, self._max_events) == 1000 and not self._ended():
            pass
        store.messages.sweep(now - KEEP_TOPICS_US)
        store.sessions.remove_stale()
        store.fairness.forget_idle_keys()
        store.nodes.forget(now - KEEP_EVENTS_US)
        while store.limits.prune() == 500 and not self._ended():
            pass

    def step(self) -> bool:
        """Delete jobs for a short time; False if none is left to look at."""
        until = time.monotonic() + PRUNE_STEP_SECONDS
        while not self._ended() and time.monotonic() < until:
            if self._store.pruner.step() is None:
                return False
        return True
