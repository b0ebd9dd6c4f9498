"""Sessions: client processes that hold locks outside of jobs, or listen; they renew a lease."""

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
    """One row, in the order of the query."""

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
    session: SessionRecord, silent: Micros, gone: bool, suspect: bool, in_contact: Micros
) -> bool:
    """Test whether its locks may be given to others, after it was `silent` for that long.

    A process that is `gone` from this machine is dead. A process elsewhere is dead if its lock is
    free and a renewal was missed, or if its lease is over although the database was reachable for a
    whole lease (`in_contact`).
    """
    missed = silent >= renewal_interval(session.lease) * 3 // 2
    return (
        gone
        or (suspect and missed and in_contact >= silent)
        or (silent >= session.lease and in_contact >= session.lease)
    )


def renewal_interval(lease: Micros) -> Micros:
    """Return how often a session renews: more often than a node, since a client has no guard."""
    return lease // CLIENT_RENEWALS_PER_LEASE


class Sessions:
    def __init__(
        self,
        database: Database,
        wakeups: ClientWakeups,
        namespace: str,
        lease: Micros,
        free_locks: Callable[[Transaction, int], list[int]],
        steady: Callable[[], Micros],
    ) -> None:
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._free_locks = free_locks  # of a session; returns the clients to wake
        self.lease = lease
        self._steady = steady
        self._watch = HeartbeatWatch()

    @property
    def renewal_interval(self) -> Micros:
        return renewal_interval(self.lease)

    def open(self, id: int) -> None:
        with self._db.single_write() as tx:
            tx.run(
                "open_session",
                id=id,
                lease=self.lease,
                pid=os.getpid(),
                born=process_start(os.getpid()) or 0,
                namespace=self._namespace,
                host=socket.gethostname(),
                machine=_machine(),
            )

    def renew(self, id: int) -> bool:
        """Renew the lease; return False if the session was declared dead."""
        with self._db.single_write() as tx:
            return tx.one("renew_session", id=id) is not None

    def close(self, id: int, beat_at: Micros | None = None) -> bool:
        """End a session and free its locks; with `beat_at`, only if it has not renewed since."""
        with self._db.transaction() as tx:
            if tx.one("delete_session", id=id, beat_at=beat_at) is None:
                return False
            woken = self._free_locks(tx, id)
        with suppress(StoreError):  # they poll anyway
            self._wakeups.wake_clients(woken)
        return True

    def all(self) -> list[SessionRecord]:
        with self._db.statement() as tx:
            return [SessionRecord(*row) for row in tx.all("sessions", namespace=self._namespace)]

    def remove_stale(self) -> None:
        """Remove the receivers of dead processes without a session: jobs that waited."""
        self._wakeups.remove_stale()

    def sweep(self, in_contact: Micros) -> int:
        """End the sessions of dead processes; return how many.

        `in_contact` is how long we have reached the database without a break.
        """
        ended = 0
        sessions = self.all()
        silence = self._watch.silence(sessions, self._steady())
        for session in sessions:
            gone, silent = _has_ended(session), silence[session.id]
            suspect = (
                not gone
                and silent >= renewal_interval(session.lease)
                and self._wakeups.lock_is_free(session.id)
            )
            if is_session_dead(session, silent, gone, suspect, in_contact) and self.close(
                session.id, session.beat_at
            ):
                self._wakeups.remove(session.id)
                ended += 1
        return ended


def _has_ended(session: SessionRecord) -> bool:
    """Test whether its pid is free on this machine, or belongs to another process by now."""
    return session.machine == _machine() and (process_start(session.pid) or 0) != session.born


def process_start(pid: int) -> int | None:
    """Return when the process began, in ticks since the machine's start; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def _machine() -> str:
    """Identify this boot of this machine, and its pid namespace; if unknown, a unique name."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
