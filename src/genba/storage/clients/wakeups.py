"""How a client hears that something has come for it, and how others see that it lives.

A bell is heard by one process.  Whoever has freed a lock or sent a message rings it; losing a ring costs the poll
interval.  While its process lives a bell is also locked, as a node's is: a free one makes its owner suspect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from genba.domain.clock import SystemClock
from genba.storage.engines.postgres.database import PostgresDatabase

_FRESH = 10  # seconds: its owner may not have locked it yet


class WakeupReceiver(Protocol):
    def fileno(self) -> int:
        """Readable when it has rung, or is broken; -1: it cannot ring."""
        ...

    def clear(self) -> None:
        """Forget the rings so far, and mend it if it is broken."""
        ...

    def close(self) -> None: ...


class ClientWakeups(Protocol):
    def open_receiver(self, id: int) -> WakeupReceiver: ...

    def ring(self, ids: Iterable[int]) -> None: ...

    def gone(self, id: int) -> bool:
        """True if its lock is free: its owner is probably dead."""
        ...

    def remove(self, id: int) -> None:
        """What a dead owner has left."""
        ...

    def remove_stale(self) -> None:
        """What all dead owners have left."""
        ...


class SqliteClientWakeups:
    """Beside the database: a lock file and a datagram socket per bell."""

    _ours: set[tuple[int, str]] = set()  # noqa: RUF012  per process: closing any descriptor of a file drops its locks

    def __init__(self, database: Path | None) -> None:
        self._folder = Path(f"{database}-clients") if database else None

    def open_receiver(self, id: int) -> WakeupReceiver:
        if self._folder is None:
            return _Silent()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._ours.add((os.getpid(), f"{self._folder}/{id}"))
        return _FileBell(self._folder, id)

    def ring(self, ids: Iterable[int]) -> None:
        if self._folder is None:
            return
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as voice,
            _opened(self._folder) as folder,
        ):
            for id in ids:
                with contextlib.suppress(OSError):  # it is full of rings, or its owner is gone
                    voice.sendto(b"!", f"{folder}/{id}.sock")

    def gone(self, id: int) -> bool:
        if self._folder is None or (os.getpid(), f"{self._folder}/{id}") in self._ours:
            return False
        try:
            fd = os.open(self._folder / f"{id}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, id: int) -> None:
        if self._folder is not None:
            for end in ("sock", "lock"):
                (self._folder / f"{id}.{end}").unlink(missing_ok=True)

    def remove_stale(self) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.glob("*.lock"):
            with contextlib.suppress(FileNotFoundError):  # its owner was quicker
                fresh = path.stat().st_mtime > SystemClock().now() / 1_000_000 - _FRESH
                if not fresh and self.gone(int(path.stem)):
                    self.remove(int(path.stem))


@contextlib.contextmanager
def _opened(folder: Path) -> Any:
    """A short name of the folder: that of a socket may have 107 bytes only."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield folder
        return
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class _Silent:
    """For a database in memory, or behind a pooler: nobody can ring."""

    def fileno(self) -> int:
        return -1

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class _FileBell:
    def __init__(self, folder: Path, id: int) -> None:
        self._paths = [folder / f"{id}.sock", folder / f"{id}.lock"]
        # A POSIX lock belongs to the process: a forked child does not keep it when its parent is dead.
        self._lock = os.open(self._paths[1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with _opened(folder) as short:
            self._sock.bind(f"{short}/{id}.sock")

    def fileno(self) -> int:
        return self._sock.fileno()

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._sock.recv(16)

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._sock.close()
        os.close(self._lock)


class PostgresClientWakeups:
    """A session of its own on the server: an advisory lock, and LISTEN; silence if a pooler lends sessions."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._db = database

    def open_receiver(self, id: int) -> WakeupReceiver:
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return _Silent()
        return _ServerBell(self._db, id, conn)

    def ring(self, ids: Iterable[int]) -> None:
        with self._db.statement() as tx:
            if not self._db.pooled:
                tx.all("wake_clients", bells=tx.numbers(list(ids)))

    def gone(self, id: int) -> bool:
        with self._db.statement() as tx:
            return (
                not self._db.pooled
                and tx.one("advisory_lock_holder", high=id >> 32, low=id & 0xFFFFFFFF) is None
            )

    def remove(self, id: int) -> None:
        pass

    def remove_stale(self) -> None:
        pass


class _ServerBell:
    def __init__(self, database: PostgresDatabase, id: int, conn: Any) -> None:
        self._db = database
        self._id = id
        self._conn: Any = None
        self._open(conn)

    def _open(self, conn: Any) -> None:
        try:
            conn.execute("SELECT pg_try_advisory_lock(%s::bigint)", (self._id,))
            conn.execute(f'LISTEN "genba_{int(self._id)}"')
        except BaseException:
            conn.close()
            raise
        self._conn = conn

    def fileno(self) -> int:
        return -1 if self._conn.closed else int(self._conn.fileno())

    def clear(self) -> None:
        try:
            for _ in self._conn.notifies(timeout=0):
                pass
            if not self._conn.closed:
                return
        except self._db.errors:
            self._conn.close()
        self._open(self._db.connect())

    def close(self) -> None:
        self._conn.close()
