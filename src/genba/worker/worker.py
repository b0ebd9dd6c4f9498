"""A worker process: it runs one job after the other, and reports how each ended.

Before each job it reads one token from a pipe that the node can read too; who gets the token has
the job.  Before the next job starts, the result of the last one is in the shared memory, where the
node finds it even if this process dies.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from genba import wire
from genba.client import current_job
from genba.client.current_job import RunningJob
from genba.domain.clock import Clock
from genba.worker.cleanup import children, end_strays, forks, threads, threads_left
from genba.worker.conditions import ConditionChecker
from genba.worker.fork_per_job import ResultFile, reseed_random
from genba.worker.job_log import JobLog
from genba.worker.job_runner import JobRunner, PackedJob, WorkerApp, cpu_time_us
from genba.worker.middleware import LifespanFailed, enter_lifespans
from genba.worker.outcome import describe
from genba.worker.process import die_like, leave

EXIT_LIFESPAN_FAILED = 4
# How long a result may lie in the shared memory before the node is notified:
NOTIFY_AFTER_US = 4_000
NOTIFY_AFTER_FEW_US = 10_000  # ... if only a few jobs end in that time
# ... if each job has a process: notifications are then most of what the node has to do.
NOTIFY_AFTER_FORKS_US = 50_000
# A job this short cannot have started a process, or filled memory that matters.
QUICK_JOB_US = 50

_RESULTS_READY = wire.frame((wire.RESULTS_READY,))


def main(
    app: WorkerApp,
    slot: int,
    sock: socket.socket,
    token_fd: int,
    memory_fd: int,
    fork: Callable[[], int] = os.fork,
) -> None:
    """Run jobs until the node hangs up; `fork` makes the process of a job that has its own."""
    worker = Worker(app, sock, token_fd, wire.SharedMemory(memory_fd), fork=fork)
    for number in {signal.SIGTERM, wire.STOP_SIGNAL}:
        signal.signal(number, worker.on_stop_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with worker.lifespans(), suppress(BrokenPipeError, ConnectionResetError):
            worker.capture_output()
            worker.serve()  # until the node is gone; then the guard is about to end this process
    except LifespanFailed as error:
        cause = error.__cause__
        trace = "" if cause is None else "".join(traceback.format_exception(cause))
        sys.stderr.write(f"genba: worker {slot} ends: {error}\n{trace}")
        sys.exit(EXIT_LIFESPAN_FAILED)


class _ExitWhileIdle(BaseException):
    """A signal asked the worker to exit while it waited for the node."""


class Worker(JobRunner):
    def __init__(
        self,
        app: WorkerApp,
        sock: socket.socket,
        token_fd: int,
        memory: wire.SharedMemory,
        clock: Clock | None = None,
        fork: Callable[[], int] = os.fork,
    ) -> None:
        super().__init__(app, memory, clock)
        self._sock = sock
        self._token_fd = token_fd
        self._frames = wire.Frames()
        self._bunches: list[tuple[int, list[list[Any]], bool]] = []  # (serial, jobs, fork per job)
        self._condition_checks: list[list[Any]] = []
        self._notified = True  # of all results
        self._notified_at = 0
        self._job: PackedJob = ()
        self._running_job: list[RunningJob] = []  # empty, or the one that the job's code asked for
        self._peak = 0
        self._fork = fork
        self._result_file: ResultFile | None = None
        self._job_pid = 0  # the process that runs the job, if it is not this one
        self._shared: Any = None  # the SharedWorker, once there was one
        self._end_shared: Callable[[], None] | None = None  # while this worker is shared
        self._own_children: frozenset[int] = frozenset()  # not started by a job
        self._own_threads: frozenset[int] | None = None  # None: no thread is ended with a job
        self._leaving = False
        self._exit_after_bunches = False
        self._idle = False
        self._title = getproctitle()
        self._title_shows_job = False
        self._output_fd: int | None = None  # of the pipe with what no Python stream sees
        os.set_blocking(token_fd, False)

    # The loop

    def lifespans(self) -> ExitStack:
        """Enter the app's lifespans; LifespanFailed if that fails."""
        entered = enter_lifespans(self._app.lifespans, self._event_loop)
        self._read_middleware()  # again: a lifespan may have set up a tracer
        return entered

    def capture_output(self) -> None:
        """Send what this process prints to the log of its job, from now on."""
        self.job_log = JobLog()  # writes to the present stderr
        faulthandler.register(signal.SIGUSR1, os.dup(2))  # shows where a worker hangs
        self._output_fd = self._capture.install()

    def serve(self) -> None:
        """Run jobs until the node hangs up or asks this worker to exit."""
        self._report_ready()
        self._measure_start()
        self._own_threads = threads()
        if len(self._own_threads) > 1:
            self._fork = os.fork
        token = b""
        while not self._leaving:
            while self._condition_checks:
                self._check_conditions(*self._condition_checks.pop(0))
            if not self._bunches:
                if not self._wait_for_node():
                    return
                continue
            token = token or self._next_token()
            if token:
                token = self._run_bunch(token)
            else:
                self._bunches.clear()  # the node has taken back all jobs that are left here

    def _report_ready(self) -> None:
        ready = wire.frame((wire.READY, os.getpid()))
        if self._output_fd is None:
            self._sock.sendall(ready)
        else:
            socket.send_fds(self._sock, [ready], [self._output_fd])
            os.close(self._output_fd)

    def _measure_start(self) -> None:
        self._cpu, self._peak = cpu_time_us(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._own_children = children() or frozenset()

    def _wait_for_node(self) -> bool:
        """Wait for the next messages; False if there will be no more jobs."""
        self._notify()
        if self._exit_after_bunches:
            return False
        if self._title_shows_job:
            self._set_title(self._title)
        try:
            self._idle = True
            received = not self._is_leaving() and self._receive()
            self._idle = False
        except _ExitWhileIdle:
            return False
        return received

    def _is_leaving(self) -> bool:
        return self._leaving  # a signal may have set it since the last look

    def _next_token(self) -> bytes:
        try:
            return os.read(self._token_fd, wire.TOKEN_SIZE)
        except BlockingIOError:
            return b""

    def _run_bunch(self, token: bytes) -> bytes:
        """Run the bunch of `token`, as far as tokens go; return a token of another bunch."""
        while True:
            while self._bunches and wire.token(self._bunches[0][0]) != token:
                self._bunches.pop(0)  # taken back
            if self._bunches:
                break
            if not self._receive():  # tokens come before their frame, which must be on its way
                return b""
        serial, jobs, fork_per_job = self._bunches.pop(0)
        bunch_token = token
        if len(jobs) == 1:  # several jobs in one bunch are too short for `ps` to show them
            self._set_title(f"{self._title} {jobs[0][wire.TASK]} #{jobs[0][0]}")
        last = len(jobs) - 1
        self._memory.set_job_pid(0)
        for index, job in enumerate(jobs):
            token = token or self._next_token()
            if token != bunch_token:
                return token
            token = b""
            if fork_per_job and index < last:
                self._run_forked(serial, index, job)
                self._memory.set_job_pid(0)
            else:
                self._run(serial, index, job)
        return b""

    def _receive(self) -> bool:
        """Wait for messages and obey them; False if the node is gone."""
        size = self._sock.recv_into(self._frames.room())
        if not size:
            self._leaving = True
            return False
        messages = list(self._frames.filled(size))
        while messages:
            message = messages.pop(0)
            if message[0] in (wire.BUNCH, wire.FORK_PER_JOB):
                self._bunches.append((message[1], message[2], message[0] == wire.FORK_PER_JOB))
            elif message[0] == wire.EXIT and self._bunches:
                self._exit_after_bunches = True
            elif message[0] == wire.EXIT:
                self._leaving = True
            elif message[0] == wire.CHECK_CONDITIONS:
                self._condition_checks.append(message[1:])
            elif message[0] == wire.SHARE:
                messages = self._serve_shared(message[1], messages)
        return True

    def _serve_shared(self, seats: int, messages: list[list[Any]]) -> list[list[Any]]:
        """Run several jobs at a time, until the node ends that; return the messages after it."""
        from genba.worker.shared_worker import SharedWorker

        self._idle = False
        loop = self._event_loop()
        shared = self._shared = self._shared or SharedWorker(
            self, self._app, self._sock, self._token_fd, self._frames
        )
        self._capture.on, self._capture.sink = True, shared

        def end_shared() -> None:
            loop.call_soon_threadsafe(shared.exit_when_empty)

        self._end_shared = end_shared
        try:
            return loop.run_until_complete(shared.serve(seats, messages))
        finally:
            self._end_shared = None
            self._capture.on, self._capture.sink = False, self._memory
            self._leaving = self._leaving or shared.leaving

    def _notify(self) -> None:
        """Tell the node that there are results, unless it knows."""
        if not self._notified:
            self._sock.sendall(_RESULTS_READY)
            self._notified = True

    def _notify_after(self, now: int, after_us: int) -> None:
        if now - self._notified_at > after_us:
            self._notified_at = now
            self._notify()

    def _set_title(self, title: str) -> None:
        """Set what `ps` shows of this process."""
        self._title_shows_job = title is not self._title
        setproctitle(title)

    # Conditions

    def _check_conditions(self, serial: int, job: list[Any], names: list[str]) -> None:
        """Evaluate these conditions for a job; one that raises means not ready."""
        # A condition is user code and may leave a thread: from now on only os.fork is safe.
        self._fork = os.fork
        checker = ConditionChecker(self._app.conditions, self._event_loop, self.by_name)
        answer: list[Any]
        try:
            readiness = checker.check(wire.JobMessage(*job), names)
            answer = [serial, readiness.ways, readiness.wait, readiness.refused_by, None]
        except BaseException as error:  # noqa: BLE001 - the node stores the error
            answer = [serial, (), None, checker.name, describe(error)]
        if children() is not None:
            end_strays(self._own_children)
        self._sock.sendall(wire.frame((wire.CONDITIONS_CHECKED, answer)))

    # One job.  For each one this runs once: no call, no object more than it needs.

    def run_one(self, serial: int, job: wire.JobMessage) -> None:
        """Run one job without a token, in a process that no node watches."""
        self._measure_start()
        self._run(serial, 0, job)

    def _run(self, serial: int, index: int, job: PackedJob) -> None:
        place = self._place = wire.place(serial, index)
        self._signalled = self._stop_is_due = False
        started = self._clock.now()
        self._memory.begin(place, started)
        outcome, payload, extra, ended = self._run_in_process(place, job, started)
        cpu = ended - started
        if 0 <= cpu < QUICK_JOB_US:
            self._cpu_is_old = True  # a system call for it would cost as much as the job did
            notify_after = NOTIFY_AFTER_US
        else:
            self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            extra = self._end_strays(extra)
            now = cpu_time_us()
            cpu = self._cpu_of_job(now, max(0, cpu))
            self._cpu, self._cpu_is_old = now, False
            notify_after = NOTIFY_AFTER_FEW_US
        self._put_result(
            place, (serial, index, outcome, payload, started, ended, cpu, self._peak, extra)
        )
        self._notify_after(ended, notify_after)

    def _run_in_process(
        self, place: int, job: PackedJob, started: int
    ) -> tuple[int, bytes | None, dict[str, Any] | None, int]:
        """Run the job in this process; return (outcome, payload, extra, end)."""
        self._started = started
        running: list[RunningJob] = []
        self._job, self._running_job = job, running
        current_job.set_current_job(self._current)
        self._capture.on = True
        outcome, payload, extra = self._call(job)
        if self._signalled or running:
            self._die_with_threads(place)
            if running:
                outcome, payload, extra = self._apply_requests(running[0], outcome, payload, extra)
        self._capture.on = False
        current_job.set_current_job(None)
        if self._memory.logged() and outcome != wire.APPLIED:
            extra = {**(extra or {}), "log": self._memory.log()}
        if self._memory.locked(place):
            extra = {**(extra or {}), "locks": True}
        return outcome, payload, extra, self._clock.now()

    def _current(self) -> RunningJob:
        """Return the running job; it is made when its code asks for it first."""
        running = self._running_job
        if not running:
            running.append(RunningJob(wire.JobMessage(*self._job), self._place, self))
        return running[0]

    def _end_strays(self, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        """Kill the processes that the job left behind, before its end is reported."""
        killed = end_strays(self._own_children) if children() is not None else 0
        return {**(extra or {}), "strays": killed} if killed else extra

    def _put_result(self, place: int, result: wire.BareResult) -> None:
        memory = self._memory
        if not memory.put(result):
            self._sock.sendall(wire.frame((wire.RESULTS, [result])))
        memory.done(place)
        if memory.logged():
            memory.forget_log()
        self._notified = False

    def _die_with_threads(self, place: int) -> None:
        """Kill this process if a stopped job has left threads: only so do they end."""
        if self._own_threads is not None and self._memory.asked_to_stop() == place:
            left = threads_left(self._own_threads)
            if left:
                self.log(f"the job was stopped, but not its threads ({left}): the worker is killed")
                os.kill(os.getpid(), signal.SIGKILL)

    # One job in a process of its own

    def _run_forked(self, serial: int, index: int, job: PackedJob) -> None:
        """Run the job in a child; if that dies, die in the same way, so that the node knows how."""
        place = self._place = wire.place(serial, index)
        result_file = self._result_file = self._result_file or ResultFile()
        # A signal before there is a child only sets `_signalled`, and is passed on below.
        self._signalled, self._stop_is_due, self._stop = False, False, _stop_no_call
        pid = self._fork()
        if pid == 0:
            self._be_job_process(result_file, place, job)
        self._memory.set_job_pid(pid)
        self._memory.begin(place, self._clock.now())
        self._job_pid = pid
        if self._signalled:
            self._pass_on_signal(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # No signal goes there any more, before its pid may become another's.
        self._job_pid, self._stop = 0, None
        _, status, usage = os.wait4(pid, 0)
        reseed_random()
        outcome_of_child = result_file.take()
        if outcome_of_child is None:
            die_like(status)
        started, outcome, payload, extra, ended = outcome_of_child
        extra = {**(self._end_strays(extra) or {}), "pid": pid}
        cpu = int((usage.ru_utime + usage.ru_stime) * 1e6)
        self._put_result(
            place, (serial, index, outcome, payload, started, ended, cpu, usage.ru_maxrss, extra)
        )
        if status:
            die_like(status)
        self._notify_after(ended, NOTIFY_AFTER_FORKS_US)

    def _pass_on_signal(self, pid: int) -> None:
        """Pass the node's signal on to the process of the job."""
        kill = self._memory.marked_for_kill() == self._place
        os.kill(pid, signal.SIGKILL if kill else wire.STOP_SIGNAL)

    def _be_job_process(self, result_file: ResultFile, place: int, job: PackedJob) -> NoReturn:
        """Run the job, leave its result, and exit.

        It does little more than the call: the kernel copies each page that this process writes to,
        and that is most of what the process costs.
        """
        code = 1
        try:
            self._stop = None
            self._forks = forks()
            self._stop_is_due = self._signalled  # the signal came first; the call will see it
            self._cpu = 0
            started = self._clock.now()
            result_file.put((started, *self._run_in_process(place, job, started)))
            code = 0
        except BaseException:  # noqa: BLE001 - the last frame of this process
            traceback.print_exc()
        finally:
            leave(code)

    # Signals

    def on_stop_signal(self, signum: int, frame: Any) -> None:
        """Stop the job that the node wants to stop; a signal from elsewhere ends the worker."""
        place = self._memory.asked_to_stop()
        if place is None:
            self._exit_after_job()
        elif place != self._place:
            return  # it was meant for a job that has just ended
        elif self._job_pid:
            self._pass_on_signal(self._job_pid)
        elif self._stop is not None:
            stop, self._stop = self._stop, None
            self._signalled = True
            stop()
        else:
            self._stop_is_due = True

    def _exit_after_job(self) -> None:
        """Exit at once if idle; otherwise the node decides about the job that runs."""
        self._leaving = True
        if self._idle:
            self._idle = False
            raise _ExitWhileIdle
        self._memory.mark_signalled()
        if self._end_shared is not None:
            self._end_shared()


def _stop_no_call() -> None:
    """Do nothing: the process of the job is not there yet."""
