"""A shared worker runs several jobs of one async task at a time, on one event loop.

Each job has a seat with a shared memory of its own, so that node and job see each other as in an
ordinary worker.  Jobs come in bunches and with tokens, too; a free seat takes the next one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import deque
from typing import Any

from genba import wire
from genba.client import current_job
from genba.client.current_job import RunningJob
from genba.enqueue import trace
from genba.worker.cleanup import children, end_strays
from genba.worker.job_runner import JobRunner, PackedJob, WorkerApp
from genba.worker.outcome import CallOutcome, returned
from genba.worker.worker import NOTIFY_AFTER_US

_RESULTS_READY = wire.frame((wire.RESULTS_READY,))
_NOTIFY_AFTER_SECONDS = NOTIFY_AFTER_US / 1e6
_RECEIVE_BYTES = 1 << 18


class LazyRunningJob:
    """Makes the RunningJob of a seat when its code asks for it first."""

    __slots__ = ("_job", "_place", "_seat", "made")

    def __init__(self, seat: JobSeat, place: int, job: PackedJob) -> None:
        self._seat = seat
        self._place = place
        self._job = job
        self.made: RunningJob | None = None

    def __call__(self) -> RunningJob:
        if self.made is None:
            self.made = RunningJob(wire.JobMessage(*self._job), self._place, self._seat)
        return self.made


class JobSeat(JobRunner):
    """Runs one job at a time, in a process that it shares with the jobs of other seats."""

    trace_layer = staticmethod(trace.trace_async_run)

    def __init__(self, app: WorkerApp, shared: SharedWorker, memory: wire.SharedMemory) -> None:
        super().__init__(app, memory)
        self.job_log = shared.job_log
        self._shared = shared
        self.task: asyncio.Task[None] | None = None
        self.begun = False

    def stop(self, place: int) -> None:
        """Cancel the job, if it is the one at this place."""
        if self.task is not None and self._place == place:
            self.cancel()

    def cancel(self) -> None:
        if self.task is not None and not self._signalled:
            self._signalled = True
            # Later, so that a task that has not begun takes its first step before.
            asyncio.get_running_loop().call_soon(self.task.cancel)

    def start(
        self, loop: asyncio.AbstractEventLoop, serial: int, index: int, job: PackedJob
    ) -> None:
        self._place = wire.place(serial, index)
        self._signalled = self.begun = False
        self.task = loop.create_task(self._run(serial, index, job), name=f"genba job {job[0]}")

    async def _run(self, serial: int, index: int, job: PackedJob) -> None:
        """Run one job, and report how it ended."""
        self.begun = True
        place = self._place
        started = self._started = self._clock.now()
        self._memory.begin(place, started)
        running = LazyRunningJob(self, place, job)
        current_job.set_current_job_of_task(running)
        try:
            task, callee, args, kwargs = self._prepare(job[wire.TASK], job[wire.ARGS])
            value = await callee.call_here(args, kwargs)
            self._exit_if_forked()
            outcome = returned(task, value)
        except BaseException as error:  # noqa: BLE001 - it ends this attempt, and nothing else
            self._exit_if_forked(error)
            outcome = self._raised(wire.JobMessage(*job), error)
        try:
            self._report(serial, index, running.made, outcome)
        except BaseException as error:  # noqa: BLE001 - a fault of this worker, not of the job
            self._shared.fail(error)

    def _report(
        self, serial: int, index: int, job: RunningJob | None, call_outcome: CallOutcome
    ) -> None:
        place, memory, shared = self._place, self._memory, self._shared
        outcome, payload, extra = call_outcome
        if job is not None:
            outcome, payload, extra = self._apply_requests(job, outcome, payload, extra)
            if memory.locked(place):
                extra = {**(extra or {}), "locks": True}
        logged = memory.logged()
        if logged and outcome != wire.APPLIED:
            extra = {**(extra or {}), "log": memory.log()}
        ended = self._clock.now()
        cpu = None  # of one job among several it is not known
        shared.put_result(
            (serial, index, outcome, payload, self._started, ended, cpu, shared.peak(), extra)
        )
        memory.done(place)
        if logged:
            memory.forget_log()
        self.task = None
        shared.free(self)


class SharedWorker:
    """The seats of one worker, for as long as it is shared."""

    def __init__(
        self,
        worker: JobRunner,
        app: WorkerApp,
        sock: socket.socket,
        token_fd: int,
        frames: wire.Frames,
    ) -> None:
        self._app = app
        self._sock = sock
        self._token_fd = token_fd
        self._frames = frames
        self._memory = worker.memory
        self.job_log = worker.job_log
        self._seats: list[JobSeat] = []
        self._free: list[JobSeat] = []
        self._busy: set[JobSeat] = set()
        self._started: list[JobSeat] = []  # since the last turn; their tasks must have begun
        # (serial, index, job): there may be a token for it
        self._waiting: deque[tuple[int, int, PackedJob]] = deque()
        self._tokens: deque[int] = deque()  # their jobs are still on their way
        self._own_children = children() or frozenset()
        self.leaving = False
        self._turn_is_due = False
        self._unreported = False  # there are results of which the node does not know
        self._notified_at = 0.0
        self._notification: asyncio.TimerHandle | None = None
        self._peak: int | None = None

    async def serve(self, seats: int, messages: list[list[Any]]) -> list[list[Any]]:
        """Run jobs until the node ends the sharing, or hangs up; return the messages after that."""
        loop = self._loop = asyncio.get_running_loop()
        while len(self._seats) < seats:
            memory = self._memory.seat(len(self._seats))
            self._seats.append(JobSeat(self._app, self, memory))
        self._free = self._seats[:seats]
        self._waiting.clear()  # the node has taken back what was left
        self._over: asyncio.Future[None] = loop.create_future()
        self._messages = messages
        self._obey()
        loop.add_reader(self._sock, self._receive)
        # libuv makes it non-blocking, but a large result has to wait for room.
        self._sock.setblocking(True)
        try:
            await self._over
        finally:
            loop.remove_reader(self._sock)
        return self._messages

    def write(self, text: bytes) -> None:
        """Write output to the log of the job that printed it; other output is dropped."""
        memory = current_job.find_memory()
        if memory is not None:
            memory.write(text)

    def exit_when_empty(self) -> None:
        """Start no more jobs, and exit when the last one has ended."""
        self.leaving = True
        self._end_if_empty()

    # Messages of the node

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._node_is_gone()
        self._messages += self._frames.feed(data)
        self._obey()

    def _node_is_gone(self) -> None:
        for seat in list(self._busy):
            seat.cancel()
        self.exit_when_empty()

    def _obey(self) -> None:
        while self._messages and not self._over.done():
            match self._messages.pop(0):
                case [wire.BUNCH, serial, jobs]:
                    self._waiting.extend([(serial, index, job) for index, job in enumerate(jobs)])
                    self._turn_soon()
                case [wire.STOP, number, place]:
                    self._seats[number].stop(place)
                case [wire.SHARE, 0]:
                    self._end()
                case [wire.EXIT]:
                    self.exit_when_empty()

    # What seats report

    def peak(self) -> int:
        """Return the peak memory of the process; it is measured once in a turn."""
        if self._peak is None:
            self._peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return self._peak

    def put_result(self, result: wire.BareResult) -> None:
        if not self._memory.put(result):
            self._sock.sendall(wire.frame((wire.RESULTS, [result])))
        self._unreported = True

    def free(self, seat: JobSeat) -> None:
        """Let the next job have this seat."""
        self._busy.discard(seat)
        self._free.append(seat)
        if not self._busy and children() is not None:
            end_strays(self._own_children)  # beside other jobs their owner would be unknown
        self._turn_soon()

    def fail(self, error: BaseException) -> None:
        """End this worker with an error."""
        if not self._over.done():
            self._over.set_exception(error)

    # Once for all that happens in one turn of the loop

    def _turn_soon(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self._peak = None
        if any(not seat.begun for seat in self._started):
            self.fail(RuntimeError("its task was cancelled"))
            return
        self._started.clear()
        if self._waiting and self._free and not self.leaving:
            self._fill_seats()
        if self._unreported:
            self._notify_soon()
        self._end_if_empty()

    def _fill_seats(self) -> None:
        tokens, waiting = self._tokens, self._waiting
        missing = min(len(self._free), len(waiting)) - len(tokens)
        if missing > 0:
            tokens.extend(self._read_tokens(missing))
        if not tokens:
            waiting.clear()  # the node has taken back all jobs that are left here
        while tokens and self._free:
            while waiting and waiting[0][0] != tokens[0]:
                waiting.popleft()  # taken back
            if not waiting:
                return  # tokens come before their frame, which must be on its way
            tokens.popleft()
            seat = self._free.pop()
            self._busy.add(seat)
            self._started.append(seat)
            seat.start(self._loop, *waiting.popleft())
        if self._started:
            self._turn_soon()  # to check that they have begun

    def _read_tokens(self, count: int) -> list[int]:
        try:
            return wire.serials(os.read(self._token_fd, count * wire.TOKEN_SIZE))
        except BlockingIOError:
            return []

    def _notify_soon(self) -> None:
        """Notify the node of results; at once if no job waits, because it has to send more."""
        now = self._loop.time()
        due = self._notified_at + _NOTIFY_AFTER_SECONDS
        if not self._waiting or now >= due:
            self._notify(now)
        elif self._notification is None:
            self._notification = self._loop.call_at(due, self._notify_late)

    def _notify_late(self) -> None:
        self._notification = None
        if self._unreported:
            self._notify(self._loop.time())

    def _notify(self, now: float) -> None:
        self._notified_at = now
        self._unreported = False
        self._sock.sendall(_RESULTS_READY)

    def _end_if_empty(self) -> None:
        if self.leaving and not self._busy:
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
