"""A node whose brain, writer, maintenance and store are the real ones, and whose loop, guard and workers are played."""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from genba import wire
from genba.errors import StoreError
from genba.node.database.events import (
    AwaitedJobsChecked,
    AwaitedJobsClaimed,
    CommandsReceived,
    DeclaredDead,
    DedicatedJobsClaimed,
    EndingsWritten,
    JobsClaimed,
    LeaseRenewed,
    LimitSlotsTaken,
    LostClaimFound,
    SlotsFreed,
    StartsMarked,
    SuccessesRefused,
    TasksDisabled,
    WorkAvailable,
)
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.node.database.writer import Writer
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.decide.worker_state import WorkerView
from genba.node.settings import NodeSettings
from genba.storage.records import NewNode
from genba.storage.schedules.rows import NewSchedule
from tests.sim.locks import Hold, SimJob, Wish
from tests.sim.world import BOOT, LEASE, MS, SECOND, Gone, Process, Run, World, a_store

TASK = "sim.work"
SHARED = "sim.shared"  # several at a time in one worker, as async tasks are
TASKS = [TASK, SHARED]
DOOR = "sim.door"  # a condition
GUARD = LEASE * 8 // 10


class Worker(Process):
    """A process that runs what it is given, as its arguments say; it outlives a pause of its node.

    Or a seat in one, its host; they die together.
    """

    def __init__(self, world: World, node: SimNode, slot: int, host: Worker | None = None) -> None:
        super().__init__(world)
        self.slot, self.host = slot, host
        self.seats: dict[int, Worker] = {}
        self._node = node
        self._unread: deque[tuple[int, wire.JobMessage]] = deque()
        self.results: list[wire.JobResult] = []
        self.place, self.phase = 0, wire.IDLE
        self.run: Run | None = None
        self._wish: Wish | None = None
        self.locked = False
        self._leaving = False
        self._patience = 0  # micros that it goes on after SIGTERM

    def give(self, serial: int, jobs: list[wire.JobMessage]) -> None:
        self._unread.extend((wire.place(serial, index), job) for index, job in enumerate(jobs))
        self._world.at(0.1 * MS, self._next, self)

    def ask(self, serial: int) -> None:
        """Whether the door is open: no more often than not, while things go wrong."""
        self._world.at(self._world.rng.uniform(0.1, 5) * MS, partial(self._answer, serial), self)

    def _answer(self, serial: int) -> None:
        shut = self._world.happens(0.6)
        self._world.hits.add("not ready" if shut else "ready")
        self._node.answer(
            self, [serial, [] if shut else [[]], SECOND // 2 if shut else None, DOOR, None]
        )

    def share(self, slots: Sequence[int]) -> None:
        """From now on what it is given runs at its seats."""
        self.seats = {slot: Worker(self._world, self._node, slot, self) for slot in slots}
        for seat in self.seats.values():
            seat.alive = self.alive  # its node may not know yet that it is dead

    def all(self) -> list[Worker]:
        """It, and its seats."""
        return [self, *self.seats.values()]

    def take_back(self) -> int:
        count = len(self._unread)
        self._unread.clear()
        return count

    def leave(self) -> None:
        self._leaving = True
        self._world.at(0.1 * MS, self._next, self)

    def _next(self) -> None:
        host = self.host or self
        for seat in host.seats.values() or [host]:
            if seat.run is None and host._unread:
                seat._begin(*host._unread.popleft())
        if host._leaving and not (host._unread or any(each.run for each in host.all())):
            host.die(0)

    def _begin(self, place: int, job: wire.JobMessage) -> None:
        self.place, self.phase = place, wire.RUNNING
        self.run = Run(
            job.id, job.attempt, job.claim, self._world.now, disturbed=self._node.disturbed
        )
        self._world.runs.append(self.run)
        orders: dict[str, Any] = json.loads(job.args)
        fate = orders["fates"][min(job.attempt, len(orders["fates"])) - 1]
        self._patience = orders.get("stubborn", 0) * MS
        then = (
            partial(self._crash, self.run)
            if fate == "crash"
            else partial(self._end, self.run, job, fate)
        )
        self.locked, self._wish = False, None
        if "lock" in orders:
            fence = SimJob(self, (job.id, job.attempt, job.claim))
            self._wish = Wish(
                self._world,
                self,
                fence,
                self._with_lock(orders, then),
                partial(self._raise, self.run),
            )
            self._wish.step()
        else:
            self._world.at(orders["ms"] * MS, then, self)

    @property
    def cut(self) -> bool:  # type: ignore[override]
        """With its node: they are on one machine."""
        return self._node.cut

    def _with_lock(
        self, orders: dict[str, Any], then: Callable[[], None]
    ) -> Callable[[Hold], None]:
        """It works for for the time in its orders, releases the lock or does not, and ends."""

        def work(hold: Hold) -> None:
            self._world.hits.add("a job has a lock")
            assert self.run is not None
            self.run.hold = hold
            if orders["lock"] == "gives back":
                assert self._wish is not None
                self._world.at(
                    orders["ms"] * MS * 0.9, partial(self._give_back, self.run, self._wish), self
                )
            self._world.at(orders["ms"] * MS, then, self)

        return work

    def _give_back(self, run: Run, wish: Wish) -> None:
        if self.run is run:
            wish.give_back()

    def _raise(self, run: Run) -> None:
        if self.run is run:
            self._over(run, wire.RAISED, b'{"type":"LeaseLost","message":"sim"}')

    def _crash(self, run: Run) -> None:
        if self.run is run:
            self.die(signal.SIGSEGV)

    def _end(self, run: Run, job: wire.JobMessage, fate: str) -> None:
        if self.run is not run:
            return
        outcome, payload = wire.RETURNED, json.dumps([job.attempt, job.claim]).encode()
        if fate == "raise":
            outcome, payload = wire.RAISED, b'{"type":"ValueError","message":"sim"}'
        self._over(run, outcome, payload)
        run.completed = fate == "return"

    def term(self) -> None:
        if self.run is not None:
            self._world.at(self._patience + MS, partial(self._stopped, self.run), self)

    def _stopped(self, run: Run) -> None:
        if self.run is run:
            self._over(run, wire.STOPPED, b'{"type":"Stopped","message":"sim"}')

    def _over(self, run: Run, outcome: int, payload: bytes) -> None:
        wall, spent = self._world.clock.now(), self._world.now - run.began
        serial, index = self.place >> 24, self.place & 0xFFFFFF
        extra = {"locks": True} if self.locked else None
        result = wire.JobResult(serial, index, outcome, payload, wall - spent, wall, 5, 6, extra)
        (self.host or self).results.append(result)
        run.end(self._world.now)
        self.run, self.phase = None, wire.DONE
        if self._wish is not None:
            self._wish.drop()
        self._world.at(0.1 * MS, partial(self._node.hear, self.host or self), self._node)
        self._world.at(0.1 * MS, self._next, self)

    def die(self, status: int) -> None:
        if self.host is not None:
            self.host.die(status)
        elif self.alive:
            self.end()
            self._world.at(MS, partial(self._node.lost, self, status), self._node)

    def end(self) -> None:
        for each in self.all():
            each.alive = False
            if each.run is not None:
                if each.run.hold is not None and each.run.hold.ended is None:
                    self._world.hits.add("died with a lock")
                each.run.end(self._world.now)

    def view(self) -> WorkerView:
        return WorkerView(self.place, self.phase, 0, False, None, locked=self.locked)


class SimNode(Process):
    def __init__(self, world: World, name: str, schedules: list[NewSchedule]) -> None:
        super().__init__(world)
        self.cut = False
        self.name = name
        self.disturbed = False
        self._absent = False  # was paused, or cut off: then others may take it for dead
        self._schedules = schedules
        self.id = world.rng.getrandbits(62) + 1
        self._inbox: deque[Any] = deque()
        self._workers: dict[int, Worker] = {}
        self._beat_at = world.now
        self._guarded = True
        self._writer_due = False
        self._maintenance_at: int | None = None
        self.store = a_store(world, self)
        self._settings = NodeSettings(
            target="sim", name=name, pool="static", min=2, max=2, grace=2 * SECOND
        )
        self.brain = Brain(self._settings, TASKS, world.rng.random)
        self.brain.concurrency = {SHARED: 3}
        self.brain.conditions = [DOOR]
        lost_claims = LostClaims(world.clock)
        self._writer = Writer("sim", self.store, self.id, TASKS, lost_claims, self._inbox.append)
        self._maintenance = Maintenance(
            self.store,
            self.id,
            lease=LEASE,
            poll=2 * SECOND,
            queues=["default"],
            tasks=TASKS,
            conditions=(DOOR,),
            keep={},
            schedules=schedules,
            boot_id=BOOT,
            clock=world.clock,
            lost_claims=lost_claims,
            post=self._inbox.append,
        )

    # life

    def start(self) -> None:
        """Until it is a member; a database that does not answer only makes it late."""
        try:
            self.store.install()
            self.store.events.node = self.id
            self._world.nodes[self.id] = self
            self.store.nodes.join(
                NewNode(
                    id=self.id,
                    name=self.name,
                    host="sim",
                    boot_id=BOOT,
                    pid=1,
                    slots=2,
                    lease=LEASE,
                    queues=("default",),
                    tasks=tuple({"name": task} for task in TASKS),
                    version="0",
                )
            )
            self.brain.wall_offset = self.store.now() - self._world.now
        except (StoreError, Gone):
            self.die()
            return
        self._perform(self.brain.on_zygote_ready(self._world.now))
        self._wake_maintenance(0)
        self._tick()
        self._watch()

    def die(self) -> None:
        """SIGKILL: its guard ends the workers a moment later; another incarnation comes."""
        if not self.alive:
            return
        self.alive = False
        self._world.nodes.pop(self.id, None)
        for worker in self._workers.values():
            self._touch()
            self._world.at(
                self._world.rng.uniform(1, 100) * MS, partial(worker.die, signal.SIGKILL)
            )
        again = SimNode(self._world, f"{self.name}'", self._schedules)
        self._world.at(self._world.rng.uniform(0.2, 3) * SECOND, again.start)

    def pause(self) -> None:
        super().pause()
        self._absent = True
        self._touch()

    def _touch(self) -> None:
        """Note that what runs here may rightly be repeated elsewhere."""
        self.disturbed = True
        for each in self._all():
            if each.run is not None:
                each.run.disturbed = True

    def set_cut(self, cut: bool) -> None:
        self.cut = cut
        self._absent = self._absent or cut
        self._touch()

    def drain(self) -> None:
        if not self.brain.draining:
            self._writer.write_draining()
            self._perform(self.brain.on_drain(self._world.now))

    def _all(self) -> list[Worker]:
        return [each for worker in self._workers.values() for each in worker.all()]

    def _at(self, slot: int) -> Worker | None:
        return next((each for each in self._all() if each.slot == slot), None)

    def workers(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.alive]

    # the guard

    def _watch(self) -> None:
        """It ends the tree when the node's loop has been silent for too long, whatever the node does meanwhile."""
        world = self._world
        if not self.alive:
            return
        if self._guarded and world.now - self._beat_at >= GUARD:
            self._guarded = False
            world.hits.add("guard")
            self._touch()
            for worker in self.workers():
                worker.end()
            world.at(0, self._guard_died, self)
        world.at(LEASE / 20, self._watch)

    def _guard_died(self) -> None:
        views = {}
        for each in self._all():
            self._take_in(each)
            views[each.slot] = each.view()
        self._workers.clear()
        self._perform(self.brain.on_guard_died(views, self._world.now))
        self._beat_at, self._guarded = self._world.now, True
        self._perform(self.brain.on_zygote_ready(self._world.now))

    # the loop

    def _tick(self) -> None:
        world, brain = self._world, self.brain
        self._beat_at = world.now
        for each in self._all():
            if each.alive:
                self._take_in(each)
        self._perform(
            brain.on_tick(world.now, {each.slot: each.view() for each in self._all() if each.alive})
        )
        if brain.draining and brain.empty and not self._workers and self._writer.all_written:
            try:
                self.store.nodes.leave(self.id)
            except StoreError:
                pass
            except Gone:  # killed on its way out
                return
            self.die()
            return
        world.at(
            50 * MS if brain.timed or brain.draining else 250 * MS if brain.busy else SECOND,
            self._tick,
            self,
        )

    def rung(self) -> None:
        self._writer.on_wakeup()
        self._wake_maintenance(0)
        self._perform(self.brain.on_wakeup(self._world.now))

    def hear(self, worker: Worker) -> None:
        if worker.alive:
            self._take_in(worker)

    def answer(self, worker: Worker, said: list[Any]) -> None:
        self._world.at(0.1 * MS, partial(self._hear_answer, worker, said), self)

    def _hear_answer(self, worker: Worker, said: list[Any]) -> None:
        if worker.alive and self._workers.get(worker.slot) is worker:
            self._perform(self.brain.on_conditions_checked(worker.slot, said, self._world.now))

    def _take_in(self, worker: Worker) -> None:
        results, worker.results = worker.results, []
        if results and self._at(worker.slot) is worker:
            self._perform(self.brain.on_results(worker.slot, results, self._world.now))

    def lost(self, worker: Worker, status: int) -> None:
        if self._workers.get(worker.slot) is worker:
            self._take_in(worker)
            seats = {slot: seat.view() for slot, seat in worker.seats.items()}
            del self._workers[worker.slot]
            orders = (worker.slot, status, 0, 0, worker.view(), self._world.now, False, seats)
            self._perform(self.brain.on_worker_ended(*orders))

    def _ready(self, worker: Worker) -> None:
        if worker.alive:
            self._perform(
                self.brain.on_worker_ready(worker.slot, 100 + worker.slot, self._world.now)
            )

    def _swept(self, token: int) -> None:
        self._perform(self.brain.on_swept(token, self._world.now))

    def _perform(self, actions: list[do.Action]) -> None:
        world, writer = self._world, self._writer
        for action in actions:
            match action:
                case do.SpawnWorker(slot):
                    worker = self._workers[slot] = Worker(world, self, slot)
                    world.at(5 * MS, partial(self._ready, worker), self)
                case do.GiveJobs(slot, serial, jobs):
                    if (target := self._at(slot)) is not None:
                        target.give(serial, jobs)
                case do.SetSeats(slot, seats):
                    if slot in self._workers:
                        world.hits.add("in a shared worker")
                        self._workers[slot].share(seats)
                case do.StopSeat(seat):
                    if (target := self._at(seat)) is not None:
                        target.term()
                case do.CheckConditions(slot, serial):
                    if slot in self._workers:
                        self._workers[slot].ask(serial)
                case do.ReportNotReady(answers):
                    writer.report_not_ready(answers)
                case do.ReportConditionsHold(key):
                    writer.report_conditions_hold(key)
                case do.TakeJobsBack(slot):
                    if slot in self._workers:
                        count = self._workers[slot].take_back()
                        self._perform(self.brain.on_taken_back(slot, count, world.now))
                case do.SignalWorker(slot, number):
                    if slot in self._workers:
                        victim = self._workers[slot]
                        victim.term() if number == signal.SIGTERM else victim.die(number)
                case do.DismissWorker(slot):
                    if slot in self._workers:
                        self._workers[slot].leave()
                case do.SweepLeftovers(token):
                    world.at(2 * MS, partial(self._swept, token), self)
                case do.WriteSuccesses(ended):
                    writer.write_successes(ended)
                case do.WriteEndings(ended):
                    writer.write_endings(ended)
                case do.ClaimJobs(wants, only):
                    writer.claim(wants, only)
                case do.ClaimDedicated(queues, count):
                    writer.claim_dedicated(queues, count)
                case do.ClaimAwaited() | do.CheckAwaited():
                    writer.look_at_awaited(action)
                case do.MarkStarted(jobs, first):
                    writer.mark_started(jobs, first)
                case (
                    do.RequestStop()
                    | do.RequestStopOfAll()
                    | do.SuggestStop()
                    | do.WriteProgress()
                    | do.WriteEvent()
                ):
                    pass  # jobs here look at nothing and tell nothing
                case _:
                    raise AssertionError(f"no simulation for {action}")
        if writer._pending:
            self._wake_writer(0.3 * MS)
        self._read_inbox()

    def _read_inbox(self) -> None:
        brain = self.brain
        while self._inbox and self.alive:
            event, now = self._inbox.popleft(), self._world.now
            match event:
                case JobsClaimed(jobs, claim, failed):
                    self._perform(brain.on_claimed(jobs, claim, now, failed=failed))
                case DedicatedJobsClaimed(jobs, claim):
                    self._perform(brain.on_claimed_dedicated(jobs, claim, now))
                case AwaitedJobsClaimed(jobs, claim):
                    self._perform(brain.on_claimed_awaited(jobs, claim, now))
                case AwaitedJobsChecked(can_end):
                    self._perform(brain.on_awaited_checked(can_end, now))
                case SuccessesRefused(lost):
                    self._perform(brain.on_refused(lost, now))
                case EndingsWritten(again):
                    if again or self.store.dependencies.unsettled:
                        self._wake_maintenance(0)
                case StartsMarked(ours, lost):
                    brain.on_mark_lost(lost)
                    self._perform(brain.on_marked(ours, now))
                case WorkAvailable() | SlotsFreed():
                    self._perform(brain.on_wakeup(now))
                case LeaseRenewed(sent, wall, draining):
                    brain.on_renewed(sent, LEASE)
                    brain.wall_offset = wall - now
                    self._writer.on_wakeup()
                    if draining:
                        self.drain()
                case CommandsReceived(commands):
                    for command in commands:
                        if command.job_id is not None:
                            orders = (
                                command.job_id,
                                command.verb,
                                command.data,
                                now,
                                command.attempt,
                            )
                            self._perform(brain.on_cancel(*orders))
                case TasksDisabled(tasks):
                    self._perform(brain.on_disabled(tasks, now))
                case LostClaimFound(jobs, claim):
                    self._perform(brain.on_lost_claim_found(jobs, claim, now))
                case LimitSlotsTaken(ours, lost):
                    self._perform(brain.on_limit_slots(ours, lost, now))
                case DeclaredDead():
                    self._world.hits.add("declared dead")
                    self._world.false_alarms += not self._absent
                    self.die()
                case _:
                    raise AssertionError(f"no handler for {event}")

    # its threads

    def _wake_writer(self, delay: float) -> None:
        if not self._writer_due:
            self._writer_due = True
            self._world.at(delay, self._step_writer, self)

    def _step_writer(self) -> None:
        self._writer_due = False
        try:
            done = self._writer.step()
        except Gone:
            return
        if not done:
            self._wake_writer(self._world.rng.uniform(0.1, 2) * SECOND)
        self._read_inbox()

    def _wake_maintenance(self, delay: float) -> None:
        """Then, or before if it is awake before."""
        moment = self._world.now + int(delay)
        if self._maintenance_at is None or moment < self._maintenance_at:
            self._maintenance_at = moment
            self._world.at(delay, partial(self._step_maintenance, moment), self)

    def _step_maintenance(self, moment: int) -> None:
        if self._maintenance_at != moment:
            return
        self._maintenance_at = None
        try:
            pause = self._maintenance.step()
        except Gone:
            return
        self._wake_maintenance(max(MS, pause * SECOND))
        self._read_inbox()
