"""SQLite: one file, many processes. Writers queue (`write_queue`) before they lock the file."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from genba.domain.clock import Clock
from genba.errors import StoreError, StoreUnreachable
from genba.signal_safe import defer_stop
from genba.storage.engines.database import DiskInfo, QueryCall, Row, WritingProcess
from genba.storage.engines.queries import Query
from genba.storage.engines.sqlite.batch import BatchStatement
from genba.storage.engines.sqlite.drivers import (
    ApswDriver,
    Sqlite3Driver,
    has_wal_reset_bug,
    warn_of_wal_reset_bug,
)
from genba.storage.engines.sqlite.file_checks import SqliteLocation, check_location, file_system
from genba.storage.engines.sqlite.job_transaction import SqliteJobTransaction
from genba.storage.engines.sqlite.schema import SqliteSchema
from genba.storage.engines.sqlite.transaction import SqliteSnapshot, SqliteTransaction
from genba.storage.engines.sqlite.write_queue import (
    BUSY_SECONDS,
    WriteQueue,
    close_connection,
    describe_process,
    lock_holder,
)

MIGRATION_SECONDS = 60  # how long a migration waits for its turn to write

# The byte of the shared memory's file that a writer has locked (SQLite's file format, 2.3.1).
_WRITE_LOCK_BYTE = 120
_LONG_ARGUMENTS = "(SELECT a.args FROM genba_argument a WHERE a.job_id = id)"
_ARGUMENTS = f"CASE WHEN length(args) > 0 THEN args ELSE COALESCE({_LONG_ARGUMENTS}, args) END"


class SqliteDatabase:
    dialect = "sqlite"
    parallel_writers = 1
    pooler_found = False

    def __init__(
        self, location: SqliteLocation, queries: Mapping[str, Query], clock: Clock
    ) -> None:
        self.queries: Mapping[str, Query] = {
            name: _translated(query) for name, query in queries.items()
        }
        self.batches: Mapping[str, BatchStatement] = {
            name: BatchStatement(query) for name, query in self.queries.items() if query.columns
        }
        self.clock = clock
        self.driver: ApswDriver | Sqlite3Driver = (
            ApswDriver() if location.driver == "apsw" else Sqlite3Driver()
        )
        self._location = location
        self._log: str | None = None  # the file that commits go to first; None: SQLite syncs
        self._idle: list[Any] = []
        self._pid = os.getpid()
        self._inherited: list[Any] = []  # a child must never close a connection of its parent
        self._memory_lock = threading.RLock()  # for a database in memory, which has one connection
        self._marker_lock = threading.Lock()
        self._marker: Any = None  # never writes: a connection does not see its own commits
        self._checked = False

    # connections

    def _forget_parent(self) -> None:
        """In a forked child, put aside the connections that belong to the parent."""
        if self._pid != os.getpid():
            self._inherited = [*self._inherited, *self._idle, self._marker]
            self._idle, self._pid = [], os.getpid()
            self._memory_lock, self._marker_lock = threading.RLock(), threading.Lock()
            self._marker = None

    def _connection(self) -> Any:
        self._forget_parent()
        with suppress(IndexError):  # no test before pop: other threads take from the list too
            return self._idle.pop()
        return self._connect()

    def _connect(self, synchronous: str = "NORMAL") -> Any:
        """Open a connection.

        With FULL, a commit is on the disk when it returns; with NORMAL, once `_sync` was called.
        """
        path = self._location.path
        try:
            with WriteQueue.opening:
                if path is not None and not self._checked:
                    check_location(self._location, path)
                    if has_wal_reset_bug(tuple(map(int, self.driver.version.split(".")))):
                        warn_of_wal_reset_bug(self.driver.version)
                    self._checked = True
                conn = self.driver.connect(str(path) if path else ":memory:", BUSY_SECONDS)
            if path is not None and _set_wal_mode(conn):
                # SQLite follows links before it adds the ending.
                self._log = f"{os.path.realpath(path)}-wal"
            else:  # in memory, or on a network file system by the user's choice
                synchronous = "FULL"
            conn.execute(f"PRAGMA synchronous = {synchronous}").fetchall()
            conn.execute("PRAGMA wal_autocheckpoint = 4000").fetchall()
            conn.execute("PRAGMA cache_size = -65536").fetchall()
            conn.execute("PRAGMA foreign_keys = OFF").fetchall()
        except self.driver.errors as error:
            raise StoreUnreachable(f"cannot open {path}: {error}") from error
        return conn

    def _sync(self) -> None:
        """Write to the disk what is committed, by us or by others.

        Called after the write lock is released: waiting for the disk takes longer than all that a
        small transaction does, and writers who wait for it together wait once.
        """
        if self._log is None:
            return
        try:
            sync_file(self._log)
        except OSError as error:
            raise StoreUnreachable(
                f"{self._location.path}: {error.strerror} while syncing the last commit to the disk"
            ) from error

    def _write_queue(self) -> WriteQueue | None:
        return WriteQueue.of(self._location.path) if self._location.path else None

    def _exclusive(self) -> AbstractContextManager[Any]:
        """A database in memory is used by one thread at a time."""
        return self._memory_lock if self._location.path is None else nullcontext()

    @contextmanager
    def store_errors(self) -> Iterator[None]:
        """Raise errors of the driver as errors of the store."""
        try:
            yield
        except self.driver.errors as error:
            raise _as_store_error(error, self._location.path) from error
        except UnicodeDecodeError as error:  # SQLite stores any bytes as text
            raise StoreError(
                f"{self._location.path}: a text in a table is not UTF-8: {error.reason}"
            ) from error

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with WriteQueue.opening:
            while self._idle:
                self._idle.pop().close()
            if self._marker:
                self._marker.close()
                self._marker = None

    # transactions

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        with defer_stop, self._exclusive(), self.store_errors():
            conn = self._connection()
            queue = self._write_queue()
            if queue:
                queue.acquire(BUSY_SECONDS)
            try:
                conn.execute("BEGIN IMMEDIATE")
                yield SqliteTransaction(conn, self, begun=True)
                conn.execute("COMMIT")
            except BaseException:  # even Ctrl-C must not leave it open; raised again
                if self.driver.in_transaction(conn):
                    conn.execute("ROLLBACK")
                raise
            finally:
                if queue:
                    queue.release()
                self._idle.append(conn)
            self._sync()

    def single_write(self) -> AbstractContextManager[SqliteTransaction]:
        return self.transaction()

    def pipeline(self, *calls: QueryCall) -> list[list[Row]]:
        with self.transaction() as tx:
            return [
                tx.all(name, **values) if self.queries[name].text else [] for name, values in calls
            ]

    @contextmanager
    def statement(self) -> Iterator[SqliteTransaction]:
        with defer_stop, self._exclusive(), self.store_errors():
            conn = self._connection()
            try:
                yield SqliteTransaction(conn, self)
            finally:
                self._idle.append(conn)

    @contextmanager
    def snapshot(self) -> Iterator[SqliteSnapshot]:
        with self._exclusive(), self.store_errors():
            conn = self._connection()
            try:
                # In WAL mode, from its first read on it sees nothing newer, and blocks no writer.
                conn.execute("BEGIN")
                yield SqliteSnapshot(conn, self.queries)
            finally:
                conn.execute("ROLLBACK")
                self._idle.append(conn)

    @contextmanager
    def adopt(self, conn: Any) -> Iterator[SqliteTransaction]:
        module = type(conn).__module__.partition(".")[0]
        if module != self._location.driver:
            raise StoreError(
                f"conn is a {module} connection, and this app uses {self._location.driver}: two "
                "SQLite libraries in one process drop each other's locks. Add "
                f"?driver={module} to the URL, or pass an {self._location.driver} connection"
            )
        if not self.driver.in_transaction(conn):
            raise StoreError(
                "conn has no open transaction: begin one (BEGIN IMMEDIATE) before you enqueue in it"
            )
        with self.store_errors():
            yield SqliteTransaction(conn, self)

    @defer_stop
    def job_transaction(self, within: float) -> SqliteJobTransaction:
        with self.store_errors():
            conn = self._connect("FULL")
            queue = self._write_queue()
            try:
                if queue:
                    queue.acquire(BUSY_SECONDS)
            except BaseException:  # even a stop signal must not leave it open; raised again
                close_connection(conn)
                raise
            return SqliteJobTransaction(self, conn, queue, within, self.store_errors)

    # the schema

    @contextmanager
    def schema(self) -> Iterator[SqliteSchema]:
        with defer_stop, self._exclusive(), self.store_errors():
            conn = self._connection()
            try:
                yield SqliteSchema(conn, self.clock)
            finally:
                self._idle.append(conn)

    @contextmanager
    def migrations(self) -> Iterator[SqliteSchema]:
        with defer_stop, self._exclusive(), self.store_errors():
            conn = self._connection()
            queue = self._write_queue()
            if queue:
                queue.acquire(MIGRATION_SECONDS)
            try:
                yield SqliteSchema(conn, self.clock)
            finally:
                if queue:
                    queue.release()
                self._idle.append(conn)
            self._sync()

    # facts

    def disk(self) -> DiskInfo:
        path = self._location.path
        if path is None:
            return DiskInfo()
        return DiskInfo(file_system(path.parent), shutil.disk_usage(path.parent).free)

    def writing_process(self, *, any_holder: bool = False) -> WritingProcess | None:
        """Find the process that holds our write lock or SQLite's own.

        A user's transaction (`conn=`) takes SQLite's lock without our queue. Reading all locks of
        the machine keeps every process from taking one for some 15 ms: it is done if one of our
        threads holds the lock from one call to the next, or with `any_holder`.
        """
        queue = self._write_queue()
        if queue is None or self._location.path is None:
            return None
        if not any_holder:
            other, is_long_held = queue.other_holder(), queue.held_since_last_check()
            if other is not None or not is_long_held:
                return describe_process(other)
        # SQLite follows links before it adds the ending.
        path = os.path.realpath(self._location.path)
        return describe_process(
            lock_holder(Path(f"{path}-shm"), _WRITE_LOCK_BYTE)
            or lock_holder(Path(f"{self._location.path}-turn"))
        )

    def write_marker(self) -> object:
        if self._location.path is None:
            return object()
        self._forget_parent()
        with defer_stop, self.store_errors(), self._marker_lock:
            if self._marker is None:
                self._marker = self._connect()
            # With the connection: the number means nothing to another one, such as after a fork.
            return self._marker, self._marker.execute("PRAGMA data_version").fetchone()[0]


def sync_file(path: str) -> None:
    """Sync SQLite's log, which may be opened and closed here: SQLite locks nothing in it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the last process that had it open has moved it into the database, and synced that
    try:
        os.fdatasync(file)
    finally:
        os.close(file)


def _set_wal_mode(conn: Any) -> bool:
    return bool(conn.execute("PRAGMA journal_mode = WAL").fetchall() == [("wal",)])


def _translated(query: Query) -> Query:
    text = (
        query.text.replace("genba.", "genba_")
        .replace("/* now */", ":now")
        .replace("/* boot */", ":boot")
    )
    text = text.replace("/* lock */", "").replace("/* args */", _ARGUMENTS)
    return Query(query.name, text, query.columns, query.literals)


def _as_store_error(error: Exception, path: Path | None) -> StoreError:
    text = str(error)
    if "readonly" in text or "unable to open" in text or "disk I/O" in text or "full" in text:
        return StoreUnreachable(f"{path}: {text}")
    if "locked" in text or "busy" in text.lower():
        return StoreUnreachable(
            f"{path}: another process has kept it locked for {BUSY_SECONDS:g} s"
        )
    return StoreError(f"{path}: {text}")
