"""What a node decides: an event and the time go in, actions come out.

No clock, no process, no database.

Times are micros of the node's own steady clock; `NodeState.wall` turns one into the store's time.
The brain takes each event and lets its parts decide: `pool_size` how many workers there are,
`claim` what to claim, `dispatch` and `shared_workers` which worker gets what, `conditions` what may
start, `stop` and `cancel` what must end, `results` and `worker_death` how it ended.  All of them
share one `NodeState`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from genba.domain.states import Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide import cancel, stop
from genba.node.decide.actions import (
    Action,
    RequestStopOfAll,
    SignalWorker,
    SweepLeftovers,
    TakeJobsBack,
    WriteSuccesses,
)
from genba.node.decide.claim import ClaimPlanner
from genba.node.decide.conditions import ConditionChecks
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.lending import Lending
from genba.node.decide.pool_size import PoolSize
from genba.node.decide.results import endings_of_refused, take_results
from genba.node.decide.shared_workers import SharedWorkers
from genba.node.decide.state import NodeState, without_attempt, write_endings
from genba.node.decide.worker_death import WorkerDeath, end_all_attempts, end_attempts
from genba.node.decide.worker_state import ClaimedJob, WorkerView
from genba.node.settings import NodeSettings
from genba.node.timing import DRAIN_LEAVE_US, WORKER_EXIT_US, dead_us, safe_us
from genba.node.watch.counters import Counters
from genba.storage.jobs.judge import UNREADABLE_OPTIONS, read_options
from genba.storage.records import Claimed, Ending, JobId, Micros, Success

# Jobs with a mean between these end by ones and twos: their commit waits up to GATHER_US for more.
BRIEF_US = 200
GATHER_US = 8_000

# One call for three fields: access by name costs as much as the rest of the loop in `_take_in`.
_task_options_losses = itemgetter(*map(Claimed._fields.index, ("task", "options", "losses")))
_NO_SEATS: Mapping[int, WorkerView] = MappingProxyType({})


class Brain:
    def __init__(
        self, settings: NodeSettings, tasks: Iterable[str], random: Callable[[], float]
    ) -> None:
        self.tasks = sorted(tasks)
        self._state = NodeState(settings, random)
        self._pool_size = PoolSize(self._state)
        self._lending = Lending(self._state)
        self._dispatcher = Dispatcher(self._state, self._pool_size)
        self._shared_workers = SharedWorkers(self._state, self._dispatcher)
        self._checks = ConditionChecks(self._state)
        self._claims = ClaimPlanner(
            self._state, self._pool_size, self._dispatcher, self._shared_workers
        )
        self._sweep_token = 0
        self._hurried = False

    # what the loop may read and set

    @property
    def settings(self) -> NodeSettings:
        return self._state.settings

    @property
    def concurrency(self) -> Mapping[str, int]:
        """How many jobs of a task run in one worker, where it is more than one."""
        return self._state.concurrency

    @concurrency.setter
    def concurrency(self, by_task: Mapping[str, int]) -> None:
        self._state.concurrency, self._state.seats_outdated = by_task, True

    @property
    def workers_fork(self) -> bool:
        """Whether a worker may fork for each job.

        The app can be forked, and has no lifespan to enter.
        """
        return self._state.workers_fork

    @workers_fork.setter
    def workers_fork(self, may: bool) -> None:
        self._state.workers_fork = may

    @property
    def conditions(self) -> frozenset[str]:
        """The conditions that the node's app has."""
        return self._checks.known

    @conditions.setter
    def conditions(self, names: Iterable[str]) -> None:
        self._checks.known = frozenset(names)

    @property
    def wall_offset(self) -> Micros:
        """The store's wall time minus the node's steady clock."""
        return self._state.wall_offset

    @wall_offset.setter
    def wall_offset(self, micros: Micros) -> None:
        self._state.wall_offset = micros

    @property
    def skew(self) -> Micros:
        """The store's wall time minus this machine's."""
        return self._state.skew

    @skew.setter
    def skew(self, micros: Micros) -> None:
        self._state.skew = micros

    def use_counters(self, counters: Counters) -> None:
        """Count there what is done."""
        self._state.counters = counters

    @property
    def worker_counts(self) -> tuple[int, int]:
        """How many workers are ready, and how many of them have work."""
        ready = [worker for worker in self._state.workers() if worker.ready]
        return len(ready), sum(worker.outstanding > 0 for worker in ready)

    @property
    def draining(self) -> bool:
        return self._state.draining

    @property
    def empty(self) -> bool:
        """Whether leaving now would lose nothing."""
        return self._state.empty

    @property
    def busy(self) -> bool:
        return self._state.busy

    @property
    def timed(self) -> bool:
        """Whether a job has a timer or is being stopped, so that ticks must be short."""
        return self._state.timed

    @property
    def measured(self) -> list[tuple[int, int]]:
        """(slot, pid) of the workers whose use of memory and CPU is limited."""
        return self._state.measured

    def claimed_ids(self) -> list[JobId]:
        """Give the jobs that the node has claimed and not yet let go."""
        return self._state.claimed_ids()

    @property
    def leave_by(self) -> Micros | None:
        """When a draining node must be gone, whatever is left to do."""
        until = self._state.draining_until
        return None if until is None else until + DRAIN_LEAVE_US

    @property
    def may_leave(self) -> bool:
        """Whether no worker is left, or there is no time to wait for one."""
        return not self._state.by_slot or self._hurried

    # processes

    def on_zygote_ready(self, now: Micros) -> list[Action]:
        self._pool_size.can_spawn = True
        return self._flow(now)

    def on_zygote_gone(self) -> list[Action]:
        self._pool_size.can_spawn = False
        return []

    def pid_of(self, slot: int) -> int:
        """Give the pid of a worker that has reported that it is ready; else 0."""
        worker = self._state.by_slot.get(slot)
        return 0 if worker is None else worker.pid

    def on_worker_ready(self, slot: int, pid: int, now: Micros) -> list[Action]:
        worker = self._state.by_slot.get(slot)
        if worker is None:
            return []
        worker.pid, worker.ready, worker.idle_since = pid, True, now
        if worker.outstanding:  # its jobs could not start before
            worker.given_at = worker.seen_since = worker.beat_at = now
        self._pool_size.failed_starts = 0
        return self._flow(now)

    def on_spawn_failed(self, slot: int, now: Micros) -> list[Action]:
        worker = self._state.by_slot.pop(slot, None)
        self._pool_size.back_off(now)
        cancelled = self._state.put_back(worker.unfinished_jobs(), now) if worker else []
        return write_endings(cancelled) + self._flow(now)

    def on_worker_ended(
        self,
        slot: int,
        status: int | None,
        cpu: Micros,
        peak: int,
        view: WorkerView,
        now: Micros,
        out_of_memory: bool = False,
        seats: Mapping[int, WorkerView] = _NO_SEATS,
    ) -> list[Action]:
        """Write how the jobs of a dead worker ended, and queue those that had not started."""
        worker = self._state.by_slot.pop(slot, None)
        if worker is None:
            return []
        never_ready = not worker.ready and worker.dismissed_at is None
        if never_ready:
            self._pool_size.back_off(now)
        death = WorkerDeath(status, cpu, peak, view, out_of_memory, seats)
        endings, unstarted = end_attempts(self._state, worker, death, now)
        actions = write_endings(self._state.put_back(unstarted, now))
        if worker.check is not None:
            actions += self._checks.on_death(worker, status, now)
        if worker.worked:
            self._sweep_token += 1
            self._state.sweeps[self._sweep_token] = endings
            actions.append(SweepLeftovers(self._sweep_token))
        if never_ready and self._pool_size.helpless:
            actions += self._state.release_ready(now)
        return actions + self._flow(now)

    def on_app_changed(self, now: Micros) -> list[Action]:
        """The app's code has changed."""
        return self._pool_size.replace_all(now)

    def on_swept(self, token: int, now: Micros) -> list[Action]:
        """Let a dead worker's jobs go: no process of theirs is left."""
        return write_endings(self._state.sweeps.pop(token, [])) + self._flow(now)

    def on_guard_died(self, views: dict[int, WorkerView], now: Micros) -> list[Action]:
        """Write that the running jobs died with the guard, which is not their fault."""
        self._pool_size.can_spawn = False
        endings: list[Ending] = [
            ending for swept in self._state.sweeps.values() for ending in swept
        ]
        self._state.sweeps.clear()
        died, ended = end_all_attempts(self._state, views, now)
        endings += died
        workers = self._state.workers()
        self._state.by_slot.clear()
        for worker in workers:
            unstarted = [c for c in worker.unfinished_jobs() if c.job.id not in ended]
            endings += self._state.put_back(unstarted, now)
            if worker.check is not None:
                self._checks.on_guard_died(worker, now)
        return write_endings(endings) + self._flow(now)

    # jobs come

    def on_claimed(
        self, jobs: Sequence[Claimed], claim: int, now: Micros, *, failed: bool = False
    ) -> list[Action]:
        self._claims.on_answer(jobs, now, failed=failed)
        return self._take_in(jobs, claim, now)

    def on_claimed_dedicated(
        self, jobs: Sequence[Claimed], claim: int, now: Micros
    ) -> list[Action]:
        self._claims.on_dedicated_answer()
        return self._take_in(jobs, claim, now)

    def on_claimed_awaited(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        self._claims.on_awaited_answer(jobs)
        return self._take_in(jobs, claim, now)

    def on_awaited_checked(self, can_end: bool, now: Micros) -> list[Action]:
        return self._lending.on_checked(can_end, now)

    def on_lost_claim_found(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        """Take in jobs of a claim whose answer was lost."""
        return self._take_in(jobs, claim, now)

    def _take_in(self, jobs: Sequence[Claimed], claim: int, now: Micros) -> list[Action]:
        unreadable: list[Ending] = []
        state = self._state
        state.measure_arguments(jobs)
        concurrency, add = state.concurrency, state.ready.append
        for job in jobs:
            task, options_text, losses = _task_options_losses(job)
            if options_text is None and not losses and task not in concurrency:  # as for most jobs
                add(ClaimedJob(job, claim, None))
                continue
            options = read_options(options_text)
            claimed = ClaimedJob(job, claim, options)
            if options is UNREADABLE_OPTIONS:
                end = AttemptEnd(
                    cause=Cause.EXCEPTION,
                    started=False,
                    wants="hold",
                    reason="its options cannot be read",
                )
                unreadable.append(without_attempt(state.ending(claimed, end, now)))
            else:
                state.queue_for(claimed).append(claimed)
        return write_endings(unreadable) + self._flow(now)

    def on_wakeup(self, now: Micros) -> list[Action]:
        """There may be work."""
        self._claims.on_wakeup()
        return self._flow(now)

    def on_marked(self, ids: Iterable[JobId], now: Micros) -> list[Action]:
        """Let jobs start whose start is written."""
        marking = self._state.marking
        jobs = [marking.pop(id) for id in ids if id in marking]
        for claimed in jobs:
            claimed.marked = True
        return write_endings(self._state.put_back(jobs, now)) + self._flow(now)

    def on_mark_lost(self, ids: Iterable[JobId]) -> None:
        """Forget jobs that are not this node's any more."""
        for id in ids:
            self._state.marking.pop(id, None)
            self._state.cancelled.pop(id, None)

    def _flow(self, now: Micros) -> list[Action]:
        """Give queued jobs to free workers, start workers and claim jobs as needed."""
        state = self._state
        if state.draining:
            return self._flow_out(now)
        actions: list[Action] = []
        if state.reserve:
            self._lending.keep_reserve(actions, now)
        if state.unchecked:
            self._checks.check(actions, now)
        if state.dedicated:
            self._dispatcher.give_dedicated(actions, now)
        if state.concurrency or state.shared or state.seats_outdated:
            self._shared_workers.give_shared(actions, now)
        self._dispatcher.give_exclusive(actions, now)
        self._dispatcher.give_ready(actions, now)
        self._pool_size.start_workers(actions, now)
        if state.settings.pool == "ondemand":
            self._dispatcher.give_new_workers(actions, now)
        claims: list[Action] = []
        self._claims.claim_more(claims, now)
        return claims + actions  # the database works while the loop gives out jobs

    def _flow_out(self, now: Micros) -> list[Action]:
        """Give back queued jobs and dismiss idle workers, while the node drains."""
        actions = self._state.release_ready(now)
        for worker in self._state.workers():
            if not worker.outstanding:
                self._state.dismiss(actions, worker, now)
        return actions

    # jobs end

    def on_results(self, slot: int, results: Sequence[Sequence[Any]], now: Micros) -> list[Action]:
        worker = self._state.by_slot.get(slot)
        if worker is None:
            return []
        later: list[Action] = []
        successes, endings = take_results(self._state, later, worker, results, now)
        self._pool_size.recycle(later, worker, results)
        if worker.leaving and not worker.outstanding:
            self._state.dismiss(later, worker, now)
        actions: list[Action] = []
        if successes:
            actions.append(WriteSuccesses(successes, self._patience(successes)))
        return actions + write_endings(endings) + later + self._flow(now)

    def _patience(self, successes: Sequence[Success]) -> Micros:
        """Give how long a commit may wait for more successes.

        Not if these have slots of a limit.
        """
        mean = self._state.mean
        if not BRIEF_US <= mean < GATHER_US:
            return 0
        more = any(w.outstanding * mean > GATHER_US for w in self._state.workers())
        return GATHER_US if more and not any(success.limited for success in successes) else 0

    def on_conditions_checked(self, slot: int, answer: Sequence[Any], now: Micros) -> list[Action]:
        """A worker has checked the conditions of a job."""
        worker = self._state.by_slot.get(slot)
        if worker is None:
            return []
        actions = self._checks.on_checked(worker, answer, now)
        if worker.leaving and not worker.outstanding:
            self._state.dismiss(actions, worker, now)
        return actions + self._flow(now)

    def on_limit_slots(
        self, ours: Sequence[JobId], lost: Sequence[JobId], now: Micros
    ) -> list[Action]:
        """The limit slots that conditions ask for are taken, or there are none."""
        return self._checks.on_limit_slots(ours, lost, now) + self._flow(now)

    def on_refused(self, successes: Sequence[Success], now: Micros) -> list[Action]:
        """The store has refused these successes."""
        return write_endings(endings_of_refused(self._state, successes))

    # requests of users and operators

    def on_cancel(
        self, id: JobId, how: str, reason: str | None, now: Micros, attempt: int | None = None
    ) -> list[Action]:
        """Cancel or kill a job of this node; `attempt` is None for whichever it is at."""
        actions, waited = cancel.cancel(self._state, id, how, reason, now, attempt)
        return actions + self._flow(now) if waited else actions

    def on_concurrency(self, by_task: Mapping[str, int], now: Micros) -> list[Action]:
        """Run so many jobs of these tasks in one worker; those that run now are left alone."""
        self.concurrency = by_task
        return self._flow(now)

    def on_disabled(self, tasks: Iterable[str], now: Micros) -> list[Action]:
        """Start no more jobs of these tasks."""
        return cancel.disable(self._state, frozenset(tasks), now) + self._flow(now)

    def on_taken_back(self, slot: int, count: int, now: Micros) -> list[Action]:
        """Queue the last `count` jobs of a worker again: it had not read their tokens."""
        worker = self._state.by_slot.get(slot)
        if worker is None:
            return []
        actions = write_endings(cancel.take_back(self._state, worker, count, now))
        if worker.leaving and not worker.outstanding:
            self._state.dismiss(actions, worker, now)
        return actions + self._flow(now)

    def on_settings(self, settings: NodeSettings, now: Micros) -> list[Action]:
        """The pool has another size or mode."""
        return self._pool_size.resize(settings, now) + self._flow(now)

    def on_load_gate(self, closed: bool, now: Micros) -> list[Action]:
        """The machine has enough to do, or can do more again."""
        self._claims.gate_closed = closed
        return self._flow(now)

    def on_paused_writer(
        self, slot: int, views: dict[int, WorkerView], now: Micros
    ) -> list[Action]:
        """A process of this worker is stopped (SIGSTOP) in the middle of a write."""
        actions: list[Action] = []
        worker = self._state.by_slot.get(slot)
        if worker is not None:
            stop.stop_paused_writer(self._state, actions, worker, views, now)
        return actions

    def on_renewed(self, sent: Micros, lease: Micros) -> None:
        """The lease was renewed; it counts from when the renewal was sent."""
        self._state.safe_until = sent + safe_us(lease)
        self._state.dead_by = sent + dead_us(lease)

    def on_drain(self, now: Micros, *, hurry: bool = False) -> list[Action]:
        """Claim nothing more, let jobs run until the grace is over, and give back the rest."""
        state = self._state
        first = not state.draining
        self._hurried = self._hurried or hurry
        deadline = now if hurry else now + state.settings.grace
        state.draining_until = (
            deadline if first else min(deadline, state.draining_until or deadline)
        )
        actions = state.release_ready(now)
        if first:
            actions.append(RequestStopOfAll())
            actions += [TakeJobsBack(w.slot) for w in state.by_slot.values() if w.outstanding]
        return actions

    # time passes

    def on_tick(self, now: Micros, views: dict[int, WorkerView]) -> list[Action]:
        """Look at each worker: stop what runs too long, dismiss what is idle."""
        state = self._state
        actions: list[Action] = []
        for worker in list(state.by_slot.values()):
            view = views.get(worker.slot)
            if view is not None and (worker.outstanding or worker.host is not None):
                stop.watch_job(state, actions, worker, view, now)
            if view is not None and view.signalled:
                stop.release_signalled(state, actions, worker, views, now)
            stop.escalate(state, actions, worker, view, now)
            if worker.dismissed_at is not None and now - worker.dismissed_at >= WORKER_EXIT_US:
                actions.append(SignalWorker(worker.slot, signal.SIGKILL))
        self._shared_workers.take_back_spare(actions)
        self._lending.update(actions, views, now)
        self._checks.kill_late(actions, now)
        if state.draining_until is None:
            self._pool_size.shrink(actions, now)
            self._pool_size.dismiss_unneeded(actions, now)
            actions += self._dispatcher.release_surplus(now)
        elif now >= state.draining_until:
            stop.end_drain(state, actions, views, state.draining_until, now)
        return actions + self._flow(now)
