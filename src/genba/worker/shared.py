"""Several jobs of one async task at a time, on the loop of one worker.

Each has a seat: a piece of the shared memory of its own, so that node and job see each other as if it were alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import resource
import socket
from typing import Any

from genba import context, trace, wire
from genba.context import RunningJob
from genba.worker.leavings import children, end_strays
from genba.worker.lines import JobLines
from genba.worker.run import App, Worker
from genba.worker.telling import Told, returned

_BELL = wire.frame((wire.BELL,))
_seat: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("genba_seat", default=None)


class Seat(Worker):
    """A worker within a worker: its job shares the process with those of other seats."""

    tracing = staticmethod(trace.around_async)

    def __init__(
        self, app: App, sock: socket.socket, token_fd: int, slate: wire.Slate, number: int, lines: JobLines | None
    ) -> None:
        super().__init__(app, sock, token_fd, slate)
        self.lines = lines
        self.number = number
        self.task: asyncio.Task[None] | None = None

    def stop(self, place: int) -> None:
        if self.task is not None and self._place == place:
            self.leave()

    def leave(self) -> None:
        if self.task is not None and not self._signalled:
            self._signalled = True
            asyncio.get_running_loop().call_soon(self.task.cancel)  # after its first step, if it is still to come

    def take(self, serial: int) -> None:
        self._place = wire.place(serial, 0)
        self._signalled = False

    async def live(self, serial: int, job: wire.Job) -> None:
        """Run one job, and tell how it ended."""
        place = self._place
        started = self._started = self._clock.now()
        self._slate.begin(place, started)
        running = RunningJob(job, place, self)
        context.enter_task(running)
        _seat.set(self)
        told = self._as_asked(running, *await self._await_call(job))
        outcome, payload, extra = told
        if self._slate.logged() and outcome != wire.APPLIED:
            extra = {**(extra or {}), "log": self._slate.log()}
        if self._slate.locked(place):
            extra = {**(extra or {}), "locks": True}
        # The CPU time of one among several is not known.
        peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        result = (serial, 0, outcome, payload, started, self._clock.now(), None, peak, extra)
        if not self._slate.put(result):
            self._sock.sendall(wire.frame((wire.SEATED, self.number, [result])))
        self._slate.done(place)
        if self._slate.logged():
            self._slate.forget_log()

    async def _await_call(self, job: wire.Job) -> Told:
        try:
            task, callee, args, kwargs = self._prepared(job.task, job.args)
            value = await callee.call_here(args, kwargs)
            self._end_if_forked()
            return returned(task, value)
        except BaseException as error:  # noqa: BLE001  whatever the user's code raises ends this attempt, and only it
            self._end_if_forked(error)
            return self._raised(job, error)


class Shared:
    """The seats of one worker, while it is shared."""

    def __init__(
        self, worker: Worker, app: App, sock: socket.socket, token_fd: int, frames: wire.Frames
    ) -> None:
        self._worker = worker
        self._app = app
        self._sock = sock
        self._tokens = token_fd
        self._frames = frames
        self._seats: list[Seat] = []
        self._busy: set[Seat] = set()
        self._kept = children() or frozenset()
        self.leaving = False
        self._rings = False

    async def serve(self, count: int, heard: list[list[Any]]) -> list[list[Any]]:
        """Until the node takes the seats away again, or hangs up; takes and gives what was heard beyond that."""
        loop = asyncio.get_running_loop()
        while len(self._seats) < count:
            number = len(self._seats)
            slate = self._worker.slate.seat(number)
            self._seats.append(Seat(self._app, self._sock, self._tokens, slate, number, self._worker.lines))
        self._over: asyncio.Future[None] = loop.create_future()
        self._heard = heard
        self._obey()
        loop.add_reader(self._sock, self._hear)
        try:
            await self._over
        finally:
            loop.remove_reader(self._sock)
        return self._heard

    def write(self, text: bytes) -> None:
        """What is printed goes to the seat that prints; what no job prints, to nobody's log."""
        seat = _seat.get()
        if seat is not None:
            seat.slate.write(text)

    def bow_out(self) -> None:
        """Somebody wants this process to go: no more jobs after these."""
        self.leaving = True
        self._end_if_empty()

    def release(self) -> None:
        """There is no node any more."""
        for seat in list(self._busy):
            seat.leave()
        self.bow_out()

    def _hear(self) -> None:
        try:
            data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
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
                case [wire.SEAT, number, serial, job]:
                    self._start(self._seats[number], serial, wire.Job(*job))
                case [wire.STOP, number, place]:
                    self._seats[number].stop(place)
                case [wire.SHARE, 0]:
                    self._end()
                case [wire.EXIT]:
                    self.bow_out()

    def _start(self, seat: Seat, serial: int, job: wire.Job) -> None:
        self._busy.add(seat)
        seat.take(serial)
        seat.task = asyncio.get_running_loop().create_task(seat.live(serial, job), name=f"genba job {job.id}")
        seat.task.add_done_callback(lambda done: self._ended(seat, done))

    def _ended(self, seat: Seat, done: asyncio.Task[None]) -> None:
        seat.task = None
        self._busy.discard(seat)
        lost = RuntimeError("its task was cancelled") if done.cancelled() else done.exception()
        if lost is not None:
            if not self._over.done():
                self._over.set_exception(lost)  # ours, not the job's: this worker is of no use any more
            return
        if not self._busy and children() is not None:
            end_strays(self._kept)  # while others run, nobody can tell whose they are
        if not self._rings:
            self._rings = True
            asyncio.get_running_loop().call_soon(self._ring)
        self._end_if_empty()

    def _ring(self) -> None:
        """Once for all that have ended in this round of the loop."""
        self._rings = False
        self._sock.sendall(_BELL)

    def _end_if_empty(self) -> None:
        if self.leaving and not self._busy:
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
