"""SQLite: one file, many processes.

Writers queue on a lock file beside the database before `BEGIN IMMEDIATE`, because SQLite's own busy handler
sleeps and guesses, and starves whoever is unlucky.  The kernel hands our lock on in order, and drops it when
its holder dies.  A checkpoint happens inside a commit, so it happens under the lock too.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genba.domain.clock import Clock
from genba.errors import StoreError, StoreUnreachable
from genba.storage.database import PARAMETER, TABLES, Query, Row

BUSY = 10.0  # seconds a writer waits for its turn before it gives up
NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "ceph", "glusterfs", "afs", "fuse.")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the database is: a path, or None for one in memory."""

    path: Path | None
    driver: str = "apsw"
    allow_network: bool = False


class Turns:
    """The queue of writers of one file, for one process.

    POSIX locks belong to the process: a child does not inherit them, the kernel frees them at death, and
    `holder()` can name who has it.  Such a lock falls when *any* descriptor of the file is closed, hence one
    descriptor per process and file, kept for good.
    """

    _all: dict[tuple[int, str], Turns] = {}  # noqa: RUF012  per process, because the kernel counts per process
    _at_rest: list[Turns] = []  # noqa: RUF012  while a fork is under way
    _guard = threading.Lock()
    opening = threading.Lock()  # who looks at which library has the file must not meet a half-open connection

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mine = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def of(cls, database: Path) -> Turns:
        key = (os.getpid(), str(database))
        with cls._guard:
            if key not in cls._all:
                cls._all[key] = cls(Path(f"{database}-turn"))
            return cls._all[key]

    @classmethod
    def before_fork(cls) -> None:
        """No thread may be writing: SQLite keeps what it has locked in the memory that the child inherits."""
        cls._at_rest = [turns for turns in list(cls._all.values()) if turns._mine.acquire(timeout=BUSY)]

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
            raise StoreUnreachable(f"{self._path}: another thread of this process has been writing for {within:g} s")
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stand_in_line(within)
        except OSError:
            self._mine.release()
            raise

    def _stand_in_line(self, within: float) -> None:
        """A thread waits in the kernel's queue, since a lock has no deadline of its own."""
        came = threading.Event()
        story = threading.Lock()
        state = "waiting"

        def wait() -> None:
            nonlocal state
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            with story:
                if state == "late":
                    self.give()
                state = "ours"
            came.set()

        threading.Thread(target=wait, name="genba-turn", daemon=True).start()
        came.wait(within)
        with story:
            if state == "ours":
                return
            state = "late"
        raise StoreUnreachable(f"{self._path}: process {self.holder() or '?'} has been writing for {within:g} s")

    def give(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._mine.release()

    def holder(self) -> int | None:
        """The process that has the turn."""
        for line in Path("/proc/locks").read_text().splitlines() if os.path.exists("/proc/locks") else ():
            words = line.split()
            if "->" not in words and words[5].endswith(f":{os.fstat(self._fd).st_ino}"):
                return int(words[4])
        return None


os.register_at_fork(before=Turns.before_fork, after_in_parent=Turns.after_fork, after_in_child=Turns.in_child)


class Tx:
    def __init__(self, conn: Any, database: SqliteDatabase) -> None:
        self._conn = conn
        self._sql = database.queries
        self._clock = database.clock
        self._batches = database.batches
        self._driver = database.driver

    def _bound(self, values: dict[str, Any]) -> dict[str, Any]:
        values["now"] = self._clock.now()
        values["boot"] = self._clock.boot()
        return values

    def all(self, name: str, /, **values: Any) -> list[Row]:
        return self._conn.execute(self._sql[name].text, self._bound(values)).fetchall()  # type: ignore[no-any-return]

    def one(self, name: str, /, **values: Any) -> Row | None:
        return self._conn.execute(self._sql[name].text, self._bound(values)).fetchone()  # type: ignore[no-any-return]

    def run(self, name: str, /, **values: Any) -> int:
        if not self._sql[name].text:
            return 0
        return self._driver.run(self._conn, self._sql[name].text, self._bound(values))

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        text, tail = self._batches[name]
        if not rows or not text:
            return []
        if tail:
            shared = self._bound(values)
            same = tuple(shared[column] for column in tail)
            rows = [(*row, *same) for row in rows]
        return self._driver.batch(self._conn, text, rows)

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        marks = ", ".join("?" * len(columns))
        text = f"INSERT INTO genba_job ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  our own column names
        self._driver.batch(self._conn, text, rows)

    def select(self, text: str, /, **values: Any) -> list[Row]:
        return self._conn.execute(text.replace("genba.", "genba_"), values).fetchall()  # type: ignore[no-any-return]

    def names(self, values: Sequence[str]) -> Any:
        return json.dumps(list(values))

    def numbers(self, values: Sequence[int]) -> Any:
        return json.dumps(list(values))

    def ids(self, count: int) -> list[int]:
        ((last,),) = self.all("next_ids", count=count)
        return list(range(last - count + 1, last + 1))

    def now(self) -> int:
        return self._clock.now()


def _batched(query: Query) -> tuple[str, tuple[str, ...]]:
    """The text with numbered places, and the parameters that are the same for every row."""
    tail = tuple(dict.fromkeys(name for name in PARAMETER.findall(query.text) if name not in query.columns))
    places = {name: str(i + 1) for i, name in enumerate((*query.columns, *tail))}
    return PARAMETER.sub(lambda m: "?" + places[m[1]], query.text), tail


class Apsw:
    """The driver that brings a SQLite of its own, newer and sounder than most systems'."""

    def __init__(self) -> None:
        import apsw

        self.errors: tuple[type[Exception], ...] = (apsw.Error,)
        self._apsw = apsw

    def connect(self, path: str) -> Any:
        flags = self._apsw.SQLITE_OPEN_READWRITE | self._apsw.SQLITE_OPEN_CREATE
        conn = self._apsw.Connection(path, flags=flags, statementcachesize=200)
        conn.set_busy_timeout(int(BUSY * 1000))
        return conn

    @staticmethod
    def run(conn: Any, text: str, values: Mapping[str, Any]) -> int:
        conn.execute(text, values).fetchall()
        return int(conn.changes())

    @staticmethod
    def batch(conn: Any, text: str, rows: Sequence[Row]) -> list[Row]:
        """A batch that only tells which rows it matched is counted first: RETURNING costs half an update more."""
        bare, _, columns = text.rpartition("RETURNING ")
        if columns not in ("id", "id, attempt") or len(rows) < 8:
            return conn.executemany(text, rows).fetchall()  # type: ignore[no-any-return]
        before = conn.total_changes()
        conn.execute("SAVEPOINT genba_batch")
        conn.executemany(bare, rows).fetchall()
        if conn.total_changes() - before == len(rows):
            conn.execute("RELEASE genba_batch")
            width = columns.count(",") + 1
            return [row[:width] for row in rows]
        conn.execute("ROLLBACK TO genba_batch")
        conn.execute("RELEASE genba_batch")
        return conn.executemany(text, rows).fetchall()  # type: ignore[no-any-return]

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


class StandardLibrary:
    """The `sqlite3` of Python, for processes that have the file open with it anyway."""

    def __init__(self) -> None:
        import sqlite3

        self.errors: tuple[type[Exception], ...] = (sqlite3.Error,)
        self._sqlite3 = sqlite3

    def connect(self, path: str) -> Any:
        return self._sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)

    @staticmethod
    def run(conn: Any, text: str, values: Mapping[str, Any]) -> int:
        cursor = conn.execute(text, values)
        cursor.fetchall()
        return max(0, int(cursor.rowcount))

    @staticmethod
    def batch(conn: Any, text: str, rows: Sequence[Row]) -> list[Row]:
        if "RETURNING" not in text and not text.startswith("SELECT"):
            conn.executemany(text, rows)
            return []
        return [found for row in rows for found in conn.execute(text, row).fetchall()]

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


class SqliteDatabase:
    dialect = "sqlite"
    lanes = 1

    def __init__(self, place: Place, queries: Mapping[str, Query], clock: Clock) -> None:
        self.queries = {name: _translated(query) for name, query in queries.items()}
        self.batches = {name: _batched(query) for name, query in self.queries.items() if query.columns}
        self.clock = clock
        self.driver: Apsw | StandardLibrary = Apsw() if place.driver == "apsw" else StandardLibrary()
        self._place = place
        self._idle: list[Any] = []
        self._pid = os.getpid()
        self._inherited: list[Any] = []  # a child must never close what its parent opened
        self._memory = threading.RLock()
        self._watch = threading.Lock()
        self._watcher: Any = None  # never writes: a connection does not see its own commits
        self._opened = False

    # connections

    def _own(self) -> None:
        """In a forked child: forget what belongs to the parent."""
        if self._pid != os.getpid():
            self._inherited, self._idle, self._pid = [*self._inherited, *self._idle, self._watcher], [], os.getpid()
            self._memory, self._watch, self._watcher = threading.RLock(), threading.Lock(), None

    def _connection(self) -> Any:
        self._own()
        with suppress(IndexError):  # asked for, not looked for: other threads take from it too
            return self._idle.pop()
        return self._connect()

    def _connect(self) -> Any:
        path = self._place.path
        try:
            with Turns.opening:
                if path is not None and not self._opened:
                    _check_place(self._place, path)
                    self._opened = True
                conn = self.driver.connect(str(path) if path else ":memory:")
            if path is not None:
                conn.execute("PRAGMA journal_mode = WAL").fetchall()
            conn.execute("PRAGMA synchronous = FULL").fetchall()
            conn.execute("PRAGMA wal_autocheckpoint = 4000").fetchall()
            conn.execute("PRAGMA cache_size = -65536").fetchall()
            conn.execute("PRAGMA foreign_keys = OFF").fetchall()
        except self.driver.errors as error:
            raise StoreUnreachable(f"cannot open {path}: {error}") from error
        return conn

    def _turn(self) -> Turns | None:
        return Turns.of(self._place.path) if self._place.path else None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        try:
            yield
        except self.driver.errors as error:
            raise _spoken(error, self._place.path) from error

    @contextmanager
    def transaction(self) -> Iterator[Tx]:
        with self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            turn = self._turn()
            if turn:
                turn.take(BUSY)
            try:
                conn.execute("BEGIN IMMEDIATE")
                try:
                    yield Tx(conn, self)
                    conn.execute("COMMIT")
                except BaseException:
                    if self.driver.in_transaction(conn):
                        conn.execute("ROLLBACK")
                    raise
            finally:
                self._idle.append(conn)
                if turn:
                    turn.give()

    def single(self) -> AbstractContextManager[Tx]:
        return self.transaction()

    @contextmanager
    def statement(self) -> Iterator[Tx]:
        with self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            try:
                yield Tx(conn, self)
            finally:
                self._idle.append(conn)

    @contextmanager
    def adopt(self, conn: Any) -> Iterator[Tx]:
        module = type(conn).__module__.partition(".")[0]
        if module != self._place.driver:
            raise StoreError(
                f"conn is a {module} connection, and this app uses {self._place.driver}: two SQLite libraries in "
                f"one process drop each other's locks. Add ?driver={module} to the URL, or pass an "
                f"{self._place.driver} connection"
            )
        if not self.driver.in_transaction(conn):
            raise StoreError("conn has no open transaction: begin one (BEGIN IMMEDIATE) before you enqueue in it")
        with self.wrapped():
            yield Tx(conn, self)

    def joint(self, within: float) -> Joint:
        with self.wrapped():
            conn = self._connect()
            turn = self._turn()
            try:
                if turn:
                    turn.take(BUSY)
            except BaseException:
                self.retire(conn)
                raise
            return Joint(self, conn, turn, within)

    def retire(self, conn: Any) -> None:
        with Turns.opening:
            conn.close()

    def mark(self) -> object:
        if self._place.path is None:
            return object()
        self._own()
        with self.wrapped(), self._watch:
            if self._watcher is None:
                self._watcher = self._connect()
            # Its number means nothing to another connection, such as the next one after a fork.
            return self._watcher, self._watcher.execute("PRAGMA data_version").fetchone()[0]

    @contextmanager
    def migrations(self) -> Iterator[Migrating]:
        with self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            turn = self._turn()
            if turn:
                turn.take(60)
            try:
                yield Migrating(conn, self.clock)
            finally:
                if turn:
                    turn.give()
                self._idle.append(conn)

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with Turns.opening:
            while self._idle:
                self._idle.pop().close()
            if self._watcher:
                self._watcher.close()
                self._watcher = None


class Joint:
    """On a connection of its own, which is closed at the end: what a user has set on it is gone with it.

    While it is open nobody else can write.  So when its time is over a thread closes the connection, whatever the
    user's code does meanwhile; a mere rollback would let its next statements commit one by one.
    """

    def __init__(self, database: SqliteDatabase, conn: Any, turn: Turns | None, within: float) -> None:
        self.connection = conn
        self.expired = ""
        self._database = database
        self._turn = turn
        self._ending = threading.Lock()
        self._over = False
        self._timer = threading.Timer(within, self._expire, (within,))
        self._timer.name, self._timer.daemon = "genba-transaction", True
        try:
            conn.execute("BEGIN IMMEDIATE")
            self._timer.start()
        except BaseException:
            self._close()
            raise

    @contextmanager
    def ours(self) -> Iterator[Tx]:
        with self._database.wrapped():
            yield Tx(self.connection, self._database)

    def _expire(self, within: float) -> None:
        with self._ending:
            if self._over:
                return
            self._over = True
            self.expired = f"the job's transaction was open for more than {within:g} s, and was rolled back"
        while True:
            try:
                self.connection.interrupt()
                self._close()
                return
            except self._database.driver.errors:  # a statement of the user's is just being interrupted
                time.sleep(0.01)

    def _close(self) -> None:
        self._database.retire(self.connection)
        if self._turn:
            self._turn.give()

    def _settle(self) -> bool:
        """False if its time was over before."""
        with self._ending:
            if self._over:
                return False
            self._over = True
        self._timer.cancel()
        self._timer.join()
        return True

    def take_back(self) -> None:
        if not self._settle():
            raise StoreError(self.expired)
        if not self._database.driver.in_transaction(self.connection):
            raise StoreError("the transaction was ended inside its block: leave COMMIT and ROLLBACK to the block")

    def commit(self) -> None:
        try:
            with self._database.wrapped():
                self.connection.execute("COMMIT")
        finally:
            self._close()

    def rollback(self) -> None:
        """Closing does it; twice is once."""
        if self._settle() or not self.expired:
            with suppress(*self._database.driver.errors):
                self._close()


class Migrating:
    def __init__(self, conn: Any, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock

    def applied(self) -> Mapping[int, str]:
        if not self._conn.execute("SELECT 1 FROM sqlite_schema WHERE name = 'genba_migration'").fetchone():
            return {}
        return dict(self._conn.execute("SELECT version, name FROM genba_migration").fetchall())

    def apply(self, version: int, name: str, script: str) -> None:
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            self._conn.execute(
                "CREATE TABLE IF NOT EXISTS genba_migration "
                "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)"
            )
            for statement in split_script(script):
                self._conn.execute(statement.replace("genba.", "genba_"))
            self._conn.execute(
                "INSERT INTO genba_migration (version, name, applied_at) VALUES (?, ?, ?)",
                (version, name, self._clock.now()),
            )
            self._conn.execute("COMMIT")
        except BaseException:
            self._conn.execute("ROLLBACK")
            raise

    def drop_all(self) -> list[str]:
        named = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE 'genba\\_%' ESCAPE '\\'"
        names = [row[0] for row in self._conn.execute(named).fetchall()]
        ours = [name for name in names if name.removeprefix("genba_") in TABLES]
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            for name in ours:
                self._conn.execute(f'DROP TABLE "{name}"')
            self._conn.execute("COMMIT")
        except BaseException:
            self._conn.execute("ROLLBACK")
            raise
        return ours


def split_script(script: str) -> list[str]:
    """The statements of a migration; its texts have neither a semicolon nor two dashes."""
    bare = "\n".join(line.partition("--")[0] for line in script.splitlines())
    return [part.strip() for part in bare.split(";") if part.strip()]


def _translated(query: Query) -> Query:
    text = query.text.replace("genba.", "genba_").replace("/* now */", ":now").replace("/* boot */", ":boot")
    return Query(query.name, text.replace("/* lock */", ""), query.columns, query.literals)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# The place: what must be true before SQLite may touch it

MOUNTS = Path("/proc/self/mountinfo")


def _check_place(place: Place, path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise StoreUnreachable(f"cannot open {path}: there is no folder {folder}")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise StoreUnreachable(f"cannot open {path}: it is not a file")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        raise StoreUnreachable(f"cannot open {path}: this user may not write there (SQLite needs the folder too)")
    kind = file_system(folder)
    if not place.allow_network and any(kind == bad or kind.startswith(bad) for bad in NETWORK):
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite's locks cannot be trusted. Use a local disk or "
            "PostgreSQL; if you know better, add ?network=allow to the URL"
        )
    if not path.exists():
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return  # another process was quicker; to open and close it now would drop the locks of ours
        except OSError as error:
            raise StoreUnreachable(f"cannot create {path}: {error.strerror}") from error
        return
    owner = _library(path)
    if owner not in (None, place.driver):
        raise StoreError(
            f"{path} is open in this process through {owner}, and two SQLite libraries drop each other's locks. "
            f"Add ?driver={owner} to the URL, so that genba uses the same one"
        )


def _library(path: Path) -> str | None:
    """Which library has the file open in this process: apsw can name its connections, so the rest is sqlite3's."""
    real = os.path.realpath(path)
    try:
        here = any(_link(f"/proc/self/fd/{fd}") == real for fd in os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        here = False
    if not here:
        return None
    apsw = sys.modules.get("apsw")
    return "apsw" if apsw and any(_opens(conn, real) for conn in apsw.connections()) else "sqlite3"


def _opens(conn: Any, real: str) -> bool:
    import apsw

    try:
        return bool(os.path.realpath(conn.filename) == real)
    except apsw.ThreadingViolationError:  # at work in another thread, it cannot be asked: it may well be the one
        return True


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """The kind of file system that holds `folder`, as the kernel names it ("" where it cannot be known)."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _spoken(error: Exception, path: Path | None) -> StoreError:
    text = str(error)
    if "readonly" in text or "unable to open" in text or "disk I/O" in text or "full" in text:
        return StoreUnreachable(f"{path}: {text}")
    if "locked" in text or "busy" in text.lower():
        return StoreUnreachable(f"{path}: another process has kept it locked for {BUSY:g} s")
    return StoreError(f"{path}: {text}")

