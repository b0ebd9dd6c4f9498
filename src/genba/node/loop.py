"""The node's loop: it performs what the brain decides.

One thread waits for everything at once: workers, guard and zygote, the bell, signals, and what the desks and the
keeper have to tell.  It never waits for the database.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import random
import secrets
import selectors
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from genba.domain.clock import SystemClock, skew
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.errors import BadOption, GenbaError, StoreError
from genba.node.database.exit_deadline import ExitDeadline
from genba.node.database.join import join, queues_of, set_title
from genba.node.database.maintenance import (
    CommandsReceived,
    ConcurrencyChanged,
    DeclaredDead,
    LeaseRenewed,
    LostClaimFound,
    TasksDisabled,
    WorkAvailable,
)
from genba.node.database.threads import DatabaseThreads
from genba.node.database.writer import (
    DedicatedJobsClaimed,
    EndingsWritten,
    JobsClaimed,
    LimitSlotsTaken,
    SlotsFreed,
    StartsMarked,
    SuccessesRefused,
)
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.decide.shared_workers import concurrency_of
from genba.node.log import describe_action, log_endings, log_environ, set_up_log
from genba.node.processes.channel import Channel
from genba.node.processes.channels import Channels
from genba.node.processes.linux import keep_memory
from genba.node.processes.pool import (
    AppChanged,
    AppImported,
    GuardDied,
    ImportFailed,
    LeftoversSwept,
    Pool,
    SpawnFailed,
    WorkerEnded,
    WorkerStarted,
    ZygoteDied,
)
from genba.node.processes.wakeup import WakeupSocket
from genba.node.settings import NodeSettings
from genba.node.watch.machine import use_of
from genba.node.watch.monitor import Monitor
from genba.storage.nodes.leftover_processes import INCARNATION
from genba.storage.records import Command, Micros
from genba.storage.store import Store, open_store

if TYPE_CHECKING:
    from genba.node.watch.http import MetricsServer

log = logging.getLogger("genba.node")

SECOND = 1_000_000
TICK = 50_000  # µs between looks at workers while something is timed
SLOW_TICK = 250_000  # ... while something runs
EXIT_OK, EXIT_FAILED = 0, 1


class CannotImport(BadOption):
    """There is no app to run the jobs of; `frames` shows the lines of the user's code that led there."""

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


def run(settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None) -> int:
    """Be a node until told to end; gives the exit code.  `reread` gives the settings anew, on SIGHUP.

    CannotImport, if there is no app.
    """
    set_up_log(settings)
    if sys.platform != "linux":
        raise GenbaError(
            f"a node needs Linux (this is {sys.platform}); enqueueing and asking work everywhere"
        )
    gc.freeze()
    gc.set_threshold(
        200_000, 20, 20
    )  # thousands of jobs come and go here, and none refers to itself
    keep_memory()
    while True:
        node = Node(settings, reread)
        try:
            code = node.run()
        finally:
            node.close()
        settings = node.settings
        if code is not None:
            return code
        log.warning("starting again as a new incarnation")


class Node:
    def __init__(
        self, settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None
    ) -> None:
        self.settings = settings
        self._reread = reread
        self.id = secrets.randbits(62) + 1
        self._clock = SystemClock()
        self._inbox: collections.deque[Any] = collections.deque()
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, "wake")
        env = {**os.environ, INCARNATION: str(self.id), **log_environ(settings)}
        self._pool = Pool(
            settings.target, env=env, node_title=f"/node[{os.getpid()}]", reload=settings.reload
        )
        self._selector.register(self._pool.sockets[0], selectors.EVENT_READ, "pool")
        self._lines = Channels(self._selector)
        self._store: Store | None = None
        self._told: dict[str, Any] = {}  # by the zygote that came last
        self._ruled_seats: Mapping[str, int] = {}
        self._brain: Brain | None = None
        self._office: DatabaseThreads | None = None
        self._bell = WakeupSocket(self._selector)
        self._lease: Micros = 15 * SECOND
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._exit: int | None = None
        self._over = False
        self._lost_lease = False
        self._last_tick: Micros = 0
        self._last_beat: Micros = 0
        self._last_second: Micros = 0
        self._zygote_starts = 0
        self._lookout = Monitor()
        self._departure = ExitDeadline(self._clock)
        self._port = _open_port(settings)

    # life

    def run(self) -> int | None:
        """None: start again, under a new identity."""
        self._listen_to_signals()
        self._pool.start()
        if self._port:
            log.info("metrics are at http://%s/metrics", self._port.address)
        while not self._over:
            if self._port:
                self._port.turned()
            for key, _ in self._selector.select(self._patience()):
                self._hear(key)
            self._read_signals()
            self._read_inbox()
            self._tick()
        return None if self._lost_lease and self._exit is None else self._exit

    def close(self) -> None:
        """Give everything back; whatever still runs is ended."""
        if self._port:
            self._port.close()
        left = self._pool.end()
        if left:
            log.error("%d processes could not be ended", left)
        self._tell_of_workers()
        if self._store and self._office:
            self._office.finish()
            try:
                if not self._lost_lease:
                    self._store.nodes.leave(self.id)
            except StoreError as error:
                log.warning("could not say good-bye: %s", error)
        if self._store:
            self._store.node_wakeups.unregister()
            self._store.close()
        self._lines.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
        self._departure.over()

    def _patience(self) -> float:
        brain = self._brain
        if self._inbox:
            return 0
        if brain is None:
            return 1.0
        if brain.draining or brain.timed:
            return TICK / SECOND
        return SLOW_TICK / SECOND if brain.busy else self.settings.poll / SECOND

    def _now(self) -> Micros:
        return self._clock.boot()

    # what is heard

    def _listen_to_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, note)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)

    def _post(self, event: Any) -> None:
        """From another thread."""
        self._inbox.append(event)
        with contextlib.suppress(BlockingIOError):  # it is full of wake-ups
            os.write(self._wake_in, b"\0")

    def _hear(self, key: selectors.SelectorKey) -> None:
        match key.data:
            case "wake":
                os.read(self._wake_out, 1 << 16)
            case "pool":
                for event in self._pool.ready():
                    self._on_pool(event)
            case "bell":
                self._on_bell()
            case Channel() as line if (
                self._lines.get(line.slot) is line
            ):  # its end may have been heard just before
                self._read_line(line)

    def _read_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._read_settings_again()
                continue
            if self._brain is None:
                self._exit, self._over = EXIT_OK, True
                return
            hurry = self._brain.draining
            log.info("%s: %s", signal.Signals(number).name, "hurrying" if hurry else "draining")
            self._drain(hurry)

    def _drain(self, hurry: bool) -> None:
        assert self._brain is not None
        assert self._office is not None
        self._exit = EXIT_OK
        if not self._brain.draining:
            self._office.writer.add(draining=True)
        self._perform(self._brain.on_drain(self._now(), hurry=hurry))
        if self._brain.leave_by is not None:
            self._departure.by(self._brain.leave_by)

    def _read_inbox(self) -> None:
        brain = self._brain
        while self._inbox and brain is not None:
            event = self._inbox.popleft()
            now = self._now()
            match event:
                case JobsClaimed(jobs, claim, failed):
                    self._perform(brain.on_claimed(jobs, claim, now, failed=failed))
                case DedicatedJobsClaimed(jobs, claim):
                    self._perform(brain.on_claimed_dedicated(jobs, claim, now))
                case LostClaimFound(jobs, claim):
                    self._perform(brain.on_found(jobs, claim, now))
                case LimitSlotsTaken(ours, lost):
                    self._perform(brain.on_slots(ours, lost, now))
                case SuccessesRefused(lost):
                    self._perform(brain.on_unmatched(lost, now))
                case EndingsWritten(again):
                    self._look_after_children(again)
                case StartsMarked(ours, lost):
                    brain.on_mark_lost(lost)
                    self._perform(brain.on_marked(ours, now))
                case WorkAvailable() | SlotsFreed():
                    self._perform(brain.on_ring(now))
                case LeaseRenewed(sent, wall, draining):
                    self._on_renewed(sent, wall, draining)
                case TasksDisabled(tasks):
                    self._perform(brain.on_disabled(tasks, now))
                    self._tick(force=True)
                case ConcurrencyChanged(seats):
                    self._ruled_seats = seats
                    self._perform(
                        brain.on_company(concurrency_of(self._told, self._ruled_seats), now)
                    )
                case CommandsReceived(commands):
                    for command in commands:
                        self._on_command(command)
                case DeclaredDead():
                    log.error("this node was declared dead: what it runs is not its own any more")
                    self._lost_lease = self._over = True

    def _look_after_children(self, again: bool) -> None:
        """The keeper knows when to wake up next; a retry may be due before that."""
        if self._store and self._office and (again or self._store.dependencies.unsettled):
            self._office.keeper.poke()

    def _on_renewed(self, sent: Micros, wall: Micros, draining: bool) -> None:
        brain = self._brain
        assert brain is not None
        now = self._now()
        brain.on_renewed(sent, self._lease)
        brain.delta = wall - now
        brain.skew = skew(wall, self._clock.now(), now - sent)
        assert self._office is not None
        self._office.rung()  # a lost bell must not keep producers from ringing again
        if draining and not brain.draining:
            self._drain(False)

    def _on_command(self, command: Command) -> None:
        assert self._brain is not None
        match command.verb:
            case "cancel" | "kill" if command.job_id is not None:
                verb, job = command.verb, command.job_id
                self._perform(
                    self._brain.on_cancel(job, verb, command.data, self._now(), command.attempt)
                )
                self._tick(force=True)
            case "drain" | "stop":
                hurry = command.verb == "stop"
                log.info("told to %s", "stop" if hurry else "drain")
                self._drain(hurry)
                self._tick(force=True)
            case "set":
                self._change(
                    read_json(
                        command.data,
                        dict[str, Any],
                        {UNREADABLE: command.data} if command.data else {},
                    )
                )
            case _:
                log.warning("an unknown command: %s", command.verb)

    def _on_bell(self) -> None:
        assert self._store is not None
        assert self._brain is not None
        assert self._office is not None
        self._store.node_wakeups.clear()
        self._bell.follow(self._store.node_wakeups)
        self._office.rung()
        self._perform(self._brain.on_ring(self._now()))
        self._office.keeper.poke()  # after the claim is on its way

    def _read_line(self, line: Channel) -> None:
        assert self._brain is not None
        if line.stuffed:
            line.flush()
        self._take_in(line)
        self._lines.watch(line)

    def _take_in(self, line: Channel) -> None:
        """All that a worker has said; the very first may come with a result."""
        assert self._brain is not None
        results, ready = line.receive()
        if ready is not None:
            self._lookout.came(line.slot, ready)
            self._perform(self._brain.on_worker_ready(line.slot, ready, self._now()))
        if results:
            self._perform(self._brain.on_results(line.slot, results, self._now()))
        self._take_answers(line)

    def _take_answers(self, line: Channel) -> None:
        assert self._brain is not None
        while line.answers:
            self._perform(self._brain.on_answer(line.slot, line.answers.pop(0), self._now()))

    # processes

    def _on_pool(self, event: Any) -> None:
        now = self._now()
        brain = self._brain
        match event:
            case AppImported(contents):
                self._on_hello(contents)
            case ImportFailed(message, frames):
                if not self.settings.reload:
                    raise CannotImport(message, frames)
                sys.stderr.write(f"{frames}genba: {message}\n")
                log.warning("waiting for a change of its files")
            case AppChanged(path):
                log.info("%s has changed: importing the app again", path)
                if brain:
                    self._perform(brain.on_changed(now))
                self._pool.restart_zygote()
            case ZygoteDied(status, restarting):
                self._on_zygote_died(status, restarting)
            case WorkerStarted(slot, _pid, _):
                started = self._lines.get(slot)
                if started is not None:
                    started.handed_over()
            case SpawnFailed(slot, reason) if brain:
                log.warning("a worker could not be started: %s", reason)
                self._on_spawn_failed(slot)
            case WorkerEnded(slot, pid, status, cpu, peak) if brain:
                self._lookout.went(slot, pid, status)
                self._on_worker_ended(slot, status, cpu, peak)
            case LeftoversSwept(token, _killed, unkillable) if brain:
                if unkillable:
                    log.error(
                        "%d processes that a job left behind belong to another user", unkillable
                    )
                self._perform(brain.on_swept(token, now))
            case GuardDied(status, slots, _left):
                self._on_guard_died(status, slots)

    def _on_zygote_died(self, status: int, restarting: bool) -> None:
        if self._over:
            return
        if self._brain:
            self._perform(self._brain.on_zygote_gone())
        self._zygote_starts += not restarting
        if self._zygote_starts > 10 and self._brain is None:
            raise CannotImport(
                f"{self.settings.target} kills the process that imports it ({status})"
            )
        if not restarting:
            log.warning("the zygote died (status %s); starting another", status)
            self._pool.restart_zygote()

    def _on_guard_died(self, status: int, slots: Iterable[int]) -> None:
        sights = self._lines.last_sights()
        for line in self._lines.all():
            self._take_in(line)  # before its last word is read
        if self._brain:
            self._perform(self._brain.on_guard_died(sights, self._now()))
        for line in self._lines.all():
            self._lines.drop(line.slot)
        if not self._over:
            log.warning(
                "the guard died (status %s), and all workers with it; starting again", status
            )
            self._pool.start()

    def _on_spawn_failed(self, slot: int) -> None:
        """It may have come all the same, worked, and be dead now: then that is a death like any other."""
        assert self._brain is not None
        line = self._lines.get(slot)
        if line is not None:
            self._take_in(line)
        if pid := self._brain.worker_at(slot):
            self._lookout.went(slot, pid, None)
            self._on_worker_ended(slot, None, 0, 0)
        else:
            self._lines.drop(slot)
            self._perform(self._brain.on_spawn_failed(slot, self._now()))

    def _on_worker_ended(self, slot: int, status: int | None, cpu: int, peak: int) -> None:
        assert self._brain is not None
        line = self._lines.get(slot)
        if line is None:
            return
        self._take_in(line)  # before its last word is read
        sight = line.last_sight()
        seats = {seat.slot: seat.last_sight() for seat in line.seats}
        self._lines.drop(slot)
        starved = status is not None and os.WIFSIGNALED(status) and self._lookout.starved()
        self._perform(
            self._brain.on_worker_ended(slot, status, cpu, peak, sight, self._now(), starved, seats)
        )

    # the beginning

    def _on_hello(self, contents: dict[str, Any]) -> None:
        self._choose_spawn(contents.get("threads", ()))
        workers_fork = self._pool.forks and not contents.get("lifespans")
        if self._brain is not None:
            self._brain.workers_fork = workers_fork
            self._brain.conditions = contents.get("conditions", ())
            self._adopt(contents)
            self._perform(self._brain.on_zygote(self._now()))
            return
        self.settings = self.settings.serving(queues_of(contents))
        self._lease = int(contents["lease"])
        self._store = store = open_store(
            contents["url"], namespace=contents["namespace"], age_step=int(contents["age_step"])
        )
        store.install()
        if store.pooler_found:
            every = self.settings.poll / SECOND
            log.warning(
                "behind a pooler nobody can wake a node: looking for work every %g s", every
            )
        store.events.node = self.id
        set_title(f"genba-{contents['namespace']}: /node[{os.getpid()}] {self.settings.name}")
        tasks = [task["name"] for task in contents["tasks"]]
        self._join(store, contents)
        self._brain = brain = Brain(self.settings, tasks, random.random)
        self._told = contents
        brain.concurrency = concurrency_of(self._told, self._ruled_seats)
        brain.workers_fork = workers_fork
        brain.conditions = contents.get("conditions", ())
        meter = self._port.meter if self._port else None
        self._office = DatabaseThreads(
            store, self.id, self.settings, contents, self._clock, self._post, meter
        )
        if self._port:
            brain.count_with(self._port.meter)
            self._port.joined(store, self._lease, self.settings)
        brain.delta = store.now() - self._now()
        self._office.start()
        self._beat()
        log.info(
            "node %s is ready: %d tasks, queues %s, up to %d workers",
            self.settings.name,
            len(tasks),
            ", ".join(self.settings.queues),
            self.settings.slots,
        )
        if contents.get("loop"):
            log.info("async jobs run on %s", contents["loop"])
        self._look_around(self._now())  # before the first claim: the gate may be closed
        self._perform(brain.on_zygote(self._now()))

    def _choose_spawn(self, threads: Sequence[str]) -> None:
        """A fork copies one thread only, and the locks of all of them."""
        spawn = self.settings.spawn or ("exec" if threads else "fork")
        self._pool.forks = spawn == "fork"
        if threads:
            names = ", ".join(threads)
            if self.settings.spawn is None:
                log.warning(
                    "the app starts threads at import (%s): workers import it anew (spawn=exec)",
                    names,
                )
            elif self._pool.forks:
                log.warning(
                    "the app starts threads at import (%s): a lock they hold stays locked in workers",
                    names,
                )

    def _adopt(self, contents: dict[str, Any]) -> None:
        """A zygote that has imported the app again may know other tasks."""
        assert self._brain is not None
        assert self._office is not None
        assert self._store is not None
        self._store.age_step = int(contents["age_step"])
        serving = self.settings.serving(queues_of(contents))
        self._office.serve(contents, list(serving.queues))
        if serving is not self.settings:
            self.settings = serving
            self._perform(self._brain.on_settings(serving, self._now()))
        self._told = contents
        self._brain.concurrency = concurrency_of(self._told, self._ruled_seats)
        names = sorted(task["name"] for task in contents["tasks"])
        if names != self._brain.tasks:
            log.info("the app has %d tasks now", len(names))
            self._brain.tasks = names

    def _join(self, store: Store, contents: dict[str, Any]) -> None:
        store.node_wakeups.register(self.id)
        self._bell.follow(store.node_wakeups)
        join(store, self.id, self.settings, self._lease, contents["tasks"])

    # time

    def _tick(self, force: bool = False) -> None:
        brain = self._brain
        if brain is None:
            return
        now = self._now()
        if now - self._last_beat >= self._lease // 5:
            self._beat()
        step = TICK if brain.draining or brain.timed else SLOW_TICK
        if not force and now - self._last_tick < step:
            return
        self._last_tick = now
        for line in self._lines.all():  # a result may lie there unrung while the next job runs on
            self._read_line(line)
        sights = self._lines.sights()
        for slot, pid in brain.weighed:
            if slot in sights:
                sights[slot] = replace(sights[slot], use=use_of(pid))
        self._perform(brain.on_tick(now, sights))
        if now - self._last_second >= SECOND:
            self._last_second = now
            self._look_around(now)
        if self._store is not None:
            self._bell.follow(self._store.node_wakeups)
        assert self._office is not None
        for name in self._office.dead():
            log.critical("thread %s has died; this node ends, and its jobs go to others", name)
            self._exit, self._over = EXIT_FAILED, True
        written = self._office.clear and not self._inbox
        if brain.draining and brain.empty and brain.deserted and written:
            self._over = True

    def _look_around(self, now: Micros) -> None:
        """Once a second: how the machine is, and who has come and gone."""
        assert self._brain is not None
        turned = self._lookout.look(self.settings.gate, now)
        if turned is not None:
            self._perform(self._brain.on_gate(turned, now))
        if self._port and self._office:
            self._port.note(self._brain, self._office.keeper, self._lookout.closed)
        self._tell_of_workers()
        self._look_at_writer(now)

    def _look_at_writer(self, now: Micros) -> None:
        """To ask the database would be of no use: it is what nobody can write to."""
        assert self._brain is not None
        assert self._store is not None
        paused = self._lookout.paused(self._store.writer())
        if paused is None:
            return
        slot = self._pool.above(paused)
        if slot is None or self.settings.debug:
            log.warning(
                "process %d is stopped in the middle of a write, and nobody else can write", paused
            )
        else:
            log.error(
                "process %d was stopped in the middle of a write, and nobody else could write: ended",
                paused,
            )
            self._perform(self._brain.on_paused_writer(slot, self._lines.sights(), now))

    def _tell_of_workers(self) -> None:
        if self._office:
            told = self._lookout.told()
            if told:
                self._office.writer.add(events=told)

    def _read_settings_again(self) -> None:
        if self._reread is None:
            return
        try:
            again = self._reread()
        except GenbaError as error:
            log.error("the settings stay as they are: %s", error)
            return
        self._change(again.staff)

    def _change(self, changes: dict[str, Any]) -> None:
        try:
            changed = self.settings.changed(**changes)
        except (BadOption, TypeError) as error:
            log.error("the settings stay as they are: %s", error)
            return
        if changed == self.settings:
            return
        self.settings = changed
        log.info("now a %s pool, min %d, max %d", changed.pool, changed.min, changed.max)
        if self._brain:
            assert self._office is not None
            self._office.writer.add(resized=(changed.slots, changed.staff))
            self._perform(self._brain.on_settings(changed, self._now()))

    def _beat(self) -> None:
        """The guard ends everything if the next beat does not come before the lease is nearly over."""
        self._last_beat = self._now()
        self._pool.beat(max(1.0, self._lease / SECOND * 0.8))

    # deeds

    def _perform(self, actions: list[do.Action]) -> None:
        assert self._brain is not None
        assert self._office is not None
        writer, claimer = self._office.writer, self._office.claimer
        if self.settings.debug:
            for told in (told for action in actions for told in describe_action(action)):
                log.debug("%s", told)
        for action in actions:
            match action:
                case do.GiveJobs(slot) | do.DismissWorker(slot) if not self._lines.has(slot):
                    pass  # the worker could not be started, and the brain has its job back
                case do.GiveJobs(slot, serial, jobs, each):
                    self._lines.give(slot, serial, jobs, each)
                case do.SetSeats(slot, seats):
                    self._lines.share(slot, seats)
                case do.StopSeat(slot, place):
                    self._lines.interrupt(slot, place)
                case do.CheckConditions(slot, serial, job, conditions):
                    self._lines.ask(slot, serial, job, conditions)
                case do.ReportNotReady(answers):
                    writer.add(answers=answers)
                case do.TakeLimitSlots(wanted):
                    writer.add(wanted=wanted)
                case do.ReportConditionsHold(key):
                    writer.add(opened=[key])
                case do.WriteSuccesses(ended, patience):
                    self._office.finisher.add(succeeded=ended, patience=patience / SECOND)
                case do.ClaimJobs(wants, only):
                    claimer.add(wants=wants, only=only)
                case do.ClaimDedicated(queues, count):
                    claimer.add(dedicated=(queues, count))
                case do.WriteEndings(ended):
                    writer.add(ended=ended)
                    log_endings(ended)
                    if self._port:
                        self._port.meter.ended(ended)
                case do.MarkStarted(jobs, first):
                    writer.add(first=jobs) if first else writer.add(marks=jobs)
                case do.WriteProgress(progress):
                    writer.add(notes=progress)
                case do.WriteEvent(kind, job, more):
                    writer.add(events=[(kind, {"ids": [job], **more})])
                case do.TakeJobsBack(slot):
                    tokens = self._lines.take_back(slot)
                    self._perform(self._brain.on_taken_back(slot, tokens, self._now()))
                case do.RefuseWait(slot, place):
                    self._lines.refuse(slot, place)
                case do.RequestStop(slot, place):
                    self._lines.ask_to_stop(slot, place)
                case do.KillJobProcess(slot, place):
                    self._lines.doom(slot, place)
                case do.SignalWorker(slot, number):
                    self._pool.signal(slot, number)
                case do.DismissWorker(slot):
                    self._lines.dismiss(slot)
                case do.SpawnWorker(slot):
                    self._spawn(slot)
                case do.SweepLeftovers(token):
                    self._pool.sweep(token)
                case do.SuggestStop(slot, place):
                    self._lines.bow_out(slot, place)
                case do.RequestStopOfAll():
                    self._lines.drain()

    def _spawn(self, slot: int) -> None:
        assert self._brain is not None
        line = self._lines.open(slot)
        if not self._pool.spawn(slot, *line.ends()):
            self._lines.drop(slot)
            self._perform(self._brain.on_spawn_failed(slot, self._now()))


def _open_port(settings: NodeSettings) -> MetricsServer | None:
    if settings.metrics is None:
        return None
    from genba.node.watch.http import (
        MetricsServer,
    )  # most nodes have none, and need not have http.server in memory

    return MetricsServer(settings.metrics, settings.name, settings.slots)
