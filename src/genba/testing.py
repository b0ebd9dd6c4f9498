"""`with app.testing() as q:` no node, no sleep, a clock that you move.

Jobs are stored in a database of their own (SQLite, in a temporary folder), claimed, run in this process and judged as a
node does it.  Time passes when the test says so, also inside a job, which may run out of it.  What needs a process of
its own is not there: memory and CPU limits, kills.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from genba import wire
from genba.client import current_job
from genba.client.job import Job
from genba.domain.clock import Clock, ManualClock, SystemClock
from genba.domain.duration import Duration, Micros, duration, to_datetime
from genba.domain.states import FINAL
from genba.errors import GenbaError, Stopped, WaitTimeout
from genba.node.foreground import ForegroundNode
from genba.worker.conditions import ConditionChecker
from genba.worker.foreground import run_in_foreground

if TYPE_CHECKING:
    from genba.client.app import Genba

FAR = 1 << 55  # micros: a thousand years, no lease ends in a test
LONG = "366d"  # to wait for the last job
MANY = 10_000  # jobs of one call: then one of them makes the next for ever


class Testing:
    """A queue under test; what it runs, it runs when you say so."""

    __test__ = False  # pytest: this is no test class

    def __init__(self, app: Genba) -> None:
        self._app = app
        self.clock = ManualClock(SystemClock().now())
        self._folder: TemporaryDirectory[str] | None = None
        self._before: tuple[Any, Clock] | None = None
        self._node = 0
        self._listened = False

    def __enter__(self) -> Testing:
        if self._before is not None:
            raise GenbaError("this testing() is open already")
        shm = Path("/dev/shm")  # noqa: S108  a folder of our own in it
        fast = str(shm) if os.access(shm, os.W_OK) else None
        self._folder = TemporaryDirectory(prefix="genba-test-", dir=fast)
        store = self._app.another_store(f"sqlite:///{self._folder.name}/test.db", self.clock)
        self._listened = self._app.handlers.listening
        self._app.handlers.close()
        self._before = self._app.swap(store, self.clock, self)
        store.install()
        if self._listened:
            self._app.handlers.listen()
        self._here = ForegroundNode(store, FAR, self.clock, lambda: 0.0, timed=True)
        self._node = self._here.join()
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
        """Let time pass, and nothing else happen; gives what time it is then.

        Inside a job, in place of a sleep or of slow work: `Stopped` is raised there when the job has run out of time.
        """
        self.clock.advance(by)
        if self._here.tick():
            raise Stopped("this job has run out of time")
        return self.now

    # running

    def run(self, limit: int = MANY) -> list[Job[Any]]:
        """Run what may start now, and what follows from it now; gives the jobs in the order of their runs."""
        ran: list[Job[Any]] = []
        while len(ran) < limit and (id := self._run_next()) is not None:
            ran.append(self._app.job(id))
        return ran

    async def arun(self, limit: int = MANY) -> list[Job[Any]]:
        return await self._app.threads(self.run, limit)

    def run_until_idle(self, within: Duration | None = None, limit: int = MANY) -> list[Job[Any]]:
        """Run, and move the clock to the next due moment, until nothing is due any more, or not `within` that time.

        Schedules in code are never done.  Without `within` they run as time passes, and alone they do not let it pass.
        """
        ran, end = self.run(limit), self.clock.now() + duration(LONG if within is None else within)
        endless = within is not None
        while len(ran) < limit and (due := self._next_moment(endless)) is not None and due <= end:
            late = self.clock.now() - due
            self.clock.advance(max(0, -late) / 1_000_000)
            more = self.run(limit - len(ran))
            if late >= 0 and not more:
                break  # it is due, and something else keeps it
            ran += more
        return ran

    async def arun_until_idle(
        self, within: Duration | None = None, limit: int = MANY
    ) -> list[Job[Any]]:
        return await self._app.threads(self.run_until_idle, within, limit)

    def _next_moment(self, endless: bool) -> Micros | None:
        """`endless`: even if there is nothing to come but runs of schedules in code."""
        chores = self._app.store.nodes.due_work(self._node, [], [])
        others = (chores.next_ripe, chores.pause_ends)
        if not endless and others == (None, None) and self._only_declared():
            return None
        moments = (chores.next_due, chores.next_tick, *others)
        return min((moment for moment in moments if moment is not None), default=None)

    def _only_declared(self) -> bool:
        schedules = self._app.schedules()
        declared = {one.record.id for one in schedules if not one.by_hand}
        ticks = any(one.by_hand and one.record.next_at is not None for one in schedules)
        scheduled = self._app.jobs(state="scheduled", limit=100_000)
        return not ticks and all(job.record.schedule_id in declared for job in scheduled)

    def _run_next(self) -> int | None:
        store = self._app.store
        while store.schedules.fire() or store.promote() or store.settle():
            pass
        store.expire()
        store.policy.end_pauses()
        store.limits.recheck()
        store.limits.serve_due_rates()
        store.fairness.rank_new()
        store.conditions.look()
        tasks = sorted(self._app.task_table())
        queues = {job.queue for job in self._app.jobs(state="waiting", limit=1000)}
        claim = secrets.randbits(63)
        for queue in sorted(queues):
            for claimed in store.claim(self._node, claim, {queue: 1}, tasks):
                record = store.job(claimed.id)
                assert record is not None
                if not self._here.may_start(claimed, claim, self._ask):
                    return self._run_next()
                outer = current_job.set_current_job(None)
                try:
                    self._here.go(record, claimed, claim, self._call)
                finally:
                    current_job.set_current_job(outer)
                return claimed.id
        return None

    def _ask(
        self, job: wire.JobMessage, conditions: Sequence[str]
    ) -> tuple[bool, Micros | None, str, str | None]:
        """Whether its conditions hold, when to ask again, who said no, and what it raised."""
        with asyncio.Runner() as runner:
            asking = ConditionChecker(self._app.conditions, runner.get_loop, self._app.by_name)
            try:
                verdict = asking.ask(job, conditions)
            except Exception as raised:  # noqa: BLE001  as in a worker: who raises is not ready
                return False, None, asking.name, f"{type(raised).__name__}: {raised}"
        return bool(verdict), verdict.wait, asking.name, None

    def _call(
        self, serial: int, job: wire.JobMessage, memory: wire.SharedMemory
    ) -> list[list[Any]]:
        return run_in_foreground(self._app, serial, job, memory, self.clock)

    def wait(self, jobs: Iterable[Job[Any]], until: str) -> None:
        """`wait` and `result` in a test: run what may start; WaitTimeout at once if that is not enough."""
        ids = {job.id for job in jobs}
        enough = any if until == "any" else all

        def done() -> bool:
            states = self._app.store.states(sorted(ids))
            return enough(states.get(id, "gone") in (*FINAL, "gone") for id in ids)

        while ids and not done():
            if self._run_next() is None:
                states = self._app.store.states(sorted(ids))
                told = ", ".join(
                    f"job {id} is {state}"
                    for id, state in sorted(states.items())
                    if state not in FINAL
                )
                raise WaitTimeout(
                    f"in a test nobody else runs jobs, and {told}: q.advance(…) lets time pass"
                )

    # what was asked for

    def enqueued(self, task: Any = None, /, **arguments: Any) -> list[Job[Any]]:
        """The jobs that were enqueued in this test, the first one first: all, of a task, with these arguments."""
        name = None if task is None else str(getattr(task, "name", task))
        plain = msgspec.json.decode(msgspec.json.encode(arguments))
        found = self._app.jobs(state="any", task=name, limit=100_000)
        return (
            [job for job in reversed(found) if plain.items() <= job.args.items()]
            if plain
            else found[::-1]
        )

    def assert_enqueued(
        self, task: Any, count: int | None = None, /, **arguments: Any
    ) -> list[Job[Any]]:
        """AssertionError unless a job (or `count` of them) of this task was enqueued with these arguments.

        `count=` by name is so many, too, unless the task has an argument of that name.
        """
        name = str(getattr(task, "name", task))
        if (
            count is None
            and type(arguments.get("count")) in (int, NoneType)
            and not self._takes(name, "count")
        ):
            count = arguments.pop("count", None)
        found = self.enqueued(task, **arguments)
        if found and count in (None, len(found)):
            return found
        many = "a job" if count is None else f"{count} jobs"
        wanted = f"{many} of {name} with {arguments}" if arguments else f"{many} of {name}"
        there = [f"{job.task} {job.args}" for job in self.enqueued()]
        if count == 0 and not found:
            return []
        raise AssertionError(
            f"{wanted} expected, {len(found)} found; enqueued were {there or 'none at all'}"
        )

    def _takes(self, task: str, name: str) -> bool:
        known = self._app.arguments_of(task)
        return known is not None and name in known.signature.parameters
