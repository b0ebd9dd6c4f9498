"""Lock: the handle of a mutex or a semaphore; and all locks as seen from outside."""

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
from typing import Any

from genba.client.connection import ClientConnection
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
from genba.storage.store import Store

# Between two looks: of the first in the queue, and of the others.
FIRST_WAITER_POLL_SECONDS, OTHER_WAITER_POLL_SECONDS = 0.25, 1.0
_LONGEST_NAME = 200
_MOST_HOLDERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Grant:
    """A lock that we got."""

    token: int
    owner: LockOwner
    job: RunningJob | None


class HeldLocks:
    """The locks that jobs of this process hold, with the number of uses inside each job."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._uses: dict[tuple[LockOwner, str], list[int]] = {}  # [token, number of uses]

    @property
    def lock(self) -> threading.RLock:
        """The lock for a look and the change that follows from it."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: the child holds none of the parent's
        return self._lock

    def add_use(self, owner: LockOwner, name: str, token: int | None = None) -> int | None:
        """Count one more use and return the token; None if the job does not hold the lock.

        `token` is that of a lock which the job has just got.
        """
        uses = self._uses.setdefault((owner, name), [token or 0, 0])
        if not uses[0]:
            del self._uses[owner, name]
            return None
        uses[1] += 1
        return uses[0]

    def end_use(self, owner: LockOwner, name: str) -> bool:
        """Count one use less; True if it was the last."""
        uses = self._uses.get((owner, name), [0, 1])
        uses[1] -= 1
        if uses[1] <= 0:
            self._uses.pop((owner, name), None)
        return uses[1] <= 0


class Lock:
    """A mutex or a semaphore: `with` it, or `acquire` and `release`.

    Inside a job it belongs to the job and is freed with its end at the latest; elsewhere it belongs
    to the process.
    """

    def __init__(
        self,
        connection: ClientConnection,
        held_locks: HeldLocks,
        name: str,
        n: int,
        wait: Duration | None,
    ) -> None:
        self._connection = connection
        self._held_locks = held_locks
        self.name = checked_name("lock", name)
        if type(n) is not int or not 1 <= n <= _MOST_HOLDERS:
            raise BadOption(
                f"semaphore {name!r}: n must be a whole number of at least 1, not {n!r}"
            )
        self.n = n
        self._wait_seconds = None if wait is None else duration(wait) / 1_000_000
        self._wait = wait
        self._grants: list[Grant] = []
        self._last: Grant | None = None

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}{f' token {self.token}' if self else ''}>"

    def __bool__(self) -> bool:
        """Whether this handle has taken it; `check()` asks the database."""
        return bool(self._grants)

    @property
    def token(self) -> int:
        """A number larger than those of earlier holders, for stores that refuse smaller ones."""
        if self._last is None:
            raise LockLost(f"lock {self.name!r} was not taken")
        return self._last.token

    # take

    def acquire(self) -> bool:
        """Take it and return True; LockTimeout when the wait is over, with `wait=0` False."""
        request = LockRequest(self, find_job())
        try:
            while (pause := request.step()) is not None:
                self._connection.store.listener.wait(request.mark, pause)
        except BaseException:  # Ctrl-C and a stop too must leave the queue; raised again
            request.abandon()
            raise
        return self._decided(request)

    async def aacquire(self) -> bool:
        threads = self._connection.threads
        request = LockRequest(self, find_job())
        try:
            while (pause := await threads(request.step)) is not None:
                await self._connection.store.listener.await_(request.mark, pause)
        except BaseException:  # Ctrl-C and a stop too must leave the queue; raised again
            await asyncio.shield(threads(request.abandon))
            raise
        return self._decided(request)

    def _decided(self, request: LockRequest) -> bool:
        grant = request.end()
        if grant is not None:
            self._grants.append(grant)
            self._last = grant
            return True
        if self._wait_seconds == 0:
            return False
        raise LockTimeout(f"lock {self.name!r} was not free within {self._wait}")

    # release

    def release(self) -> None:
        """Release it; LockLost if it was lost before.  In the child of a fork it does nothing."""
        grant = self._last_grant()
        self._grants.remove(grant)
        if grant.owner.pid == os.getpid():
            _release(self._connection, self._held_locks, self.name, grant)

    async def arelease(self) -> None:
        await asyncio.shield(self._connection.threads(self.release))

    def _last_grant(self) -> Grant:
        if not self._grants:
            raise LockLost(f"lock {self.name!r} is not held here")
        return self._grants[-1]

    # check

    def check(self) -> None:
        """Ask the database; LockLost if another owner may have it by now."""
        grant = self._last_grant()
        self._check_process(grant)
        store, session = self._connection.store, grant.owner.session_id
        if session is not None and store.listener.lost(session):
            raise lock_lost_error(self.name, grant.token)
        if not store.locks.held(self.name, grant.token):
            raise lock_lost_error(self.name, grant.token)

    async def acheck(self) -> None:
        await self._connection.threads(self.check)

    def assert_fence(self, conn: Any) -> None:
        """Keep the lock until the end of your own transaction on the same database.

        LockLost if it was lost before; then roll back.
        """
        grant = self._last_grant()
        self._check_process(grant)
        self._connection.store.locks.assert_held(conn, self.name, grant.token)

    async def aassert_fence(self, conn: Any) -> None:
        await self._connection.threads(self.assert_fence, conn)

    def _check_process(self, grant: Grant) -> None:
        if grant.owner.pid != os.getpid():
            raise LockLost(
                f"lock {self.name!r} was taken before the fork, "
                f"and stays with process {grant.owner.pid}"
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
            # An error in the block says more than one of the release.
            with suppress(*(() if error is None else (GenbaError,))):
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
    """One request for a lock: call `step` until it returns None.

    Its steps may run in different threads, one at a time.
    """

    def __init__(self, lock: Lock, job: RunningJob | None) -> None:
        if job is not None and job.in_transaction:
            raise IllegalMove(
                f"job {job.id}: take lock {lock.name!r} before transaction(), not inside of it"
            )
        self._connection = lock._connection
        self._held_locks = lock._held_locks
        self._name, self._n = lock.name, lock.n
        self._job = job
        self._limit_seconds = lock._wait_seconds
        # Our number in the queue: 0 before we have one, None if we do not queue.
        self._seq: int | None = None if lock._wait_seconds == 0 else 0
        self._ahead = 0
        self._grant: Grant | None = None
        self._contact = DatabaseContact()
        self._began: float | None = None
        self._over = False
        self._step_lock = threading.Lock()
        self._pid = os.getpid()
        # Tells our rows from those of other requests of the same session.
        self._request_id = secrets.randbits(62) + 1
        self._session_owner: LockOwner | None = None  # once the session has asked
        self.mark = 0  # of the listener, at the last look

    def step(self) -> float | None:
        """Try once; return the seconds to wait for a wake-up, or None when it is decided."""
        with self._step_lock:
            if self._over:
                return None
            store = self._connection.store
            ahead = self._begin(store) if self._began is None else self._look(store)
            if self._grant is not None or self._seq is None:
                return None
            pause = OTHER_WAITER_POLL_SECONDS if ahead else FIRST_WAITER_POLL_SECONDS
            left = self._seconds_left()
            if left is None:
                return pause
            return None if left <= 0 else min(pause, left)

    def _seconds_left(self) -> float | None:
        if self._limit_seconds is None or self._began is None:
            return None
        return self._began + self._limit_seconds - time.monotonic()

    def _begin(self, store: Store) -> int:
        store.install()
        self._began = time.monotonic()
        self._contact.gap = store.sessions.lease // 2
        store.listener.enter()
        if self._job is not None:
            self._job.lock()
        return self._take(store)

    def _look(self, store: Store) -> int:
        woken, mark = self.mark != store.listener.mark(), store.listener.mark()
        self._remove_dead(store)
        if woken or store.locks.look(self._name, self._n, self._seq or 0):
            return self._take(store)
        self.mark = mark
        return self._ahead

    def _remove_dead(self, store: Store) -> None:
        """Remove dead holders and waiters: perhaps no other process is there to notice them."""
        now = int(time.monotonic() * 1_000_000)
        # Not since we began: this process may have been suspended while no node could renew.
        lasted = self._contact.duration(now)
        # A stopped process may have a row locked for a while: then the next look does it.
        with suppress(StoreError):
            store.sessions.sweep(lasted)
            nodes = store.locks.nodes_in_the_way(self._name)
            if nodes:
                boot = boot_id() if store.parallel_writers == 1 else None
                take_over_dead_nodes(store.nodes, 0, boot, lasted, nodes)
            store.locks.sweep()
            self._contact.confirm(now)

    def _take(self, store: Store) -> int:
        """Take the lock, or a place in the queue; returns how many are ahead."""
        self.mark = store.listener.mark()
        if self._job is None:
            owner, answer = self._take_as_session(store)
        else:
            owner, answer = self._take_as_job(store, self._job)
        if isinstance(answer, LockTaken):
            self._grant, self._seq, self._ahead = Grant(answer.token, owner, self._job), None, 0
        else:
            self._seq = None if self._seq is None else answer.seq
            self._ahead = answer.ahead
        return self._ahead

    def _take_as_job(
        self, store: Store, job: RunningJob
    ) -> tuple[LockOwner, LockTaken | LockWaiting]:
        owner = LockOwner(*job.fence, None, self._pid)
        held = self._held_locks
        with held.lock:
            token = held.add_use(owner, self._name)
            if token is not None:
                return owner, LockTaken(token)
            answer = store.locks.take(owner, self._name, self._n, self._seq, store.listener.id)
            if isinstance(answer, LockTaken):
                held.add_use(owner, self._name, answer.token)
            return owner, answer

    def _take_as_session(self, store: Store) -> tuple[LockOwner, LockTaken | LockWaiting]:
        locks, listener = store.locks, store.listener
        while True:
            session = listener.session()
            owner = LockOwner(None, None, self._request_id, session, self._pid)
            self._session_owner = owner
            try:
                return owner, locks.take(owner, self._name, self._n, self._seq, listener.id)
            except SessionOver:
                listener.forget(session)
            except StoreError:
                self._withdraw_later()
                raise

    def _withdraw_later(self) -> None:
        """Remove rows of ours without an answer: else this process may wait for itself."""
        owner, store = self._session_owner, self._connection.store
        if owner is not None:
            store.listener.later(lambda: store.locks.withdraw(self._name, owner))

    def end(self) -> Grant | None:
        """End the request, leave the queue, and return the lock if we got it."""
        with self._step_lock:
            self._over = True
            grant, began = self._grant, self._began
        if began is None:
            return None
        store = self._connection.store
        try:
            if grant is None and self._seq:
                store.locks.leave(self._name, self._seq)
        except StoreError:
            self._withdraw_later()
            raise
        finally:
            # A lock of the session needs the listener, which keeps the session alive.
            if grant is None or grant.job is not None:
                store.listener.leave()
        return grant

    def abandon(self) -> None:
        """End the request, and release the lock if we got it."""
        if self._pid != os.getpid():
            return
        with suppress(StoreError):  # it ends with its owner at the latest
            grant = self.end()
            if grant is not None:
                _release(self._connection, self._held_locks, self._name, grant)


def _release(connection: ClientConnection, held_locks: HeldLocks, name: str, grant: Grant) -> None:
    store = connection.store
    if grant.job is None:
        try:
            if not store.locks.release(name, grant.token):
                raise lock_lost_error(name, grant.token)
        except StoreError:
            # This process may live for long, so the listener tries again later.
            store.listener.later(lambda: store.locks.release(name, grant.token))
            raise
        finally:
            store.listener.leave()
        return
    with held_locks.lock:
        if not held_locks.end_use(grant.owner, name):
            return
        if grant.job.applied:
            return  # the end of the job has released it
        if not store.locks.release(name, grant.token):
            raise lock_lost_error(name, grant.token)


# all locks, from outside


@dataclass(frozen=True, slots=True)
class LockUser:
    """A holder or waiter of a lock: a job on a node, or a process outside of jobs."""

    node: str | None
    host: str | None
    pid: int
    job: int | None
    attempt: int | None
    since: datetime
    token: int | None  # None while it waits

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
    waiters: list[LockUser]  # in the order of the queue

    @property
    def holder(self) -> LockUser | None:
        """The holder of a mutex."""
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
    """Return the name of a lock or a topic, or raise BadOption."""
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        raise BadOption(
            f"the name of a {what} is a text of 1 to {_LONGEST_NAME} printable characters, "
            f"not {name!r}"
        )
    return name
