"""Performs the actions that the brain returns: on workers, channels and database threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from genba.domain.clock import Clock
from genba.domain.duration import SECOND
from genba.node.database.threads import DatabaseThreads
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.log import describe_action, log_endings
from genba.node.processes.channel import Channels
from genba.node.processes.pool import Pool
from genba.node.watch.counters import Counters

log = logging.getLogger("genba.node")


class Performer:
    def __init__(
        self,
        brain: Brain,
        threads: DatabaseThreads,
        channels: Channels,
        pool: Pool,
        clock: Clock,
        counters: Counters | None,
        debug: bool,
    ) -> None:
        self._brain = brain
        self._threads = threads
        self._channels = channels
        self._pool = pool
        self._clock = clock
        self._counters = counters
        self._debug = debug
        self._methods = self._by_action()

    def perform(self, actions: list[do.Action]) -> None:
        if self._debug:
            for line in (line for action in actions for line in describe_action(action)):
                log.debug("%s", line)
        for action in actions:
            self._methods[type(action)](action)

    def _by_action(self) -> Mapping[type, Callable[[Any], object]]:
        channels, writer = self._channels, self._threads.writer
        return {
            do.SpawnWorker: self._spawn_worker,
            do.DismissWorker: self._dismiss_worker,
            do.SetSeats: lambda a: channels.set_seats(a.slot, a.seats),
            do.SignalWorker: lambda a: self._pool.signal(a.slot, a.number),
            do.SweepLeftovers: lambda a: self._pool.sweep(a.token),
            do.GiveJobs: self._give_jobs,
            do.TakeJobsBack: self._take_jobs_back,
            do.CheckConditions: self._check_conditions,
            do.RefuseWait: lambda a: channels.refuse_wait(a.slot, a.place),
            do.SuggestStop: lambda a: channels.suggest_stop(a.slot, a.place),
            do.RequestStop: lambda a: channels.request_stop(a.slot, a.place),
            do.RequestStopOfAll: lambda a: channels.request_stop_of_all(),
            do.StopSeat: lambda a: channels.stop_seat(a.seat, a.place),
            do.KillJobProcess: lambda a: channels.kill_job_process(a.slot, a.place),
            do.ClaimJobs: lambda a: self._threads.claimer.claim(a.wants, a.tasks),
            do.ClaimDedicated: lambda a: self._threads.claimer.claim_dedicated(a.queues, a.count),
            do.ClaimAwaited: lambda a: self._threads.claimer.look_at_awaited(a),
            do.CheckAwaited: lambda a: self._threads.claimer.look_at_awaited(a),
            do.TakeLimitSlots: lambda a: writer.take_slots(a.wanted),
            do.WriteSuccesses: self._write_successes,
            do.WriteEndings: self._write_endings,
            do.MarkStarted: lambda a: writer.mark_started(a.jobs, a.first),
            do.WriteProgress: lambda a: writer.write_progress(a.progress),
            do.WriteEvent: lambda a: writer.write_events([(a.kind, {"ids": [a.job], **a.more})]),
            do.ReportNotReady: lambda a: writer.report_not_ready(a.answers),
            do.ReportConditionsHold: lambda a: writer.report_conditions_hold(a.key),
        }

    def _spawn_worker(self, action: do.SpawnWorker) -> None:
        channel = self._channels.open(action.slot)
        if not self._pool.spawn(action.slot, *channel.worker_ends()):
            self._channels.drop(action.slot)
            self.perform(self._brain.on_spawn_failed(action.slot, self._clock.boot()))

    def _dismiss_worker(self, action: do.DismissWorker) -> None:
        if self._channels.has(action.slot):
            self._channels.dismiss(action.slot)

    def _give_jobs(self, action: do.GiveJobs) -> None:
        # Without a channel the worker could not start, and the brain has its jobs back.
        if self._channels.has(action.slot):
            self._channels.give(action.slot, action.serial, action.jobs, action.each)

    def _take_jobs_back(self, action: do.TakeJobsBack) -> None:
        tokens = self._channels.take_back(action.slot)
        self.perform(self._brain.on_taken_back(action.slot, tokens, self._clock.boot()))

    def _check_conditions(self, action: do.CheckConditions) -> None:
        slot, serial = action.slot, action.serial
        self._channels.check_conditions(slot, serial, action.job, action.conditions)

    def _write_successes(self, action: do.WriteSuccesses) -> None:
        patience = action.patience / SECOND
        self._threads.success_writer.write_successes(action.ended, patience)

    def _write_endings(self, action: do.WriteEndings) -> None:
        self._threads.writer.write_endings(action.ended)
        log_endings(action.ended)
        if self._counters is not None:
            self._counters.count_endings(action.ended)
