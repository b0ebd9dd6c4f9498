"""PostgreSQL: the server's clock, rows locked one by one, two writers at once."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any
from urllib.parse import parse_qsl, urlunsplit

from genba.domain.clock import Clock
from genba.domain.url import mask_password, scrub_password, split_url
from genba.errors import BadOption, StoreError, StoreUnreachable
from genba.signal_safe import defer_stop
from genba.storage.engines.database import (
    PARAMETER,
    TABLES,
    AnswerLost,
    DiskInfo,
    Query,
    QueryCall,
    Row,
)
from genba.storage.engines.postgres.arrays import BytesColumn, IntColumn, TextColumn, register
from genba.storage.engines.postgres.deadline import ANSWER_SECONDS, connection_class
from genba.storage.engines.postgres.libpq import MAX_PREPARED, BoundStatement, LibpqConnection

# statement_timestamp() is the same for the whole statement; as a sub-select it is computed once, not per row
NOW = "(SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)"
BLOCK = 100  # ids that one step of the sequence stands for
AGE_OF_IDS = 60.0  # seconds; then what is left of a block is thrown away, so that ids follow the time (search.SKEW)
# Every statement of ours goes through an index.  Before the first ANALYZE the planner does not know that, and reads
# the whole table; it need not think anew for each batch either.
SESSION = {
    "statement_timeout": "10s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",  # one that is suspended keeps its own row locked, and others bury it
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}
DEADLINES = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    "application_name": "genba",
    "options": " ".join(f"-c {name}={value}" for name, value in SESSION.items()),
}
# Where user code has a say: time for its statements, and the server's own planner settings.
LENT = {
    "statement_timeout": "60s",
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "60s",
    "client_connection_check_interval": "500ms",  # of a killed worker no statement keeps the job's row locked
}
SEQUENCES = ("job_id", "token")
MIGRATION_LOCK = 0x67656E6261  # "genba"
_UNKNOWN = "unsupported startup parameter"  # what PgBouncer says to our settings


class PostgresTransaction:
    def __init__(self, direct: LibpqConnection, database: PostgresDatabase) -> None:
        self._direct = direct
        self._conn = direct.conn
        self._database = database
        self._sql = database.queries

    def _execute(self, query: Query, values: Mapping[str, Any]) -> Any:
        return self.ask(*self._database.bound(query, values))

    def ask(self, text: str, values: Mapping[str, Any]) -> Any:
        return self._direct.execute(text, values)

    def all(self, name: str, /, **values: Any) -> list[Row]:
        return self._execute(self._sql[name], values).fetchall()  # type: ignore[no-any-return]

    def all_json(self, name: str, /, **values: Any) -> list[Row]:
        return self.all(name, **values)

    def one(self, name: str, /, **values: Any) -> Row | None:
        return self._execute(self._sql[name], values).fetchone()  # type: ignore[no-any-return]

    def run(self, name: str, /, **values: Any) -> int:
        if not self._sql[name].text:
            return 0
        return max(0, int(self._execute(self._sql[name], values).rowcount))

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        if not rows or not self._sql[name].text:
            return []
        done = self._batch(name, rows, values)
        return done.fetchall() if done.description else []

    def _batch(self, name: str, rows: Sequence[Row], values: dict[str, Any]) -> Any:
        query = self._sql[name]
        for column, cells in zip(query.columns, zip(*rows, strict=True), strict=True):
            values[column] = _column(cells)
        return self._execute(query, values)

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        if not rows:
            return None
        done = self._batch(name, rows, values)
        return None if done.rowcount == len(rows) else done.fetchall()

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        return self.all("claim", **values)

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        with self._cursor().copy(f"COPY genba.job ({', '.join(columns)}) FROM STDIN") as copy:
            for start in range(0, len(rows), 2000):
                copy.write(copy_text(rows[start : start + 2000]))

    def insert_alike(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        middle = "\t".join(map(_cell, same))
        with self._cursor().copy(f"COPY genba.job ({', '.join(columns)}) FROM STDIN") as copy:
            for start in range(0, len(rows), 2000):
                part = rows[start : start + 2000]
                copy.write("".join([f"{id}\t{middle}\t\\\\x{args.hex()}\n" for id, args in part]))

    def select(self, text: str, /, **values: Any) -> list[Row]:
        text = PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))
        # The values are written into it (force_generic_plan holds for parameters): a plan for all would take a task
        # that few have for one that every second job has.
        self._open()
        cursor = self._database.literal_cursor(self._conn, row_factory=self._database.tuples)
        return cursor.execute(text, values).fetchall()

    def names(self, values: Sequence[str]) -> Any:
        return TextColumn(values)

    def numbers(self, values: Sequence[int]) -> Any:
        return IntColumn(values)

    def ids(self, count: int) -> list[int]:
        return self._database.ids(self, count)

    def now(self) -> int:
        ((now,),) = self.all("now")
        return int(now)

    def _open(self) -> None:
        """Before a cursor goes on."""
        self._direct.begun()

    def _cursor(self) -> Any:
        self._open()
        return self._conn.cursor(binary=True, row_factory=self._database.tuples)


class CursorTransaction(PostgresTransaction):
    """By cursors of psycopg: on a user's connection, where they may have to begin a transaction."""

    def __init__(self, conn: Any, database: PostgresDatabase) -> None:
        self._conn = conn
        self._database = database
        self._sql = database.queries

    def ask(self, text: str, values: Mapping[str, Any]) -> Any:
        return self._cursor().execute(text, values, prepare=not self._database.pooled)

    def _open(self) -> None:
        pass

    def _cursor(self) -> Any:
        cursor = super()._cursor()
        register(cursor.adapters)
        return cursor


def _column(cells: tuple[Any, ...]) -> Any:
    """One array parameter. Our own dumpers: psycopg's dump element by element, ten times slower."""
    for cell in cells:
        if cell is not None:
            if isinstance(cell, int):
                return IntColumn(cells)
            return BytesColumn(cells) if isinstance(cell, bytes) else TextColumn(cells)
    return TextColumn(cells)


def copy_text(rows: Sequence[Row]) -> str:
    """Rows in COPY's text format, made column by column: most cells of a batch are the same in all rows."""
    columns: list[Iterable[str]] = []
    same = ""
    for cells in zip(*rows, strict=True):
        if cells.count(cells[0]) == len(cells):
            same += _cell(cells[0]) + "\t"
            continue
        if same:
            columns.append(repeat(same[:-1], len(rows)))
            same = ""
        columns.append(
            map(str, cells) if all(type(cell) is int for cell in cells) else map(_cell, cells)
        )
    if same:
        columns.append(repeat(same[:-1], len(rows)))
    return "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"


_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _cell(value: Any) -> str:
    """One value in COPY's text format."""
    if value is None:
        return "\\N"
    if isinstance(value, bytes):
        return "\\\\x" + value.hex()
    if isinstance(value, str):
        return value if value.isalnum() else value.translate(_ESCAPES)
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)


class PostgresDatabase:
    dialect = "postgres"
    parallel_writers = 2

    def __init__(self, url: str, queries: Mapping[str, Query], clock: Clock | None) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise StoreError("PostgreSQL needs psycopg: pip install 'genba[postgres]'") from error
        self._psycopg = psycopg
        self._connections = connection_class(psycopg)
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)
        self.tuples = psycopg.rows.tuple_row
        self.literal_cursor = psycopg.ClientCursor
        self.queries = {
            name: _translated(query, clock is not None) for name, query in queries.items()
        }
        self.clock = clock  # None: the server's; a test moves its own
        self._url, self._pooler = _without_pooler(url)
        self.pooler_found = False  # nobody has said so
        self._idle: list[LibpqConnection] = []
        self._lent: list[
            LibpqConnection
        ] = []  # idle too, but for joint transactions, where the user's statements run
        self._blocks: list[range] = []
        self._blocks_until = 0.0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._inherited: list[Any] = []  # a child must never close what its parent opened
        self._closed = False  # what is used all the same is closed after its use

    @property
    def pooled(self) -> bool:
        """A pooler lends us a session of the server for one transaction at a time."""
        return self._pooler == "transaction"

    def connect(self, **settings: Any) -> Any:
        """A new connection of its own, with deadlines on everything."""
        try:
            conn = self._connections.connect(
                self._url, autocommit=True, **{**self._deadlines(), **settings}
            )
        except self._psycopg.Error as error:
            if self._pooler is None and _UNKNOWN in str(error):
                self._pooler, self.pooler_found = "transaction", True
                settings.pop("options", None)
                return self.connect(**settings)
            text = scrub_password(str(error).strip(), self._url)
            told = StoreUnreachable(f"cannot reach {mask_password(self._url)}: {text}")
            raise told from (error if text == str(error).strip() else None)
        conn.prepared_max = MAX_PREPARED
        register(conn.adapters)
        if self._pooler is None:
            self.pooler_found = _is_lent(conn)
            self._pooler = "transaction" if self.pooler_found else "none"
        if self.pooled:
            conn.prepare_threshold = None
        return conn

    def _deadlines(self) -> dict[str, Any]:
        given = self._psycopg.conninfo.conninfo_to_dict(self._url)
        unwanted = (
            {*given, "options"} if self.pooled else given
        )  # nobody's session, nobody's settings
        return {name: value for name, value in DEADLINES.items() if name not in unwanted}

    def _own(self) -> None:
        """In a forked child: forget what belongs to the parent."""
        if self._pid != os.getpid():
            self._inherited, self._idle, self._blocks = (
                [*self._inherited, *self._idle, *self._lent],
                [],
                [],
            )
            self._lent = []
            self._lock, self._pid = threading.Lock(), os.getpid()

    @contextmanager
    def _straight(self) -> Iterator[LibpqConnection]:
        self._own()
        direct = self._rested(self._idle) or self._opened()
        try:
            yield direct
        except self._psycopg.Error as error:
            raise self.as_store_error(direct.conn, error) from error
        finally:
            self._rest(direct, self._idle)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        with self._straight() as direct:
            yield direct.conn

    def _opened(self, **settings: Any) -> LibpqConnection:
        conn = self.connect(**settings)
        return LibpqConnection(self._psycopg, conn, prepare=not self.pooled)

    def _rest(self, direct: LibpqConnection, pile: list[LibpqConnection]) -> None:
        """For the next one, unless a signal has cut it off in a statement, or we were closed meanwhile."""
        conn = direct.conn
        if conn.closed or conn.broken:
            return
        idle = conn.pgconn.transaction_status == self._psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            keep = idle and not self._closed
            if keep:
                pile.append(direct)
        if not keep:
            conn.close()

    def _rested(self, pile: list[LibpqConnection]) -> LibpqConnection | None:
        """An idle connection that still lives: a server that went away has closed its end, which is readable."""
        while True:
            with self._lock:
                direct = pile.pop() if pile else None
            if direct is None:
                return None
            conn = direct.conn
            if (
                not conn.closed
                and not conn.broken
                and not select.select([conn.pgconn.socket], [], [], 0)[0]
            ):
                return direct
            conn.close()

    def _spoken(self, error: Any) -> StoreError:
        text = scrub_password(str(error).strip(), self._url) or type(error).__name__
        if isinstance(error, self._psycopg.OperationalError):
            return StoreUnreachable(f"{mask_password(self._url)}: {text}")
        return StoreError(f"{mask_password(self._url)}: {text}")

    def bound(self, query: Query, values: Mapping[str, Any]) -> BoundStatement:
        text = query.text
        for literal in query.literals:
            text = text.replace(f"%({literal})s", str(int(values[literal])))
        if self.clock is not None:
            values = {**values, "now": self.clock.now(), "boot": self.clock.boot()}
        return text, values

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._straight() as direct:
            direct.begin()
            try:
                yield PostgresTransaction(direct, self)
            except BaseException:  # also a stop must not leave it open; raised again
                direct.rollback()
                raise
            direct.commit()

    @contextmanager
    def single_write(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._straight() as direct:
            yield PostgresTransaction(direct, self)

    def pipeline(self, *steps: QueryCall) -> list[list[Row]]:
        there = [place for place, (name, _) in enumerate(steps) if self.queries[name].text]
        asked = [
            self.bound(self.queries[name], values)
            for name, values in (steps[place] for place in there)
        ]
        with defer_stop, self._straight() as direct:
            found = dict(zip(there, direct.pipeline(asked), strict=True))
        return [found[place].rows if place in found else [] for place in range(len(steps))]

    @contextmanager
    def statement(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._straight() as direct:
            yield PostgresTransaction(direct, self)

    @contextmanager
    def snapshot(self) -> Iterator[PostgresSnapshot]:
        with self._connection() as conn, _without_limit(conn), conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            conn.execute("SET LOCAL statement_timeout = 0")  # all there is may be much
            conn.execute(
                "SET LOCAL idle_in_transaction_session_timeout = '60s'"
            )  # and whoever reads it may be slow
            for way in ("seqscan", "hashjoin", "mergejoin"):
                conn.execute(f"SET LOCAL enable_{way} = on")
            yield PostgresSnapshot(conn, self)

    @contextmanager
    def adopt(self, conn: Any) -> Iterator[PostgresTransaction]:
        if not isinstance(conn, self._psycopg.Connection):
            raise StoreError(
                f"conn must be a psycopg connection, not {type(conn).__module__}.{type(conn).__name__}"
            )
        idle = self._psycopg.pq.TransactionStatus.IDLE
        if conn.autocommit and conn.info.transaction_status == idle:
            raise StoreError(
                "conn has no open transaction: use `with conn.transaction():` or autocommit=False"
            )
        try:
            yield CursorTransaction(conn, self)
        except self._psycopg.Error as error:
            raise self._spoken(error) from error

    @defer_stop
    def job_transaction(self, within: float) -> PostgresJobTransaction:
        self._own()
        direct = self._rested(self._lent)
        if direct is None:
            lent = (
                ""
                if self.pooled
                else " ".join(f"-c {name}={value}" for name, value in LENT.items())
            )
            direct = self._opened(**({"options": lent} if lent else {}))
        conn = direct.conn
        try:
            conn.row_factory, conn.limit = (
                self.tuples,
                None,
            )  # the user's statements take as long as they take
            if not self.pooled:
                conn.execute("RESET ALL")  # what the last user has set
            return PostgresJobTransaction(self, direct)
        except self._psycopg.Error as error:
            conn.close()
            raise self._spoken(error) from error

    def give_back(self, direct: LibpqConnection) -> None:
        self._rest(direct, self._lent)

    def as_store_error(self, conn: Any, error: Exception) -> StoreError:
        if conn.closed or conn.broken:
            self._drop_idle()
            return AnswerLost(
                f"{mask_password(self._url)}: {scrub_password(str(error).strip(), self._url)}"
            )
        return self._spoken(error)

    def _drop_idle(self) -> None:
        """What has cut one off has probably cut off all: to find that out of each would take its whole deadline."""
        with self._lock:
            idle, self._idle = self._idle, []
        for direct in idle:
            direct.conn.close()

    def ids(self, tx: PostgresTransaction, count: int) -> list[int]:
        """From the blocks at hand; new ones come from a sequence, which no rollback gives back."""
        with self._lock:
            now = time.monotonic()
            if now > self._blocks_until:
                self._blocks = []
            held = sum(map(len, self._blocks))
            if held < count:
                self._blocks_until = now + AGE_OF_IDS if not held else self._blocks_until
                steps = -(-(count - held) // BLOCK)
                more = "SELECT nextval('genba.job_id') FROM generate_series(1, %(steps)s)"
                got = tx.ask(more, {"steps": steps}).fetchall()
                self._blocks += [range(start, start + BLOCK) for (start,) in sorted(got)]
            ids: list[int] = []
            while len(ids) < count:
                block = self._blocks.pop(0)
                wanted = count - len(ids)
                ids += block[:wanted]
                if len(block) > wanted:
                    self._blocks.insert(0, block[wanted:])
            return ids

    def home(self) -> DiskInfo:
        return DiskInfo()

    def writer(self, *, whoever: bool = False) -> None:
        return None  # many write at once

    def mark(self) -> object:
        return object()

    @contextmanager
    def schema(self) -> Iterator[PostgresSchema]:
        with defer_stop, self._connection() as conn:
            yield PostgresSchema(conn)

    @contextmanager
    def migrations(self) -> Iterator[PostgresSchema]:
        with defer_stop, self._connection() as conn, _without_limit(conn), conn.transaction():
            conn.execute("SET LOCAL lock_timeout = '60s'")
            conn.execute("SET LOCAL statement_timeout = '60s'")
            conn.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            conn.execute("SET LOCAL lock_timeout = '5s'")
            conn.execute(
                "SET LOCAL client_connection_check_interval = '500ms'"
            )  # who is killed keeps nobody waiting
            yield PostgresSchema(conn)

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._closed = True
                idle = [*self._idle, *self._lent]
                self._idle, self._lent = [], []
            for direct in idle:
                direct.conn.close()


@contextmanager
def _without_limit(conn: Any) -> Iterator[None]:
    """For what may take longer than a statement of ours; the server has its own deadlines for it."""
    before, conn.limit = getattr(conn, "limit", ANSWER_SECONDS), None
    try:
        yield
    finally:
        conn.limit = before


class PostgresSnapshot:
    def __init__(self, conn: Any, database: PostgresDatabase) -> None:
        self._conn = conn
        self._sql = database.queries
        self._count = 0

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        self._count += 1
        with self._conn.cursor(f"genba_{self._count}") as cursor:
            cursor.itersize = 2000
            yield from cursor.execute(self._sql[name].text, values)


class PostgresJobTransaction:
    """With the server's own planner settings, for the user's statements; only deadlines are ours."""

    expired = ""  # a row lock of ours harms nobody else

    def __init__(self, database: PostgresDatabase, direct: LibpqConnection) -> None:
        self.connection = direct.conn
        self._direct = direct
        self._database = database
        self._block = direct.conn.transaction()
        self._block.__enter__()

    @contextmanager
    def ours(self) -> Iterator[PostgresTransaction]:
        try:
            yield CursorTransaction(self.connection, self._database)
        except self._database.errors as error:
            raise self._database.as_store_error(self.connection, error) from error

    def take_back(self) -> None:
        status = self.connection.info.transaction_status.name
        if status == "INERROR":
            raise StoreError(
                "a statement in the job's transaction had failed, so that it cannot be committed"
            )
        if status != "INTRANS":
            raise StoreError(
                "the transaction was ended inside its block: leave COMMIT and ROLLBACK to the block"
            )

    @defer_stop
    def commit(self) -> None:
        try:
            self._block.__exit__(None, None, None)
        except self._database.errors as error:
            raise self._database.as_store_error(self.connection, error) from error
        finally:
            self._database.give_back(self._direct)

    @defer_stop
    def rollback(self) -> None:
        undo = RuntimeError("rolled back")
        with suppress(
            RuntimeError, *self._database.errors
        ):  # psycopg closes what it cannot roll back
            self._block.__exit__(RuntimeError, undo, None)
        self._database.give_back(self._direct)


class PostgresSchema:
    """All pending migrations are one transaction, under a lock that ends with it."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def applied(self) -> Mapping[int, str]:
        if self._conn.execute("SELECT to_regclass('genba.migration')").fetchone()[0] is None:
            return {}
        return dict(self._conn.execute("SELECT version, name FROM genba.migration").fetchall())

    def serves(self) -> Mapping[int, int]:
        if not self.applied():
            return {}
        return dict(
            self._conn.execute(
                "SELECT version, COALESCE(serves, version) FROM genba.migration"
            ).fetchall()
        )

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        self._conn.execute("CREATE SCHEMA IF NOT EXISTS genba")
        self._conn.execute(
            "CREATE TABLE IF NOT EXISTS genba.migration "
            "(version bigint PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), "
            "serves bigint)"
        )
        self._conn.execute(script)
        told = (version, name, serves)
        self._conn.execute(
            "INSERT INTO genba.migration (version, name, serves) VALUES (%s, %s, %s)", told
        )

    def drop_all(self) -> list[str]:
        """Without CASCADE, so that what somebody has built upon our tables, or put beside them, is not lost."""
        there = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('genba') AND relkind = %s ORDER BY 1"
        tables = [
            name for (name,) in self._conn.execute(there, ("r",)).fetchall() if name in TABLES
        ]
        if not tables:
            return []
        self._conn.execute(f"DROP TABLE {', '.join(f'genba.{name}' for name in tables)}")
        sequences = [
            name for (name,) in self._conn.execute(there, ("S",)).fetchall() if name in SEQUENCES
        ]
        for name in sequences:
            self._conn.execute(f"DROP SEQUENCE genba.{name}")
        rest = "SELECT 1 FROM pg_class WHERE relnamespace = to_regnamespace('genba')"
        if not self._conn.execute(rest).fetchone():
            self._conn.execute("DROP SCHEMA genba")
        return [f"genba.{name}" for name in (*tables, *sequences)]


def _without_pooler(url: str) -> tuple[str, str | None]:
    """The URL as the driver knows it, and what it says of a pooler; None: nothing."""
    parts = split_url(url)
    modes = [
        value for name, value in parse_qsl(parts.query, keep_blank_values=True) if name == "pooler"
    ]
    if not modes:
        return url, None
    if modes[-1] not in ("transaction", "session"):
        raise BadOption(f"pooler={modes[-1]} is not known: pooler=transaction or pooler=session")
    rest = "&".join(part for part in parts.query.split("&") if not part.startswith("pooler="))
    return urlunsplit(parts._replace(query=rest)), modes[-1]


def _is_lent(conn: Any) -> bool:
    """Whether we talk to other sessions than the one that greeted us: a pooler is in between."""
    ours = {conn.execute("SELECT pg_backend_pid()", prepare=False).fetchone()[0] for _ in range(4)}
    return ours != {conn.info.backend_pid}


def _translated(query: Query, bound: bool) -> Query:
    text = query.text.replace("%", "%%")
    text = text.replace("/* now */", ":now" if bound else NOW).replace(
        "/* boot */", ":boot" if bound else NOW
    )
    text = text.replace("/* lock */", "FOR UPDATE SKIP LOCKED").replace("/* args */", "args")
    return Query(query.name, PARAMETER.sub(r"%(\1)s", text), query.columns, query.literals)
