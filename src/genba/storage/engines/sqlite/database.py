"""SQLite: one file, many processes; writers take turns (`turns`), before they even ask SQLite for its lock."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from genba.domain.clock import Clock
from genba.errors import StoreError, StoreUnreachable
from genba.signal_safe import defer_stop
from genba.storage.engines.database import (
    LONG_ARGUMENTS_BYTES,
    TABLES,
    DiskInfo,
    Query,
    QueryCall,
    Row,
    WritingProcess,
)
from genba.storage.engines.sqlite.batch import ROWS_PER_STATEMENT, BatchStatement
from genba.storage.engines.sqlite.file_checks import SqliteLocation, check_location, file_system
from genba.storage.engines.sqlite.write_queue import (
    BUSY_SECONDS,
    WriteQueue,
    describe_process,
    lock_holder,
)
from genba.storage.records import Claimed

log = logging.getLogger("genba")


class SqliteTransaction:
    def __init__(self, conn: Any, database: SqliteDatabase, *, begun: bool = False) -> None:
        self._conn = conn
        self._untouched = (
            database.driver.changes(conn) if begun else -1
        )  # just begun by us, and nothing is written
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
        batch = self._batches[name]
        if not rows or not batch.text:
            return []
        shared = self._bound(values)
        if not batch.wide:
            return self._driver.batch(self._conn, batch.text, batch.in_order(rows, shared))
        if not batch.returning:
            return self._in_parts(batch, rows, shared, "")
        found = self._wide(batch, rows, shared)
        return [row[: batch.returned] for row in rows] if found is None else found

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        return self._wide(self._batches[name], rows, self._bound(values)) if rows else None

    def _wide(
        self, batch: BatchStatement, rows: Sequence[Row], shared: Mapping[str, Any]
    ) -> list[Row] | None:
        """Many rows to a statement; None if all are found.  To ask each for its id costs half an update more, so they
        are counted first."""
        conn, before = self._conn, self._driver.changes(self._conn)
        alone = before == self._untouched
        if not alone:
            conn.execute("SAVEPOINT genba_batch")
        self._in_parts(batch, rows, shared, "")
        complete = self._driver.changes(conn) - before == len(rows)
        if (
            alone and not complete
        ):  # a savepoint would copy every page for the case that this happens
            conn.execute("ROLLBACK")
            conn.execute("BEGIN IMMEDIATE")
            self._untouched = self._driver.changes(conn)
        elif not alone:
            conn.execute("RELEASE genba_batch" if complete else "ROLLBACK TO genba_batch")
            if not complete:
                conn.execute("RELEASE genba_batch")
        return None if complete else self._in_parts(batch, rows, shared, batch.returning)

    def _in_parts(
        self, batch: BatchStatement, rows: Sequence[Row], shared: Mapping[str, Any], returning: str
    ) -> list[Row]:
        found: list[Row] = []
        at = 0
        for size in ROWS_PER_STATEMENT:
            while len(rows) - at >= size:
                values = batch.abreast(rows[at : at + size], shared)
                found += self._conn.execute(batch.for_rows(size, returning), values).fetchall()
                at += size
        return found

    def all_json(self, name: str, /, **values: Any) -> list[Row]:
        ((found,),) = self._conn.execute(self._sql[name].text, self._bound(values)).fetchall()
        return [tuple(row) for row in _rows(found)]

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        values = self._bound(values)
        ((found,),) = self._conn.execute(self._sql["claim"].text, values).fetchall()
        try:
            rows = _as_bytes(_decode(found))
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            try:
                rows = [
                    list(row)
                    for row in self._conn.execute(
                        self._sql["claim_row_by_row"].text, values
                    ).fetchall()
                ]
            except UnicodeDecodeError:  # a text, too, is none
                rows = _as_bytes(_rows(found))
        if rows:
            self._fetch_long(rows)
            values["ids"] = self.numbers([row[1] for row in rows])
            self._conn.execute(self._sql["mark_claimed"].text, values).fetchall()
        return rows

    def _fetch_long(self, rows: Sequence[list[Any]]) -> None:
        """Arguments that are not in the row of their job."""
        apart = {row[1]: row for row in rows if not row[_ARGS]}
        if apart:
            ids = self.numbers(list(apart))
            for id, args in self._conn.execute(
                self._sql["long_arguments"].text, {"ids": ids}
            ).fetchall():
                apart[id][_ARGS] = args

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        at = columns.index("args")
        long = [(row[0], row[at]) for row in rows if len(row[at]) > LONG_ARGUMENTS_BYTES]
        if long:
            self.batch("insert_long_arguments", long)
            rows = [
                (*row[:at], b"", *row[at + 1 :]) if len(row[at]) > LONG_ARGUMENTS_BYTES else row
                for row in rows
            ]
        marks = ", ".join("?" * len(columns))
        text = f"INSERT INTO genba_job ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608  our own column names
        self._driver.batch(self._conn, text, rows)

    def insert_alike(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        long = [row for row in rows if len(row[1]) > LONG_ARGUMENTS_BYTES]
        if long:
            self.batch("insert_long_arguments", long)
            rows = [(id, b"" if len(args) > LONG_ARGUMENTS_BYTES else args) for id, args in rows]
        self.batch("enqueue_uniform", rows, **dict(zip(columns[1:-1], same, strict=True)))

    def select(self, text: str, /, **values: Any) -> list[Row]:
        return self._conn.execute(text.replace("genba.", "genba_"), values).fetchall()  # type: ignore[no-any-return]

    def names(self, values: Sequence[str]) -> Any:
        return _json.encode(values).decode()

    def numbers(self, values: Sequence[int]) -> Any:
        return _json.encode(values).decode()

    def ids(self, count: int) -> list[int]:
        ((last,),) = self.all("next_ids", count=count)
        return list(range(last - count + 1, last + 1))

    def now(self) -> int:
        return self._clock.now()


_WRITE_LOCK = 120  # the byte of the shared memory's file that a writer has locked (SQLite's file format, 2.3.1)
_json = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(list[list[Any]]).decode


def _as_bytes(rows: list[list[Any]]) -> list[list[Any]]:
    """As the claim of PostgreSQL gives them: arguments and checkpoint are bytes."""
    for row in rows:
        row[_ARGS] = row[_ARGS].encode()
        if row[_SAVED] is not None:
            row[_SAVED] = row[_SAVED].encode()
    return rows


def _rows(found: bytes) -> list[list[Any]]:
    try:
        return _decode(found)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
    ):  # SQLite keeps any bytes as a text: others must not wait for it
        return _decode(found.decode(errors="replace"))


_ARGS, _SAVED = Claimed._fields.index("args"), Claimed._fields.index("saved")
_APART = "(SELECT a.args FROM genba_argument a WHERE a.job_id = id)"
_WHOLE = f"CASE WHEN length(args) > 0 THEN args ELSE COALESCE({_APART}, args) END"


class ApswDriver:
    """The driver that brings a SQLite of its own, newer and sounder than most systems'."""

    def __init__(self) -> None:
        import apsw

        self.errors: tuple[type[Exception], ...] = (apsw.Error,)
        self.version = apsw.sqlite_lib_version()
        self._apsw = apsw

    def connect(self, path: str) -> Any:
        flags = self._apsw.SQLITE_OPEN_READWRITE | self._apsw.SQLITE_OPEN_CREATE
        conn = self._apsw.Connection(path, flags=flags, statementcachesize=200)
        conn.set_busy_timeout(int(BUSY_SECONDS * 1000))
        # Else a statement is compiled anew for each value that is bound to it: 105 µs instead of 4 for a claim.
        conn.config(self._apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return conn

    @staticmethod
    def run(conn: Any, text: str, values: Mapping[str, Any]) -> int:
        conn.execute(text, values).fetchall()
        return int(conn.changes())

    @staticmethod
    def batch(conn: Any, text: str, rows: Sequence[Row]) -> list[Row]:
        return conn.executemany(text, rows).fetchall()  # type: ignore[no-any-return]

    @staticmethod
    def changes(conn: Any) -> int:
        """Since it was opened."""
        return int(conn.total_changes())

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


class Sqlite3Driver:
    """The `sqlite3` of Python, for processes that have the file open with it anyway."""

    def __init__(self) -> None:
        import sqlite3

        self.errors: tuple[type[Exception], ...] = (sqlite3.Error,)
        self.version = sqlite3.sqlite_version
        self._sqlite3 = sqlite3

    def connect(self, path: str) -> Any:
        return self._sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

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
    def changes(conn: Any) -> int:
        return int(conn.total_changes)

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


class SqliteDatabase:
    dialect = "sqlite"
    parallel_writers = 1
    pooler_found = False

    def __init__(self, place: SqliteLocation, queries: Mapping[str, Query], clock: Clock) -> None:
        self.queries = {name: _translated(query) for name, query in queries.items()}
        self.batches = {
            name: BatchStatement(query) for name, query in self.queries.items() if query.columns
        }
        self.clock = clock
        self.driver: ApswDriver | Sqlite3Driver = (
            ApswDriver() if place.driver == "apsw" else Sqlite3Driver()
        )
        self._place = place
        self._log: str | None = None  # where commits go first; None: SQLite syncs them itself
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
            self._inherited, self._idle, self._pid = (
                [*self._inherited, *self._idle, self._watcher],
                [],
                os.getpid(),
            )
            self._memory, self._watch, self._watcher = threading.RLock(), threading.Lock(), None

    def _connection(self) -> Any:
        self._own()
        with suppress(IndexError):  # asked for, not looked for: other threads take from it too
            return self._idle.pop()
        return self._connect()

    def _connect(self, synchronous: str = "NORMAL") -> Any:
        """With FULL, a commit by whoever gets it is on the disk; with NORMAL, once `_sync` was called."""
        path = self._place.path
        try:
            with WriteQueue.opening:
                if path is not None and not self._opened:
                    check_location(self._place, path)
                    if has_wal_reset_bug(tuple(map(int, self.driver.version.split(".")))):
                        _warn_of(self.driver.version)
                    self._opened = True
                conn = self.driver.connect(str(path) if path else ":memory:")
            if path is not None and conn.execute("PRAGMA journal_mode = WAL").fetchall() == [
                ("wal",)
            ]:
                self._log = f"{os.path.realpath(path)}-wal"  # SQLite follows links before it adds the ending
            else:  # in memory, or on a network file system, for those who know better
                synchronous = "FULL"
            conn.execute(f"PRAGMA synchronous = {synchronous}").fetchall()
            conn.execute("PRAGMA wal_autocheckpoint = 4000").fetchall()
            conn.execute("PRAGMA cache_size = -65536").fetchall()
            conn.execute("PRAGMA foreign_keys = OFF").fetchall()
        except self.driver.errors as error:
            raise StoreUnreachable(f"cannot open {path}: {error}") from error
        return conn

    def _sync(self) -> None:
        """What is committed is on the disk, also what others have committed and we have seen.

        After the turn was given away: to wait for the disk takes longer than all that a small transaction does, and
        those who wait for it together wait once.
        """
        if self._log is None:
            return
        try:
            sync_file(self._log)
        except OSError as error:
            text = f"{self._place.path}: {error.strerror}, when what was just written was to be kept on the disk"
            raise StoreUnreachable(text) from error

    def _turn(self) -> WriteQueue | None:
        return WriteQueue.of(self._place.path) if self._place.path else None

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        try:
            yield
        except self.driver.errors as error:
            raise _spoken(error, self._place.path) from error
        except UnicodeDecodeError as error:  # SQLite keeps any bytes as a text
            raise StoreError(
                f"{self._place.path}: a text in a table is no UTF-8: {error.reason}"
            ) from error

    def pipeline(self, *steps: QueryCall) -> list[list[Row]]:
        with self.transaction() as tx:
            return [
                tx.all(name, **values) if self.queries[name].text else [] for name, values in steps
            ]

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        with defer_stop, self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            turn = self._turn()
            if turn:
                turn.take(BUSY_SECONDS)
            try:
                conn.execute("BEGIN IMMEDIATE")
                yield SqliteTransaction(conn, self, begun=True)
                conn.execute("COMMIT")
            except BaseException:  # also Ctrl-C must not leave it open; raised again
                if self.driver.in_transaction(conn):
                    conn.execute("ROLLBACK")
                raise
            finally:
                if turn:
                    turn.give()
                self._idle.append(conn)
            self._sync()

    def single_write(self) -> AbstractContextManager[SqliteTransaction]:
        return self.transaction()

    @contextmanager
    def statement(self) -> Iterator[SqliteTransaction]:
        with defer_stop, self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            try:
                yield SqliteTransaction(conn, self)
            finally:
                self._idle.append(conn)

    @contextmanager
    def snapshot(self) -> Iterator[SqliteSnapshot]:
        with self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            try:
                conn.execute(
                    "BEGIN"
                )  # WAL: from its first read on it sees nothing newer, and hinders nobody
                yield SqliteSnapshot(conn, self)
            finally:
                conn.execute("ROLLBACK")
                self._idle.append(conn)

    @contextmanager
    def adopt(self, conn: Any) -> Iterator[SqliteTransaction]:
        module = type(conn).__module__.partition(".")[0]
        if module != self._place.driver:
            raise StoreError(
                f"conn is a {module} connection, and this app uses {self._place.driver}: two SQLite libraries in "
                f"one process drop each other's locks. Add ?driver={module} to the URL, or pass an "
                f"{self._place.driver} connection"
            )
        if not self.driver.in_transaction(conn):
            raise StoreError(
                "conn has no open transaction: begin one (BEGIN IMMEDIATE) before you enqueue in it"
            )
        with self.wrapped():
            yield SqliteTransaction(conn, self)

    @defer_stop
    def job_transaction(self, within: float) -> SqliteJobTransaction:
        with self.wrapped():
            conn = self._connect("FULL")
            turn = self._turn()
            try:
                if turn:
                    turn.take(BUSY_SECONDS)
            except BaseException:  # also a stop must not leave it open; raised again
                self.retire(conn)
                raise
            return SqliteJobTransaction(self, conn, turn, within)

    def retire(self, conn: Any) -> None:
        with WriteQueue.opening:
            conn.close()

    def home(self) -> DiskInfo:
        path = self._place.path
        if path is None:
            return DiskInfo()
        return DiskInfo(file_system(path.parent), shutil.disk_usage(path.parent).free)

    def writer(self, *, whoever: bool = False) -> WritingProcess | None:
        """Who has the turn, or SQLite's own lock, which one who writes by `conn=` takes without a turn.

        To read all locks of the machine keeps everybody from taking one for some 15 ms: it is done if a turn of ours
        lasts from one look to the next, or if we are asked for `whoever` it is.
        """
        turn = self._turn()
        if turn is None or self._place.path is None:
            return None
        if not whoever:
            other, lasts = turn.other(), turn.lasts()
            if other is not None or not lasts:
                return describe_process(other)
        path = os.path.realpath(self._place.path)  # SQLite follows links before it adds the ending
        return describe_process(
            lock_holder(Path(f"{path}-shm"), _WRITE_LOCK)
            or lock_holder(Path(f"{self._place.path}-turn"))
        )

    def mark(self) -> object:
        if self._place.path is None:
            return object()
        self._own()
        with defer_stop, self.wrapped(), self._watch:
            if self._watcher is None:
                self._watcher = self._connect()
            # Its number means nothing to another connection, such as the next one after a fork.
            return self._watcher, self._watcher.execute("PRAGMA data_version").fetchone()[0]

    @contextmanager
    def schema(self) -> Iterator[SqliteSchema]:
        with defer_stop, self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            try:
                yield SqliteSchema(conn, self.clock)
            finally:
                self._idle.append(conn)

    @contextmanager
    def migrations(self) -> Iterator[SqliteSchema]:
        with defer_stop, self._memory if self._place.path is None else _nothing(), self.wrapped():
            conn = self._connection()
            turn = self._turn()
            if turn:
                turn.take(60)
            try:
                yield SqliteSchema(conn, self.clock)
            finally:
                if turn:
                    turn.give()
                self._idle.append(conn)
            self._sync()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with WriteQueue.opening:
            while self._idle:
                self._idle.pop().close()
            if self._watcher:
                self._watcher.close()
                self._watcher = None


class SqliteSnapshot:
    def __init__(self, conn: Any, database: SqliteDatabase) -> None:
        self._conn = conn
        self._sql = database.queries

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        yield from self._conn.execute(self._sql[name].text, values)


class SqliteJobTransaction:
    """On a connection of its own, which is closed at the end: what a user has set on it is gone with it.

    While it is open nobody else can write.  So when its time is over a thread closes the connection, whatever the
    user's code does meanwhile; a mere rollback would let its next statements commit one by one.
    """

    def __init__(
        self, database: SqliteDatabase, conn: Any, turn: WriteQueue | None, within: float
    ) -> None:
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
        except BaseException:  # also a stop must not leave it open; raised again
            self._close()
            raise

    @contextmanager
    def ours(self) -> Iterator[SqliteTransaction]:
        with self._database.wrapped():
            yield SqliteTransaction(self.connection, self._database)

    def _expire(self, within: float) -> None:
        with self._ending:
            if self._over:
                return
            self._over = True
            self.expired = (
                f"the job's transaction was open for more than {within:g} s, and was rolled back"
            )
        while True:
            try:
                self.connection.interrupt()
                self._close()
                return
            except (
                self._database.driver.errors
            ):  # a statement of the user's is just being interrupted
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

    @defer_stop
    def take_back(self) -> None:
        if not self._settle():
            raise StoreError(self.expired)
        if not self._database.driver.in_transaction(self.connection):
            raise StoreError(
                "the transaction was ended inside its block: leave COMMIT and ROLLBACK to the block"
            )

    @defer_stop
    def commit(self) -> None:
        try:
            with self._database.wrapped():
                self.connection.execute("COMMIT")
        finally:
            self._close()

    @defer_stop
    def rollback(self) -> None:
        """Closing does it; twice is once."""
        if self._settle() or not self.expired:
            with suppress(*self._database.driver.errors):
                self._close()


class SqliteSchema:
    def __init__(self, conn: Any, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock

    def applied(self) -> Mapping[int, str]:
        if not self._conn.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'genba_migration'"
        ).fetchone():
            return {}
        return dict(self._conn.execute("SELECT version, name FROM genba_migration").fetchall())

    def serves(self) -> Mapping[int, int]:
        if not self.applied():
            return {}
        return dict(
            self._conn.execute(
                "SELECT version, COALESCE(serves, version) FROM genba_migration"
            ).fetchall()
        )

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            self._conn.execute(
                "CREATE TABLE IF NOT EXISTS genba_migration "
                "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL, serves INTEGER)"
            )
            for statement in split_script(script):
                self._conn.execute(statement.replace("genba.", "genba_"))
            self._conn.execute(
                "INSERT INTO genba_migration (version, name, applied_at, serves) VALUES (?, ?, ?, ?)",
                (version, name, self._clock.now(), serves),
            )
            self._conn.execute("COMMIT")
        except BaseException:  # also a stop must not leave it open; raised again
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
        except BaseException:  # also a stop must not leave it open; raised again
            self._conn.execute("ROLLBACK")
            raise
        return ours


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Whether this SQLite has the WAL-reset bug: since 3.7.0, mended in 3.51.3, and in 3.50.7 and 3.44.6."""
    mended = ((3, 50, 7), (3, 44, 6))
    return (3, 7) <= version < (3, 51, 3) and not any(m <= version < (3, m[1] + 1) for m in mended)


@cache
def _warn_of(version: str) -> None:
    """Once in a process.  Ours write in turn, so that two of them never do it at the same moment; others may."""
    log.warning(
        "SQLite %s may corrupt a file that two connections write at the same moment: processes of genba take turns, "
        "but nobody else who has it open does. Leave ?driver=sqlite3 out of the URL (apsw brings a sound SQLite), or "
        "use a Python with SQLite 3.51.3 or later",
        version,
    )


def split_script(script: str) -> list[str]:
    """The statements of a migration; its texts have neither a semicolon nor two dashes."""
    bare = "\n".join(line.partition("--")[0] for line in script.splitlines())
    return [part.strip() for part in bare.split(";") if part.strip()]


def _translated(query: Query) -> Query:
    text = (
        query.text.replace("genba.", "genba_")
        .replace("/* now */", ":now")
        .replace("/* boot */", ":boot")
    )
    text = text.replace("/* lock */", "").replace("/* args */", _WHOLE)
    return Query(query.name, text, query.columns, query.literals)


def sync_file(log: str) -> None:
    """SQLite locks nothing in its log, so that it may be opened and closed beside it."""
    try:
        file = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
    except (
        FileNotFoundError
    ):  # the last who had it open has put all into the database, and synced that
        return
    try:
        os.fdatasync(file)
    finally:
        os.close(file)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _spoken(error: Exception, path: Path | None) -> StoreError:
    text = str(error)
    if "readonly" in text or "unable to open" in text or "disk I/O" in text or "full" in text:
        return StoreUnreachable(f"{path}: {text}")
    if "locked" in text or "busy" in text.lower():
        return StoreUnreachable(
            f"{path}: another process has kept it locked for {BUSY_SECONDS:g} s"
        )
    return StoreError(f"{path}: {text}")
