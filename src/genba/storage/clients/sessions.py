"""Sessions: client processes that hold locks outside of jobs, or listen; when one is dead, and what it leaves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from genba.domain.liveness import CLIENT_RENEWALS_PER_LEASE
from genba.errors import StoreError
from genba.storage.engines.database import Database, Transaction
from genba.storage.nodes.dead_nodes import HeartbeatWatch
from genba.storage.records import Micros
from genba.storage.wakeups import ClientWakeups


class SessionRecord(NamedTuple):
    """(The order is that of the query.)"""

    id: int
    pid: int
    born: int
    host: str
    machine: str
    beat_at: Micros
    lease_until: Micros
    lease: Micros
    seen_at: Micros


def is_session_dead(
    session: SessionRecord, silent: Micros, gone: bool, suspect: bool, lasted: Micros
) -> bool:
    """Whether what it holds may be given to others; it has been `silent` for so long.

    A process that is `gone` from this machine is dead.  Of one elsewhere only signs are seen: its bell's lock is free
    and a beat was missed, or its lease is over although the database was there for a whole lease (`lasted`).
    """
    missed = silent >= renewal_interval(session.lease) * 3 // 2
    return (
        gone
        or (suspect and missed and lasted >= silent)
        or (silent >= session.lease and lasted >= session.lease)
    )


def renewal_interval(lease: Micros) -> Micros:
    """More often than a node: nobody else looks after a client."""
    return lease // CLIENT_RENEWALS_PER_LEASE


class Sessions:
    def __init__(
        self,
        database: Database,
        wakeups: ClientWakeups,
        namespace: str,
        lease: Micros,
        left: Callable[[Transaction, int], list[int]],
        steady: Callable[[], Micros],
    ) -> None:
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._left = left  # frees what a session had; gives the bells to be rung
        self.lease = lease
        self._steady = steady
        self._watch = HeartbeatWatch()

    @property
    def beat(self) -> Micros:
        return renewal_interval(self.lease)

    def open(self, id: int) -> None:
        with self._db.single_write() as tx:
            tx.run(
                "open_session",
                id=id,
                lease=self.lease,
                pid=os.getpid(),
                born=born(os.getpid()) or 0,
                namespace=self._namespace,
                host=socket.gethostname(),
                machine=_machine(),
            )

    def renew(self, id: int) -> bool:
        """False if others have declared it dead."""
        with self._db.single_write() as tx:
            return tx.one("renew_session", id=id) is not None

    def close(self, id: int, beat_at: Micros | None = None) -> bool:
        """End it, and free what it holds; with `beat_at` only if it was not heard since."""
        with self._db.transaction() as tx:
            if tx.one("delete_session", id=id, beat_at=beat_at) is None:
                return False
            called = self._left(tx, id)
        with suppress(StoreError):  # they look by themselves
            self._wakeups.wake_clients(called)
        return True

    def all(self) -> list[SessionRecord]:
        with self._db.statement() as tx:
            return [SessionRecord(*row) for row in tx.all("sessions", namespace=self._namespace)]

    def remove_stale(self) -> None:
        """Forget the bells of dead processes that had no session: jobs that waited."""
        self._wakeups.remove_stale()

    def sweep(self, lasted: Micros) -> int:
        """End the sessions of dead processes; `lasted` is how long we have seen the database without a break."""
        ended = 0
        sessions = self.all()
        silence = self._watch.silence(sessions, self._steady())
        for session in sessions:
            gone, silent = _gone(session), silence[session.id]
            suspect = (
                not gone
                and silent >= renewal_interval(session.lease)
                and self._wakeups.lock_is_free(session.id)
            )
            if is_session_dead(session, silent, gone, suspect, lasted) and self.close(
                session.id, session.beat_at
            ):
                self._wakeups.remove(session.id)
                ended += 1
        return ended


def _gone(session: SessionRecord) -> bool:
    """Surely not here any more: its pid is free, or that of another process by now."""
    return session.machine == _machine() and (born(session.pid) or 0) != session.born


def born(pid: int) -> int | None:
    """When the process began, in ticks since the machine's start; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def _machine() -> str:
    """One run of one machine, and the space in which its pids count; where that is not known, like no other."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
