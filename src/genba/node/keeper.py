"""The keeper: one thread that renews the lease and keeps the queue in motion.

Every node has one, and each does all of it: promote what is due, settle dependencies, expire, take over from the
dead, put aside what nobody can run, prune.  An idle node only reads.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genba.domain.clock import Clock
from genba.errors import StoreError
from genba.node.endings import judge_orphan
from genba.node.rescuer import Patience, dead
from genba.storage.membership import Beat, Orphan
from genba.storage.records import Command, Ending, Micros
from genba.storage.store import Store

log = logging.getLogger("genba.node")

SWEEP = 2.0
SWEEP_SUSPECT = 0.5
PRUNE = 60.0
PARK = 5.0
KEEP_EVENTS = 7 * 86_400_000_000


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease is good again; `sent` is when we asked, `now` what the store's clock said."""

    sent: Micros
    now: Micros
    draining: bool


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """Others have buried us."""


@dataclass(frozen=True, slots=True)
class Commands:
    commands: list[Command]


@dataclass(frozen=True, slots=True)
class Work:
    """There is something to claim."""


class Keeper(threading.Thread):
    def __init__(
        self,
        store: Store,
        node: int,
        *,
        lease: Micros,
        poll: Micros,
        queues: Sequence[str],
        tasks: Sequence[str],
        keep: Mapping[str, Micros | None],
        boot_id: str | None,
        clock: Clock,
        post: Callable[[Any], None],
    ) -> None:
        super().__init__(name="genba-keeper", daemon=True)
        self._store = store
        self._node = node
        self._lease = lease
        self._poll = poll / 1_000_000
        self._queues = queues
        self._tasks = tasks
        self._keep = keep
        self._boot_id = boot_id
        self._clock = clock
        self._post = post
        self._poked = threading.Event()
        self._ended = False
        self._patience = Patience()
        self._due_in: float | None = None
        self._told: Sequence[dict[str, Any]] | None = None
        self._trouble = False
        now = time.monotonic()
        self._next = {"beat": now, "sweep": now, "prune": now + PRUNE * random.random(), "park": now}  # noqa: S311

    def serve(self, tasks: Sequence[dict[str, Any]]) -> None:
        """The app was imported again: tell what it can run now."""
        self._told = tasks
        self._poked.set()

    def poke(self) -> None:
        """Look now."""
        self._poked.set()

    def finish(self, within: float) -> None:
        self._ended = True
        self._poked.set()
        self.join(within)

    def run(self) -> None:
        self._unpark()
        while not self._ended:
            pause = self._poll
            try:
                self._round()
                self._patience.seen(self._clock.boot())
                if self._trouble:
                    log.warning("the database answers again")
                self._trouble = False
            except Exception as error:  # a keeper that stops would lose the lease of a healthy node
                if not isinstance(error, StoreError):
                    log.exception("the keeper stumbled; going on")
                elif not self._trouble:
                    log.warning("cannot keep the queue: %s; trying again", error)
                self._trouble = True
                self._patience.broken()
                self._due_in = None
                pause = 0.5
            due = self._due_in if self._due_in is not None else pause
            beat = self._next["beat"] - time.monotonic()
            self._poked.wait(max(0.0, min(pause, due, max(beat, 0.05))))
            self._poked.clear()

    def _round(self) -> None:
        if self._told is not None:
            self._tell_tasks(self._told)
        if self._turn("beat", self._lease / 5 / 1_000_000 * random.uniform(0.9, 1.1)):  # noqa: S311
            self._beat()
        self._chores()
        if self._turn("sweep", SWEEP):
            self._rescue()
        if self._turn("park", PARK):
            self._park()
        if self._turn("prune", PRUNE):
            self._prune()

    def _tell_tasks(self, tasks: Sequence[dict[str, Any]]) -> None:
        self._store.nodes.declare(self._node, tasks)
        self._tasks = [task["name"] for task in tasks]
        self._keep = {task["name"]: task.get("keep") for task in tasks}
        if self._told is tasks:
            self._told = None
        self._unpark()

    def _turn(self, what: str, every: float) -> bool:
        now = time.monotonic()
        if now < self._next[what]:
            return False
        self._next[what] = now + every
        return True

    def _beat(self) -> None:
        sent = self._clock.boot()
        beat: Beat = self._store.nodes.renew(self._node)
        if not beat.alive:
            self._post(DeclaredDead())
            return
        self._post(Renewed(sent, beat.now, beat.draining))
        if beat.commands:
            self._post(Commands(beat.commands))
        if not self._store.presence.check():
            log.warning("the listening connection was lost and is there again")

    def _chores(self) -> None:
        self._store.children_wait = False
        chores = self._store.nodes.chores(self._node, self._queues, self._tasks)
        if chores.commands:
            self._post(Commands(self._store.nodes.commands(self._node)))
        work = chores.work
        due = chores.next_due
        if due is not None and due <= chores.now:
            while self._store.promote() == 500:
                pass
            work, due = True, self._store.next_due()
        if chores.unsettled:
            work = self._store.settle() > 0 or work
        if chores.next_expiry is not None and chores.next_expiry <= chores.now:
            self._store.expire()
        self._due_in = None if due is None else max(0.0, (due - chores.now) / 1_000_000)
        if work:
            self._post(Work())

    def _rescue(self) -> None:
        nodes = self._store.nodes.live()
        suspects = {node.id for node in self._store.nodes.suspects(nodes, self._node)}
        gone = {node.id for node in nodes if node.host == socket.gethostname() and not _lives(node.pid)}
        lasted = self._patience.lasted(self._clock.boot())
        for node in dead(nodes, suspects, self._node, self._boot_id, lasted, gone):
            taken = self._store.nodes.bury(node.id, self._judge)
            log.warning("node %s (pid %s on %s) is dead; took over %d jobs", node.name, node.pid, node.host, len(taken))
            if taken:
                self._post(Work())
        for lost in self._store.nodes.left_behind():
            if self._store.nodes.orphans_of(lost, self._judge):
                self._post(Work())
        if suspects:
            self._next["sweep"] = time.monotonic() + SWEEP_SUSPECT

    def _judge(self, orphan: Orphan, now: Micros) -> Ending:
        return judge_orphan(orphan, now, random.random)

    def _park(self) -> None:
        known = self._store.nodes.known_tasks()
        for queue in self._queues:
            while self._store.park_unknown(queue, known) == 500:
                pass
        self._unpark()

    def _unpark(self) -> None:
        """What was put aside because nobody knew its task, and we do."""
        ours = {f"unknown task {task}" for task in self._tasks}
        while not self._ended:
            try:
                freed = ours & self._store.parked_on()
                if not freed or not self._store.unpark(freed):
                    return
                self._post(Work())
            except StoreError:
                return

    def _prune(self) -> None:
        now = self._store.now()
        for task, keep in self._keep.items():
            while keep is not None and self._store.prune(now - keep, task) == 500 and not self._ended:
                pass
        while self._store.prune_events(now - KEEP_EVENTS) == 500 and not self._ended:
            pass
        self._store.nodes.forget(now - KEEP_EVENTS)


def _lives(pid: int) -> bool:
    """Whether this machine has such a process (perhaps another one by now: then it is not known to be gone)."""
    return os.path.exists(f"/proc/{pid}")
