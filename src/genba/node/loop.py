"""The node's loop: it performs what the brain decides.

One thread waits for everything at once: workers, guard and zygote, the bell, signals, and what the desks and the
keeper have to tell.  It never waits for the database.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import random
import secrets
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec

from genba import wire
from genba.domain.clock import SystemClock
from genba.errors import BadOption, GenbaError, StoreError
from genba.node import actions as do
from genba.node.brain import Brain
from genba.node.desk import ClaimedDedicated, ClaimedJobs, Desk, Ended, Marked, Refused
from genba.node.endings import judge_orphan
from genba.node.keeper import Commands, DeclaredDead, Keeper, Renewed, Work
from genba.node.line import Line, Seat
from genba.node.loud import words
from genba.node.machine import Machine, use_of
from genba.node.pool import (
    INCARNATION,
    Changed,
    GuardDied,
    Hello,
    ImportFailed,
    Pool,
    SpawnFailed,
    Swept,
    WorkerEnded,
    WorkerStarted,
    ZygoteDied,
    leftovers,
)
from genba.node.settings import CHANGEABLE, NodeSettings
from genba.storage.records import Command, Micros, NewNode
from genba.storage.store import Store, open_store

log = logging.getLogger("genba.node")

SECOND = 1_000_000
TICK = 50_000  # µs between looks at workers while something is timed
SLOW_TICK = 250_000  # ... while something runs
EXIT_OK, EXIT_FAILED, EXIT_IMPORT = 0, 1, 3


def run(settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None) -> int:
    """Be a node until told to end; gives the exit code.  `reread` gives the settings anew, on SIGHUP."""
    level = logging.DEBUG if settings.debug else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if sys.platform != "linux":
        raise GenbaError(f"a node needs Linux (this is {sys.platform}); enqueueing and asking work everywhere")
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
    def __init__(self, settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None) -> None:
        self.settings = settings
        self._reread = reread
        self.id = secrets.randbits(62) + 1
        self._clock = SystemClock()
        self._inbox: collections.deque[Any] = collections.deque()
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, "wake")
        env = {**os.environ, INCARNATION: str(self.id)}
        self._pool = Pool(settings.target, env=env, node_title=f"/node[{os.getpid()}]", reload=settings.reload)
        self._selector.register(self._pool.sockets[0], selectors.EVENT_READ, "pool")
        self._lines: dict[int, Line] = {}
        self._seats: dict[int, Seat] = {}
        self._watched: dict[int, int] = {}
        self._store: Store | None = None
        self._brain: Brain | None = None
        self._desks: list[Desk] = []
        self._keeper: Keeper | None = None
        self._bell = -1
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
        self._machine = Machine()
        self._closed: str | None = None  # why nothing is claimed
        self._came: list[dict[str, Any]] = []
        self._went: list[dict[str, Any]] = []

    # life

    def run(self) -> int | None:
        """None: start again, under a new identity."""
        self._listen_to_signals()
        self._pool.start()
        while not self._over:
            for key, _ in self._selector.select(self._patience()):
                self._hear(key)
            self._read_signals()
            self._read_inbox()
            self._tick()
        return None if self._lost_lease and self._exit is None else self._exit

    def close(self) -> None:
        """Give everything back; whatever still runs is ended."""
        left = self._pool.end()
        if left:
            log.error("%d processes could not be ended", left)
        self._tell_of_workers()
        for desk in self._desks:
            desk.finish(10)
        if self._keeper:
            self._keeper.finish(10)
        if self._store and self._keeper:
            try:
                if not self._lost_lease:
                    self._store.nodes.leave(self.id)
            except StoreError as error:
                log.warning("could not say good-bye: %s", error)
        if self._store:
            self._store.presence.vanish()
            self._store.close()
        for line in self._lines.values():
            line.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)

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
            case Line() as line if self._lines.get(line.slot) is line:  # its end may have been heard just before
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
        self._exit = EXIT_OK
        if not self._brain.draining:
            self._desks[0].add(draining=True)
        self._perform(self._brain.on_drain(self._now(), hurry=hurry))

    def _read_inbox(self) -> None:
        brain = self._brain
        while self._inbox and brain is not None:
            event = self._inbox.popleft()
            now = self._now()
            match event:
                case ClaimedJobs(jobs, claim, failed):
                    self._perform(brain.on_claimed(jobs, claim, now, failed=failed))
                case ClaimedDedicated(jobs, claim):
                    self._perform(brain.on_claimed_dedicated(jobs, claim, now))
                case Refused(lost):
                    self._perform(brain.on_unmatched(lost, now))
                case Ended(_, again):
                    self._look_after_children(again)
                case Marked(ours, lost):
                    brain.on_mark_lost(lost)
                    self._perform(brain.on_marked(ours, now))
                case Work():
                    self._perform(brain.on_ring(now))
                case Renewed(sent, wall, draining):
                    self._on_renewed(sent, wall, draining)
                case Commands(commands):
                    for command in commands:
                        self._on_command(command)
                case DeclaredDead():
                    log.error("this node was declared dead: what it runs is not its own any more")
                    self._lost_lease = self._over = True

    def _look_after_children(self, again: bool) -> None:
        """The keeper knows when to wake up next; a retry may be due before that."""
        if self._store and self._keeper and (again or self._store.children_wait):
            self._keeper.poke()

    def _on_renewed(self, sent: Micros, wall: Micros, draining: bool) -> None:
        brain = self._brain
        assert brain is not None
        brain.on_renewed(sent, self._lease)
        brain.delta = wall - self._now()
        brain.skew = wall - self._clock.now()
        for desk in self._desks:
            desk.rung()  # a lost bell must not keep producers from ringing again
        if abs(brain.skew) < 50_000:
            brain.skew = 0  # within what the journey of the answer explains
        if draining and not brain.draining:
            self._drain(False)

    def _on_command(self, command: Command) -> None:
        assert self._brain is not None
        match command.verb:
            case "cancel" | "kill" if command.job_id is not None:
                verb, job = command.verb, command.job_id
                self._perform(self._brain.on_cancel(job, verb, command.data, self._now(), command.attempt))
                self._tick(force=True)
            case "drain" | "stop":
                hurry = command.verb == "stop"
                log.info("told to %s", "stop" if hurry else "drain")
                self._drain(hurry)
                self._tick(force=True)
            case "set":
                self._change(msgspec.json.decode(command.data or "{}", type=dict[str, Any]))
            case _:
                log.warning("an unknown command: %s", command.verb)

    def _on_bell(self) -> None:
        assert self._store is not None
        assert self._brain is not None
        assert self._keeper is not None
        self._store.presence.drain()
        if self._bell_changed():
            self._listen_again()
        for desk in self._desks:
            desk.rung()
        self._keeper.poke()
        self._perform(self._brain.on_ring(self._now()))

    def _read_line(self, line: Line) -> None:
        assert self._brain is not None
        if line.stuffed:
            line.flush()
        results, ready = line.receive()
        now = self._now()
        if ready is not None:
            self._came.append({"slot": line.slot, "pid": ready})
            self._perform(self._brain.on_worker_ready(line.slot, ready, now))
        if results:
            self._perform(self._brain.on_results(line.slot, results, now))
        self._watch(line)
        for seat in line.seats:
            self._read_seat(seat)

    def _read_seat(self, seat: Seat) -> None:
        assert self._brain is not None
        if seat.slot not in self._seats:
            return  # what was heard of its neighbours has ended the company
        results = seat.receive()
        if results:
            self._perform(self._brain.on_results(seat.slot, results, self._now()))

    def _share(self, line: Line, slots: Sequence[int]) -> None:
        if slots:
            self._seats.update({seat.slot: seat for seat in line.share(slots)})
        else:
            self._drop_seats(line)
            line.unshare()
        self._watch(line)

    def _all_lines(self) -> list[tuple[int, Line | Seat]]:
        return [*self._lines.items(), *self._seats.items()]

    def _drop_seats(self, line: Line) -> None:
        for seat in line.seats:
            del self._seats[seat.slot]
            seat.close()

    def _watch(self, line: Line) -> None:
        """Registered for what it can still do."""
        self._watch_outside(line, wanted=not line.silent)
        if not line.open:
            if line.slot in self._watched:
                self._selector.unregister(line.sock)
                self._watched.pop(line.slot)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.stuffed else 0)
        if self._watched.get(line.slot) != wanted:
            if line.slot in self._watched:
                self._selector.modify(line.sock, wanted, line)
            else:
                self._selector.register(line.sock, wanted, line)
            self._watched[line.slot] = wanted

    def _watch_outside(self, line: Line, *, wanted: bool) -> None:
        if line.outside == -1 or wanted == line.overheard:
            return
        line.overheard = wanted
        if wanted:
            self._selector.register(line.outside, selectors.EVENT_READ, line)
        else:
            self._selector.unregister(line.outside)

    # processes

    def _on_pool(self, event: Any) -> None:
        now = self._now()
        brain = self._brain
        match event:
            case Hello(contents):
                self._on_hello(contents)
            case ImportFailed(text):
                sys.stderr.write(f"genba: cannot import {self.settings.target}:\n{text.rstrip()}\n")
                if self.settings.reload:
                    log.warning("waiting for a change of its files")
                else:
                    self._exit, self._over = EXIT_IMPORT, True
            case Changed(path):
                log.info("%s has changed: importing the app again", path)
                if brain:
                    self._perform(brain.on_changed(now))
                self._pool.restart_zygote()
            case ZygoteDied(status, restarting):
                self._on_zygote_died(status, restarting)
            case WorkerStarted(slot, _pid, _):
                if slot in self._lines:
                    self._lines[slot].handed_over()
            case SpawnFailed(slot, reason) if brain:
                log.warning("a worker could not be started: %s", reason)
                self._drop(slot)
                self._perform(brain.on_spawn_failed(slot, now))
            case WorkerEnded(slot, pid, status, cpu, peak) if brain:
                self._went.append({"slot": slot, "pid": pid, "status": status})
                self._on_worker_ended(slot, status, cpu, peak)
            case Swept(token, _killed, unkillable) if brain:
                if unkillable:
                    log.error("%d processes that a job left behind belong to another user", unkillable)
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
            sys.stderr.write(f"genba: {self.settings.target} kills the process that imports it ({status})\n")
            self._exit, self._over = EXIT_IMPORT, True
        elif not restarting:
            log.warning("the zygote died (status %s); starting another", status)
            self._pool.restart_zygote()

    def _on_guard_died(self, status: int, slots: Iterable[int]) -> None:
        sights = {slot: line.last_sight() for slot, line in self._all_lines()}
        for slot in list(self._lines):
            self._settle_line(slot)
        if self._brain:
            self._perform(self._brain.on_guard_died(sights, self._now()))
        for slot in list(self._lines):
            self._drop(slot)
        if not self._over:
            log.warning("the guard died (status %s), and all workers with it; starting again", status)
            self._pool.start()

    def _on_worker_ended(self, slot: int, status: int | None, cpu: int, peak: int) -> None:
        assert self._brain is not None
        line = self._lines.get(slot)
        if line is None:
            return
        self._settle_line(slot)
        sight = line.last_sight()
        seats = {seat.slot: seat.last_sight() for seat in line.seats}
        self._drop(slot)
        starved = status is not None and os.WIFSIGNALED(status) and self._machine.starved()
        self._perform(self._brain.on_worker_ended(slot, status, cpu, peak, sight, self._now(), starved, seats))

    def _settle_line(self, slot: int) -> None:
        """Read all that a dead worker has said, before its last word is read."""
        assert self._brain is not None
        line = self._lines[slot]
        results, _ = line.receive()
        if results:
            self._perform(self._brain.on_results(slot, results, self._now()))
        for seat in line.seats:
            self._read_seat(seat)

    def _drop(self, slot: int) -> None:
        line = self._lines.pop(slot, None)
        if line is not None:
            if slot in self._watched:
                self._selector.unregister(line.sock)
                self._watched.pop(slot)
            self._watch_outside(line, wanted=False)
            self._drop_seats(line)
            line.close()

    # the beginning

    def _on_hello(self, contents: dict[str, Any]) -> None:
        self._choose_spawn(contents.get("threads", ()))
        if self._brain is not None:
            self._adopt(contents["tasks"])
            self._perform(self._brain.on_zygote(self._now()))
            return
        self._lease = int(contents["lease"])
        self._store = store = open_store(contents["url"], namespace=contents["namespace"])
        store.install()
        _set_title(f"genba-{contents['namespace']}: /node[{os.getpid()}] {self.settings.name}")
        tasks = [task["name"] for task in contents["tasks"]]
        self._join(store, contents)
        self._brain = brain = Brain(self.settings, tasks, random.random)
        brain.concurrency = _concurrency(contents["tasks"])
        self._desks = [Desk("writer", store, self.id, tasks, self._post)]
        if store.lanes > 1:
            self._desks.append(Desk("claimer", store, self.id, tasks, self._post))
        self._keeper = Keeper(
            store,
            self.id,
            lease=self._lease,
            poll=self.settings.poll,
            queues=list(self.settings.queues),
            tasks=tasks,
            keep={task["name"]: task.get("keep") for task in contents["tasks"]},
            boot_id=_boot_id() if store.lanes == 1 else None,
            clock=self._clock,
            post=self._post,
        )
        brain.delta = store.now() - self._now()
        for thread in (*self._desks, self._keeper):
            thread.start()
        self._beat()
        log.info(
            "node %s is ready: %d tasks, queues %s, up to %d workers",
            self.settings.name,
            len(tasks),
            ", ".join(self.settings.queues),
            self.settings.slots,
        )
        self._perform(brain.on_zygote(self._now()))

    def _choose_spawn(self, threads: Sequence[str]) -> None:
        """A fork copies one thread only, and the locks of all of them."""
        spawn = self.settings.spawn or ("exec" if threads else "fork")
        self._pool.forks = spawn == "fork"
        if threads:
            names = ", ".join(threads)
            if self.settings.spawn is None:
                log.warning("the app starts threads at import (%s): workers import it anew (spawn=exec)", names)
            elif self._pool.forks:
                log.warning("the app starts threads at import (%s): a lock they hold stays locked in workers", names)

    def _adopt(self, tasks: Sequence[dict[str, Any]]) -> None:
        """A zygote that has imported the app again may know other tasks."""
        assert self._brain is not None
        assert self._keeper is not None
        names = sorted(task["name"] for task in tasks)
        self._keeper.serve(tasks)
        self._brain.concurrency = _concurrency(tasks)
        if names != self._brain.tasks:
            log.info("the app has %d tasks now", len(names))
            self._brain.tasks = names
            for desk in self._desks:
                desk.serve(names)

    def _join(self, store: Store, contents: dict[str, Any]) -> None:
        store.presence.appear(self.id)
        self._bell = store.presence.fileno()
        if self._bell >= 0:
            self._selector.register(self._bell, selectors.EVENT_READ, "bell")
        node = NewNode(
            id=self.id,
            name=self.settings.name,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid=os.getpid(),
            slots=self.settings.slots,
            lease=self._lease,
            queues=tuple(self.settings.queues),
            tasks=tuple(contents["tasks"]),
            version=_version(),
        )
        gone = [other for other in store.nodes.live() if other.host == node.host and store.presence.gone(other)]
        if gone:
            killed = leftovers([str(other.id) for other in gone])
            if killed:
                log.warning("ended %d processes that dead nodes had left behind", killed)
            for other in gone:
                if other.name == node.name:
                    store.nodes.bury(other.id, lambda orphan, now: judge_orphan(orphan, now, random.random))
        store.nodes.join(node)

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
        for line in list(self._lines.values()):  # a result may lie there unrung while the next job runs on
            self._read_line(line)
        sights = {slot: line.sight() for slot, line in self._all_lines()}
        for slot, pid in brain.weighed:
            if slot in sights:
                sights[slot] = replace(sights[slot], use=use_of(pid))
        self._perform(brain.on_tick(now, sights))
        if now - self._last_second >= SECOND:
            self._last_second = now
            self._look_around(now)
        if self._bell_changed():
            self._listen_again()
        for thread in (*self._desks, self._keeper):
            if thread is not None and not thread.is_alive():
                log.critical("thread %s has died; this node ends, and its jobs go to others", thread.name)
                self._exit, self._over = EXIT_FAILED, True
        written = all(desk.clear for desk in self._desks) and not self._inbox
        if brain.draining and brain.empty and brain.deserted and written:
            self._over = True

    def _look_around(self, now: Micros) -> None:
        """Once a second: how the machine is, and who has come and gone."""
        assert self._brain is not None
        self._machine.look()
        gate = self.settings.gate
        if gate.watched:
            why = gate.closed(self._machine.read(now), self._closed is not None)
            if (why is None) != (self._closed is None):
                log.warning("claiming nothing: %s", why) if why else log.info("claiming again")
                self._desks[0].add(events=[("gate_closed", {"reason": why}) if why else ("gate_opened", {})])
                self._perform(self._brain.on_gate(why is not None, now))
            self._closed = why
        self._tell_of_workers()

    def _tell_of_workers(self) -> None:
        events = [("worker_started", {"workers": self._came}), ("worker_ended", {"workers": self._went})]
        told = [(kind, more) for kind, more in events if more["workers"]]
        if told and self._desks:
            self._came, self._went = [], []
            self._desks[0].add(events=told)

    def _read_settings_again(self) -> None:
        if self._reread is None:
            return
        try:
            again = self._reread()
        except GenbaError as error:
            log.error("the settings stay as they are: %s", error)
            return
        self._change({name: getattr(again, name) for name in CHANGEABLE})

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
            self._desks[0].add(slots=changed.slots)
            self._perform(self._brain.on_settings(changed, self._now()))

    def _beat(self) -> None:
        """The guard ends everything if the next beat does not come before the lease is nearly over."""
        self._last_beat = self._now()
        self._pool.beat(max(1.0, self._lease / SECOND * 0.8))

    def _bell_changed(self) -> bool:
        return self._store is not None and self._store.presence.fileno() != self._bell

    def _listen_again(self) -> None:
        assert self._store is not None
        if self._bell >= 0:
            with contextlib.suppress(KeyError, ValueError):  # closed descriptors leave the selector by themselves
                self._selector.unregister(self._bell)
        self._bell = self._store.presence.fileno()
        if self._bell >= 0:
            self._selector.register(self._bell, selectors.EVENT_READ, "bell")

    # deeds

    def _perform(self, actions: list[do.Action]) -> None:
        assert self._brain is not None
        writer, claimer = self._desks[0], self._desks[-1]
        if self.settings.debug:
            for told in (told for action in actions for told in words(action)):
                log.debug("%s", told)
        for action in actions:
            match action:
                case do.Give(slot, serial, jobs) if slot in self._seats:
                    self._seats[slot].give(serial, jobs)
                    self._watch(self._seats[slot].host)
                case do.Give(slot, serial, jobs):
                    line = self._lines[slot]
                    line.give(serial, jobs)
                    self._watch(line)
                case do.Share(slot, seats):
                    self._share(self._lines[slot], seats)
                case do.Interrupt(slot, place):
                    self._seats[slot].stop(place)
                    self._watch(self._seats[slot].host)
                case do.Succeed(ended):
                    writer.add(succeeded=ended)
                case do.Claim(wants, only):
                    claimer.add(wants=wants, only=only)
                case do.ClaimDedicated(queues, count):
                    claimer.add(dedicated=(queues, count))
                case do.Finish(ended):
                    writer.add(ended=ended)
                case do.Mark(jobs, first):
                    writer.add(first=jobs) if first else writer.add(marks=jobs)
                case do.Note(progress):
                    writer.add(notes=progress)
                case do.TakeBack(slot) if slot in self._seats:
                    pass  # what is there has started
                case do.TakeBack(slot):
                    line = self._lines[slot]
                    self._perform(self._brain.on_taken_back(slot, line.take_back(), self._now()))
                case do.AskToStop(slot, place):
                    (self._seats.get(slot) or self._lines[slot]).slate.ask_to_stop(place)
                case do.Signal(slot, number):
                    self._pool.signal(slot, number)
                case do.Dismiss(slot):
                    line = self._lines[slot]
                    line.send((wire.EXIT,))
                    self._watch(line)
                case do.Spawn(slot):
                    self._spawn(slot)
                case do.Sweep(token):
                    self._pool.sweep(token)
                case do.DrainAll():
                    for _, each in self._all_lines():
                        each.slate.drain()

    def _spawn(self, slot: int) -> None:
        assert self._brain is not None
        line = self._lines[slot] = Line(slot)
        self._watch(line)
        if not self._pool.spawn(slot, *line.ends()):
            self._drop(slot)
            self._perform(self._brain.on_spawn_failed(slot, self._now()))


def _concurrency(tasks: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {task["name"]: task["concurrency"] for task in tasks if task.get("concurrency", 1) > 1}


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("genba")
    except PackageNotFoundError:
        return "0"


def _set_title(title: str) -> None:
    os.environ["SPT_NOENV"] = "1"  # or it wipes the environment, and with it the incarnation
    from setproctitle import setproctitle

    setproctitle(title)
