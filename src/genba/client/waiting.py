"""Waiting for jobs: one thread of the process looks for all who wait."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from genba.client.current_job import find_job
from genba.domain.duration import Duration, duration
from genba.domain.states import FINAL
from genba.errors import BadOption, GenbaError, JobGone, WaitTimeout, WaitWouldDeadlock
from genba.signal_safe import defer_stop

_LOOK = 0.05  # seconds between two looks whether the node lends
_CHECK = 0.5  # ... whether what it waits for can start at all
IDLE_SECONDS = 1.0  # seconds; then the thread ends
_PAUSES = (0.001, 0.05)  # seconds between two looks: from, to


class JobStates(Protocol):
    """The store, as far as one who waits needs it."""

    def states(self, ids: list[int]) -> dict[int, str]: ...

    def write_marker(self) -> object: ...


class WaitingJob(Protocol):
    """The job that waits, if one does."""

    @property
    def id(self) -> int: ...

    def lending(self) -> AbstractContextManager[None]: ...

    def check_loan(self) -> None: ...


def wait_in_job(
    done: threading.Event,
    within: float | None,
    job: WaitingJob | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Until it is done or the time is over; a job lends its slot meanwhile, and `check` says whether that helps."""
    if job is None:
        done.wait(within)
        return
    deadline = None if within is None else time.monotonic() + within
    check_at = time.monotonic() + _CHECK
    with job.lending():
        while not done.is_set() and (deadline is None or time.monotonic() < deadline):
            done.wait(
                _LOOK if deadline is None else max(0.0, min(_LOOK, deadline - time.monotonic()))
            )
            job.check_loan()
            if time.monotonic() >= check_at and not done.is_set():
                check()
                check_at = time.monotonic() + _CHECK


async def await_in_job(
    done: asyncio.Event,
    within: float | None,
    job: WaitingJob | None,
    check: Callable[[], Awaitable[None]],
) -> None:
    async def wait() -> None:
        if job is None:
            await done.wait()
            return
        check_at = time.monotonic() + _CHECK
        with job.lending():
            while not done.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), _LOOK)
                job.check_loan()
                if time.monotonic() >= check_at and not done.is_set():
                    await check()
                    check_at = time.monotonic() + _CHECK

    with suppress(TimeoutError):
        await asyncio.wait_for(wait(), within)


class JobWait:
    """One who waits, until all (or any) of these jobs are final, or one has `failed` and that is enough."""

    def __init__(
        self, ids: Iterable[int], until: str, throw: bool, wake: Callable[[], object]
    ) -> None:
        self.open = set(ids)
        self._total = len(self.open)
        self._any = until == "any"
        self._throw = throw
        self._wake = wake
        self.error: GenbaError | None = None
        self.done = False

    def look(self, seen: dict[int, str]) -> None:
        ended = {id for id in self.open if seen.get(id) in FINAL}
        gone = {id for id in self.open if id not in seen}
        self.open -= ended
        if gone:
            lost = (
                f"job {min(gone)} is not there any more: it was pruned, deleted, or never committed"
            )
            self.end(JobGone(lost))
        elif not self.open or (
            ended and (self._any or (self._throw and any(seen[id] != "succeeded" for id in ended)))
        ):
            self.end()

    def end(self, error: GenbaError | None = None) -> None:
        self.error, self.done = error, True
        self._wake()

    def check(self, of: int, timeout: Duration | None) -> None:
        """What went wrong, or that it took too long, as an exception."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise WaitTimeout(f"{len(self.open)} of {of} jobs were not final after {timeout}")


def _wait(
    ids: Sequence[int], until: str, throw: bool, wake: Callable[[], object]
) -> JobWait | None:
    if until not in ("all", "any"):
        raise BadOption(f'until is "all" or "any", not {until!r}')
    return JobWait(ids, until, throw, wake) if ids else None


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else duration(timeout) / 1_000_000


def check_deadlock(store: Any, job: WaitingJob | None, wait: JobWait) -> None:
    """WaitWouldDeadlock if this job, or one that it is a part of, has what the awaited ones stand in line for."""
    chain: list[int] = []
    above: int | None = None if job is None else job.id
    while above is not None and above not in chain:
        chain.append(above)
        record = store.job(above)
        above = record.parent_id if record else None
    for id in sorted(wait.open)[:20] if chain else ():
        record = store.job(id)
        line = store.limits.line(id, record.rank, record.parked_on) if record else None
        if (
            line
            and line.per is None
            and line.holders
            and all(holder.job in chain for holder in line.holders)
        ):
            held = ", ".join(f"job {holder.job}" for holder in line.holders)
            raise WaitWouldDeadlock(
                f"job {chain[0]} waits for job {id}, which waits for {line.bucket!r}, and that is held by {held}: "
                "use after= instead of waiting in a job, or another bucket"
            )


class WaitThread:
    """The thread; it ends when nobody waits any more."""

    def __init__(self, store: Callable[[], JobStates]) -> None:
        self._store = store
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._waits: set[JobWait] = set()
        self._cond = threading.Condition()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pause = _PAUSES[0]

    @defer_stop
    def add(self, wait: JobWait) -> None:
        if self._pid != os.getpid():
            self._renew()
        with self._cond:
            self._waits.add(wait)
            self._pause = _PAUSES[0]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="genba-waiter", daemon=True)
                self._thread.start()
            self._cond.notify()

    @defer_stop
    def drop(self, wait: JobWait) -> None:
        with self._cond:
            self._waits.discard(wait)

    def at_rest(self) -> threading.Lock:
        """Held, nobody looks: who closes the store meanwhile leaves no connection that a look has opened."""
        if self._pid != os.getpid():
            self._renew()
        return self._looking

    def wait(self, ids: Sequence[int], until: str, throw: bool, timeout: Duration | None) -> None:
        """Until all (or any) of these are final; WaitTimeout, or what stands in the way."""
        done = threading.Event()
        wait = _wait(ids, until, throw, done.set)
        if wait is None:
            return
        self.add(wait)
        try:
            job = find_job()
            wait_in_job(
                done, _seconds(timeout), job, lambda: check_deadlock(self._store(), job, wait)
            )
        finally:
            self.drop(wait)
        wait.check(len(ids), timeout)

    async def await_(
        self, ids: Sequence[int], until: str, throw: bool, timeout: Duration | None
    ) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        wait = _wait(ids, until, throw, lambda: loop.call_soon_threadsafe(done.set))
        if wait is None:
            return
        self.add(wait)
        try:
            job = find_job()
            await await_in_job(
                done,
                _seconds(timeout),
                job,
                lambda: asyncio.to_thread(check_deadlock, self._store(), job, wait),
            )
        finally:
            self.drop(wait)
        wait.check(len(ids), timeout)

    def _run(self) -> None:
        before: object = None
        known: set[JobWait] = set()
        while True:
            with self._cond:
                if not self._waits and not self._cond.wait_for(lambda: self._waits, IDLE_SECONDS):
                    self._thread = None  # under the lock: whoever comes now starts another
                    return
            began = time.monotonic()
            with self._looking:
                with self._cond:
                    waits = set(
                        self._waits
                    )  # of now: who has given up meanwhile may have closed the store
                if waits:
                    before, known = self._look(waits, before, known)
            with self._cond:
                self._waits -= {wait for wait in waits if wait.done}
                if self._waits:
                    spent = time.monotonic() - began
                    pause = max(self._pause, 3 * spent) * random.uniform(0.8, 1.2)  # noqa: S311  not all at once
                    self._cond.wait(pause)
                    self._pause = min(_PAUSES[1], self._pause * 1.5)

    def _look(
        self, waits: set[JobWait], before: object, known: set[JobWait]
    ) -> tuple[object, set[JobWait]]:
        try:
            mark = self._store().write_marker()
            if mark == before and waits <= known:
                return before, known
            ids = sorted({id for wait in waits for id in wait.open})
            seen = self._store().states(ids) if ids else {}
            for wait in waits:
                wait.look(seen)
        except GenbaError as error:
            for wait in waits:
                wait.end(error)
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it, whatever it is
            for wait in waits:
                wait.end(GenbaError(f"waiting broke off: {type(error).__name__}: {error}"))
        else:
            return mark, waits
        return before, known
