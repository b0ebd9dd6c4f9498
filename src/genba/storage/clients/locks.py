"""Mutexes and semaphores: the places of a named lock, granted in the order of asking.

The owner of a place is an attempt at a job, or the session of a process. Its rows are deleted in
the transaction that ends the owner. The transaction that frees a place calls the next waiter, and
wakes it; a waiter that has been called takes the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from genba.errors import BadOption, LeaseLost, LockLost, StoreError
from genba.storage.engines.database import Database, QueryCall, Row, Transaction
from genba.storage.records import JobId, Micros
from genba.storage.wakeups import ClientWakeups

CALL_PATIENCE_US = 2_000_000  # a waiter that was called and has not come is passed over then
_BEHIND_ALL = (1 << 63) - 1  # a sequence number

_json = msgspec.json.Encoder()


class LockOwner(NamedTuple):
    """An attempt at a job, or a session; `pid` tells the processes of a job apart.

    For a session, `claim_id` tells its requests apart.
    """

    job_id: int | None
    attempt: int | None
    claim_id: int | None
    session_id: int | None
    pid: int


class LockTaken(NamedTuple):
    token: int


class LockWaiting(NamedTuple):
    """Waiting for a place; `seq` is 0 after a mere try."""

    seq: int
    ahead: int


class SessionOver(Exception):
    """The session was declared dead, and has to be opened again."""


class LockRow(NamedTuple):
    """A holder (`number` is its token) or a waiter (its sequence number).

    In the order of the query.
    """

    name: str
    n: int
    number: int
    job_id: JobId | None
    attempt: int | None
    pid: int
    since: Micros
    node: str | None
    host: str | None


class Locks:
    def __init__(self, database: Database, wakeups: ClientWakeups, namespace: str) -> None:
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._called: list[int] = []  # clients to wake after a commit that is not ours

    # take

    def take(
        self, owner: LockOwner, name: str, n: int, seq: int | None, bell: int
    ) -> LockTaken | LockWaiting:
        """Take a place if one is free for us; otherwise wait.

        `seq` is our number as a waiter, 0 if we do not wait yet, None for a mere try.
        """
        if not seq and (token := self._take_free(owner, name, n)) is not None:
            return LockTaken(token)
        with self._db.transaction() as tx:
            self._check(tx, owner)
            self._lock_name(tx, name)
            rows = tx.all("places_of_lock", namespace=self._namespace, name=name)
            for row in rows:
                if owner.job_id is not None and row[3:] == (
                    owner.job_id,
                    owner.attempt,
                    owner.claim_id,
                    owner.pid,
                ):
                    self._stop_waiting(tx, seq)
                    return LockTaken(row[1])
            self._check_size(tx, name, n, rows)
            if seq == 0 and owner.job_id is not None:
                seq = self._own_waiter(tx, owner, name)
            came = tx.one("waiter_called_at", seq=seq) if seq else None
            ahead = self._ahead(tx, name, n, _BEHIND_ALL if seq is None or came is None else seq)
            free = n - len(rows)
            if free > ahead:
                self._stop_waiting(tx, seq)
                return LockTaken(self._grant(tx, owner, name, n, {row[0] for row in rows}))
            called = self._call_next(tx, name)
            if seq is None:
                line = LockWaiting(0, ahead)
            elif came is None:
                line = LockWaiting(self._insert_waiter(tx, owner, name, n, bell), ahead)
            else:
                if free <= 0 and came[0] is not None:
                    tx.run("clear_call", seq=seq)  # it came too late
                line = LockWaiting(seq, ahead)
        self._wake([client for client in called if client != bell])
        return line

    def _take_free(self, owner: LockOwner, name: str, n: int) -> int | None:
        """Take the lock in one round trip if it has no holder and no waiter; otherwise None."""
        which = {"namespace": self._namespace, "name": name}
        own = ("own_session" if owner.job_id is None else "own_attempt", owner._asdict())
        taking = ("take_free_lock", {**which, "n": n, **owner._asdict()})
        _, _, taken, _ = self._db.pipeline(
            own, ("lock_one_name", which), taking, ("advance_token", which)
        )
        return int(taken[0][0]) if taken else None

    def look(self, name: str, n: int, seq: int) -> bool:
        """Test whether to try again; reads only."""
        with self._db.statement() as tx:
            rows = tx.all("places_of_lock", namespace=self._namespace, name=name)
            return n > len(rows) or tx.one("waiter_called_at", seq=seq) is None

    def _check(self, tx: Transaction, owner: LockOwner) -> None:
        if owner.job_id is not None:
            fence = {"job_id": owner.job_id, "attempt": owner.attempt, "claim_id": owner.claim_id}
            if tx.one("own_attempt", **fence) is None:
                raise LeaseLost(
                    f"job {owner.job_id}: attempt {owner.attempt} is over, and cannot take a lock"
                )
        elif tx.one("own_session", session_id=owner.session_id) is None:
            raise SessionOver

    def _check_size(
        self, tx: Transaction, name: str, n: int, rows: Sequence[tuple[Any, ...]]
    ) -> None:
        sizes = {row[2] for row in rows} - {n}
        other = (
            tx.one("other_size_of_waiters", namespace=self._namespace, name=name, n=n)
            if not sizes
            else None
        )
        if sizes or other:
            there = min(sizes) if sizes else other[0] if other else n
            raise BadOption(
                f"lock {name!r} has {there} place{'s' * (there > 1)} for its holders "
                f"and waiters, not {n}: "
                "all uses of a name must agree (a mutex has one)"
            )

    def _ahead(self, tx: Transaction, name: str, n: int, seq: int) -> int:
        row = tx.one(
            "count_waiters_ahead",
            namespace=self._namespace,
            name=name,
            seq=seq,
            patience=CALL_PATIENCE_US,
            n=n,
        )
        return int(row[0]) if row else 0

    def _grant(self, tx: Transaction, owner: LockOwner, name: str, n: int, taken: set[int]) -> int:
        row = tx.one("next_token")
        assert row is not None
        place = next(place for place in range(n) if place not in taken)
        tx.run(
            "insert_lock",
            namespace=self._namespace,
            name=name,
            place=place,
            n=n,
            token=row[0],
            **owner._asdict(),
        )
        return int(row[0])

    def _insert_waiter(
        self, tx: Transaction, owner: LockOwner, name: str, n: int, bell: int
    ) -> int:
        row = tx.one(
            "insert_waiter", namespace=self._namespace, name=name, n=n, bell=bell, **owner._asdict()
        )
        assert row is not None
        return int(row[0])

    def _own_waiter(self, tx: Transaction, owner: LockOwner, name: str) -> int:
        """Return this attempt's number as a waiter, if an answer was lost.

        It must not wait for itself.
        """
        fence = {
            "job_id": owner.job_id,
            "attempt": owner.attempt,
            "claim_id": owner.claim_id,
            "pid": owner.pid,
        }
        row = tx.one("own_waiter", namespace=self._namespace, name=name, **fence)
        return int(row[0]) if row else 0

    def _stop_waiting(self, tx: Transaction, seq: int | None) -> None:
        if seq:
            tx.all("delete_waiter", seq=seq)

    def leave(self, name: str, seq: int) -> None:
        """Stop waiting; if we had just been called, the next waiter is."""
        self._then_call(name, ("delete_waiter", {"seq": seq}))

    def withdraw(self, name: str, owner: LockOwner) -> None:
        """Undo one request of a session, whatever has become of it."""
        which = {"namespace": self._namespace, "name": name}
        whose = {**which, "session_id": owner.session_id, "claim_id": owner.claim_id}
        calling = ("call_next_waiters", {**which, "patience": CALL_PATIENCE_US})
        *_, called = self._db.pipeline(
            ("lock_one_name", which),
            ("free_lock_of_request", whose),
            ("delete_waiter_of_request", whose),
            calling,
        )
        self._wake([row[0] for row in called])

    # give back

    def release(self, name: str, token: int) -> bool:
        """Free the place; return False if it was not ours any more."""
        which = {"namespace": self._namespace, "name": name}
        return bool(self._then_call(name, ("free_lock", {**which, "token": token})))

    def break_(self, name: str, token: int | None, by: str) -> list[int]:
        """Take the lock from its holders; return their tokens, which are invalid from now on."""
        with self._db.transaction() as tx:
            self._lock_name(tx, name)
            broken = tx.all("break_lock", namespace=self._namespace, name=name, token=token)
            called = self._call_next(tx, name)
            for number, job_id, _, pid in broken:
                data = _json.encode({"lock": name, "token": number, "pid": pid, "by": by})
                tx.run(
                    "insert_client_event",
                    namespace=self._namespace,
                    kind="lock_broken",
                    job_id=job_id,
                    data=data,
                )
        self._wake(called)
        return sorted(row[0] for row in broken)

    def held(self, name: str, token: int) -> bool:
        with self._db.statement() as tx:
            return (
                tx.one("lock_is_held", namespace=self._namespace, name=name, token=token)
                is not None
            )

    def assert_held(self, conn: Any, name: str, token: int) -> None:
        """Keep the lock until the caller's transaction ends; LockLost if it is not ours."""
        with self._db.adopt(conn) as tx:
            if (
                tx.one("assert_lock_held", namespace=self._namespace, name=name, token=token)
                is None
            ):
                raise lock_lost_error(name, token)

    # owners end

    def free_attempts(self, tx: Transaction, attempts: Sequence[tuple[JobId, int]]) -> None:
        """Free the locks of attempts, in the transaction that ends them.

        After their rows are written; `wake_called` follows its commit.
        """
        rows = tx.all("lock_names_of_jobs", ids=tx.numbers([id for id, _ in attempts]))
        if rows:
            names = sorted(row[0] for row in rows)
            for name in names:
                self._lock_name(tx, name)
            tx.batch("free_locks_of_attempts", attempts)
            tx.batch("delete_waiters_of_attempts", attempts)
            for name in names:
                self._called += self._call_next(tx, name)

    def free_session(self, tx: Transaction, id: int) -> list[int]:
        """Free the locks of a session, in the transaction that ends it.

        Returns the clients to wake after the commit.
        """
        names = sorted(row[0] for row in tx.all("lock_names_of_session", id=id))
        for name in names:
            self._lock_name(tx, name)
        tx.run("free_locks_of_session", id=id)
        tx.run("delete_waiters_of_session", id=id)
        tx.run("delete_listeners_of_session", id=id)
        return [client for name in names for client in self._call_next(tx, name)]

    def wake_called(self) -> None:
        """Wake the clients that were called in a transaction that is committed by now."""
        if self._called:
            called, self._called = self._called, []
            self._wake(called)

    def sweep(self) -> int:
        """Free the locks of attempts and sessions that are over; return how many names."""
        with self._db.statement() as tx:
            names = sorted(
                row[0] for row in tx.all("ownerless_lock_names", namespace=self._namespace)
            )
        for name in names:
            with self._db.transaction() as tx:
                self._lock_name(tx, name)
                tx.run("free_ownerless_locks", namespace=self._namespace, name=name)
                tx.run("delete_ownerless_waiters", namespace=self._namespace, name=name)
                called = self._call_next(tx, name)
            self._wake(called)
        return len(names)

    # read

    def holders(self) -> list[LockRow]:
        with self._db.statement() as tx:
            return [LockRow(*row) for row in tx.all("lock_holders", namespace=self._namespace)]

    def waiters(self) -> list[LockRow]:
        with self._db.statement() as tx:
            return [LockRow(*row) for row in tx.all("lock_waiters", namespace=self._namespace)]

    def nodes_in_the_way(self, name: str) -> set[int]:
        """Return the nodes whose jobs hold this lock or wait for it."""
        with self._db.statement() as tx:
            return {row[0] for row in tx.all("nodes_of_lock", namespace=self._namespace, name=name)}

    # shared

    def _lock_name(self, tx: Transaction, name: str) -> None:
        """Keep other transactions from taking or freeing places of this name.

        The rows of owners are locked before it.
        """
        tx.run("lock_one_name", namespace=self._namespace, name=name)

    def _then_call(self, name: str, step: QueryCall) -> list[Row]:
        """Run the query alone for its name, then call the next waiters; return its rows."""
        which = {"namespace": self._namespace, "name": name}
        calling = ("call_next_waiters", {**which, "patience": CALL_PATIENCE_US})
        _, rows, called = self._db.pipeline(("lock_one_name", which), step, calling)
        self._wake([row[0] for row in called])
        return rows

    def _call_next(self, tx: Transaction, name: str) -> list[int]:
        return [
            row[0]
            for row in tx.all(
                "call_next_waiters", namespace=self._namespace, name=name, patience=CALL_PATIENCE_US
            )
        ]

    def _wake(self, called: Sequence[int]) -> None:
        if called:
            with suppress(StoreError):  # they poll anyway
                self._wakeups.wake_clients(called)


def lock_lost_error(name: str, token: int) -> LockLost:
    return LockLost(
        f"lock {name!r} with token {token} is not ours any more, and another process may have it"
    )
