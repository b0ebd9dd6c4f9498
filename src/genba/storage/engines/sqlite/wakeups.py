"""Wake-ups beside a SQLite file: one lock file and one datagram socket per receiver."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from genba.domain.clock import SystemClock
from genba.storage.records import NodeRecord
from genba.storage.wakeups import NoReceiver, WakeupReceiver

_FRESH_SECONDS = 10  # the process may not have locked a file that is younger
_WAKEUP = b"!"


class SqliteNodeWakeups:
    """In the folder `DATABASE-nodes`."""

    times_connected = 1  # a socket does not break

    def __init__(self, database: Path | None) -> None:
        self._folder = Path(f"{database}-nodes") if database else None
        self._lock = -1
        self._receiver: socket.socket | None = None
        self._node = 0
        self._sender: socket.socket | None = None
        self._known: tuple[int, list[str]] = (-1, [])  # the folder's mtime, and its sockets
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
        self._receiver = _datagram_socket()
        self._receiver.bind(self._short(self._folder, f"{node}.sock"))

    def _short(self, folder: Path, name: str) -> str:
        """Return a path through a descriptor.

        The name of a socket may have 107 bytes, and the folder's may be longer.
        """
        if self._pid != os.getpid():
            self._opening, self._pid = threading.Lock(), os.getpid()
        with self._opening:
            # The last node removes the folder when it leaves; another may have created it again.
            if self._dir != -1 and os.fstat(self._dir).st_nlink == 0:
                os.close(self._dir)
                self._dir = -1
            if self._dir == -1:
                self._dir = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return f"/proc/self/fd/{self._dir}/{name}"

    def check(self, within: float) -> bool:
        return True

    def fileno(self) -> int:
        return self._receiver.fileno() if self._receiver else -1

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._receiver:
                self._receiver.recv(16)

    def unregister(self) -> None:
        if self._receiver is None or self._folder is None:
            return
        self._receiver.close()
        self._receiver = None
        for name in (f"{self._node}.sock", f"{self._node}.lock"):
            (self._folder / name).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):  # other nodes may use it
            self._folder.rmdir()

    def lock_is_free(self, node: NodeRecord) -> bool:
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

    def is_unreachable(self, node: NodeRecord) -> bool:
        if self._folder is None:
            return False
        with _datagram_socket() as sender:
            try:
                sender.sendto(_WAKEUP, self._short(self._folder, f"{node.id}.sock"))
            except BlockingIOError:
                return False
            except OSError:
                return True
        return False

    def are_delivered(self) -> bool:
        return True  # by the kernel

    def wake_nodes(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        for name in self._sockets():
            self._send(name)

    def wake_node(self, node: int) -> None:
        self._send(f"{node}.sock")

    def _sockets(self) -> list[str]:
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
        if self._sender is None:
            self._sender = _datagram_socket()
        try:
            self._sender.sendto(_WAKEUP, self._short(self._folder, name))
        except BlockingIOError:
            pass  # its buffer is full of wake-ups: the node will look
        except OSError:
            self._known = (-1, [])  # the node left, or died

    def close(self) -> None:
        if self._sender:
            self._sender.close()
            self._sender = None
        with self._opening:
            if self._dir != -1:
                os.close(self._dir)
                self._dir = -1


class SqliteClientWakeups:
    """In the folder `DATABASE-clients`."""

    # Per process: closing any descriptor of a file drops its POSIX locks.
    _ours: set[tuple[int, str]] = set()  # noqa: RUF012

    def __init__(self, database: Path | None) -> None:
        self._folder = Path(f"{database}-clients") if database else None

    def open_receiver(self, id: int) -> WakeupReceiver:
        if self._folder is None:
            return NoReceiver()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._ours.add((os.getpid(), f"{self._folder}/{id}"))
        return _SocketReceiver(self._folder, id)

    def wake_clients(self, ids: Iterable[int]) -> None:
        if self._folder is None:
            return
        with _datagram_socket() as sender, _short_name(self._folder) as folder:
            for id in ids:
                # Its buffer may be full of wake-ups, or its process gone.
                with contextlib.suppress(OSError):
                    sender.sendto(_WAKEUP, f"{folder}/{id}.sock")

    def lock_is_free(self, id: int) -> bool:
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
            for ending in ("sock", "lock"):
                (self._folder / f"{id}.{ending}").unlink(missing_ok=True)

    def remove_stale(self) -> None:
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.glob("*.lock"):
            with contextlib.suppress(FileNotFoundError):  # its process was quicker
                oldest_fresh = SystemClock().now() / 1_000_000 - _FRESH_SECONDS
                is_fresh = path.stat().st_mtime > oldest_fresh
                if not is_fresh and self.lock_is_free(int(path.stem)):
                    self.remove(int(path.stem))


class _SocketReceiver:
    def __init__(self, folder: Path, id: int) -> None:
        self._paths = [folder / f"{id}.sock", folder / f"{id}.lock"]
        # A POSIX lock belongs to the process: a forked child does not keep it when its parent dies.
        self._lock = os.open(self._paths[1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        self._sock = _datagram_socket()
        with _short_name(folder) as short:
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


def _datagram_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


@contextlib.contextmanager
def _short_name(folder: Path) -> Iterator[str | Path]:
    """Name the folder by a descriptor: the name of a socket may have 107 bytes only."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield folder
        return
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
