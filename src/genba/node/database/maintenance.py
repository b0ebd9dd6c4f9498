"""The thread that renews the lease and keeps the queue moving.

Every node has one, and each does everything: promote jobs that are due, settle dependencies,
expire, take over from dead nodes (`rescue.py`), park jobs that no node can run, and prune
(`prune.py`).  On an idle node it only reads.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from genba.domain.clock import Clock
from genba.domain.duration import SECOND
from genba.enqueue.new_schedule import apply_overrides
from genba.errors import StoreError
from genba.node.database.events import (
    CommandsReceived,
    ConcurrencyChanged,
    DeclaredDead,
    LeaseRenewed,
    LostClaimFound,
    TasksDisabled,
    WorkAvailable,
)
from genba.node.database.join import log_task_changes
from genba.node.database.lost_claims import LostClaims
from genba.node.database.prune import Pruning
from genba.node.database.rescue import Rescue
from genba.node.timing import (
    ABANDONED_SECONDS,
    KEEP_EVENTS_US,
    LIMITS_SECONDS,
    PARK_SECONDS,
    PROBE_SECONDS,
    PROBE_SOON_SECONDS,
    PRUNE_PAUSE_SECONDS,
    PRUNE_SECONDS,
    RENEWAL_JITTER,
    REPLAN_SECONDS,
    RETRY_SECONDS,
    SET_BACK_SECONDS,
    SET_BACK_US,
    SHORTEST_PAUSE_SECONDS,
    SWEEP_SECONDS,
    SWEEP_SUSPECT_SECONDS,
    renewal_us,
)
from genba.options.parse import KeepTimes
from genba.options.table import SCHEDULE_OPTIONS
from genba.storage.jobs.conditions import parked_on_unknown
from genba.storage.nodes.dead_nodes import DatabaseContact
from genba.storage.nodes.nodes import DueWork, LeaseRenewal
from genba.storage.operators import OperatorRules, keep_of
from genba.storage.records import Micros
from genba.storage.schedules.rows import NewSchedule
from genba.storage.store import Store

log = logging.getLogger("genba.node")

PROMOTED_AT_ONCE = 500
DEFAULT_MAX_EVENTS = 5_000_000


def _overrides_of(
    overrides: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Give what operators have changed of these options, by task."""
    by_task = {
        task: {name: value for name, value in changes.items() if name in names}
        for task, changes in overrides.items()
    }
    return {task: changes for task, changes in by_task.items() if changes}


class Maintenance(threading.Thread):
    def __init__(  # noqa: PLR0913 - the node names each once, by keyword
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
        keep_events: Micros = KEEP_EVENTS_US,
        max_events: int = DEFAULT_MAX_EVENTS,
        schedules: Sequence[NewSchedule],
        boot_id: str | None,
        clock: Clock,
        lost_claims: LostClaims,
        post: Callable[[Any], None],
    ) -> None:
        super().__init__(name="genba-maintenance", daemon=True)
        self._store = store
        self._node = node
        self._lease = lease
        self._poll_seconds = poll / SECOND
        self._queues = queues
        self._tasks = tasks
        self._conditions = conditions
        self._keep = keep
        self._schedules = schedules
        self._clock = clock
        self._lost_claims = lost_claims
        self._post = post
        self._contact = DatabaseContact(lease // 2)
        self._pruning = Pruning(store, keep_events, max_events, lambda: self._ended)
        self._rescue = Rescue(store, node, boot_id, post)
        self._woken = threading.Event()
        self._ended = False
        self._new_tasks: Sequence[dict[str, Any]] | None = None  # not yet written
        self._declared = False  # the schedules, as code and operators have them now
        self._declared_names: list[str] = []
        self._schedule_overrides: dict[str, dict[str, Any]] = {}  # when they were declared
        self._rules = OperatorRules(-1)
        self._concurrency: dict[str, int] = {}  # where operators have changed it
        self._abandoned: dict[str, float] = {}  # schedules that no node declares, since when
        self._latest: Micros = 0  # the store's time at the last look
        self._set_back_until = 0.0
        self._prunes_on = False
        self._due_in: float | None = None
        self.last_round_at: float | None = None  # by the monotonic clock
        self.trouble: str | None = None  # why the round after that failed
        now = self._seconds()
        self._next = {
            "renew": now,
            "sweep": now,
            "prune": now + PRUNE_SECONDS * random.random(),  # noqa: S311
            "park": now,
            "replan": now,
            "limits": now,
        }

    def set_app(
        self,
        tasks: Sequence[dict[str, Any]],
        queues: Sequence[str],
        schedules: Sequence[NewSchedule],
        conditions: Sequence[str],
    ) -> None:
        """Use what an app declares that was imported again."""
        self._conditions = conditions
        self._queues = queues
        self._schedules, self._declared = schedules, False
        self._new_tasks = tasks
        self._woken.set()

    def wake(self) -> None:
        """Do a round now."""
        self._woken.set()

    def finish(self, within: float) -> None:
        self._ended = True
        self._woken.set()
        self.join(within)

    # rounds

    def run(self) -> None:
        self._unpark()
        while not self._ended:
            self._woken.wait(self.step())
            self._woken.clear()

    def step(self) -> float:
        """Do one round, whatever happens in it; gives the seconds until the next."""
        pause = self._poll_seconds
        try:
            self._round()
            self._contact.confirm(self._clock.boot())
            if self.trouble is not None:
                log.warning("the database answers again")
            self.last_round_at, self.trouble = time.monotonic(), None
        except Exception as error:  # without this thread, a healthy node would lose its lease
            if not isinstance(error, StoreError):
                log.exception("an error in the maintenance of the queue; going on")
            elif self.trouble is None:
                log.warning("cannot maintain the queue: %s; trying again", error)
            self.trouble = str(error) or type(error).__name__
            self._contact.lose()
            self._next["renew"] = self._seconds()  # the first thing when the database answers again
            self._due_in = None
            pause = RETRY_SECONDS
        due = self._due_in if self._due_in is not None else pause
        renew = self._next["renew"] - self._seconds()
        pause = min(pause, PRUNE_PAUSE_SECONDS) if self._prunes_on else pause
        return max(0.0, min(pause, due, max(renew, SHORTEST_PAUSE_SECONDS)))

    def _seconds(self) -> float:
        return self._clock.boot() / SECOND

    def _round(self) -> None:
        if self._new_tasks is not None:
            self._write_tasks(self._new_tasks)
        interval = renewal_us(self._lease) / SECOND * random.uniform(*RENEWAL_JITTER)  # noqa: S311
        # Half a poll early rather than waking up for it soon again.
        if self._is_time("renew", interval, early=self._poll_seconds / 2):
            self._renew()
        if not self._declared:
            self._declare_schedules()
        if self._is_time("replan", REPLAN_SECONDS):
            self._replan()
        due = self._do_due_work()
        self._find_lost_claims()
        if self._is_time("sweep", SWEEP_SECONDS):
            self._sweep(due)
        if due.lines and self._is_time("limits", LIMITS_SECONDS):
            self._store.limits.sweep()
            if self._store.wake_for_granted():
                self._post(WorkAvailable())
        if self._is_time("park", PARK_SECONDS):
            self._park()
        if self._is_time("prune", PRUNE_SECONDS):
            self._pruning.begin(self._keep_times())
        self._prunes_on = self._pruning.step()

    def _is_time(self, duty: str, interval: float, early: float = 0.0) -> bool:
        now = self._seconds()
        if now < self._next[duty] - early:
            return False
        self._next[duty] = now + interval
        return True

    def _renew(self) -> None:
        sent = self._clock.boot()
        renewal: LeaseRenewal = self._store.nodes.renew(self._node)
        if not renewal.alive:
            self._post(DeclaredDead())
            return
        self._post(LeaseRenewed(sent, renewal.now, renewal.draining))
        within = PROBE_SECONDS if self.trouble is None else PROBE_SOON_SECONDS
        if not self._store.node_wakeups.check(within):
            log.warning("the listening connection was lost and is there again")

    def _sweep(self, due: DueWork) -> None:
        suspects, more = self._rescue.sweep(due, self._contact.duration(self._clock.boot()))
        if suspects:
            self._next["sweep"] = self._seconds() + SWEEP_SUSPECT_SECONDS
        if more:
            self._next["sweep"] = self._seconds()
            self._woken.set()  # for the rest, after the renewal

    # what is due

    def _do_due_work(self) -> DueWork:
        """Do what is due.

        Gives what was seen, so that other duties need not look if there is nothing.
        """
        store, rules = self._store, self._rules
        store.dependencies.unsettled = False
        queues = [queue for queue in self._queues if queue not in rules.paused]
        tasks = [task for task in self._tasks if task not in rules.disabled]
        due = store.nodes.due_work(self._node, queues, tasks)
        self._follow_operators(due)
        self._notice_set_back(due.now)
        work = due.work
        work = self._fire_schedules(due) or work
        promoted, next_due = self._promote(due)
        work = promoted or work
        if due.unsettled and store.settle():
            work = True
            self._woken.set()  # there may be more: after the renewal
        if rules.fair:
            work = store.fairness.rank_unranked() > 0 or work
        if due.next_expiry is not None and due.next_expiry <= due.now:
            store.expire()
        next_check = due.next_look
        if next_check is not None and next_check <= due.now:
            sent, next_check = store.conditions.send_scouts()
            work = sent > 0 or work
        next_rate = self._serve_limits(due)
        work = store.wake_for_granted() or work
        self._wait_until(due, next_due, next_check, due.pause_ends, due.next_tick, next_rate)
        if work:
            self._post(WorkAvailable())
        return due

    def _follow_operators(self, due: DueWork) -> None:
        operators = self._store.operators
        if due.epoch != self._rules.epoch:
            self._use_rules(operators.refresh())
        pause_over = due.pause_ends is not None and due.pause_ends <= due.now
        if pause_over and operators.end_pauses():
            self._use_rules(operators.refresh())
        if due.commands:
            self._post(CommandsReceived(self._store.nodes.commands(self._node)))

    def _notice_set_back(self, now: Micros) -> None:
        """Renew and plan anew if the store's clock was set back.

        What was planned by its old time would come too late.
        """
        if now < self._latest - SET_BACK_US:
            log.warning("the clock was set back; planning anew what waits for its old time")
            self._set_back_until = self._seconds() + SET_BACK_SECONDS
            self._next["renew"] = self._next["replan"] = 0.0
            self._woken.set()
        self._latest = now

    def _fire_schedules(self, due: DueWork) -> bool:
        if due.next_tick is None or due.next_tick > due.now:
            return False
        fired = self._store.ticks.fire()
        self._woken.set()  # for the ticks after these
        return fired > 0

    def _promote(self, due: DueWork) -> tuple[bool, Micros | None]:
        """Let scheduled jobs wait that are due.

        Gives whether there were any, and when the next is due.
        """
        if due.next_due is None or due.next_due > due.now:
            return False, due.next_due
        while self._store.promote() == PROMOTED_AT_ONCE:
            pass
        return True, self._store.due.next_due()

    def _serve_limits(self, due: DueWork) -> Micros | None:
        """Give freed slots to jobs that wait for them; gives when the next rate allows a job."""
        if due.recheck:
            self._store.limits.recheck()
        if due.next_ripe is not None and due.next_ripe <= due.now:
            return self._store.limits.serve_due_rates()
        return due.next_ripe

    def _wait_until(self, due: DueWork, *moments: Micros | None) -> None:
        first = min((moment for moment in moments if moment is not None), default=None)
        self._due_in = None if first is None else max(0.0, (first - due.now) / SECOND)

    def _find_lost_claims(self) -> None:
        for claim in self._lost_claims.open():
            jobs = self._lost_claims.found(
                claim, self._store.claims.jobs_of_claim(self._node, claim)
            )
            if jobs:
                log.warning("found %d jobs that were claimed without an answer", len(jobs))
                self._post(LostClaimFound(jobs, claim))

    # tasks, operators, schedules

    def _write_tasks(self, tasks: Sequence[dict[str, Any]]) -> None:
        log_task_changes(self._store.nodes.declare(self._node, tasks, self._queues))
        self._tasks = [task["name"] for task in tasks]
        self._keep = {task["name"]: task.get("keep") for task in tasks}
        if self._new_tasks is tasks:
            self._new_tasks = None
        self._unpark()

    def _use_rules(self, rules: OperatorRules) -> None:
        """Follow what operators have changed."""
        before, self._rules = self._rules, rules
        if rules.disabled != before.disabled:
            self._post(TasksDisabled(rules.disabled))
        changed = _overrides_of(rules.overrides, ("concurrency",))
        concurrency = {task: options["concurrency"] for task, options in changed.items()}
        if concurrency != self._concurrency:
            self._concurrency = concurrency
            self._post(ConcurrencyChanged(concurrency))
        if _overrides_of(rules.overrides, SCHEDULE_OPTIONS) != self._schedule_overrides:
            self._declared = False
            self._woken.set()
        for task in sorted(rules.unreadable - before.unreadable):
            log.error("task %s: cannot read what operators have changed; using the code's", task)
        self._next["park"] = self._seconds()
        self._post(WorkAvailable())

    def _declare_schedules(self) -> None:
        """Declare the code's schedules with the changes that operators have made to them."""
        overrides = self._store.operators.refresh().overrides
        self._schedule_overrides = _overrides_of(overrides, SCHEDULE_OPTIONS)
        schedules, removed = apply_overrides(self._schedules, overrides)
        self._store.schedules.declare(schedules)
        for name in removed:
            self._store.schedules.undeclare(name)
        self._declared_names = [schedule.name for schedule in schedules]
        self._declared = True

    def _replan(self) -> None:
        """Pause schedules that no node declares, and plan ticks that are missing."""
        schedules = self._store.schedules
        # Also those that operators have given to tasks of this app: no other node declares them.
        ours = {*self._declared_names, *(self._schedule_overrides.keys() & set(self._tasks))}
        schedules.still_declared(sorted(ours))
        now = self._seconds()
        self._abandoned = {name: self._abandoned.get(name, now) for name in schedules.abandoned()}
        old = [name for name, since in self._abandoned.items() if now - since >= ABANDONED_SECONDS]
        for name in schedules.pause_abandoned(old) if old else ():
            log.warning("schedule %s is paused: no live node declares it", name)
        set_back = self._seconds() < self._set_back_until
        moved = self._store.ticks.replan(set_back) + self._store.clock_set_back.repair()
        if set_back:
            moved += self._store.clock_set_back.repair_ranks()
            # Again soon, as other nodes may not know yet that the clock was set back.
            self._next["replan"] = self._seconds() + SET_BACK_SECONDS / 4
        if moved:
            self._woken.set()

    def _keep_times(self) -> dict[str, KeepTimes]:
        """Give how long jobs of each task are kept, with the operators' changes."""
        overrides = self._rules.overrides
        return {task: keep_of(times, overrides.get(task)) for task, times in self._keep.items()}

    # parked jobs

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
        """Release jobs that were parked for an unknown task or condition that this node knows."""
        reasons = {f"unknown task {task}" for task in self._tasks}
        reasons |= {parked_on_unknown(condition) for condition in self._conditions}
        while not self._ended:
            try:
                parked = self._store.parked.reasons_among(reasons)
                if not parked or not self._store.parked.unpark(parked):
                    return
                self._post(WorkAvailable())
            except StoreError:
                return
