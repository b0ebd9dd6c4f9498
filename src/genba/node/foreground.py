"""A node of one job, in this process: no worker, no timer, and a terminal for the debugger."""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from genba import wire
from genba.domain.clock import Clock, SystemClock
from genba.domain.states import Cause, State
from genba.domain.verdict import AttemptEnd
from genba.errors import GenbaError, JobNotFound, StoreError
from genba.node.database.join import boot_id
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.decide.endings import without_attempt
from genba.node.processes.channel import sight
from genba.node.settings import NodeSettings
from genba.storage.jobs.conditions import ConditionAnswer, check_key
from genba.storage.jobs.judge import DEFAULT_OPTIONS, build_ending, read_options
from genba.storage.records import Claimed, Ending, JobId, JobRecord, Micros, NewNode
from genba.storage.store import Store

STARTABLE = (State.WAITING, State.SCHEDULED, State.HELD)
_BROKEN_OFF = ("BdbQuit", "KeyboardInterrupt")  # `q` in pdb, Ctrl-C
_HINTS = {
    State.RUNNING: "a node has it; cancel it first",
    State.BLOCKED: "it waits for other jobs",
}

Ask = Callable[[wire.JobMessage, Sequence[str]], tuple[bool, Micros | None, str, str | None]]
Run = Callable[[int, wire.JobMessage, wire.SharedMemory], list[list[Any]]]


class ForegroundNode:
    def __init__(
        self,
        store: Store,
        lease: Micros,
        clock: Clock | None = None,
        random: Callable[[], float] = random.random,
        *,
        timed: bool = False,
    ) -> None:
        """`timed`: whoever moves the clock calls `tick`, and jobs run out of time."""
        self._store = store
        self._lease = lease
        self._clock = clock or SystemClock()
        self._random = random
        self._id = secrets.randbits(62) + 1
        self._memory = wire.SharedMemory(wire.SharedMemory.create())
        self._place = 0
        self._timed = timed
        self._running: tuple[Brain, int, int] | None = (
            None  # who decides about it, its slot and its place
        )

    def run(self, id: JobId, call: Run) -> bool:
        """Claim this very job, run it by `call`, write how it ended; False if it was broken off.

        It need not be due, and no limit holds for it; GenbaError if it is in no state to start.
        """
        self._store.install()
        record = self._store.job(id)
        if record is None:
            raise JobNotFound(f"there is no job {id}")
        with self._membership(record):
            claim = secrets.randbits(63)
            claimed = (
                self._store.claims.claim_job(self._id, claim, id)
                if record.state in STARTABLE
                else None
            )
            if claimed is None:
                raise GenbaError(_why_not(self._store.job(id) or record))
            self._store.mark_started([(claimed.id, claimed.attempt, claim, self._store.now())])
            return self.go(record, claimed, claim, call)

    # to be a node, as far as others can see

    @contextmanager
    def _membership(self, record: JobRecord) -> Iterator[None]:
        store = self._store
        store.node_wakeups.register(self._id)
        try:
            store.nodes.join(self._as_node())
            over = threading.Event()
            beats = threading.Thread(
                target=self._beat, args=(over,), name="genba-here", daemon=True
            )
            beats.start()
            try:
                yield
            finally:
                over.set()
                beats.join()
                store.nodes.leave(self._id)
        finally:
            store.node_wakeups.unregister()

    def join(self) -> int:
        """Be a node without a heart-beat, for those who have a clock of their own; its id."""
        self._store.nodes.join(self._as_node())
        return self._id

    def _as_node(self) -> NewNode:
        return NewNode(
            id=self._id,
            name=f"{socket.gethostname()}-{os.getpid()}-here",
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid=os.getpid(),
            slots=1,
            lease=self._lease,
            queues=(),
            tasks=(),
            version="here",
        )

    def _beat(self, over: threading.Event) -> None:
        """The job is ours for as long as it takes, a debugger's pauses included."""
        while not over.wait(self._lease / 5 / 1_000_000):
            try:
                self._store.nodes.renew(self._id)
                commands = self._store.nodes.commands(self._id)
            except StoreError:
                continue  # the fence will tell whether it is still ours
            if any(command.verb in ("cancel", "kill") for command in commands):
                self._memory.ask_to_stop(self._place)

    def may_start(self, claimed: Claimed, claim: int, ask: Ask) -> bool:
        """Whether the conditions of a claimed job hold; if not, it is given back.  Slots are not counted here."""
        names = _conditions(claimed)
        if not names:
            return True
        extra = (claimed.options, claimed.retries, claimed.crashes, claimed.saved)
        job = wire.JobMessage(claimed.id, claimed.attempt, claim, claimed.task, claimed.args, extra)
        fine, wait, said, error = ask(job, names)
        key = check_key(claimed.task, names, claimed.args, claimed.options)
        if fine:
            self._store.conditions.open(key)
            return True
        end = AttemptEnd(cause=Cause.NOT_READY, started=False)
        options = read_options(claimed.options) or DEFAULT_OPTIONS
        back = without_attempt(build_ending(claimed, claim, options, end, self._store.now(), 0.0))
        answer = ConditionAnswer(
            ending=replace(back, quiet=True),
            key=key,
            task=claimed.task,
            conditions=names,
            wait=wait,
            said=said,
            error=error,
        )
        self._store.conditions.record_answers(self._id, [answer])
        return False

    # to run it, as a node decides

    def go(self, record: JobRecord, claimed: Claimed, claim: int, call: Run) -> bool:
        """Run what is claimed already."""
        queues: dict[str, int | None] = {record.queue: None}
        settings = NodeSettings(
            target="here", pool="static", min=1, max=1, queues=queues, debug=not self._timed
        )
        brain = Brain(settings, [record.task], self._random)
        claimed = _unconditional(claimed)
        brain.delta = self._store.now() - self._clock.boot()
        finished = True
        todo = [
            *brain.on_zygote(self._clock.boot()),
            *brain.on_claimed([claimed], claim, self._clock.boot()),
        ]
        while todo:
            action, now = todo.pop(0), self._clock.boot()
            match action:
                case do.SpawnWorker(slot):
                    todo += brain.on_worker_ready(slot, os.getpid(), now)
                case do.MarkStarted(jobs, first) if first:
                    todo += brain.on_marked([job[0] for job in jobs], now)
                case do.GiveJobs(slot, serial, [job]):
                    self._place = wire.place(serial, 0)
                    outer, self._running = self._running, (brain, slot, self._place)
                    try:
                        results = call(serial, job, self._memory)
                    finally:
                        self._running = outer
                    finished = not any(_broken_off(result) for result in results)
                    if not finished:
                        results = [[*result[:2], wire.STOPPED, *result[3:]] for result in results]
                    todo += brain.on_results(slot, results, self._clock.boot())
                case do.WriteSuccesses(ended):
                    matched = self._store.finish(self._id, ended)
                    todo += brain.on_unmatched([one for one in ended if one.id not in matched], now)
                case do.WriteEndings(endings):
                    self._store.end(
                        self._id, [end if finished else _as_before(end, record) for end in endings]
                    )
        return finished

    def tick(self) -> bool:
        """Time has passed; True if there is a job that runs here and must stop because of it."""
        if self._running is None:
            return False
        brain, slot, place = self._running
        seen = replace(
            sight(self._memory), place=place, phase=wire.RUNNING
        )  # it may have waited for another job here
        actions = brain.on_tick(self._clock.boot(), {slot: seen})
        stops = any(isinstance(action, do.RequestStop) for action in actions)
        if stops:
            self._memory.ask_to_stop(place)
        return stops


def _conditions(job: Claimed) -> tuple[str, ...]:
    options = read_options(job.options)
    return options.ready if options is not None else ()


def _unconditional(job: Claimed) -> Claimed:
    """A person wants it to run, whatever its conditions say."""
    if job.options is None:
        return job
    options = {
        name: value for name, value in msgspec.json.decode(job.options).items() if name != "ready"
    }
    return job._replace(options=msgspec.json.encode(options).decode())


def _broken_off(result: list[Any]) -> bool:
    _, _, outcome, payload, *_ = result
    return outcome == wire.RAISED and msgspec.json.decode(payload)["type"] in _BROKEN_OFF


def _as_before(ending: Ending, record: JobRecord) -> Ending:
    """Not run to its end by the person who ran it: nothing has changed."""
    held = record.state == State.HELD
    return replace(ending, state=record.state, reason=record.reason if held else None)


def _why_not(record: JobRecord) -> str:
    state = State(record.state)
    if state in STARTABLE:
        return f"job {record.id} could not be claimed; try again"
    hint = _HINTS.get(state, f"`genba job requeue {record.id}` lets it run again")
    return f"job {record.id} is {state}: {hint}"
