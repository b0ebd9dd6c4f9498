"""The queue of those who write to one SQLite file.

Writers queue on a lock file beside the database before `BEGIN IMMEDIATE`, because SQLite's own busy handler
sleeps and guesses, and starves whoever is unlucky.  The kernel hands our lock on in order, and drops it when
its holder dies.  A checkpoint happens inside a commit, so it happens under the lock too.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
from pathlib import Path

from genba.errors import StoreUnreachable
from genba.storage.engines.database import WritingProcess

BUSY_SECONDS = 10.0  # seconds a writer waits for its turn before it gives up
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
REST = 1.0  # seconds after which a thread goes that nobody needs


class _Waiting:
    """Somebody in line."""

    __slots__ = ("came", "state", "story")

    def __init__(self) -> None:
        self.came = threading.Lock()  # open once the turn has come
        self.came.acquire()
        self.story = threading.Lock()
        self.state = ""  # then "waiting", and "ours" or "late"


class WriteQueue:
    """The queue of writers of one file, for one process.

    POSIX locks belong to the process: a child does not inherit them, the kernel frees them at death, and
    `holder()` can name who has it.  Such a lock falls when *any* descriptor of the file is closed, hence one
    descriptor per process and file, kept for good.
    """

    _all: dict[tuple[int, str], WriteQueue] = {}  # noqa: RUF012  per process, because the kernel counts per process
    _at_rest: list[WriteQueue] = []  # noqa: RUF012  while a fork is under way
    _guard = threading.Lock()
    opening = (
        threading.Lock()
    )  # who looks at which library has the file must not meet a half-open connection

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mine = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._line: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._hall = threading.Lock()
        self._has_usher = False
        self._taken = 0  # how often
        self._seen = -1  # the same, at the last look

    @classmethod
    def of(cls, database: Path) -> WriteQueue:
        key = (os.getpid(), str(database))
        with cls._guard:
            if key not in cls._all:
                cls._all[key] = cls(Path(f"{database}-turn"))
            return cls._all[key]

    @classmethod
    def before_fork(cls) -> None:
        """No thread may be writing: SQLite keeps what it has locked in the memory that the child inherits."""
        cls._at_rest = [
            turns for turns in list(cls._all.values()) if turns._mine.acquire(timeout=BUSY_SECONDS)
        ]

    @classmethod
    def after_fork(cls) -> None:
        for turns in cls._at_rest:
            turns._mine.release()

    @classmethod
    def in_child(cls) -> None:
        cls._all, cls._at_rest = {}, []
        cls._guard, cls.opening = threading.Lock(), threading.Lock()

    def take(self, within: float) -> None:
        if not self._mine.acquire(timeout=within):
            raise StoreUnreachable(
                f"{self._path}: another thread of this process has been writing for {within:g} s"
            )
        self._taken += 1
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stand_in_line(within)
        except (
            BaseException
        ):  # also a stop, which comes when the call has just returned; raised again
            self.give()
            raise

    def _stand_in_line(self, within: float) -> None:
        """A thread waits in the kernel's queue, since a lock has no deadline of its own."""
        me = _Waiting()
        try:
            self._send(me)
            me.came.acquire(timeout=within)
        except (
            BaseException
        ):  # a stop: the turn will come all the same, and must not stay here; raised again
            with me.story:
                if me.state != "waiting":  # ours, or nobody was sent
                    self.give()
                me.state = "late"
            raise
        with me.story:
            if me.state == "ours":
                return
            me.state = "late"
        writer = describe_process(self.holder())
        stopped = " (stopped)" if writer and writer.stopped else ""
        who = f"process {writer.pid if writer else '?'}{stopped}"
        raise StoreUnreachable(f"{self._path}: {who} has been writing for {within:g} s")

    def _send(self, me: _Waiting) -> None:
        with self._hall:
            if not self._has_usher:
                threading.Thread(target=self._be_usher, name="genba-turn", daemon=True).start()
                self._has_usher = True
            me.state = "waiting"
            self._line.put(me)

    def _be_usher(self) -> None:
        """Waits for whoever holds `_mine`; to start anew for each would cost more than what most of them write."""
        while True:
            try:
                one = self._line.get(timeout=REST)
            except queue.Empty:
                with self._hall:
                    if self._line.empty():
                        self._has_usher = False
                        return
                continue
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            with one.story:
                if one.state == "late":
                    self.give()
                one.state = "ours"
            one.came.release()

    def give(self) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def other(self) -> int | None:
        """The process that has the turn, if it is not ours; the kernel is asked for this lock alone."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return pid if kind != fcntl.F_UNLCK and pid > 0 else None

    def lasts(self) -> bool:
        """One of our threads has had the turn, or waited for it, since the last look."""
        before, self._seen = self._seen, self._taken
        return self._mine.locked() and before == self._taken

    def holder(self) -> int | None:
        """The process that has the turn."""
        return lock_holder(self._path)


def lock_holder(path: Path, byte: int = 0) -> int | None:
    """The process that has this byte for itself; the file is not opened, for to close it would free our own locks."""
    try:
        inode, locks = os.stat(path).st_ino, Path("/proc/locks").read_text()
    except OSError:  # nobody has written yet, or this is no Linux
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


os.register_at_fork(
    before=WriteQueue.before_fork,
    after_in_parent=WriteQueue.after_fork,
    after_in_child=WriteQueue.in_child,
)
