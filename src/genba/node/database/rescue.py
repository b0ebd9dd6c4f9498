"""Rescue: takes over the jobs of dead nodes, and ends dead client sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from genba.node.database.events import WorkAvailable
from genba.storage.nodes.leftover_processes import end_leftovers
from genba.storage.nodes.nodes import ORPHANS_PER_CALL, DueWork
from genba.storage.nodes.take_over import judge_with_jitter, take_over_dead_nodes
from genba.storage.records import Micros
from genba.storage.store import Store

log = logging.getLogger("genba.node")


class Rescue:
    def __init__(
        self, store: Store, node: int, boot_id: str | None, post: Callable[[Any], None]
    ) -> None:
        self._store = store
        self._node = node
        self._boot_id = boot_id
        self._post = post
        # Other nodes of this machine that lived at the last look.
        self._neighbours: frozenset[int] = frozenset()

    def sweep(self, due: DueWork, contact: Micros) -> tuple[bool, bool]:
        """Look once, having seen the database for `contact` without a break.

        Gives (a node is suspect, there are more jobs to take over).
        """
        suspects = self._take_over_dead(contact)
        more = self._take_over_left_behind() if due.running else False
        self._store.locks.wake_called()
        if due.sessions:
            self._store.sessions.sweep(contact)
            self._store.locks.sweep()
        return suspects, more

    def _take_over_dead(self, contact: Micros) -> bool:
        nodes = self._store.nodes
        suspects, here, dead = take_over_dead_nodes(nodes, self._node, self._boot_id, contact)
        for node, jobs, ended in dead:
            log.warning(
                "node %s (pid %s on %s) is dead; took over %d jobs",
                node.name,
                node.pid,
                node.host,
                len(jobs),
            )
            _log_leftovers(ended)
            if jobs:
                self._post(WorkAvailable())
        if self._neighbours - here:
            # Nodes elsewhere have taken over their jobs, but cannot end their processes on this
            # machine.
            _log_leftovers(end_leftovers(self._neighbours - here))
        self._neighbours = here - {self._node, *(death.node.id for death in dead)}
        return bool(suspects)

    def _take_over_left_behind(self) -> bool:
        """Take over running jobs of nodes that are gone already; True if there are more."""
        more = False
        for node in self._store.nodes.left_behind():
            taken = self._store.nodes.take_over_jobs(node, judge_with_jitter)
            if taken:
                self._post(WorkAvailable())
            more = more or len(taken) == ORPHANS_PER_CALL
        return more


def _log_leftovers(ended: int) -> None:
    if ended:
        log.warning("ended %d processes that a dead node had left behind", ended)
