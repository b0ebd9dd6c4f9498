"""A node for single jobs in the calling process, with its terminal for a debugger.

No workers, no timers.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from genba import wire
from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import SECOND
from genba.domain.states import Cause, State
from genba.domain.verdict import AttemptEnd
from genba.errors import GenbaError, JobNotFound, StoreError
from genba.node.database.join import boot_id
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.decide.state import without_attempt
from genba.node.processes.channel import view_of
from genba.node.settings import NodeSettings
from genba.node.timing import renewal_us
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

# (job, names of conditions) -> (whether they hold, how long to wait, which does not hold, error)
Check = Callable[[wire.JobMessage, Sequence[str]], tuple[bool, Micros | None, str, str | None]]
# (serial, job, shared memory) -> results
Run = Callable[[int, wire.JobMessage, wire.SharedMemory], list[list[Any]]]


class AppWithStore(Protocol):
    @property
    def store(self) -> Store: ...

    @property
    def settings(self) -> Any: ...


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
        """With `timed`, jobs run out of time, and the caller must call `tick` as time passes."""
        self._store = store
        self._lease = lease
        self._clock = clock or SystemClock()
        self._random = random
        self._id = secrets.randbits(62) + 1
        self._memory = wire.SharedMemory(wire.SharedMemory.create())
        self._place = 0
        self._timed = timed
        # The running job's brain, slot and place.
        self._running: tuple[Brain, int, int] | None = None

    @classmethod
    def of(cls, app: AppWithStore) -> ForegroundNode:
        """Return one that works on the database of `app`."""
        return cls(app.store, app.settings.lease)

    def run(self, id: JobId, call: Run) -> bool:
        """Claim this job, run it by `call`, and write how it ended; False if the user broke it off.

        It need not be due, and no limit holds for it; GenbaError if it is in no state to start.
        """
        self._store.install()
        record = self._store.job(id)
        if record is None:
            raise JobNotFound(f"there is no job {id}")
        with self._joined():
            claim = secrets.randbits(63)
            claimed = None
            if record.state in STARTABLE:
                claimed = self._store.claims.claim_job(self._id, claim, id)
            if claimed is None:
                raise GenbaError(_why_not(self._store.job(id) or record))
            self._store.mark_started([(claimed.id, claimed.attempt, claim, self._store.now())])
            return self.run_claimed(record, claimed, claim, call)

    # a node, as far as other nodes can see

    @contextmanager
    def _joined(self) -> Iterator[None]:
        store = self._store
        store.node_wakeups.register(self._id)
        try:
            store.nodes.join(self._new_node())
            over = threading.Event()
            renewals = threading.Thread(
                target=self._renew, args=(over,), name="genba-foreground", daemon=True
            )
            renewals.start()
            try:
                yield
            finally:
                over.set()
                renewals.join()
                store.nodes.leave(self._id)
        finally:
            store.node_wakeups.unregister()

    def join(self) -> int:
        """Join without renewals, for callers with a clock of their own; gives the node's id."""
        self._store.nodes.join(self._new_node())
        return self._id

    def _new_node(self) -> NewNode:
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

    def _renew(self, over: threading.Event) -> None:
        """Keep the lease for as long as the job takes, a debugger's pauses included."""
        while not over.wait(renewal_us(self._lease) / SECOND):
            try:
                self._store.nodes.renew(self._id)
                commands = self._store.nodes.commands(self._id)
            except StoreError:
                continue  # the write of the job's end shows whether it is still this node's
            if any(command.verb in ("cancel", "kill") for command in commands):
                self._memory.ask_to_stop(self._place)

    # conditions

    def may_start(self, claimed: Claimed, claim: int, check: Check) -> bool:
        """Check the conditions of a claimed job, and release it if they do not hold.

        Slots of limits are not counted here.
        """
        names = _conditions(claimed)
        if not names:
            return True
        extra = (claimed.options, claimed.retries, claimed.crashes, claimed.saved)
        job = wire.JobMessage(claimed.id, claimed.attempt, claim, claimed.task, claimed.args, extra)
        hold, wait, said, error = check(job, names)
        key = check_key(claimed.task, names, claimed.args, claimed.options)
        if hold:
            self._store.conditions.open(key)
            return True
        end = AttemptEnd(cause=Cause.NOT_READY, started=False)
        options = read_options(claimed.options) or DEFAULT_OPTIONS
        ending = build_ending(claimed, claim, options, end, self._store.now(), 0.0)
        answer = ConditionAnswer(
            ending=replace(without_attempt(ending), quiet=True),
            key=key,
            task=claimed.task,
            conditions=names,
            wait=wait,
            said=said,
            error=error,
        )
        self._store.conditions.record_answers(self._id, [answer])
        return False

    # the run, as a node's brain decides

    def run_claimed(self, record: JobRecord, claimed: Claimed, claim: int, call: Run) -> bool:
        """Run a job that is claimed already; False if the user broke it off."""
        settings = NodeSettings(
            target="here",
            pool="static",
            min=1,
            max=1,
            queues={record.queue: None},
            debug=not self._timed,
        )
        brain = Brain(settings, [record.task], self._random)
        claimed = _unconditional(claimed)
        brain.wall_offset = self._store.now() - self._clock.boot()
        finished = True
        actions = [
            *brain.on_zygote_ready(self._clock.boot()),
            *brain.on_claimed([claimed], claim, self._clock.boot()),
        ]
        while actions:
            action, now = actions.pop(0), self._clock.boot()
            match action:
                case do.SpawnWorker(slot):
                    actions += brain.on_worker_ready(slot, os.getpid(), now)
                case do.MarkStarted(jobs, first) if first:
                    actions += brain.on_marked([job[0] for job in jobs], now)
                case do.GiveJobs(slot, serial, [job]):
                    results, finished = self._call(brain, slot, serial, job, call)
                    actions += brain.on_results(slot, results, self._clock.boot())
                case do.WriteSuccesses(successes):
                    matched = self._store.finish(self._id, successes)
                    refused = [success for success in successes if success.id not in matched]
                    actions += brain.on_refused(refused, now)
                case do.WriteEndings(endings):
                    if not finished:
                        endings = [_as_before(ending, record) for ending in endings]
                    self._store.end(self._id, endings)
        return finished

    def _call(
        self, brain: Brain, slot: int, serial: int, job: wire.JobMessage, call: Run
    ) -> tuple[list[list[Any]], bool]:
        """Give the results of a job, and whether it came to its end."""
        self._place = wire.place(serial, 0)
        outer, self._running = self._running, (brain, slot, self._place)
        try:
            results = call(serial, job, self._memory)
        finally:
            self._running = outer
        if any(_broken_off(result) for result in results):
            return [[*result[:2], wire.STOPPED, *result[3:]] for result in results], False
        return results, True

    def tick(self) -> bool:
        """Note that time has passed; True if a job runs here and must stop because of it."""
        if self._running is None:
            return False
        brain, slot, place = self._running
        # The job may be waiting for another one that runs here, whose place the memory shows.
        view = replace(view_of(self._memory), place=place, phase=wire.RUNNING)
        actions = brain.on_tick(self._clock.boot(), {slot: view})
        stops = any(isinstance(action, do.RequestStop) for action in actions)
        if stops:
            self._memory.ask_to_stop(place)
        return stops


def _conditions(job: Claimed) -> tuple[str, ...]:
    options = read_options(job.options)
    return options.ready if options is not None else ()


def _unconditional(job: Claimed) -> Claimed:
    """Remove its conditions: a person wants it to run whatever they say."""
    if job.options is None:
        return job
    options = msgspec.json.decode(job.options)
    options.pop("ready", None)
    return job._replace(options=msgspec.json.encode(options).decode())


def _broken_off(result: list[Any]) -> bool:
    _, _, outcome, payload, *_ = result
    return outcome == wire.RAISED and msgspec.json.decode(payload)["type"] in _BROKEN_OFF


def _as_before(ending: Ending, record: JobRecord) -> Ending:
    """Give back a job that its user has broken off in the state it had."""
    held = record.state == State.HELD
    return replace(ending, state=record.state, reason=record.reason if held else None)


def _why_not(record: JobRecord) -> str:
    state = State(record.state)
    if state in STARTABLE:
        return f"job {record.id} could not be claimed; try again"
    hint = _HINTS.get(state, f"`genba job requeue {record.id}` lets it run again")
    return f"job {record.id} is {state}: {hint}"
