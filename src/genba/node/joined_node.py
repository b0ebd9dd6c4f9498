"""A node that has joined: it takes events of workers, database and operators to the brain.

`loop.py` waits for the events; `perform.py` performs what the brain decides.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from genba.domain.clock import Clock, skew
from genba.domain.duration import SECOND
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.errors import BadOption
from genba.node.database import events as db
from genba.node.database.exit_deadline import ExitDeadline
from genba.node.database.join import queues_of
from genba.node.database.threads import DatabaseThreads
from genba.node.decide.actions import Action
from genba.node.decide.brain import Brain
from genba.node.decide.shared_workers import concurrency_of
from genba.node.perform import Performer
from genba.node.processes.channel import Channel, Channels
from genba.node.processes.pool import LeftoversSwept, Pool, SpawnFailed, WorkerEnded
from genba.node.processes.wakeup import WakeupSocket
from genba.node.settings import NodeSettings
from genba.node.timing import MONITOR_US, SLOW_TICK_US, TICK_US, guard_seconds, renewal_us
from genba.node.watch.machine import use_of
from genba.node.watch.monitor import Monitor
from genba.storage.records import Command, Micros
from genba.storage.store import Store

if TYPE_CHECKING:
    from genba.node.watch.http import MetricsServer

log = logging.getLogger("genba.node")

EXIT_OK, EXIT_FAILED = 0, 1


@dataclass(slots=True)
class NodeExit:
    """Whether the node is at its end, and its exit code.

    After a lost lease it has none, and starts again under a new identity.
    """

    over: bool = False
    code: int | None = None
    lost_lease: bool = False


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node has before it joins."""

    id: int
    clock: Clock
    pool: Pool
    channels: Channels
    wakeup: WakeupSocket
    monitor: Monitor
    metrics: MetricsServer | None
    exit: NodeExit
    inbox: Collection[Any]  # events of other threads that the loop has not read yet
    post: Callable[[Any], None]  # adds one, from another thread


class JoinedNode:
    def __init__(
        self, parts: NodeParts, store: Store, settings: NodeSettings, app: Mapping[str, Any]
    ) -> None:
        """`app` is what the app declares, as the zygote reports it."""
        self.settings = settings
        self._parts = parts
        self._clock = parts.clock
        self._pool = parts.pool
        self._channels = parts.channels
        self._monitor = parts.monitor
        self._metrics = parts.metrics
        self._exit = parts.exit
        self._store = store
        self._app = app
        self._lease = int(app["lease"])
        self._concurrency_overrides: Mapping[str, int] = {}
        self._deadline = ExitDeadline(parts.clock)
        self._last_tick: Micros = 0
        self._last_beat: Micros = 0
        self._last_monitor: Micros = 0
        counters = parts.metrics.counters if parts.metrics else None
        tasks = [task["name"] for task in app["tasks"]]
        self._brain = brain = Brain(settings, tasks, random.random)
        brain.concurrency = concurrency_of(app, self._concurrency_overrides)
        self._use_forks_and_conditions(app)
        self._threads = DatabaseThreads(
            store, parts.id, settings, dict(app), parts.clock, parts.post, counters
        )
        if counters is not None:
            brain.use_counters(counters)
        brain.wall_offset = store.now() - self._now()
        self._performer = Performer(
            brain,
            self._threads,
            parts.channels,
            parts.pool,
            parts.clock,
            counters,
            settings.debug,
        )

    def start(self) -> None:
        if self._metrics:
            self._metrics.on_joined(self._store, self._lease, self.settings)
        self._threads.start()
        self._beat()
        log.info(
            "node %s is ready: %d tasks, queues %s, up to %d workers",
            self.settings.name,
            len(self._brain.tasks),
            ", ".join(self.settings.queues),
            self.settings.slots,
        )
        if self._app.get("loop"):
            log.info("async jobs run on %s", self._app["loop"])
        self._watch_machine(self._now())  # before the first claim: the gate may be closed
        self._perform(self._brain.on_zygote_ready(self._now()))

    def close(self) -> None:
        """Write what is left and leave; other nodes have the jobs already if the lease was lost."""
        self._write_worker_events()
        self._threads.finish()

    def cancel_deadline(self) -> None:
        self._deadline.cancel()

    def patience(self) -> float:
        """Give how many seconds the loop may wait for events."""
        brain = self._brain
        if brain.draining or brain.timed:
            return TICK_US / SECOND
        return (SLOW_TICK_US if brain.busy else self.settings.poll) / SECOND

    @property
    def draining(self) -> bool:
        return self._brain.draining

    def _now(self) -> Micros:
        return self._clock.boot()

    def _perform(self, actions: list[Action]) -> None:
        self._performer.perform(actions)

    # the app

    def _use_forks_and_conditions(self, app: Mapping[str, Any]) -> None:
        self._brain.workers_fork = self._pool.forks and not app.get("lifespans")
        self._brain.conditions = app.get("conditions", ())

    def set_app(self, app: dict[str, Any]) -> None:
        """Use what the app declares, which a new zygote has imported again."""
        self._store.age_step = int(app["age_step"])
        settings = self.settings.serving(queues_of(app))
        self._use_forks_and_conditions(app)
        self._threads.set_app(app, list(settings.queues))
        if settings is not self.settings:
            self.settings = settings
            self._perform(self._brain.on_settings(settings, self._now()))
        self._app = app
        self._brain.concurrency = concurrency_of(app, self._concurrency_overrides)
        names = sorted(task["name"] for task in app["tasks"])
        if names != self._brain.tasks:
            log.info("the app has %d tasks now", len(names))
            self._brain.tasks = names
        self._perform(self._brain.on_zygote_ready(self._now()))

    def on_app_changed(self) -> None:
        self._perform(self._brain.on_app_changed(self._now()))

    # the database

    def on_database_event(self, event: Any) -> None:
        """Take what a database thread reports."""
        brain, now = self._brain, self._now()
        match event:
            case db.JobsClaimed(jobs, claim, failed):
                self._perform(brain.on_claimed(jobs, claim, now, failed=failed))
            case db.DedicatedJobsClaimed(jobs, claim):
                self._perform(brain.on_claimed_dedicated(jobs, claim, now))
            case db.AwaitedJobsClaimed(jobs, claim):
                self._perform(brain.on_claimed_awaited(jobs, claim, now))
            case db.AwaitedJobsChecked(can_end):
                self._perform(brain.on_awaited_checked(can_end, now))
            case db.EndingsWritten(again):
                self._wake_for_children(again)
            case db.SuccessesRefused(refused):
                self._perform(brain.on_refused(refused, now))
            case db.WorkAvailable() | db.SlotsFreed():
                self._perform(brain.on_wakeup(now))
            case db.StartsMarked(ours, lost):
                brain.on_mark_lost(lost)
                self._perform(brain.on_marked(ours, now))
            case db.LimitSlotsTaken(ours, lost):
                self._perform(brain.on_limit_slots(ours, lost, now))
            case db.LostClaimFound(jobs, claim):
                self._perform(brain.on_lost_claim_found(jobs, claim, now))
            case _:
                self._on_maintenance_event(event)

    def _on_maintenance_event(self, event: Any) -> None:
        now = self._now()
        match event:
            case db.LeaseRenewed(sent, wall, draining):
                self._on_renewed(sent, wall, draining)
            case db.TasksDisabled(tasks):
                self._perform(self._brain.on_disabled(tasks, now))
                self.tick(force=True)
            case db.ConcurrencyChanged(by_task):
                self._concurrency_overrides = by_task
                concurrency = concurrency_of(self._app, by_task)
                self._perform(self._brain.on_concurrency(concurrency, now))
            case db.CommandsReceived(commands):
                for command in commands:
                    self._on_command(command)
            case db.DeclaredDead():
                log.error("this node was declared dead; other nodes have taken over its jobs")
                self._exit.lost_lease = self._exit.over = True

    def _wake_for_children(self, again: bool) -> None:
        """Have maintenance look now: children wait, or a retry may be due before its next look."""
        if again or self._store.dependencies.unsettled:
            self._threads.maintenance.wake()

    def _on_renewed(self, sent: Micros, wall: Micros, draining: bool) -> None:
        brain, now = self._brain, self._now()
        brain.on_renewed(sent, self._lease)
        brain.wall_offset = wall - now
        brain.skew = skew(wall, self._clock.now(), now - sent)
        # A lost wake-up has cleared the flag: it must be set again, or no producer wakes this node.
        self._threads.on_wakeup()
        if draining and not brain.draining:
            self.drain(hurry=False)

    def on_wakeup(self) -> None:
        self._store.node_wakeups.clear()
        self._parts.wakeup.follow(self._store.node_wakeups)
        self._threads.on_wakeup()
        self._perform(self._brain.on_wakeup(self._now()))
        self._threads.maintenance.wake()  # after the claim has begun

    # operators

    def _on_command(self, command: Command) -> None:
        match command.verb:
            case "cancel" | "kill" if command.job_id is not None:
                verb, job, reason = command.verb, command.job_id, command.data
                actions = self._brain.on_cancel(job, verb, reason, self._now(), command.attempt)
                self._perform(actions)
                self.tick(force=True)
            case "drain" | "stop":
                hurry = command.verb == "stop"
                log.info("an operator asks this node to %s", command.verb)
                self.drain(hurry)
                self.tick(force=True)
            case "set":
                unreadable = {UNREADABLE: command.data} if command.data else {}
                self.change_settings(read_json(command.data, dict[str, Any], unreadable))
            case _:
                log.warning("unknown command: %s", command.verb)

    def drain(self, hurry: bool) -> None:
        self._exit.code = EXIT_OK
        if not self._brain.draining:
            self._threads.writer.write_draining()
        self._perform(self._brain.on_drain(self._now(), hurry=hurry))
        if self._brain.leave_by is not None:
            self._deadline.set(self._brain.leave_by)

    def change_settings(self, changes: dict[str, Any]) -> None:
        changed = changed_settings(self.settings, changes)
        if changed is not None:
            self.settings = changed
            self._threads.writer.write_pool(changed.slots, changed.pool_settings)
            self._perform(self._brain.on_settings(changed, self._now()))

    # workers

    def read_channel(self, channel: Channel) -> None:
        if channel.has_unsent:
            channel.flush()
        self._take_in(channel)
        self._channels.watch(channel)

    def _take_in(self, channel: Channel) -> None:
        """Take all that a worker has sent; its first message may come with a result."""
        slot = channel.slot
        results, ready = channel.receive()
        if ready is not None:
            self._monitor.worker_started(slot, ready)
            self._perform(self._brain.on_worker_ready(slot, ready, self._now()))
        if results:
            self._perform(self._brain.on_results(slot, results, self._now()))
        while channel.condition_results:
            answer = channel.condition_results.pop(0)
            self._perform(self._brain.on_conditions_checked(slot, answer, self._now()))

    def on_pool_event(self, event: Any) -> None:
        match event:
            case SpawnFailed(slot, reason):
                log.warning("a worker could not be started: %s", reason)
                self._on_spawn_failed(slot)
            case WorkerEnded(slot, pid, status, cpu, peak):
                self._monitor.worker_ended(slot, pid, status)
                self._on_worker_ended(slot, status, cpu, peak)
            case LeftoversSwept(token, _killed, unkillable):
                if unkillable:
                    log.error(
                        "%d processes that a job left behind belong to another user", unkillable
                    )
                self._perform(self._brain.on_swept(token, self._now()))

    def on_zygote_gone(self) -> None:
        self._perform(self._brain.on_zygote_gone())

    def on_guard_died(self) -> None:
        views = self._channels.last_views()
        for channel in self._channels.all():
            self._take_in(channel)  # what it has sent comes before its death
        self._perform(self._brain.on_guard_died(views, self._now()))
        for channel in self._channels.all():
            self._channels.drop(channel.slot)

    def _on_spawn_failed(self, slot: int) -> None:
        """Note a failed start; if the worker has come and worked all the same, its death."""
        channel = self._channels.get(slot)
        if channel is not None:
            self._take_in(channel)
        if pid := self._brain.pid_of(slot):
            self._monitor.worker_ended(slot, pid, None)
            self._on_worker_ended(slot, None, 0, 0)
        else:
            self._channels.drop(slot)
            self._perform(self._brain.on_spawn_failed(slot, self._now()))

    def _on_worker_ended(self, slot: int, status: int | None, cpu: int, peak: int) -> None:
        channel = self._channels.get(slot)
        if channel is None:
            return
        self._take_in(channel)  # what it has sent comes before its death
        view = channel.last_view()
        seats = {seat.slot: seat.last_view() for seat in channel.seats}
        self._channels.drop(slot)
        signalled = status is not None and os.WIFSIGNALED(status)
        out_of_memory = signalled and self._monitor.out_of_memory_kill()
        now = self._now()
        self._perform(
            self._brain.on_worker_ended(slot, status, cpu, peak, view, now, out_of_memory, seats)
        )

    # time

    def tick(self, force: bool = False) -> None:
        brain, now = self._brain, self._now()
        if now - self._last_beat >= renewal_us(self._lease):
            self._beat()
        step = TICK_US if brain.draining or brain.timed else SLOW_TICK_US
        if not force and now - self._last_tick < step:
            return
        self._last_tick = now
        for channel in self._channels.all():
            # A result may be there without a message while the next job runs already.
            self.read_channel(channel)
        views = self._channels.views()
        for slot, pid in brain.measured:
            if slot in views:
                views[slot] = replace(views[slot], use=use_of(pid))
        self._perform(brain.on_tick(now, views))
        if now - self._last_monitor >= MONITOR_US:
            self._last_monitor = now
            self._watch_machine(now)
        self._parts.wakeup.follow(self._store.node_wakeups)
        self._check_end()

    def _check_end(self) -> None:
        brain = self._brain
        for name in self._threads.dead_threads():
            log.critical("thread %s has died; this node ends, and its jobs go to others", name)
            self._exit.code, self._exit.over = EXIT_FAILED, True
        written = self._threads.all_written and not self._parts.inbox
        if brain.draining and brain.empty and brain.may_leave and written:
            self._exit.over = True

    def _watch_machine(self, now: Micros) -> None:
        """Look at the load gate, at workers that came and went, and at a paused write."""
        closed = self._monitor.check_gate(self.settings.gate, now)
        if closed is not None:
            self._perform(self._brain.on_load_gate(closed, now))
        if self._metrics:
            maintenance = self._threads.maintenance
            self._metrics.note(self._brain, maintenance, self._monitor.gate_reason)
        self._write_worker_events()
        self._check_paused_writer(now)

    def _check_paused_writer(self, now: Micros) -> None:
        """End a process that is stopped in the middle of a write.

        The store's lock file says which one it is; the database cannot be asked, as it is locked.
        """
        pid = self._monitor.paused_writer(self._store.writer())
        if pid is None:
            return
        slot = self._pool.above(pid)
        if slot is None or self.settings.debug:
            log.warning("process %d is stopped in the middle of a write and blocks all others", pid)
        else:
            log.error(
                "ended process %d: it was stopped in the middle of a write and blocked all others",
                pid,
            )
            self._perform(self._brain.on_paused_writer(slot, self._channels.views(), now))

    def _write_worker_events(self) -> None:
        events = self._monitor.take_events()
        if events:
            self._threads.writer.write_events(events)

    def _beat(self) -> None:
        """Have the guard end everything unless the next beat comes before the lease ends."""
        self._last_beat = self._now()
        self._pool.beat(guard_seconds(self._lease))


def changed_settings(settings: NodeSettings, changes: dict[str, Any]) -> NodeSettings | None:
    """Give the settings with these changes.

    None if nothing changes, or the changes make no sense.
    """
    try:
        changed = settings.changed(**changes)
    except (BadOption, TypeError) as error:
        log.error("the settings stay as they are: %s", error)
        return None
    if changed == settings:
        return None
    log.info("now a %s pool, min %d, max %d", changed.pool, changed.min, changed.max)
    return changed
