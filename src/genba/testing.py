"""`with app.testing() as q:` a queue for tests without nodes and sleeps, with a clock you move.

Jobs are stored in a separate SQLite database in a temporary folder.  They are claimed, run in this
process and judged as a node does it.  Time passes only when the test moves the clock, also inside a
job, which may then time out.  Features that need a process per job are missing: memory and CPU
limits, kills.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from genba import wire
from genba.client import current_job
from genba.client.job import Job
from genba.client.under_test import MAX_RUNS, Testing
from genba.domain.clock import Clock, ManualClock, SystemClock
from genba.domain.duration import SECOND, Duration, Micros, duration, to_datetime
from genba.domain.states import FINAL
from genba.enqueue.call import JobHandle
from genba.errors import GenbaError, Stopped, WaitTimeout
from genba.node.foreground import ForegroundNode
from genba.worker.conditions import ConditionChecker
from genba.worker.foreground import run_in_foreground

if TYPE_CHECKING:
    from genba.client.app import Genba

_ENDLESS_LEASE: Micros = 1 << 55  # a thousand years: no lease ends in a test
_MAX_IDLE_WAIT = "366d"  # the longest time that `run_until_idle` moves the clock
_MAX_LISTED = 100_000


class InProcessTesting(Testing):
    """A queue under test, which runs jobs only when the test calls it."""

    __test__ = False  # pytest must not collect this class

    def __init__(self, app: Genba) -> None:
        self._app = app
        self.clock = ManualClock(SystemClock().now())
        self._folder: TemporaryDirectory[str] | None = None
        self._before: tuple[Any, Clock] | None = None
        self._node = 0
        self._listened = False

    def __enter__(self) -> InProcessTesting:
        if self._before is not None:
            raise GenbaError("this testing() is open already")
        memory = Path("/dev/shm")  # noqa: S108  TemporaryDirectory makes a private folder in it
        parent = str(memory) if os.access(memory, os.W_OK) else None
        self._folder = TemporaryDirectory(prefix="genba-test-", dir=parent)
        store = self._app.another_store(f"sqlite:///{self._folder.name}/test.db", self.clock)
        self._listened = self._app.handlers.listening
        self._app.handlers.close()
        self._before = self._app.swap(store, self.clock, self)
        store.install()
        if self._listened:
            self._app.handlers.listen()
        self._runner = ForegroundNode(store, _ENDLESS_LEASE, self.clock, lambda: 0.0, timed=True)
        self._node = self._runner.join()
        store.schedules.declare(self._app.declared_schedules())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._before is not None
        assert self._folder is not None
        self._app.handlers.close()
        store, _ = self._app.swap(*self._before, None)
        self._before = None
        if self._listened:
            self._app.handlers.listen()
        if store is not None:
            store.close()
        self._folder.cleanup()

    # time

    @property
    def now(self) -> datetime:
        return to_datetime(self.clock.now())

    def advance(self, by: Duration) -> datetime:
        """Move the clock without running anything; return the new time.

        Call it inside a job in place of a sleep or of slow work.  It raises `Stopped` there if the
        job has run out of time.
        """
        self.clock.advance(by)
        if self._runner.tick():
            raise Stopped("this job has run out of time")
        return self.now

    # running

    def run(self, limit: int = MAX_RUNS) -> list[Job[Any]]:
        """Run all jobs that may start now, including new ones; return them in the order of runs."""
        ran: list[Job[Any]] = []
        while len(ran) < limit and (id := self._run_next()) is not None:
            ran.append(self._app.job(id))
        return ran

    async def arun(self, limit: int = MAX_RUNS) -> list[Job[Any]]:
        return await self._app.threads(self.run, limit)

    def run_until_idle(
        self, within: Duration | None = None, limit: int = MAX_RUNS
    ) -> list[Job[Any]]:
        """Run jobs and move the clock to the next due moment until nothing is due, `within` a time.

        Schedules in code never end.  Without `within` they run as time passes, but the clock does
        not move for them alone.
        """
        ran = self.run(limit)
        end = self.clock.now() + duration(_MAX_IDLE_WAIT if within is None else within)
        endless = within is not None
        while len(ran) < limit and (due := self._next_moment(endless)) is not None and due <= end:
            late = self.clock.now() - due
            self.clock.advance(max(0, -late) / SECOND)
            more = self.run(limit - len(ran))
            if late >= 0 and not more:
                break  # a job is due, but something else keeps it from running
            ran += more
        return ran

    async def arun_until_idle(
        self, within: Duration | None = None, limit: int = MAX_RUNS
    ) -> list[Job[Any]]:
        return await self._app.threads(self.run_until_idle, within, limit)

    def _next_moment(self, endless: bool) -> Micros | None:
        """Return the next due moment; with `endless`, also if only schedules in code are left."""
        due = self._app.store.nodes.due_work(self._node, [], [])
        others = (due.next_ripe, due.pause_ends)
        if not endless and others == (None, None) and self._only_declared():
            return None
        moments = (due.next_due, due.next_tick, *others)
        return min((moment for moment in moments if moment is not None), default=None)

    def _only_declared(self) -> bool:
        """Return whether all future runs belong to schedules in code."""
        schedules = self._app.schedules()
        declared = {schedule.record.id for schedule in schedules if not schedule.by_hand}
        ticks = any(
            schedule.by_hand and schedule.record.next_at is not None for schedule in schedules
        )
        scheduled = self._app.jobs(state="scheduled", limit=_MAX_LISTED)
        return not ticks and all(job.record.schedule_id in declared for job in scheduled)

    def _run_next(self) -> int | None:
        store = self._app.store
        while store.ticks.fire() or store.promote() or store.settle():
            pass
        store.expire()
        store.operators.end_pauses()
        store.limits.recheck()
        store.limits.serve_due_rates()
        store.fairness.rank_unranked()
        store.conditions.send_scouts()
        tasks = sorted(self._app.task_table())
        queues = {job.queue for job in self._app.jobs(state="waiting", limit=1000)}
        claim = secrets.randbits(63)
        for queue in sorted(queues):
            for claimed in store.claim(self._node, claim, {queue: 1}, tasks):
                record = store.job(claimed.id)
                assert record is not None
                if not self._runner.may_start(claimed, claim, self._ask):
                    return self._run_next()
                outer = current_job.set_current_job(None)
                try:
                    self._runner.run_claimed(record, claimed, claim, self._call)
                finally:
                    current_job.set_current_job(outer)
                return claimed.id
        return None

    def _ask(
        self, job: wire.JobMessage, conditions: Sequence[str]
    ) -> tuple[bool, Micros | None, str, str | None]:
        """Return whether the conditions hold, the wait, the last condition, and its error."""
        with asyncio.Runner() as runner:
            checker = ConditionChecker(self._app.conditions, runner.get_loop, self._app.by_name)
            try:
                readiness = checker.check(job, conditions)
            except Exception as error:  # noqa: BLE001  as in a worker: an error means not ready
                return False, None, checker.name, f"{type(error).__name__}: {error}"
        return bool(readiness), readiness.wait, checker.name, None

    def _call(
        self, serial: int, job: wire.JobMessage, memory: wire.SharedMemory
    ) -> list[list[Any]]:
        return run_in_foreground(self._app, serial, job, memory, self.clock)

    def wait(self, jobs: Iterable[JobHandle], until: str) -> None:
        """Run jobs for `wait` and `result` in a test; WaitTimeout if that does not end the wait."""
        ids = {job.id for job in jobs}
        enough = any if until == "any" else all

        def done() -> bool:
            states = self._app.store.states(sorted(ids))
            return enough(states.get(id, "gone") in (*FINAL, "gone") for id in ids)

        while ids and not done():
            if self._run_next() is None:
                states = self._app.store.states(sorted(ids))
                open_jobs = ", ".join(
                    f"job {id} is {state}"
                    for id, state in sorted(states.items())
                    if state not in FINAL
                )
                raise WaitTimeout(
                    f"{open_jobs}, and in a test no node runs jobs; q.advance(…) lets time pass"
                )

    # enqueued jobs

    @property
    def task_names(self) -> Collection[str]:
        return self._app.registry.tasks.keys()

    def enqueued(self, task: Any = None, /, **arguments: Any) -> list[Job[Any]]:
        """Return the jobs enqueued in this test, oldest first; of a task, with these arguments."""
        name = None if task is None else str(getattr(task, "name", task))
        plain = msgspec.json.decode(msgspec.json.encode(arguments))
        newest_first = self._app.jobs(state="any", task=name, limit=_MAX_LISTED)
        if not plain:
            return newest_first[::-1]
        return [job for job in reversed(newest_first) if plain.items() <= job.args.items()]

    def assert_enqueued(
        self, task: Any, count: int | None = None, /, **arguments: Any
    ) -> list[Job[Any]]:
        """Assert that a job, or `count` jobs, of this task was enqueued with these arguments.

        `count` may also be given by name, unless the task has an argument of that name.
        """
        name = str(getattr(task, "name", task))
        if (
            count is None
            and type(arguments.get("count")) in (int, NoneType)
            and not self._takes(name, "count")
        ):
            count = arguments.pop("count", None)
        jobs = self.enqueued(task, **arguments)
        if (jobs and count in (None, len(jobs))) or (count == 0 and not jobs):
            return jobs
        number = "a job" if count is None else f"{count} jobs"
        expected = f"{number} of {name}" + (f" with {arguments}" if arguments else "")
        enqueued = [f"{job.task} {job.args}" for job in self.enqueued()]
        raise AssertionError(
            f"expected {expected}, found {len(jobs)}; enqueued jobs: {enqueued or 'none'}"
        )

    def _takes(self, task: str, name: str) -> bool:
        arguments = self._app.arguments_of(task)
        return arguments is not None and name in arguments.signature.parameters
