"""The queue of the processes and threads that write to one SQLite file.

Writers queue on a lock file beside the database before `BEGIN IMMEDIATE`, because SQLite's own busy
handler sleeps and guesses, and starves unlucky writers. The kernel passes our lock on in order, and
frees it when its holder dies. A checkpoint happens inside a commit, so it happens under the lock
too.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
from pathlib import Path
from typing import Any

from genba.errors import StoreUnreachable
from genba.storage.engines.database import WritingProcess

BUSY_SECONDS = 10.0  # how long a writer waits for its turn before it gives up
IDLE_SECONDS = 1.0  # how long the waiting thread stays without work

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class _WaitingWriter:
    """A thread of this process that waits for the lock."""

    __slots__ = ("arrived", "state", "state_lock")

    def __init__(self) -> None:
        self.arrived = threading.Lock()  # released once the lock is ours
        self.arrived.acquire()
        self.state_lock = threading.Lock()
        self.state = ""  # then "waiting", then "ours" or "late"


class WriteQueue:
    """The queue of writers of one file, for one process.

    POSIX locks belong to the process: a child does not inherit them, the kernel frees them at
    death, and `holder()` can name the process that has it. Such a lock is lost when *any*
    descriptor of the file is closed, hence one descriptor per process and file, never closed.
    """

    # Per process, because the kernel counts per process.
    _all: dict[tuple[int, str], WriteQueue] = {}  # noqa: RUF012
    _held_for_fork: list[WriteQueue] = []  # noqa: RUF012
    _guard = threading.Lock()
    # The check which library has the file open must not see a half-open connection.
    opening = threading.Lock()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mine = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._waiting: queue.SimpleQueue[_WaitingWriter] = queue.SimpleQueue()
        self._thread_lock = threading.Lock()
        self._has_thread = False
        self._acquired = 0  # how often
        self._acquired_at_last_check = -1

    @classmethod
    def of(cls, database: Path) -> WriteQueue:
        key = (os.getpid(), str(database))
        with cls._guard:
            if key not in cls._all:
                cls._all[key] = cls(Path(f"{database}-turn"))
            return cls._all[key]

    @classmethod
    def before_fork(cls) -> None:
        """Wait until no thread writes: SQLite keeps its locks in memory that the child inherits."""
        cls._held_for_fork = [
            each for each in list(cls._all.values()) if each._mine.acquire(timeout=BUSY_SECONDS)
        ]

    @classmethod
    def after_fork(cls) -> None:
        for each in cls._held_for_fork:
            each._mine.release()

    @classmethod
    def in_child(cls) -> None:
        cls._all, cls._held_for_fork = {}, []
        cls._guard, cls.opening = threading.Lock(), threading.Lock()

    def acquire(self, within: float) -> None:
        if not self._mine.acquire(timeout=within):
            raise StoreUnreachable(
                f"{self._path}: another thread of this process has been writing for {within:g} s"
            )
        self._acquired += 1
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(within)
        except BaseException:  # even a stop signal just after the call returned; raised again
            self.release()
            raise

    def _wait(self, within: float) -> None:
        """Let a thread wait in the kernel's queue, because the lock call has no deadline."""
        writer = _WaitingWriter()
        try:
            self._pass_to_thread(writer)
            writer.arrived.acquire(timeout=within)
        except BaseException:
            # A stop signal: the lock will still arrive, and must not stay here. Raised again.
            with writer.state_lock:
                if writer.state != "waiting":  # the lock is ours, or the thread was not started
                    self.release()
                writer.state = "late"
            raise
        with writer.state_lock:
            if writer.state == "ours":
                return
            writer.state = "late"
        process = describe_process(self.holder())
        stopped = " (stopped)" if process and process.stopped else ""
        name = f"process {process.pid if process else '?'}{stopped}"
        raise StoreUnreachable(f"{self._path}: {name} has been writing for {within:g} s")

    def _pass_to_thread(self, writer: _WaitingWriter) -> None:
        with self._thread_lock:
            if not self._has_thread:
                threading.Thread(target=self._wait_for_lock, name="genba-turn", daemon=True).start()
                self._has_thread = True
            writer.state = "waiting"
            self._waiting.put(writer)

    def _wait_for_lock(self) -> None:
        """Run the thread that waits for the holder of `_mine`.

        A new thread for each wait would cost more than most writers write.
        """
        while True:
            try:
                writer = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._thread_lock:
                    if self._waiting.empty():
                        self._has_thread = False
                        return
                continue
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            with writer.state_lock:
                if writer.state == "late":
                    self.release()
                writer.state = "ours"
            writer.arrived.release()

    def release(self) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def other_holder(self) -> int | None:
        """Find another process that has the lock; asks the kernel for this lock only."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, request))
        return pid if kind != fcntl.F_UNLCK and pid > 0 else None

    def held_since_last_check(self) -> bool:
        """Test whether one of our threads has had the lock, or waited, since the last call."""
        before, self._acquired_at_last_check = self._acquired_at_last_check, self._acquired
        return self._mine.locked() and before == self._acquired

    def holder(self) -> int | None:
        """Find the process that has the lock."""
        return lock_holder(self._path)


def lock_holder(path: Path, byte: int = 0) -> int | None:
    """Find the process that has locked this byte for writing.

    Does not open the file, because closing it would free our own locks.
    """
    try:
        inode, locks = os.stat(path).st_ino, Path("/proc/locks").read_text()
    except OSError:  # nothing has been written yet, or this is not Linux
        return None
    for line in locks.splitlines():
        words = line.split()
        if "->" in words or words[3] != "WRITE" or not words[5].endswith(f":{inode}"):
            continue
        if int(words[6]) <= byte and (words[7] == "EOF" or byte <= int(words[7])):
            return int(words[4])
    return None


def describe_process(pid: int | None) -> WritingProcess | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if pid is None else WritingProcess(pid, int(fields[19]), fields[0] in (b"T", b"t"))


def close_connection(conn: Any) -> None:
    with WriteQueue.opening:
        conn.close()


os.register_at_fork(
    before=WriteQueue.before_fork,
    after_in_parent=WriteQueue.after_fork,
    after_in_child=WriteQueue.in_child,
)
