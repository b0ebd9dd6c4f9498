"""Mutexes and semaphores, as user code holds them; and what there is to see of all of them."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any

from genba.client.current_job import RunningJob, find_job
from genba.domain.duration import Duration, duration, to_datetime
from genba.errors import BadOption, GenbaError, IllegalMove, LockLost, LockTimeout, StoreError
from genba.storage.clients.locks import (
    LockOwner,
    LockRow,
    LockTaken,
    LockWaiting,
    SessionOver,
    lock_lost_error,
)
from genba.storage.clients.sessions import boot_id
from genba.storage.nodes.dead_nodes import DatabaseContact
from genba.storage.nodes.take_over import take_over_dead_nodes

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.storage.store import Store

FIRST_WAITER_POLL_SECONDS, OTHER_WAITER_POLL_SECONDS = (
    0.25,
    1.0,
)  # seconds between two looks of the first in line, and of the others
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Grant:
    """A place that we have."""

    token: int
    owner: LockOwner
    job: RunningJob | None


class HeldLocks:
    """What the jobs of this process hold: inside one job a lock is taken once, and given back with its last use."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._uses: dict[tuple[LockOwner, str], list[int]] = {}

    @property
    def lock(self) -> threading.RLock:
        """For a look and the deed that follows from it."""
        if self._pid != os.getpid():
            self._start_anew()  # what the parent has is not the child's
        return self._lock

    def taken(self, owner: LockOwner, name: str, token: int | None = None) -> int | None:
        """The token, if the job has it (or has just got it), with one use more."""
        uses = self._uses.setdefault((owner, name), [token or 0, 0])
        if not uses[0]:
            del self._uses[owner, name]
            return None
        uses[1] += 1
        return uses[0]

    def given_back(self, owner: LockOwner, name: str) -> bool:
        """True if that was its last use."""
        uses = self._uses.get((owner, name), [0, 1])
        uses[1] -= 1
        if uses[1] <= 0:
            self._uses.pop((owner, name), None)
        return uses[1] <= 0


class Lock:
    """A mutex or a semaphore: `with` it, or `acquire` and `release`.

    Inside a job it belongs to the job and is freed with its end at the latest; elsewhere it belongs to the process.
    """

    def __init__(self, app: Client, name: str, n: int, wait: Duration | None) -> None:
        self._app = app
        self.name = checked_name("lock", name)
        if type(n) is not int or not 1 <= n <= 1_000_000:
            raise BadOption(
                f"semaphore {name!r}: n must be a whole number of at least 1, not {n!r}"
            )
        self.n = n
        self._wait = None if wait is None else duration(wait) / 1_000_000
        self._given = wait
        self._grants: list[Grant] = []
        self._last: Grant | None = None

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}{f' token {self.token}' if self else ''}>"

    def __bool__(self) -> bool:
        """Whether we have it, as far as we know; `check()` makes sure."""
        return bool(self._grants)

    @property
    def token(self) -> int:
        """Larger than that of whoever had the lock before: outside stores should refuse a smaller one."""
        if self._last is None:
            raise LockLost(f"lock {self.name!r} was not taken")
        return self._last.token

    # take

    def acquire(self) -> bool:
        """True when we have it; LockTimeout when the wait is over, with `wait=0` False."""
        asking = LockRequest(self, find_job())
        try:
            while (pause := asking.step()) is not None:
                self._app.store.listener.wait(asking.mark, pause)
        except BaseException:  # also Ctrl-C and a stop must leave the line; raised again
            asking.abandon()
            raise
        return self._decided(asking)

    async def aacquire(self) -> bool:
        asking = LockRequest(self, find_job())
        try:
            while (pause := await self._app.threads(asking.step)) is not None:
                await self._app.store.listener.await_(asking.mark, pause)
        except BaseException:  # also Ctrl-C and a stop must leave the line; raised again
            await asyncio.shield(self._app.threads(asking.abandon))
            raise
        return self._decided(asking)

    def _decided(self, asking: LockRequest) -> bool:
        grant = asking.end()
        if grant is not None:
            self._grants.append(grant)
            self._last = grant
            return True
        if self._wait == 0:
            return False
        raise LockTimeout(f"lock {self.name!r} was not free within {self._given}")

    # give back

    def release(self) -> None:
        """Give it back; LockLost if it was not ours any more.  After a fork the child has nothing to give back."""
        grant = self._last_grant()
        self._grants.remove(grant)
        if grant.owner.pid == os.getpid():
            _give_back(self._app, self.name, grant)

    async def arelease(self) -> None:
        await asyncio.shield(self._app.threads(self.release))

    def _last_grant(self) -> Grant:
        if not self._grants:
            raise LockLost(f"lock {self.name!r} is not held here")
        return self._grants[-1]

    # make sure

    def check(self) -> None:
        """LockLost if somebody else may have it by now."""
        grant = self._last_grant()
        self._check_process(grant)
        session = grant.owner.session_id
        if session is not None and self._app.store.listener.lost(session):
            raise lock_lost_error(self.name, grant.token)
        if not self._app.store.locks.held(self.name, grant.token):
            raise lock_lost_error(self.name, grant.token)

    async def acheck(self) -> None:
        await self._app.threads(self.check)

    def assert_fence(self, conn: Any) -> None:
        """In your own transaction on the same database: until it is over nobody else gets the lock.

        LockLost if it is not ours any more; then roll back.
        """
        grant = self._last_grant()
        self._check_process(grant)
        self._app.store.locks.assert_held(conn, self.name, grant.token)

    async def aassert_fence(self, conn: Any) -> None:
        await self._app.threads(self.assert_fence, conn)

    def _check_process(self, grant: Grant) -> None:
        if grant.owner.pid != os.getpid():
            raise LockLost(
                f"lock {self.name!r} was taken before the fork, and stays with process {grant.owner.pid}"
            )

    # with

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._grants:
            with suppress(
                *(() if error is None else (GenbaError,))
            ):  # what went wrong in the block says more
                self.release()

    async def __aenter__(self) -> Lock:
        await self.aacquire()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._grants:
            with suppress(*(() if error is None else (GenbaError,))):
                await self.arelease()


class LockRequest:
    """One who wants a lock: `step` until it is decided.  Its steps may run in different threads, one at a time."""

    def __init__(self, lock: Lock, job: RunningJob | None) -> None:
        if job is not None and job.in_transaction:
            raise IllegalMove(
                f"job {job.id}: take lock {lock.name!r} before transaction(), not inside of it"
            )
        self._app = lock._app
        self._name, self._n = lock.name, lock.n
        self._job = job
        self._limit = lock._wait
        self._seq: int | None = None if lock._wait == 0 else 0
        self._ahead = 0
        self._grant: Grant | None = None
        self._patience = DatabaseContact()
        self._began: float | None = None
        self._over = False
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self._wish = (
            secrets.randbits(62) + 1
        )  # tells the rows of this one from others of its session
        self._owner: LockOwner | None = None  # the session's, when it has asked
        self.mark = 0

    def step(self) -> float | None:
        """Ask once; how many seconds to wait for the bell, or None: it is decided."""
        with self._turn:
            if self._over:
                return None
            store = self._app.store
            if self._began is None:
                store.install()
                self._began = time.monotonic()
                self._patience.gap = store.sessions.lease // 2
                store.listener.enter()
                if self._job is not None:
                    self._job.lock()
                ahead = self._ask(store)
            else:
                ahead = self._look(store)
            if self._grant is not None or self._seq is None:
                return None
            left = None if self._limit is None else self._began + self._limit - time.monotonic()
            if left is not None and left <= 0:
                return None
            pause = OTHER_WAITER_POLL_SECONDS if ahead else FIRST_WAITER_POLL_SECONDS
            return pause if left is None else min(pause, left)

    def _look(self, store: Store) -> int:
        rung, mark = self.mark != store.listener.mark(), store.listener.mark()
        self._tidy(store)
        if rung or store.locks.look(self._name, self._n, self._seq or 0):
            return self._ask(store)
        self.mark = mark
        return self._ahead

    def _tidy(self, store: Store) -> None:
        """Whoever is in our way may be dead, and nobody else be there to notice."""
        now = int(time.monotonic() * 1_000_000)
        lasted = self._patience.lasted(
            now
        )  # not since we began: we may have been suspended while nobody could renew
        with suppress(
            StoreError
        ):  # who is stopped may have a row locked for a while: with the next look, then
            store.sessions.sweep(lasted)
            nodes = store.locks.nodes_in_the_way(self._name)
            if nodes:
                take_over_dead_nodes(
                    store.nodes,
                    0,
                    boot_id() if store.parallel_writers == 1 else None,
                    lasted,
                    nodes,
                )
            store.locks.sweep()
            self._patience.seen(now)

    def _ask(self, store: Store) -> int:
        self.mark = store.listener.mark()
        owner, answer = (
            self._ask_as_session(store) if self._job is None else self._ask_as_job(store, self._job)
        )
        if isinstance(answer, LockTaken):
            self._grant, self._seq, self._ahead = Grant(answer.token, owner, self._job), None, 0
        else:
            self._seq = None if self._seq is None else answer.seq
            self._ahead = answer.ahead
        return self._ahead

    def _ask_as_job(
        self, store: Store, job: RunningJob
    ) -> tuple[LockOwner, LockTaken | LockWaiting]:
        owner = LockOwner(*job.fence, None, self._pid)
        keys = self._app.held_locks
        with keys.lock:
            token = keys.taken(owner, self._name)
            if token is not None:
                return owner, LockTaken(token)
            answer = store.locks.take(owner, self._name, self._n, self._seq, store.listener.id)
            if isinstance(answer, LockTaken):
                keys.taken(owner, self._name, answer.token)
            return owner, answer

    def _ask_as_session(self, store: Store) -> tuple[LockOwner, LockTaken | LockWaiting]:
        while True:
            session = store.listener.session()
            self._owner = owner = LockOwner(None, None, self._wish, session, self._pid)
            try:
                return owner, store.locks.take(
                    owner, self._name, self._n, self._seq, store.listener.id
                )
            except SessionOver:
                store.listener.forget(session)
            except StoreError:
                self._withdraw_later()
                raise

    def _withdraw_later(self) -> None:
        """There may be rows of ours that we do not know of: this process may live for long, and wait for itself."""
        owner, store = self._owner, self._app.store
        if owner is not None:
            store.listener.later(lambda: store.locks.withdraw(self._name, owner))

    def end(self) -> Grant | None:
        """What it came to; out of the line."""
        with self._turn:
            self._over = True
            grant, began = self._grant, self._began
        if began is None:
            return None
        store = self._app.store
        try:
            if grant is None and self._seq:
                store.locks.leave(self._name, self._seq)
        except StoreError:
            self._withdraw_later()
            raise
        finally:
            if (
                grant is None or grant.job is not None
            ):  # what a session holds, its ear has to keep alive
                store.listener.leave()
        return grant

    def abandon(self) -> None:
        """Nobody wants it any more."""
        if self._pid != os.getpid():
            return
        with suppress(StoreError):  # the end of the owner does the rest
            grant = self.end()
            if grant is not None:
                _give_back(self._app, self._name, grant)


def _give_back(app: Client, name: str, grant: Grant) -> None:
    store = app.store
    if grant.job is None:
        try:
            if not store.locks.release(name, grant.token):
                raise lock_lost_error(name, grant.token)
        except StoreError:
            store.listener.later(
                lambda: store.locks.release(name, grant.token)
            )  # this process may live for long
            raise
        finally:
            store.listener.leave()
        return
    with app.held_locks.lock:
        if not app.held_locks.given_back(grant.owner, name):
            return
        if grant.job.applied:
            return  # it went with the end of the job
        if not store.locks.release(name, grant.token):
            raise lock_lost_error(name, grant.token)


# what there is to see


@dataclass(frozen=True, slots=True)
class LockUser:
    """Who holds a lock, or waits for it: a job on a node, or a process outside of jobs."""

    node: str | None
    host: str | None
    pid: int
    job: int | None
    attempt: int | None
    since: datetime
    token: int | None  # None: it waits

    @classmethod
    def of(cls, row: LockRow, token: int | None) -> LockUser:
        return cls(
            row.node, row.host, row.pid, row.job_id, row.attempt, to_datetime(row.since), token
        )


@dataclass(frozen=True, slots=True)
class LockState:
    """A lock that is held or waited for."""

    name: str
    n: int
    holders: list[LockUser]
    waiters: list[LockUser]  # in the order in which they will get it

    @property
    def holder(self) -> LockUser | None:
        """Of a mutex."""
        return self.holders[0] if self.holders else None


def lock_states(holders: Iterable[LockRow], waiters: Iterable[LockRow]) -> list[LockState]:
    held = {name: list(rows) for name, rows in groupby(holders, key=lambda row: row.name)}
    waited = {name: list(rows) for name, rows in groupby(waiters, key=lambda row: row.name)}
    return [
        LockState(
            name,
            (held.get(name) or waited[name])[0].n,
            [LockUser.of(row, row.number) for row in held.get(name, ())],
            [LockUser.of(row, None) for row in waited.get(name, ())],
        )
        for name in sorted(held.keys() | waited.keys())
    ]


def checked_name(what: str, name: Any) -> str:
    """What a lock or a topic may be called."""
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        raise BadOption(
            f"the name of a {what} is a text of 1 to {_LONGEST_NAME} printable characters, not {name!r}"
        )
    return name
