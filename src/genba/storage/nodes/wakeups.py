"""Who is there, and how to wake them.

Both are hints.  A node holds a lock that its death frees, so that others suspect it early; producers ring, so
that an idle node looks at once.  Losing every hint costs the lease or the poll interval, never a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.records import NodeRecord

_ECHO = 2.0  # seconds that a knock may take


class NodeWakeups(Protocol):
    @property
    def times_connected(self) -> int:
        """How often its bell was hung up."""
        ...

    def register(self, node: int) -> None:
        """Hold the node's lock and listen for its bell."""
        ...

    def check(self, within: float) -> bool:
        """Repair the bell if it broke; False if it had."""
        ...

    def fileno(self) -> int:
        """Readable when the bell has rung; -1 if there is none."""
        ...

    def drain(self) -> None: ...

    def unregister(self) -> None: ...

    def gone(self, node: NodeRecord) -> bool:
        """True if the node's lock is free: it is probably dead."""
        ...

    def deaf(self, node: NodeRecord) -> bool:
        """Whether a knock at this living node is lost."""
        ...

    def echo(self) -> bool:
        """Whether a knock can be heard at all, through a connection like ours."""
        ...

    def ring(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        """There is work for up to `jobs` nodes in `queue` (None: somewhere)."""
        ...

    def wake_node(self, node: int) -> None:
        """There is a command for this node."""
        ...

    def close(self) -> None: ...


class SqliteNodeWakeups:
    """Beside the database: a folder with one lock file and one datagram socket per node."""

    times_connected = 1  # it does not break

    def __init__(self, database: Path | None) -> None:
        self._folder = Path(f"{database}-nodes") if database else None
        self._lock = -1
        self._bell: socket.socket | None = None
        self._node = 0
        self._voice: socket.socket | None = None
        self._known: tuple[int, list[str]] = (-1, [])
        self._dir = -1
        self._opening, self._pid = threading.Lock(), os.getpid()

    def register(self, node: int) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._node = node
        self._lock = os.open(
            self._folder / f"{node}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._bell.bind(self._short(self._folder, f"{node}.sock"))

    def _short(self, folder: Path, name: str) -> str:
        """A path through a descriptor: a socket's name may have 107 bytes, the folder's may be longer."""
        if self._pid != os.getpid():
            self._opening, self._pid = threading.Lock(), os.getpid()
        with self._opening:
            if (
                self._dir != -1 and os.fstat(self._dir).st_nlink == 0
            ):  # the folder went with its last node
                os.close(self._dir)
                self._dir = -1
            if self._dir == -1:
                self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return f"/proc/self/fd/{self._dir}/{name}"

    def check(self, within: float) -> bool:
        return True

    def fileno(self) -> int:
        return self._bell.fileno() if self._bell else -1

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell:
                self._bell.recv(16)

    def unregister(self) -> None:
        if self._bell is None or self._folder is None:
            return
        self._bell.close()
        self._bell = None
        for name in (f"{self._node}.sock", f"{self._node}.lock"):
            (self._folder / name).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):  # others may live there
            self._folder.rmdir()

    def gone(self, node: NodeRecord) -> bool:
        if self._folder is None:
            return False
        try:
            fd = os.open(self._folder / f"{node.id}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        for name in (f"{node.id}.sock", f"{node.id}.lock"):
            (self._folder / name).unlink(missing_ok=True)
        return True

    def deaf(self, node: NodeRecord) -> bool:
        if self._folder is None:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as voice:
            try:
                voice.sendto(b"!", self._short(self._folder, f"{node.id}.sock"))
            except BlockingIOError:
                return False
            except OSError:
                return True
        return False

    def echo(self) -> bool:
        return True  # the kernel carries it

    def ring(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        for name in self._listeners():
            self._send(name)

    def wake_node(self, node: int) -> None:
        self._send(f"{node}.sock")

    def _listeners(self) -> list[str]:
        if self._folder is None:
            return []
        try:
            version = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return []
        if version != self._known[0]:
            with contextlib.suppress(FileNotFoundError):
                self._known = (
                    version,
                    [name for name in os.listdir(self._folder) if name.endswith(".sock")],
                )
        return self._known[1]

    def _send(self, name: str) -> None:
        if self._folder is None:
            return
        if self._voice is None:
            self._voice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._voice.sendto(b"!", self._short(self._folder, name))
        except BlockingIOError:
            pass  # its buffer is full of our knocks: it will look
        except OSError:
            self._known = (-1, [])  # it left, or died

    def close(self) -> None:
        if self._voice:
            self._voice.close()
            self._voice = None
        with self._opening:
            if self._dir != -1:
                os.close(self._dir)
                self._dir = -1


class PostgresNodeWakeups:
    """A session of its own on the server: an advisory lock, and LISTEN on the node's channel.

    Behind a pooler in transaction mode neither outlives a transaction: there are no hints, and all look by themselves.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        self._db = database
        self._conn: Any = None
        self.times_connected = 0
        self._locked = False
        self._node = 0

    def register(self, node: int) -> None:
        self._node = node
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return
        try:
            conn.execute(f'LISTEN "genba_{int(node)}"')
            self._locked = self._lock(conn)
        except self._db.errors as error:
            conn.close()
            raise self._db.as_store_error(conn, error) from error
        self._conn = conn
        self.times_connected += 1

    def _lock(self, conn: Any) -> bool:
        """Not waited for: a session of ours that is dead may have it, as long as the server does not know."""
        return bool(
            conn.execute("SELECT pg_try_advisory_lock(%s::bigint)", (self._node,)).fetchone()[0]
        )

    def check(self, within: float) -> bool:
        """Ask the server through the listening session itself: a dead one is silent, not closed."""
        if self._conn is None:
            return True
        self._conn.limit = within
        try:
            if self._locked:
                self._conn.execute("SELECT 1")
            else:
                self._locked = self._lock(self._conn)
            return True
        except self._db.errors:
            with contextlib.suppress(Exception):  # it is broken; closing may say so once more
                self._conn.close()
            self.register(self._node)
            return False

    def fileno(self) -> int:
        return self._conn.fileno() if self._conn is not None and not self._conn.closed else -1

    def drain(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(*self._db.errors):
                for _ in self._conn.notifies(timeout=0):
                    pass

    def unregister(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def gone(self, node: NodeRecord) -> bool:
        with self._db.statement() as tx:
            lock = {"high": node.id >> 32, "low": node.id & 0xFFFFFFFF}
            return not self._db.pooled and tx.one("advisory_lock_holder", **lock) is None

    def deaf(self, node: NodeRecord) -> bool:
        return self.gone(node)  # who has lost the session of its lock hears nothing there either

    def echo(self) -> bool:
        """A pooler in transaction mode lends the session that listens to somebody else; who says so is not told."""
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return not self._db.pooler_found
        try:
            channel = f"genba_echo_{os.getpid()}"
            conn.execute(f'LISTEN "{channel}"')
            with self._db.statement() as tx:
                tx.all("notify_channel", channel=channel)
            return any(True for _ in conn.notifies(timeout=_ECHO, stop_after=1))
        finally:
            conn.close()

    def ring(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        if self._db.pooled:
            return
        with self._db.statement() as tx:
            tx.all(
                "wake_hungry_nodes",
                namespace=namespace,
                queue=f'"{queue}"' if queue else "",
                jobs=jobs,
            )

    def wake_node(self, node: int) -> None:
        if self._db.pooled:
            return
        with self._db.statement() as tx:
            tx.all("wake_node", node=node)

    def close(self) -> None:
        pass
