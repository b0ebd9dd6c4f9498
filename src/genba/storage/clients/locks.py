"""Mutexes and semaphores: places of a name, given out in the order of asking.

The owner of a place is an attempt at a job, or the session of a process.  Its rows go in the transaction that ends
the owner.  Who frees a place calls the next in line and rings its bell; who has been called takes it.
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

PATIENCE = 2_000_000  # µs that one who was called may take to come; then the next in line may pass
LAST = (1 << 63) - 1

_json = msgspec.json.Encoder()


class LockOwner(NamedTuple):
    """Whose lock it is: an attempt's, or a session's; in which process tells apart the children of a job.

    Of a session `claim_id` tells which of its wishes it was.
    """

    job_id: int | None
    attempt: int | None
    claim_id: int | None
    session_id: int | None
    pid: int


class LockTaken(NamedTuple):
    token: int


class LockWaiting(NamedTuple):
    """In line; `seq` is 0 for one who only tried."""

    seq: int
    ahead: int


class SessionOver(Exception):
    """The session that asks was taken for dead: it has to begin anew."""


class LockRow(NamedTuple):
    """One who holds a place (`number` is its token), or waits (its place in line); the order is that of the query."""

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
        self._called: list[int] = []  # bells to be rung after a commit that is not ours

    # take

    def take(
        self, owner: LockOwner, name: str, n: int, seq: int | None, bell: int
    ) -> LockTaken | LockWaiting:
        """A place, if there is one for us; otherwise a place in line.

        `seq` is the one we have, 0 if we have none yet, None for one who only tries.
        """
        if not seq and (token := self._take_free(owner, name, n)) is not None:
            return LockTaken(token)
        with self._db.transaction() as tx:
            self._check(tx, owner)
            self._alone(tx, name)
            rows = tx.all("places_of_lock", namespace=self._namespace, name=name)
            for row in rows:
                if owner.job_id is not None and row[3:] == (
                    owner.job_id,
                    owner.attempt,
                    owner.claim_id,
                    owner.pid,
                ):
                    self._step_out(tx, seq)
                    return LockTaken(row[1])
            self._check_size(tx, name, n, rows)
            if seq == 0 and owner.job_id is not None:
                seq = self._stands(tx, owner, name)
            came = tx.one("waiter_called_at", seq=seq) if seq else None
            ahead = self._ahead(tx, name, n, LAST if seq is None or came is None else seq)
            free = n - len(rows)
            if free > ahead:
                self._step_out(tx, seq)
                return LockTaken(self._grant(tx, owner, name, n, {row[0] for row in rows}))
            called = self._call_next(tx, name)
            if seq is None:
                line = LockWaiting(0, ahead)
            elif came is None:
                line = LockWaiting(self._stand(tx, owner, name, n, bell), ahead)
            else:
                if free <= 0 and came[0] is not None:
                    tx.run("clear_call", seq=seq)  # it came too late
                line = LockWaiting(seq, ahead)
        self._ring([one for one in called if one != bell])
        return line

    def _take_free(self, owner: LockOwner, name: str, n: int) -> int | None:
        """In one round trip, if nobody is there; None: look closer."""
        which = {"namespace": self._namespace, "name": name}
        own = ("own_session" if owner.job_id is None else "own_attempt", owner._asdict())
        taking = ("take_free_lock", {**which, "n": n, **owner._asdict()})
        _, _, taken, _ = self._db.pipeline(
            own, ("lock_one_name", which), taking, ("advance_token", which)
        )
        return int(taken[0][0]) if taken else None

    def look(self, name: str, n: int, seq: int) -> bool:
        """Whether it is worth while to ask again; reads only."""
        with self._db.statement() as tx:
            rows = tx.all("places_of_lock", namespace=self._namespace, name=name)
            return n > len(rows) or tx.one("waiter_called_at", seq=seq) is None

    def _check(self, tx: Transaction, owner: LockOwner) -> None:
        if owner.job_id is not None:
            fence = {"job_id": owner.job_id, "attempt": owner.attempt, "claim_id": owner.claim_id}
            if tx.one("own_attempt", **fence) is None:
                raise LeaseLost(
                    f"job {owner.job_id}: attempt {owner.attempt} is over, and can take no lock"
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
                f"lock {name!r} has {there} place{'s' * (there > 1)} for those who hold it or wait for it, not {n}: "
                "all who use a name must agree (a mutex has one)"
            )

    def _ahead(self, tx: Transaction, name: str, n: int, seq: int) -> int:
        row = tx.one(
            "count_waiters_ahead",
            namespace=self._namespace,
            name=name,
            seq=seq,
            patience=PATIENCE,
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

    def _stand(self, tx: Transaction, owner: LockOwner, name: str, n: int, bell: int) -> int:
        row = tx.one(
            "insert_waiter", namespace=self._namespace, name=name, n=n, bell=bell, **owner._asdict()
        )
        assert row is not None
        return int(row[0])

    def _stands(self, tx: Transaction, owner: LockOwner, name: str) -> int:
        """Where this attempt is in line, though it does not know: the answer was lost.  It must not wait for itself."""
        fence = {
            "job_id": owner.job_id,
            "attempt": owner.attempt,
            "claim_id": owner.claim_id,
            "pid": owner.pid,
        }
        row = tx.one("own_waiter", namespace=self._namespace, name=name, **fence)
        return int(row[0]) if row else 0

    def _step_out(self, tx: Transaction, seq: int | None) -> None:
        if seq:
            tx.all("delete_waiter", seq=seq)

    def leave(self, name: str, seq: int) -> None:
        """Out of the line; if it was just our turn, it is that of the next."""
        self._then_call(name, ("delete_waiter", {"seq": seq}))

    def withdraw(self, name: str, owner: LockOwner) -> None:
        """Whatever one wish of a session has come to: nobody wants it any more."""
        which = {"namespace": self._namespace, "name": name}
        whose = {**which, "session_id": owner.session_id, "claim_id": owner.claim_id}
        calling = ("call_next_waiters", {**which, "patience": PATIENCE})
        *_, called = self._db.pipeline(
            ("lock_one_name", which),
            ("free_lock_of_request", whose),
            ("delete_waiter_of_request", whose),
            calling,
        )
        self._ring([row[0] for row in called])

    # give back

    def release(self, name: str, token: int) -> bool:
        """False if it was not ours any more."""
        which = {"namespace": self._namespace, "name": name}
        return bool(self._then_call(name, ("free_lock", {**which, "token": token})))

    def break_(self, name: str, token: int | None, by: str) -> list[int]:
        """Take it from whoever holds it; gives the tokens that are worth nothing any more."""
        with self._db.transaction() as tx:
            self._alone(tx, name)
            broken = tx.all("break_lock", namespace=self._namespace, name=name, token=token)
            called = self._call_next(tx, name)
            for number, job_id, _, pid in broken:
                told = _json.encode({"lock": name, "token": number, "pid": pid, "by": by})
                tx.run(
                    "insert_client_event",
                    namespace=self._namespace,
                    kind="lock_broken",
                    job_id=job_id,
                    data=told,
                )
        self._ring(called)
        return sorted(row[0] for row in broken)

    def held(self, name: str, token: int) -> bool:
        with self._db.statement() as tx:
            return (
                tx.one("lock_is_held", namespace=self._namespace, name=name, token=token)
                is not None
            )

    def assert_held(self, conn: Any, name: str, token: int) -> None:
        """In the caller's transaction: until that is over nobody else gets the lock.  LockLost if it is not ours."""
        with self._db.adopt(conn) as tx:
            if (
                tx.one("assert_lock_held", namespace=self._namespace, name=name, token=token)
                is None
            ):
                raise lock_lost_error(name, token)

    # owners end

    def free_attempts(self, tx: Transaction, attempts: Sequence[tuple[JobId, int]]) -> None:
        """In the transaction that ends these attempts, after their rows are written; `ring` after its commit."""
        rows = tx.all("lock_names_of_jobs", ids=tx.numbers([id for id, _ in attempts]))
        if rows:
            names = sorted(row[0] for row in rows)
            for name in names:
                self._alone(tx, name)
            tx.batch("free_locks_of_attempts", attempts)
            tx.batch("delete_waiters_of_attempts", attempts)
            for name in names:
                self._called += self._call_next(tx, name)

    def free_session(self, tx: Transaction, id: int) -> list[int]:
        """In the transaction that ends this session; gives the bells to be rung after its commit."""
        names = sorted(row[0] for row in tx.all("lock_names_of_session", id=id))
        for name in names:
            self._alone(tx, name)
        tx.run("free_locks_of_session", id=id)
        tx.run("delete_waiters_of_session", id=id)
        tx.run("delete_listeners_of_session", id=id)
        return [bell for name in names for bell in self._call_next(tx, name)]

    def ring(self) -> None:
        """Those who were called in a transaction that is committed by now."""
        if self._called:
            called, self._called = self._called, []
            self._ring(called)

    def sweep(self) -> int:
        """Free what belongs to attempts and sessions that are over; how many names were looked at."""
        with self._db.statement() as tx:
            names = sorted(
                row[0] for row in tx.all("ownerless_lock_names", namespace=self._namespace)
            )
        for name in names:
            with self._db.transaction() as tx:
                self._alone(tx, name)
                tx.run("free_ownerless_locks", namespace=self._namespace, name=name)
                tx.run("delete_ownerless_waiters", namespace=self._namespace, name=name)
                called = self._call_next(tx, name)
            self._ring(called)
        return len(names)

    # look

    def holders(self) -> list[LockRow]:
        with self._db.statement() as tx:
            return [LockRow(*row) for row in tx.all("lock_holders", namespace=self._namespace)]

    def waiters(self) -> list[LockRow]:
        with self._db.statement() as tx:
            return [LockRow(*row) for row in tx.all("lock_waiters", namespace=self._namespace)]

    def nodes_in_the_way(self, name: str) -> set[int]:
        """Nodes whose jobs hold this lock, or wait for it."""
        with self._db.statement() as tx:
            return {row[0] for row in tx.all("nodes_of_lock", namespace=self._namespace, name=name)}

    # shared

    def _alone(self, tx: Transaction, name: str) -> None:
        """From here on nobody else takes or frees a place of this name.  Rows of owners are locked before it."""
        tx.run("lock_one_name", namespace=self._namespace, name=name)

    def _then_call(self, name: str, step: QueryCall) -> list[Row]:
        """This one alone for its name, and those whose turn it is then are called; what it gave."""
        which = {"namespace": self._namespace, "name": name}
        calling = ("call_next_waiters", {**which, "patience": PATIENCE})
        _, gave, called = self._db.pipeline(("lock_one_name", which), step, calling)
        self._ring([row[0] for row in called])
        return gave

    def _call_next(self, tx: Transaction, name: str) -> list[int]:
        return [
            row[0]
            for row in tx.all(
                "call_next_waiters", namespace=self._namespace, name=name, patience=PATIENCE
            )
        ]

    def _ring(self, called: Sequence[int]) -> None:
        if called:
            with suppress(StoreError):  # they look by themselves
                self._wakeups.wake_clients(called)


def lock_lost_error(name: str, token: int) -> LockLost:
    return LockLost(
        f"lock {name!r} with token {token} is not ours any more, and somebody else may have it"
    )
