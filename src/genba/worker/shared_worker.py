"""Several jobs of one async task at a time, on the loop of one worker.

Each has a seat: a piece of the shared memory of its own, so that node and job see each other as if it were alone.  Jobs
come in bunches and with tokens, as they do to any worker; a seat that is free takes the next one.
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
from genba.worker.job_log import JobLog
from genba.worker.outcome import CallOutcome, returned
from genba.worker.worker import BELL_AFTER, App, Packed, Worker

_BELL = wire.frame((wire.RESULTS_READY,))


class JobInSlot:
    """One job at a seat.  What running code may ask is made when somebody asks."""

    __slots__ = ("_job", "_place", "_seat", "made")

    def __init__(self, seat: WorkerSlot, place: int, job: Packed) -> None:
        self._seat = seat
        self._place = place
        self._job = job
        self.made: RunningJob | None = None

    def __call__(self) -> RunningJob:
        if self.made is None:
            self.made = RunningJob(wire.JobMessage(*self._job), self._place, self._seat)
        return self.made


class WorkerSlot(Worker):
    """A worker within a worker: its job shares the process with those of other seats."""

    tracing = staticmethod(trace.trace_async_run)

    def __init__(
        self,
        app: App,
        company: SharedWorker,
        token_fd: int,
        memory: wire.SharedMemory,
        lines: JobLog | None,
    ) -> None:
        super().__init__(app, company.sock, token_fd, memory)
        self.lines = lines
        self._company = company
        self.task: asyncio.Task[None] | None = None
        self.begun = False

    def stop(self, place: int) -> None:
        if self.task is not None and self._place == place:
            self.leave()

    def leave(self) -> None:
        if self.task is not None and not self._signalled:
            self._signalled = True
            asyncio.get_running_loop().call_soon(
                self.task.cancel
            )  # after its first step, if it is still to come

    def start(self, loop: asyncio.AbstractEventLoop, serial: int, index: int, job: Packed) -> None:
        self._place = wire.place(serial, index)
        self._signalled = self.begun = False
        self.task = loop.create_task(self._sit(serial, index, job), name=f"genba job {job[0]}")

    async def _sit(self, serial: int, index: int, job: Packed) -> None:
        """Run one job, and tell how it ended."""
        self.begun = True
        place = self._place
        started = self._started = self._clock.now()
        self._memory.begin(place, started)
        sitting = JobInSlot(self, place, job)
        current_job.set_current_job_of_task(sitting)
        try:
            task, callee, args, kwargs = self._prepared(job[wire.TASK], job[wire.ARGS])
            value = await callee.call_here(args, kwargs)
            self._end_if_forked()
            told = returned(task, value)
        except BaseException as error:  # noqa: BLE001  whatever the user's code raises ends this attempt, and only it
            self._end_if_forked(error)
            told = self._raised(wire.JobMessage(*job), error)
        try:
            self._stand_up(serial, index, sitting.made, told)
        except BaseException as error:  # noqa: BLE001  ours, not the job's
            self._company.fail(error)

    def _stand_up(self, serial: int, index: int, job: RunningJob | None, told: CallOutcome) -> None:
        place, memory, company = self._place, self._memory, self._company
        outcome, payload, extra = told
        if job is not None:
            outcome, payload, extra = self._as_asked(job, outcome, payload, extra)
            if memory.locked(place):
                extra = {**(extra or {}), "locks": True}
        logged = memory.logged()
        if logged and outcome != wire.APPLIED:
            extra = {**(extra or {}), "log": memory.log()}
        # The CPU time of one among several is not known.
        ended = self._clock.now()
        company.tell(
            (serial, index, outcome, payload, self._started, ended, None, company.peak(), extra)
        )
        memory.done(place)
        if logged:
            memory.forget_log()
        self.task = None
        company.ended(self)


class SharedWorker:
    """The seats of one worker, while it is shared."""

    def __init__(
        self, worker: Worker, app: App, sock: socket.socket, token_fd: int, frames: wire.Frames
    ) -> None:
        self._worker = worker
        self._app = app
        self.sock = sock
        self._token_fd = token_fd
        self._frames = frames
        self._memory = worker.memory
        self._seats: list[WorkerSlot] = []
        self._free: list[WorkerSlot] = []
        self._busy: set[WorkerSlot] = set()
        self._fresh: list[WorkerSlot] = []  # what they were given has not begun
        self._waiting: deque[tuple[int, int, Packed]] = (
            deque()
        )  # (serial, index, job) of which we may have a token
        self._tokens: deque[int] = deque()  # read, and their jobs are still on their way
        self._kept = children() or frozenset()
        self.leaving = False
        self._turns = False  # a turn will come
        self._untold = False  # results lie in the ring, and the node does not know
        self._rung_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._peak: int | None = None

    async def serve(self, count: int, heard: list[list[Any]]) -> list[list[Any]]:
        """Until the node takes the seats away again, or hangs up; takes and gives what was heard beyond that."""
        loop = self._loop = asyncio.get_running_loop()
        while len(self._seats) < count:
            memory = self._memory.seat(len(self._seats))
            self._seats.append(
                WorkerSlot(self._app, self, self._token_fd, memory, self._worker.lines)
            )
        self._free = self._seats[:count]
        self._waiting.clear()  # taken back, if there is anything
        self._over: asyncio.Future[None] = loop.create_future()
        self._heard = heard
        self._obey()
        loop.add_reader(self.sock, self._hear)
        self.sock.setblocking(True)  # libuv changes that, and a large result has to wait for room
        try:
            await self._over
        finally:
            loop.remove_reader(self.sock)
        return self._heard

    def write(self, text: bytes) -> None:
        """What is printed goes to the job that prints; what no job prints, to nobody's log."""
        memory = current_job.find_memory()
        if memory is not None:
            memory.write(text)

    def bow_out(self) -> None:
        """Somebody wants this process to go: no more jobs after these."""
        self.leaving = True
        self._end_if_empty()

    def release(self) -> None:
        """There is no node any more."""
        for seat in list(self._busy):
            seat.leave()
        self.bow_out()

    # what the node says

    def _hear(self) -> None:
        try:
            data = self.sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.release()
        self._heard += self._frames.feed(data)
        self._obey()

    def _obey(self) -> None:
        while self._heard and not self._over.done():
            match self._heard.pop(0):
                case [wire.BUNCH, serial, jobs]:
                    self._waiting.extend([(serial, index, job) for index, job in enumerate(jobs)])
                    self._turn_soon()
                case [wire.STOP, number, place]:
                    self._seats[number].stop(place)
                case [wire.SHARE, 0]:
                    self._end()
                case [wire.EXIT]:
                    self.bow_out()

    # what seats say

    def peak(self) -> int:
        """Of the whole process; asked for once in a turn."""
        if self._peak is None:
            self._peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return self._peak

    def tell(self, result: wire.BareResult) -> None:
        if not self._memory.put(result):
            self.sock.sendall(wire.frame((wire.RESULTS, [result])))
        self._untold = True

    def ended(self, seat: WorkerSlot) -> None:
        self._busy.discard(seat)
        self._free.append(seat)
        if not self._busy and children() is not None:
            end_strays(self._kept)  # while others run, nobody can tell whose they are
        self._turn_soon()

    def fail(self, error: BaseException) -> None:
        """This worker is of no use any more."""
        if not self._over.done():
            self._over.set_exception(error)

    # once for all that happens in a turn of the loop

    def _turn_soon(self) -> None:
        if not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turns = False
        self._peak = None
        if any(not seat.begun for seat in self._fresh):
            self.fail(RuntimeError("its task was cancelled"))
            return
        self._fresh.clear()
        if self._waiting and self._free and not self.leaving:
            self._take_seats()
        if self._untold:
            self._ring_soon()
        self._end_if_empty()

    def _take_seats(self) -> None:
        tokens, waiting = self._tokens, self._waiting
        wanted = min(len(self._free), len(waiting)) - len(tokens)
        if wanted > 0:
            tokens.extend(self._read_tokens(wanted))
        if not tokens:
            waiting.clear()  # the node has taken back all that is left here
        while tokens and self._free:
            while waiting and waiting[0][0] != tokens[0]:
                waiting.popleft()  # taken back
            if not waiting:
                return  # tokens are put before their frame, which must be on its way
            tokens.popleft()
            seat = self._free.pop()
            self._busy.add(seat)
            self._fresh.append(seat)
            seat.start(self._loop, *waiting.popleft())
        if self._fresh:
            self._turn_soon()  # to see that they have begun

    def _read_tokens(self, count: int) -> list[int]:
        try:
            return wire.serials(os.read(self._token_fd, count * wire.TOKEN_SIZE))
        except BlockingIOError:
            return []

    def _ring_soon(self) -> None:
        """At once if nothing is left to begin: the node has to give more."""
        now = self._loop.time()
        if not self._waiting or now - self._rung_at >= BELL_AFTER / 1e6:
            self._ring(now)
        elif self._alarm is None:
            self._alarm = self._loop.call_at(self._rung_at + BELL_AFTER / 1e6, self._ring_late)

    def _ring_late(self) -> None:
        self._alarm = None
        if self._untold:
            self._ring(self._loop.time())

    def _ring(self, now: float) -> None:
        self._rung_at = now
        self._untold = False
        self.sock.sendall(_BELL)

    def _end_if_empty(self) -> None:
        if self.leaving and not self._busy:
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
