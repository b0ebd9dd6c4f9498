"""Runs the code of a job: what an ordinary worker and a seat of a shared worker have in common.

It prepares the call, runs it so that it can be stopped, turns its end into an outcome, and gives
the running job what it may ask of its worker.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from genba import wire
from genba.client.current_job import RunningJob
from genba.client.job_services import Inbox
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
from genba.worker.cleanup import end_forked, forks
from genba.worker.job_log import JobLog
from genba.worker.middleware import Callee, Middleware
from genba.worker.outcome import (
    CallOutcome,
    UnfitArguments,
    apply_requests,
    raised,
    returned,
    text,
)

PackedJob = Sequence[Any]  # the fields of a wire.JobMessage; most jobs need no named access


class WorkerApp(Protocol):
    """What a worker needs of the user's app."""

    lifespans: list[Callable[[], Any]]
    middlewares: list[Callable[..., Any]]

    @property
    def conditions(self) -> Conditions: ...

    def task_table(self) -> dict[str, Task[..., Any]]: ...

    def results_of_parents(self, job_id: int) -> dict[int, Any]: ...

    def options_of(self, job_id: int) -> dict[str, Any]: ...

    def moment(self, value: Any) -> int: ...

    def inbox(self, job: RunningJob) -> Inbox: ...

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes: ...

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...

    def own_job_writes(self) -> Any: ...


class JobRunner:
    trace_layer: Callable[..., Any] = staticmethod(trace.trace_run)

    def __init__(
        self, app: WorkerApp, memory: wire.SharedMemory, clock: Clock | None = None
    ) -> None:
        self._app = app
        self._tasks = app.task_table()
        self._memory = memory
        self._clock = clock or SystemClock()
        self._capture = Capture(memory)
        self.job_log: JobLog | None = None
        self._forks = forks()
        self._loop: asyncio.Runner | None = None
        self._place = 0
        self._started = 0
        self._stored_log_bytes = 0  # when the job ended itself
        self._cpu = 0
        self._cpu_is_old = False
        self._stop: Callable[[], None] | None = None  # stops the call that runs
        self._signalled = False
        self._stop_is_due = False  # a signal came before there was a call to stop
        self._middleware: Middleware | None = None
        self._read_middleware()

    # What a running job may ask for (client.current_job.JobHost)

    @property
    def memory(self) -> wire.SharedMemory:
        return self._memory

    def inside(self) -> Any:
        return self._app.own_job_writes()

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
        self._stored_log_bytes = self._memory.logged()
        ran = max(0, self._clock.now() - self._started)
        return AttemptReport(
            progress=progress,
            log=self._memory.log(),
            ran=ran,
            pid=os.getpid(),
            cpu=self._cpu_of_job(cpu_time_us(), ran),
            peak=int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        )

    def inbox(self, job: RunningJob) -> Inbox:
        return self._app.inbox(job)

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self._app.threads(call, *args, **kwargs)

    def log(self, text: str) -> None:
        self._capture.write(f"{to_datetime(self._clock.now()):%H:%M:%S.%f} {text}\n")
        if self.job_log is not None:
            self.job_log.write(text)

    def stopping(self) -> None:
        self._signalled = True

    def _cpu_of_job(self, now: int, ran: int) -> int:
        """Return the CPU time since the last measurement.

        After jobs that were too short to measure it includes theirs, so it is at most `ran`.
        """
        used = now - self._cpu
        return min(used, ran) if self._cpu_is_old else used

    # The call

    def _read_middleware(self) -> None:
        layers = [*([self.trace_layer] if trace.tracing() else []), *self._app.middlewares]
        if layers:
            self._middleware = Middleware(layers, self._run_plain, self._run_async)

    def _prepare(
        self, name: str, payload: bytes
    ) -> tuple[Task[..., Any], Callee, tuple[Any, ...], dict[str, Any]]:
        task = self._tasks[name]
        try:
            args, kwargs = task.arguments.decode(payload)
        except BadArguments as error:
            raise UnfitArguments(f"arguments that no longer fit: {text(error)}") from error
        callee = task if self._middleware is None else self._middleware.around(task)
        return task, callee, args, kwargs

    def _call(self, job: PackedJob) -> CallOutcome:
        try:
            task, callee, args, kwargs = self._prepare(job[wire.TASK], job[wire.ARGS])
            run = self._run_async if callee.is_async else self._run_plain
            value = run(callee, args, kwargs)
            self._exit_if_forked()
            return returned(task, value)
        except BaseException as error:  # noqa: BLE001 - it ends this attempt, and nothing else
            self._exit_if_forked(error)
            return self._raised(wire.JobMessage(*job), error)

    def _run_plain(self, task: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._stop = self._stop, _stop_plain_call
        try:
            if self._stop_is_due:
                self._stop_if_due()
            return task.call_here(args, kwargs)
        finally:
            self._stop = before

    def _run_async(self, task: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loop = self._event_loop()

        async def body() -> Any:
            running = asyncio.current_task()
            assert running is not None

            def stop() -> None:
                loop.call_soon_threadsafe(running.cancel)

            before, self._stop = self._stop, stop
            try:
                self._stop_if_due()
                return await task.call_here(args, kwargs)
            finally:
                self._stop = before

        return loop.run_until_complete(body())

    def _stop_if_due(self) -> None:
        stop = self._stop
        if self._stop_is_due and stop is not None:
            self._stop_is_due, self._stop, self._signalled = False, None, True
            stop()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.Runner(loop_factory=event_loop.factory())
        return self._loop.get_loop()

    def close(self) -> None:
        """Close the event loop; a worker in a process of its own just exits."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    # Its end

    def _exit_if_forked(self, error: BaseException | None = None) -> None:
        if forks() != self._forks:
            end_forked(error)

    def _raised(self, job: wire.JobMessage, error: BaseException) -> CallOutcome:
        return raised(
            job,
            error,
            lambda: self._signalled or self._memory.should_stop(self._place),
            self._app.moment,
        )

    def _apply_requests(
        self, job: RunningJob, outcome: int, payload: bytes | None, extra: dict[str, Any] | None
    ) -> CallOutcome:
        """Add to the outcome what the job has requested: progress, clones, another end."""
        left_open = job.leave()
        if job.applied:
            error = payload if outcome in (wire.RAISED, wire.STOPPED) else None
            self._store_what_came_later(job, error)
            return wire.APPLIED, None, None
        return apply_requests(job, left_open, outcome, payload, extra)

    def _store_what_came_later(self, job: RunningJob, error: bytes | None) -> None:
        """Store the error and the output of code that ran after the job had ended itself."""
        log = self._memory.log() if self._memory.logged() > self._stored_log_bytes else None
        if error is None and log is None:
            return
        try:
            self.inside().afterwards(job.fence, error.decode() if error else None, log)
        except GenbaError as failure:
            self._capture.on = False
            sys.stderr.write(
                f"genba: job {job.id} raised after it had ended itself, "
                f"and that could not be stored: {failure}\n"
            )


def _stop_plain_call() -> None:
    stop_when_safe(_raise_stopped)


def _raise_stopped() -> None:
    raise Stopped("this job was asked to stop")


def cpu_time_us() -> int:
    return time.process_time_ns() // 1000
