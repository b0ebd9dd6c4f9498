"""The keeper: one thread that renews the lease and keeps the queue in motion.

Every node has one, and each does all of it: promote what is due, settle dependencies, expire, take over from the
dead, put aside what nobody can run, prune.  An idle node only reads.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genba.domain.clock import Clock
from genba.enqueue.new_schedule import apply_overrides
from genba.errors import StoreError
from genba.node.database.join import log_task_changes
from genba.node.database.lost_claims import LostClaims
from genba.options.parse import KeepTimes
from genba.options.table import SCHEDULE_OPTIONS
from genba.storage.jobs.conditions import parked_on_unknown
from genba.storage.nodes.dead_nodes import DatabaseContact
from genba.storage.nodes.leftover_processes import end_leftovers
from genba.storage.nodes.nodes import ORPHANS_PER_CALL, DueWork, LeaseRenewal
from genba.storage.nodes.take_over import judge_with_jitter, take_over_dead_nodes
from genba.storage.operators import OperatorRules, keep_of
from genba.storage.records import Claimed, Command, Micros
from genba.storage.schedules.rows import NewSchedule
from genba.storage.store import Store

log = logging.getLogger("genba.node")

PROBE, PROBE_SOON = (
    5.0,
    0.5,
)  # seconds for an answer to the session that listens; after trouble it is suspect
SWEEP = 2.0
SWEEP_SUSPECT = 0.5
PRUNE = 60.0
PRUNE_TIME, PRUNE_PAUSE = 0.05, 0.2  # seconds at a time: the lease has to be renewed, too
PARK = 5.0
KEEP_TOPICS = 3_600_000_000  # a slow listener is cut off after that
REPLAN = 60.0
ABANDONED = 300.0  # after a long night, or when the clock was set: time for others to declare what is theirs
SET_BACK = 1_000_000  # less than this is no jump of the clock
SET_BACK_FOR = 20.0  # seconds: more than a lease, until all have heard the new time
LIMITS = 1.0
KEEP_EVENTS = 7 * 86_400_000_000


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The lease is good again; `sent` is when we asked, `now` what the store's clock said."""

    sent: Micros
    now: Micros
    draining: bool


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """Others have buried us."""


@dataclass(frozen=True, slots=True)
class CommandsReceived:
    commands: list[Command]


@dataclass(frozen=True, slots=True)
class TasksDisabled:
    """The tasks that operators have switched off, all of them."""

    tasks: frozenset[str]


@dataclass(frozen=True, slots=True)
class ConcurrencyChanged:
    """How many jobs of a task operators let run in one worker, where they say so."""

    seats: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkAvailable:
    """There is something to claim."""


@dataclass(frozen=True, slots=True)
class LostClaimFound:
    """These are ours, by a claim whose answer was lost."""

    jobs: list[Claimed]
    claim: int


def _said(
    overrides: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What operators say of these options, by task."""
    found = {
        task: {name: value for name, value in changes.items() if name in names}
        for task, changes in overrides.items()
    }
    return {task: said for task, said in found.items() if said}


class Maintenance(threading.Thread):
    def __init__(
        self,
        store: Store,
        node: int,
        *,
        lease: Micros,
        poll: Micros,
        queues: Sequence[str],
        tasks: Sequence[str],
        conditions: Sequence[str],
        keep: Mapping[str, KeepTimes],
        keep_events: Micros = KEEP_EVENTS,
        max_events: int = 5_000_000,
        schedules: Sequence[NewSchedule],
        boot_id: str | None,
        clock: Clock,
        doubts: LostClaims,
        post: Callable[[Any], None],
    ) -> None:
        super().__init__(name="genba-keeper", daemon=True)
        self._store = store
        self._node = node
        self._lease = lease
        self._poll = poll / 1_000_000
        self._queues = queues
        self._tasks = tasks
        self._conditions = conditions
        self._keep = keep
        self._keep_events, self._max_events = keep_events, max_events
        self._schedules = schedules
        self._declared = False
        self._planned: dict[
            str, dict[str, Any]
        ] = {}  # what operators say of tasks' own schedules, as last declared
        self._alive: list[str] = []
        self._seats: dict[str, int] = {}
        self._abandoned: dict[str, float] = {}
        self._neighbours: frozenset[int] = (
            frozenset()
        )  # other nodes of this machine that lived when we last looked
        self._latest: Micros = 0
        self._set_back_until = 0.0
        self._pruning = False
        self._boot_id = boot_id
        self._clock = clock
        self._doubts = doubts
        self._post = post
        self._poked = threading.Event()
        self._ended = False
        self._patience = DatabaseContact(lease // 2)
        self._due_in: float | None = None
        self._told: Sequence[dict[str, Any]] | None = None
        self.seen: float | None = None  # when the last round was done, by the monotonic clock
        self.trouble: str | None = None  # why the one after it was not
        self._rules = OperatorRules(-1)
        now = self._seconds()
        begin = now + PRUNE * random.random()  # noqa: S311
        self._next = {
            "beat": now,
            "sweep": now,
            "prune": begin,
            "park": now,
            "replan": now,
            "limits": now,
        }

    def serve(
        self,
        tasks: Sequence[dict[str, Any]],
        queues: Sequence[str],
        schedules: Sequence[NewSchedule],
        conditions: Sequence[str],
    ) -> None:
        """The app was imported again: tell what it can run now."""
        self._conditions = conditions
        self._queues = queues
        self._schedules, self._declared = schedules, False
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
            self._poked.wait(self.step())
            self._poked.clear()

    def step(self) -> float:
        """One round, whatever becomes of it; gives the seconds until the next, if nobody pokes before."""
        pause = self._poll
        try:
            self._round()
            self._patience.seen(self._clock.boot())
            if self.trouble is not None:
                log.warning("the database answers again")
            self.seen, self.trouble = time.monotonic(), None
        except Exception as error:  # a keeper that stops would lose the lease of a healthy node
            if not isinstance(error, StoreError):
                log.exception("the keeper stumbled; going on")
            elif self.trouble is None:
                log.warning("cannot keep the queue: %s; trying again", error)
            self.trouble = str(error) or type(error).__name__
            self._patience.broken()
            self._next["beat"] = self._seconds()  # first of all, when it answers again
            self._due_in = None
            pause = 0.5
        due = self._due_in if self._due_in is not None else pause
        beat = self._next["beat"] - self._seconds()
        pause = min(pause, PRUNE_PAUSE) if self._pruning else pause
        return max(0.0, min(pause, due, max(beat, 0.05)))

    def _seconds(self) -> float:
        return self._clock.boot() / 1_000_000

    def _round(self) -> None:
        if self._told is not None:
            self._tell_tasks(self._told)
        beat = self._lease / 5 / 1_000_000 * random.uniform(0.9, 1.1)  # noqa: S311
        if self._turn(
            "beat", beat, early=self._poll / 2
        ):  # rather than to wake up for it soon again
            self._beat()
        if not self._declared:
            self._declare()
        if self._turn("replan", REPLAN):
            self._replan()
        chores = self._chores()
        self._look_for_claimed()
        if self._turn("sweep", SWEEP):
            self._rescue(chores)
        if chores.lines and self._turn("limits", LIMITS):
            self._store.limits.sweep()
            if self._store.wake_for_granted():
                self._post(WorkAvailable())
        if self._turn("park", PARK):
            self._park()
        if self._turn("prune", PRUNE):
            self._prune()
        self._pruning = self._prune_jobs()

    def _declare(self) -> None:
        """What the code says, and operators over it: by the rules of now, or a node that starts would take it back."""
        overrides = self._store.operators.refresh().overrides
        self._planned = _said(overrides, SCHEDULE_OPTIONS)
        holds, gone = apply_overrides(self._schedules, overrides)
        self._store.schedules.declare(holds)
        for name in gone:
            self._store.schedules.undeclare(name)
        self._alive = [one.name for one in holds]
        self._declared = True

    def _tell_tasks(self, tasks: Sequence[dict[str, Any]]) -> None:
        log_task_changes(self._store.nodes.declare(self._node, tasks, self._queues))
        self._tasks = [task["name"] for task in tasks]
        self._keep = {task["name"]: task.get("keep") for task in tasks}
        if self._told is tasks:
            self._told = None
        self._unpark()

    def _turn(self, what: str, every: float, early: float = 0.0) -> bool:
        now = self._seconds()
        if now < self._next[what] - early:
            return False
        self._next[what] = now + every
        return True

    def _beat(self) -> None:
        sent = self._clock.boot()
        beat: LeaseRenewal = self._store.nodes.renew(self._node)
        if not beat.alive:
            self._post(DeclaredDead())
            return
        self._post(LeaseRenewed(sent, beat.now, beat.draining))
        if not self._store.node_wakeups.check(PROBE if self.trouble is None else PROBE_SOON):
            log.warning("the listening connection was lost and is there again")

    def _chores(self) -> DueWork:
        """Do what is due; gives what was seen, for those who need not look if there is nothing."""
        self._store.dependencies.unsettled = False
        rules = self._rules
        queues = [queue for queue in self._queues if queue not in rules.paused]
        tasks = [task for task in self._tasks if task not in rules.disabled]
        chores = self._store.nodes.due_work(self._node, queues, tasks)
        if chores.epoch != rules.epoch:
            self._obey(self._store.operators.refresh())
        if (
            chores.pause_ends is not None
            and chores.pause_ends <= chores.now
            and self._store.operators.end_pauses()
        ):
            self._obey(self._store.operators.refresh())
        if chores.commands:
            self._post(CommandsReceived(self._store.nodes.commands(self._node)))
        work = chores.work
        due = chores.next_due
        if chores.now < self._latest - SET_BACK:
            log.warning("the clock was set back; what would wait for its old time is planned anew")
            self._set_back_until = self._seconds() + SET_BACK_FOR
            self._next["beat"] = self._next["replan"] = 0.0
            self._poked.set()
        self._latest = chores.now
        if chores.next_tick is not None and chores.next_tick <= chores.now:
            work = self._store.ticks.fire() > 0 or work
            self._poked.set()  # for the moments after these
        if due is not None and due <= chores.now:
            while self._store.promote() == 500:
                pass
            work, due = True, self._store.due.next_due()
        if chores.unsettled and self._store.settle():
            work = True
            self._poked.set()  # there may be more: after the beat
        if rules.fair:
            work = self._store.fairness.rank_unranked() > 0 or work
        if chores.next_expiry is not None and chores.next_expiry <= chores.now:
            self._store.expire()
        look = chores.next_look
        if look is not None and look <= chores.now:
            sent, look = self._store.conditions.send_scouts()
            work = sent > 0 or work
        ripe = chores.next_ripe
        if chores.recheck:
            self._store.limits.recheck()
        if ripe is not None and ripe <= chores.now:
            ripe = self._store.limits.serve_due_rates()
        work = self._store.wake_for_granted() or work
        moments = (due, look, chores.pause_ends, chores.next_tick, ripe)
        next_at = min((moment for moment in moments if moment is not None), default=None)
        self._due_in = None if next_at is None else max(0.0, (next_at - chores.now) / 1_000_000)
        if work:
            self._post(WorkAvailable())
        return chores

    def _look_for_claimed(self) -> None:
        for claim in self._doubts.open():
            found = self._doubts.found(claim, self._store.claims.jobs_of_claim(self._node, claim))
            if found:
                log.warning("found %d jobs that were claimed without an answer", len(found))
                self._post(LostClaimFound(found, claim))

    def _obey(self, rules: OperatorRules) -> None:
        """Operators have changed something."""
        before, self._rules = self._rules, rules
        if rules.disabled != before.disabled:
            self._post(TasksDisabled(rules.disabled))
        seats = {
            task: said["concurrency"]
            for task, said in _said(rules.overrides, ("concurrency",)).items()
        }
        if seats != self._seats:
            self._seats = seats
            self._post(ConcurrencyChanged(seats))
        if _said(rules.overrides, SCHEDULE_OPTIONS) != self._planned:
            self._declared = False
            self._poked.set()
        for task in sorted(rules.unreadable - before.unreadable):
            log.error(
                "task %s: what operators have changed cannot be read; what the code says holds",
                task,
            )
        self._next["park"] = self._seconds()
        self._post(WorkAvailable())

    def _replan(self) -> None:
        schedules = self._store.schedules
        # Also those that an operator has given to tasks of ours: nobody else would declare them.
        schedules.still_declared(sorted({*self._alive, *(self._planned.keys() & set(self._tasks))}))
        now = self._seconds()
        self._abandoned = {name: self._abandoned.get(name, now) for name in schedules.abandoned()}
        old = [name for name, since in self._abandoned.items() if now - since >= ABANDONED]
        for name in schedules.pause_abandoned(old) if old else ():
            log.warning("schedule %s is paused: no live node declares it", name)
        set_back = self._seconds() < self._set_back_until
        moved = self._store.ticks.replan(set_back) + self._store.clock_set_back.repair()
        if set_back:
            moved += self._store.clock_set_back.repair_ranks()
            self._next["replan"] = self._seconds() + SET_BACK_FOR / 4  # others may not know it yet
        if moved:
            self._poked.set()

    def _rescue(self, chores: DueWork) -> None:
        lasted = self._patience.lasted(self._clock.boot())
        suspects, here, buried = take_over_dead_nodes(
            self._store.nodes, self._node, self._boot_id, lasted
        )
        for node, taken, ended in buried:
            log.warning(
                "node %s (pid %s on %s) is dead; took over %d jobs",
                node.name,
                node.pid,
                node.host,
                len(taken),
            )
            self._tell_of_leftovers(ended)
            if taken:
                self._post(WorkAvailable())
        if (
            self._neighbours - here
        ):  # buried by somebody elsewhere, who cannot end what they have left here
            self._tell_of_leftovers(end_leftovers(self._neighbours - here))
        self._neighbours = here - {self._node, *(one.node.id for one in buried)}
        more = False
        for lost in self._store.nodes.left_behind() if chores.running else ():
            taken = self._store.nodes.take_over_jobs(lost, judge_with_jitter)
            if taken:
                self._post(WorkAvailable())
            more = more or len(taken) == ORPHANS_PER_CALL
        self._store.locks.ring()
        if chores.sessions:
            self._store.sessions.sweep(lasted)
            self._store.locks.sweep()
        if suspects:
            self._next["sweep"] = self._seconds() + SWEEP_SUSPECT
        if more:
            self._next["sweep"] = self._seconds()
            self._poked.set()  # for the rest, after the beat

    def _tell_of_leftovers(self, ended: int) -> None:
        if ended:
            log.warning("ended %d processes that a dead node had left behind", ended)

    def _park(self) -> None:
        known = self._store.nodes.known_tasks()
        for queue in self._queues:
            while self._store.parked.park_unknown(queue, known):
                pass
        self._unpark()
        if self._store.dependencies.look_for_lost():
            self._store.settle()
        if self._store.operators.keep_parked():
            self._post(WorkAvailable())

    def _unpark(self) -> None:
        """What was put aside because nobody knew its task or a condition of it, and we do."""
        ours = {f"unknown task {task}" for task in self._tasks}
        ours |= {parked_on_unknown(condition) for condition in self._conditions}
        while not self._ended:
            try:
                freed = self._store.parked.reasons_among(ours)
                if not freed or not self._store.parked.unpark(freed):
                    return
                self._post(WorkAvailable())
            except StoreError:
                return

    def _prune(self) -> None:
        now = self._store.now()
        keeps = {
            task: keep_of(said, self._rules.overrides.get(task))
            for task, said in self._keep.items()
        }
        self._store.pruner.begin(keeps, now)
        while self._store.ticks.prune_ticks() >= 500 and not self._ended:
            pass
        while (
            self._store.events.prune(now - self._keep_events, self._max_events) == 1000
            and not self._ended
        ):
            pass
        self._store.messages.sweep(now - KEEP_TOPICS)
        self._store.sessions.remove_stale()
        self._store.fairness.forget_idle_keys()
        self._store.nodes.forget(now - KEEP_EVENTS)
        while self._store.limits.prune() == 500 and not self._ended:
            pass

    def _prune_jobs(self) -> bool:
        """Whether there is more to look at."""
        until = time.monotonic() + PRUNE_TIME
        while not self._ended and time.monotonic() < until:
            if self._store.pruner.step() is None:
                return False
        return True
