"""Waiting until jobs are final: one thread of the process looks at the store for all that wait."""

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

_LOAN_CHECK_SECONDS = 0.05  # whether the node still lends the slot of a job that waits
_DEADLOCK_CHECK_SECONDS = 0.5  # whether the awaited jobs can start at all
IDLE_SECONDS = 1.0  # without a wait, then the thread ends
_PAUSES_SECONDS = (0.001, 0.05)  # between two looks: the first, the longest
_MOST_CHECKED = 20  # awaited jobs that are checked for a deadlock


class JobStates(Protocol):
    """The store, as far as the wait thread needs it."""

    def states(self, ids: list[int]) -> dict[int, str]: ...

    def write_marker(self) -> object: ...


class WaitingJob(Protocol):
    """The running job that waits for others."""

    @property
    def id(self) -> int: ...

    def lending(self, awaited: Callable[[], Iterable[int]]) -> AbstractContextManager[None]: ...

    def write_awaited(self) -> None: ...

    def check_loan(self) -> None: ...


def wait_in_job(
    done: threading.Event,
    timeout_seconds: float | None,
    job: WaitingJob | None,
    awaited: Callable[[], Iterable[int]],
    check: Callable[[], None],
) -> None:
    """Wait for `done`; a job lends its slot meanwhile.  `check` raises if waiting cannot end."""
    if job is None:
        done.wait(timeout_seconds)
        return
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    check_at = time.monotonic() + _DEADLOCK_CHECK_SECONDS
    with job.lending(awaited):
        while not done.is_set() and (deadline is None or time.monotonic() < deadline):
            left = _LOAN_CHECK_SECONDS if deadline is None else deadline - time.monotonic()
            done.wait(max(0.0, min(_LOAN_CHECK_SECONDS, left)))
            if done.is_set():
                return
            job.check_loan()
            if time.monotonic() >= check_at:
                job.write_awaited()  # others than before may be open
                check()
                check_at = time.monotonic() + _DEADLOCK_CHECK_SECONDS


async def await_in_job(
    done: asyncio.Event,
    timeout_seconds: float | None,
    job: WaitingJob | None,
    awaited: Callable[[], Iterable[int]],
    check: Callable[[], Awaitable[None]],
) -> None:
    async def wait() -> None:
        if job is None:
            await done.wait()
            return
        check_at = time.monotonic() + _DEADLOCK_CHECK_SECONDS
        with job.lending(awaited):
            while not done.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), _LOAN_CHECK_SECONDS)
                if done.is_set():
                    return
                job.check_loan()
                if time.monotonic() >= check_at:
                    job.write_awaited()
                    await check()
                    check_at = time.monotonic() + _DEADLOCK_CHECK_SECONDS

    with suppress(TimeoutError):
        await asyncio.wait_for(wait(), timeout_seconds)


class JobWait:
    """One wait, until all (or any) of its jobs are final; with `throw` also when one has failed."""

    def __init__(
        self, ids: Iterable[int], until: str, throw: bool, wake: Callable[[], object]
    ) -> None:
        self.open = dict.fromkeys(ids)  # in the order of the call
        self.ended: dict[int, str] = {}  # the states of those that are final
        self.seen = False  # the states were read at least once
        self.until_any = until == "any"
        self._throw = throw
        self._wake = wake
        self.error: GenbaError | None = None
        self.done = False

    def update(self, states: dict[int, str]) -> None:
        """Take over the states that were just read, and end the wait if they are enough."""
        self.seen = True
        ended = {id: states[id] for id in self.open if states.get(id) in FINAL}
        gone = {id for id in self.open if id not in states}
        self.open = {id: None for id in self.open if id not in ended}
        self.ended |= ended
        failed = self._throw and any(state != "succeeded" for state in ended.values())
        if gone:
            id = min(gone)
            self.end(JobGone(f"job {id} is gone: it was pruned, deleted, or never committed"))
        elif not self.open or (ended and (self.until_any or failed)):
            self.end()

    def end(self, error: GenbaError | None = None) -> None:
        self.error, self.done = error, True
        self._wake()

    def check(self, total: int, timeout: Duration | None) -> None:
        """Raise what went wrong, or WaitTimeout if it took too long."""
        if self.error is not None:
            raise self.error
        if not self.done and self.open:
            raise wait_timeout(list(self.open), total, timeout)


def wait_timeout(open_ids: Sequence[int], total: int, timeout: Duration | None) -> WaitTimeout:
    """Make the error of a wait that took too long; the first of these jobs is named."""
    message = f"{len(open_ids)} of {total} jobs were not final after {timeout}"
    return WaitTimeout(message, job_id=open_ids[0])


def looks_once(timeout: Duration | None) -> bool:
    """Check whether a wait with this timeout only looks whether the jobs are final."""
    return timeout is not None and duration(timeout) == 0


def _new_wait(
    ids: Sequence[int], until: str, throw: bool, wake: Callable[[], object]
) -> JobWait | None:
    if until not in ("all", "any"):
        raise BadOption(f'until is "all" or "any", not {until!r}')
    return JobWait(ids, until, throw, wake) if ids else None


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else duration(timeout) / 1_000_000


class DeadlockCheck:
    """Looks whether awaited jobs wait for a bucket that the waiting job or a parent of it holds.

    Raises WaitWouldDeadlock when two looks, one after the other, have found the same.
    """

    def __init__(self, store: Callable[[], Any], job: WaitingJob | None, wait: JobWait) -> None:
        self._store = store
        self._job = job
        self._wait = wait
        self._suspected: str | None = None

    def look(self) -> None:
        found = self._find() if self._job is not None else None
        if found is not None and found == self._suspected:
            raise WaitWouldDeadlock(found)
        self._suspected = found

    def _find(self) -> str | None:
        """Describe the deadlock; a wait for any needs all of its jobs to be stuck."""
        store, awaited = self._store(), list(self._wait.open)
        if self._wait.until_any and len(awaited) > _MOST_CHECKED:
            return None
        chain = _parents(store, self._job)
        found = None
        for id in awaited[:_MOST_CHECKED]:
            reason = _blocked_by(store, id, chain)
            if reason is None and self._wait.until_any:
                return None
            found = found or reason
        return found


def _blocked_by(store: Any, id: int, chain: list[int]) -> str | None:
    """Describe the bucket that keeps a job from starting, if jobs of the chain alone hold it."""
    record = store.job(id)
    blocked = store.limits.line(id, record.rank, record.parked_on) if record else None
    if blocked is None or blocked.per is not None or not blocked.holders:
        return None
    if any(holder.job not in chain for holder in blocked.holders):
        return None
    held = ", ".join(f"job {holder.job}" for holder in blocked.holders)
    return (
        f"job {chain[0]} waits for job {id}, which waits for {blocked.bucket!r}, "
        f"and that is held by {held}: "
        "use after= instead of waiting in a job, or another bucket"
    )


def _parents(store: Any, job: WaitingJob | None) -> list[int]:
    """Return the ids of the job, its parent, the parent of that, and so on."""
    chain: list[int] = []
    current: int | None = None if job is None else job.id
    while current is not None and current not in chain:
        chain.append(current)
        record = store.job(current)
        current = record.parent_id if record else None
    return chain


class WaitThread:
    """Looks at the store for all waits of this process; it ends when there are none."""

    def __init__(self, store: Callable[[], JobStates]) -> None:
        self._store = store
        self._reset()

    def _reset(self) -> None:
        """Start without waits and without a thread: also in the child of a fork."""
        self._pid = os.getpid()
        self._waits: set[JobWait] = set()
        self._cond = threading.Condition()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pause = _PAUSES_SECONDS[0]

    @defer_stop
    def add(self, wait: JobWait) -> None:
        if self._pid != os.getpid():
            self._reset()
        with self._cond:
            self._waits.add(wait)
            self._pause = _PAUSES_SECONDS[0]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="genba-waiter", daemon=True)
                self._thread.start()
            self._cond.notify()

    @defer_stop
    def drop(self, wait: JobWait) -> None:
        with self._cond:
            self._waits.discard(wait)

    def paused(self) -> threading.Lock:
        """Return the lock that pauses the thread, so that it cannot reopen a store being closed."""
        if self._pid != os.getpid():
            self._reset()
        return self._looking

    def look(
        self, ids: Sequence[int], until: str, throw: bool, timeout: Duration | None
    ) -> dict[int, str]:
        """Read the states once; like `wait` with a timeout that is over at once."""
        wait = _new_wait(ids, until, throw, lambda: None)
        if wait is None:
            return {}
        self._read(wait)
        wait.check(len(ids), timeout)
        return wait.ended

    def _read(self, wait: JobWait) -> None:
        """Read the states here, while the thread does not look."""
        with self.paused():
            wait.update(self._store().states(list(wait.open)))

    def wait(
        self, ids: Sequence[int], until: str, throw: bool, timeout: Duration | None
    ) -> dict[int, str]:
        """Wait until all (or any) of these are final; return the states of those that are.

        Raises WaitTimeout, or what went wrong.  However short the timeout, the states are read.
        """
        done = threading.Event()
        wait = _new_wait(ids, until, throw, done.set)
        if wait is None:
            return {}
        self.add(wait)
        try:
            job = find_job()
            check = DeadlockCheck(self._store, job, wait)
            wait_in_job(done, _seconds(timeout), job, lambda: wait.open, check.look)
        finally:
            self.drop(wait)
        if not wait.seen and not wait.done:
            self._read(wait)
        wait.check(len(ids), timeout)
        return wait.ended

    async def await_(
        self, ids: Sequence[int], until: str, throw: bool, timeout: Duration | None
    ) -> dict[int, str]:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, and the wait ended with it
                loop.call_soon_threadsafe(done.set)

        wait = _new_wait(ids, until, throw, wake)
        if wait is None:
            return {}
        self.add(wait)
        try:
            job = find_job()
            check = DeadlockCheck(self._store, job, wait)
            await await_in_job(
                done,
                _seconds(timeout),
                job,
                lambda: wait.open,
                lambda: asyncio.to_thread(check.look),
            )
        finally:
            self.drop(wait)
        if not wait.seen and not wait.done:
            await asyncio.to_thread(self._read, wait)
        wait.check(len(ids), timeout)
        return wait.ended

    def _run(self) -> None:
        before: object = None
        known: set[JobWait] = set()
        while True:
            with self._cond:
                if not self._waits and not self._cond.wait_for(lambda: self._waits, IDLE_SECONDS):
                    self._thread = None  # under the lock: the next wait starts another thread
                    return
            began = time.monotonic()
            with self._looking:
                with self._cond:
                    # Read again: a wait that was dropped meanwhile may have closed the store.
                    waits = set(self._waits)
                if waits:
                    before, known = self._look(waits, before, known)
            with self._cond:
                self._waits -= {wait for wait in waits if wait.done}
                if self._waits:
                    self._cond.wait(self._next_pause(time.monotonic() - began))
                    self._pause = min(_PAUSES_SECONDS[1], self._pause * 1.5)

    def _next_pause(self, look_seconds: float) -> float:
        """Pause at least three times as long as a look took; spread, so that processes differ."""
        return max(self._pause, 3 * look_seconds) * random.uniform(0.8, 1.2)  # noqa: S311

    def _look(
        self, waits: set[JobWait], before: object, known: set[JobWait]
    ) -> tuple[object, set[JobWait]]:
        """Read the states of all awaited jobs, unless nothing was written since the last look."""
        try:
            marker = self._store().write_marker()
            if marker == before and waits <= known:
                return before, known
            ids = sorted({id for wait in waits for id in wait.open})
            states = self._store().states(ids) if ids else {}
            for wait in waits:
                wait.update(states)
        except GenbaError as error:
            for wait in waits:
                wait.end(error)
        except Exception as error:  # noqa: BLE001  each wait must end, whatever went wrong
            for wait in waits:
                wait.end(GenbaError(f"waiting broke off: {type(error).__name__}: {error}"))
        else:
            return marker, waits
        return before, known
