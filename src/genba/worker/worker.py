"""A worker: it runs one job after the other, and says how each ended.

Before each job it reads one token from a pipe that the node can read too: whoever gets the token has the job.
Before the next job starts, the result of the last one is in the shared memory, where the death of this process
cannot take it away.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn, Protocol

from setproctitle import getproctitle, setproctitle

from genba import wire
from genba.client import current_job
from genba.client.current_job import RunningJob
from genba.client.task import Task
from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import to_datetime
from genba.domain.outcome import AttemptReport
from genba.enqueue import trace
from genba.errors import BadArguments, GenbaError, Stopped
from genba.options.conditions import Conditions
from genba.signal_safe import stop_when_safe
from genba.worker import event_loop
from genba.worker.capture import Capture
from genba.worker.cleanup import children, end_forked, end_strays, forks, threads, threads_left
from genba.worker.conditions import ConditionChecker
from genba.worker.fork_per_job import ResultFile, draw_others
from genba.worker.job_log import JobLog
from genba.worker.middleware import Callee, LifespanFailed, Middleware, enter
from genba.worker.outcome import (
    CallOutcome,
    UnfitArguments,
    apply_requests,
    describe,
    raised,
    returned,
    text,
)
from genba.worker.process import die_like, leave

Packed = Sequence[Any]  # a wire.Job as it came; most jobs never need it by names

UNABLE = 4  # exit code
BELL_AFTER = 4_000  # µs: how long a result may lie in the ring before the node is told
BELL_AFTER_FEW = 10_000  # ... if only a few come in that time
BELL_AFTER_FORKS = 50_000  # ... if each job has a process: what it costs to be told is then most of what the node does
QUICK = 50  # µs: too short to start a process, or to fill so much memory that one could see it


class App(Protocol):
    """What a worker needs of the user's app."""

    lifespans: list[Callable[[], Any]]
    middlewares: list[Callable[..., Any]]

    @property
    def conditions(self) -> Conditions: ...

    def task_table(self) -> dict[str, Task[..., Any]]: ...

    def results_of_parents(self, job_id: int) -> dict[int, Any]: ...

    def options_of(self, job_id: int) -> dict[str, Any]: ...

    def moment(self, value: Any) -> int: ...

    def inbox(self, job: RunningJob) -> current_job.Inbox: ...

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes: ...

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...

    @property
    def store(self) -> Any: ...


def main(
    app: App,
    slot: int,
    sock: socket.socket,
    token_fd: int,
    shm_fd: int,
    fork: Callable[[], int] = os.fork,
) -> None:
    """Run jobs until the node hangs up; `fork` is for those that have a process of their own."""
    worker = Worker(app, sock, token_fd, wire.SharedMemory(shm_fd), fork=fork)
    signal.signal(signal.SIGTERM, worker.on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with worker.surroundings(), suppress(BrokenPipeError, ConnectionResetError):
            worker.capture_output()
            worker.serve()  # until the node is gone, and then the guard is about to end us
    except LifespanFailed as error:
        sys.stderr.write(f"genba: worker {slot} ends: {error}\n{_trace(error.__cause__)}")
        sys.exit(UNABLE)


class _Dismissed(BaseException):
    """Told to go while it was idle."""


class Worker:
    tracing: Callable[..., Any] = staticmethod(trace.trace_run)

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        token_fd: int,
        memory: wire.SharedMemory,
        clock: Clock | None = None,
        fork: Callable[[], int] = os.fork,
    ) -> None:
        self._app = app
        self._tasks = app.task_table()
        self._sock = sock
        self._tokens = token_fd
        self._memory = memory
        self._frames = wire.Frames()
        self._bunches: list[tuple[int, list[list[Any]], bool]] = []
        self._questions: list[list[Any]] = []
        self._last_bell = 0
        self._rung = True
        self._forks = forks()
        self._packed: Packed = ()
        self._made: list[RunningJob] = []
        self._cpu = 0
        self._cpu_is_old = False
        self._peak = 0
        self._place = 0
        self._fork = fork
        self._box: ResultFile | None = None
        self._child = 0  # the process that runs the job, if it is not this one
        self._stoppable: Callable[[], None] | None = None
        self._bow_out: Callable[[], None] | None = None  # while it runs several jobs at a time
        self._loop: asyncio.Runner | None = None
        self._signalled = False
        self._missed = False  # a signal that came before there was anything to stop
        self._kept: frozenset[int] = frozenset()
        self._threads: frozenset[int] | None = (
            None  # those of no job; None: whoever is here is left alone
        )
        self._leaving = False
        self._last = False  # what it has in hand is all that it will run
        self._idle = False
        self._title = getproctitle()
        self._shown = False
        self._clock = clock or SystemClock()
        self._middleware: Middleware | None = None
        self._surround_calls()
        self._capture = Capture(memory)
        self.lines: JobLog | None = None
        self._outside: int | None = None
        self._shared: Any = None
        self._started = 0
        self._logged = 0  # bytes that are stored already
        os.set_blocking(token_fd, False)

    # what a running job may ask for

    @property
    def memory(self) -> wire.SharedMemory:
        return self._memory

    def inside(self) -> Any:
        self._app.store.install()  # once; not while a transaction is open
        return self._app.store.inside

    def deps(self, job_id: int) -> dict[int, Any]:
        return self._app.results_of_parents(job_id)

    def options(self, job_id: int) -> dict[str, Any]:
        return self._app.options_of(job_id)

    def moment(self, value: Any) -> int:
        return self._app.moment(value)

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes:
        return self._app.clone(job_id, changes)

    def encode_result(self, task: str, value: Any) -> tuple[bytes | None, str | None]:
        return self._tasks[task].arguments.encode_result(value)

    def by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        return self._tasks[task].arguments.by_name(payload)

    def report(self, progress: str | None) -> AttemptReport:
        self._logged = self._memory.logged()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return AttemptReport(
            progress=progress,
            log=self._memory.log(),
            ran=max(0, self._clock.now() - self._started),
            pid=os.getpid(),
            cpu=self._used(_cpu(), max(0, self._clock.now() - self._started)),
            peak=int(usage.ru_maxrss),
        )

    def inbox(self, job: RunningJob) -> current_job.Inbox:
        return self._app.inbox(job)

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self._app.threads(call, *args, **kwargs)

    def log(self, text: str) -> None:
        self._capture.write(f"{to_datetime(self._clock.now()):%H:%M:%S.%f} {text}\n")
        if self.lines is not None:
            self.lines.write(text)

    def stopping(self) -> None:
        self._signalled = True

    # the order of things

    def surroundings(self) -> ExitStack:
        """The app's lifespans, entered; LifespanFailed if that cannot be."""
        entered = enter(self._app.lifespans, self._event_loop)
        self._surround_calls()  # they may have brought a tracer
        return entered

    def _surround_calls(self) -> None:
        layers = [*([self.tracing] if trace.tracing() else []), *self._app.middlewares]
        if layers:
            self._middleware = Middleware(layers, self._run_plain, self._run_async)

    def capture_output(self) -> None:
        """From now on what this process prints belongs to the job that runs; what lifespans print is nobody's."""
        self.lines = JobLog()  # of its own way out, which is still there
        faulthandler.register(signal.SIGUSR1, os.dup(2))  # what hangs can be asked where
        self._outside = self._capture.install()

    def serve(self) -> None:
        ready = wire.frame((wire.READY, os.getpid()))
        if self._outside is None:
            self._sock.sendall(ready)
        else:
            socket.send_fds(self._sock, [ready], [self._outside])
            os.close(self._outside)
        self._cpu, self._peak = _cpu(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._kept = children() or frozenset()  # started with the worker, by no job
        self._threads = threads()
        if len(self._threads) > 1:
            self._fork = os.fork
        token = b""
        while not self._leaving:
            while self._questions:
                self._answer(*self._questions.pop(0))
            if not self._bunches:
                self._ring()
                if self._last:
                    return
                if self._shown:
                    self._show(self._title)
                try:
                    self._idle = True
                    heard = not self._told_to_go() and self._listen()
                    self._idle = False
                except _Dismissed:
                    return
                if not heard:
                    return
                continue
            token = token or self._next_token()
            if token:
                token = self._run_bunch(token)
            else:
                self._bunches.clear()  # the node has taken back all that is left here

    def _told_to_go(self) -> bool:
        return self._leaving

    def _next_token(self) -> bytes:
        try:
            return os.read(self._tokens, wire.TOKEN_SIZE)
        except BlockingIOError:
            return b""

    def _run_bunch(self, token: bytes) -> bytes:
        """Run the bunch that `token` belongs to, as far as tokens go; gives the token that did not fit."""
        while True:
            while self._bunches and wire.token(self._bunches[0][0]) != token:
                self._bunches.pop(0)  # taken back
            if self._bunches:
                break
            if not self._listen():  # tokens are put before their frame, which must be on its way
                return b""
        serial, jobs, each = self._bunches.pop(0)
        mine = token
        if (
            len(jobs) == 1
        ):  # short ones travel in company, and would be gone before anybody could look
            self._show(f"{self._title} {jobs[0][wire.TASK]} #{jobs[0][0]}")
        last = len(jobs) - 1
        self._memory.set_job_pid(0)
        for index, job in enumerate(jobs):
            token = token or self._next_token()
            if token != mine:
                return token
            token = b""
            if each and index < last:
                self._run_apart(serial, index, job)
                self._memory.set_job_pid(0)
            else:
                self._run(serial, index, job)
        return b""

    def _listen(self) -> bool:
        size = self._sock.recv_into(self._frames.room())
        if not size:
            self._leaving = True
            return False
        heard = list(self._frames.filled(size))
        while heard:
            message = heard.pop(0)
            if message[0] in (wire.BUNCH, wire.FORK_PER_JOB):
                self._bunches.append((message[1], message[2], message[0] == wire.FORK_PER_JOB))
            elif message[0] == wire.EXIT and self._bunches:
                self._last = True
            elif message[0] == wire.EXIT:
                self._leaving = True
            elif message[0] == wire.CHECK_CONDITIONS:
                self._questions.append(message[1:])
            elif message[0] == wire.SHARE:
                heard = self._share(message[1], heard)
        return True

    def _share(self, seats: int, heard: list[list[Any]]) -> list[list[Any]]:
        """Run several jobs at a time, until the node says otherwise."""
        from genba.worker.shared_worker import SharedWorker

        self._idle = False
        loop = self._event_loop()
        shared = self._shared = self._shared or SharedWorker(
            self, self._app, self._sock, self._tokens, self._frames
        )
        self._capture.on, self._capture.sink = True, shared
        self._bow_out = lambda: void(loop.call_soon_threadsafe(shared.bow_out))
        try:
            return loop.run_until_complete(shared.serve(seats, heard))
        finally:
            self._bow_out = None
            self._capture.on, self._capture.sink = False, self._memory
            self._leaving = self._leaving or shared.leaving

    def _ring(self) -> None:
        if not self._rung:
            self._sock.sendall(_BELL)
            self._rung = True

    def _show(self, title: str) -> None:
        """What `ps` tells of us."""
        self._shown = title is not self._title
        setproctitle(title)

    # may it start?

    def _answer(self, serial: int, job: list[Any], names: list[str]) -> None:
        """Ask these conditions; whoever raises is not ready."""
        self._fork = os.fork  # the user's code has been here, and may have left anything
        asking = ConditionChecker(self._app.conditions, self._event_loop, self.by_name)
        told: list[Any]
        try:
            verdict = asking.ask(wire.JobMessage(*job), names)
            told = [serial, verdict.ways, verdict.wait, verdict.refused_by, None]
        except BaseException as error:  # noqa: BLE001  whatever the user's code raises is an answer
            told = [serial, (), None, asking.name, describe(error)]
        if children() is not None:
            end_strays(self._kept)
        self._sock.sendall(wire.frame((wire.CONDITIONS_CHECKED, told)))

    # one job

    def run_one(self, serial: int, job: wire.JobMessage) -> None:
        """Without tokens and without a node that listens."""
        self._cpu, self._peak = _cpu(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._kept = children() or frozenset()
        self._run(serial, 0, job)

    def _run(self, serial: int, index: int, job: Packed) -> None:
        place = self._place = wire.place(serial, index)
        self._signalled = self._missed = False
        started = self._clock.now()
        self._memory.begin(place, started)
        outcome, payload, extra, ended = self._live(place, job, started)
        cpu = ended - started
        if 0 <= cpu < QUICK:
            self._cpu_is_old = True  # to ask for it would cost as much as such a job does
            after = BELL_AFTER
        else:
            self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            extra = self._without_strays(extra)
            now = _cpu()
            cpu = self._used(now, max(0, cpu))
            self._cpu, self._cpu_is_old = now, False
            after = BELL_AFTER_FEW
        self._tell(place, (serial, index, outcome, payload, started, ended, cpu, self._peak, extra))
        self._ring_soon(ended, after)

    def _used(self, now: int, ran: int) -> int:
        """The CPU time of a job that ran so long; right after short ones, which are in it too, at most that."""
        used = now - self._cpu
        return min(used, ran) if self._cpu_is_old else used

    def _live(
        self, place: int, job: Packed, started: int
    ) -> tuple[int, bytes | None, dict[str, Any] | None, int]:
        """Run it; gives how that ended, and when."""
        self._started = started
        made: list[RunningJob] = []
        self._packed, self._made = job, made
        current_job.set_current_job(self._current)
        self._capture.on = True
        outcome, payload, extra = self._call(job)
        if self._signalled or made:
            self._end_with_threads(place)
            if made:
                outcome, payload, extra = self._as_asked(made[0], outcome, payload, extra)
        self._capture.on = False
        current_job.set_current_job(None)
        if self._memory.logged() and outcome != wire.APPLIED:
            extra = {**(extra or {}), "log": self._memory.log()}
        if self._memory.locked(place):
            extra = {**(extra or {}), "locks": True}
        return outcome, payload, extra, self._clock.now()

    def _current(self) -> RunningJob:
        """Made when somebody asks for it."""
        made = self._made
        if not made:
            made.append(RunningJob(wire.JobMessage(*self._packed), self._place, self))
        return made[0]

    def _without_strays(self, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        """Kill what the job has left behind, before it is told that it is over."""
        killed = end_strays(self._kept) if children() is not None else 0
        return {**(extra or {}), "strays": killed} if killed else extra

    def _tell(self, place: int, result: wire.BareResult) -> None:
        memory = self._memory
        if not memory.put(result):
            self._sock.sendall(wire.frame((wire.RESULTS, [result])))
        memory.done(place)
        if memory.logged():
            memory.forget_log()
        self._rung = False

    def _ring_soon(self, now: int, after: int) -> None:
        if now - self._last_bell > after:
            self._last_bell = now
            self._ring()

    def _run_apart(self, serial: int, index: int, job: Packed) -> None:
        """In a process of its own.  If that dies we do so too, in the same way: then the node knows how."""
        place = self._place = wire.place(serial, index)
        box = self._box = self._box or ResultFile()
        self._signalled, self._missed, self._stoppable = False, False, _not_yet
        pid = self._fork()
        if pid == 0:
            self._be_job(box, place, job)
        self._memory.set_job_pid(pid)
        self._memory.begin(place, self._clock.now())
        self._child = pid
        if self._signalled:  # before there was anybody to pass it on to
            self._pass_on(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._child, self._stoppable = (
            0,
            None,
        )  # no signal goes there any more; now its number may be another's
        _, status, usage = os.wait4(pid, 0)
        draw_others()
        lived = box.take()
        if lived is None:
            die_like(status)
        started, outcome, payload, extra, ended = lived
        extra = {**(self._without_strays(extra) or {}), "pid": pid}
        cpu = int((usage.ru_utime + usage.ru_stime) * 1e6)
        self._tell(
            place, (serial, index, outcome, payload, started, ended, cpu, usage.ru_maxrss, extra)
        )
        if status:
            die_like(status)
        self._ring_soon(ended, BELL_AFTER_FORKS)

    def _pass_on(self, pid: int) -> None:
        """The node has sent us a signal; it is for the process of the job."""
        doomed = self._memory.marked_for_kill() == self._place
        os.kill(pid, signal.SIGKILL if doomed else signal.SIGTERM)

    def _be_job(self, box: ResultFile, place: int, job: Packed) -> NoReturn:
        """Little more than the call: each page that this process writes to is copied, and that is most of its cost."""
        code = 1
        try:
            self._stoppable = None
            self._forks = forks()
            self._missed = self._signalled  # already, and whoever starts the call will see it
            self._cpu = 0
            started = self._clock.now()
            box.leave((started, *self._live(place, job, started)))
            code = 0
        except BaseException:  # noqa: BLE001 - the last frame of this process
            traceback.print_exc()
        finally:
            leave(code)

    def _as_asked(
        self, job: RunningJob, outcome: int, payload: bytes | None, extra: dict[str, Any] | None
    ) -> CallOutcome:
        """How the call ended, with what the job has told and asked for."""
        left_open = job.leave()
        if job.applied:
            self._tell_late(job, payload if outcome in (wire.RAISED, wire.STOPPED) else None)
            return wire.APPLIED, None, None
        return apply_requests(job, left_open, outcome, payload, extra)

    def _end_with_threads(self, place: int) -> None:
        """A job that was told to stop is not over while its threads run, and they end only with this process."""
        if self._threads is not None and self._memory.asked_to_stop() == place:
            left = threads_left(self._threads)
            if left:
                self.log(
                    f"it was stopped, but not its threads ({left}): their worker is killed with them"
                )
                os.kill(os.getpid(), signal.SIGKILL)

    def _tell_late(self, job: RunningJob, error: bytes | None) -> None:
        """What happened after the job had ended itself."""
        log = self._memory.log() if self._memory.logged() > self._logged else None
        if error is None and log is None:
            return
        try:
            self.inside().afterwards(job.fence, error.decode() if error else None, log)
        except GenbaError as lost:
            self._capture.on = False
            sys.stderr.write(
                f"genba: job {job.id} raised after it had ended itself, and that is lost: {lost}\n"
            )

    def _call(self, job: Packed) -> CallOutcome:
        try:
            task, callee, args, kwargs = self._prepared(job[wire.TASK], job[wire.ARGS])
            run = self._run_async if callee.is_async else self._run_plain
            value = run(callee, args, kwargs)
            self._end_if_forked()
            return returned(task, value)
        except BaseException as error:  # noqa: BLE001  whatever the user's code raises ends this attempt, and only it
            self._end_if_forked(error)
            return self._raised(wire.JobMessage(*job), error)

    def _end_if_forked(self, error: BaseException | None = None) -> None:
        if forks() != self._forks:
            end_forked(error)

    def _prepared(
        self, name: str, payload: bytes
    ) -> tuple[Task[..., Any], Callee, tuple[Any, ...], dict[str, Any]]:
        task = self._tasks[name]
        try:
            args, kwargs = task.arguments.decode(payload)
        except BadArguments as error:
            raise UnfitArguments(f"arguments that no longer fit: {text(error)}") from error
        return (
            task,
            task if self._middleware is None else self._middleware.around(task),
            args,
            kwargs,
        )

    def _raised(self, job: wire.JobMessage, error: BaseException) -> CallOutcome:
        return raised(
            job,
            error,
            lambda: self._signalled or self._memory.should_stop(self._place),
            self._app.moment,
        )

    def _run_plain(self, task: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._stoppable = self._stoppable, _raise_stopped
        try:
            if self._missed:
                self._stop_late()
            return task.call_here(args, kwargs)
        finally:
            self._stoppable = before

    def _stop_late(self) -> None:
        stop = self._stoppable
        if self._missed and stop is not None:
            self._missed, self._stoppable, self._signalled = False, None, True
            stop()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.Runner(loop_factory=event_loop.factory())
        return self._loop.get_loop()

    def close(self) -> None:
        """For who goes on in this process: a worker of its own just ends."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _run_async(self, task: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loop = self._event_loop()

        async def body() -> Any:
            running = asyncio.current_task()
            assert running is not None
            before, self._stoppable = (
                self._stoppable,
                lambda: void(loop.call_soon_threadsafe(running.cancel)),
            )
            try:
                self._stop_late()
                return await task.call_here(args, kwargs)
            finally:
                self._stoppable = before

        return loop.run_until_complete(body())

    def on_sigterm(self, signum: int, frame: Any) -> None:
        """The node wants this job to stop, or somebody wants this process to."""
        asked = self._memory.asked_to_stop()
        if asked is None:
            self._go()
        elif asked != self._place:
            return  # it was meant for a job that has just ended
        elif self._child:
            self._pass_on(self._child)
        elif self._stoppable is not None:
            stop, self._stoppable = self._stoppable, None
            self._signalled = True
            stop()
        else:
            self._missed = True

    def _go(self) -> None:
        """Told so by somebody else than the node, who will say what becomes of the job that runs."""
        self._leaving = True
        if self._idle:
            self._idle = False
            raise _Dismissed
        self._memory.mark_signalled()
        if self._bow_out is not None:
            self._bow_out()


_BELL = wire.frame((wire.RESULTS_READY,))


def void(_: object) -> None:
    """For a lambda whose value nobody wants."""


def _not_yet() -> None:
    """The job's process is not there: whoever starts it passes the signal on."""


def _raise_stopped() -> None:
    stop_when_safe(_raise_it)


def _raise_it() -> None:
    raise Stopped("this job was asked to stop")


def _trace(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


def _cpu() -> int:
    return time.process_time_ns() // 1000
