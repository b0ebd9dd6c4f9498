"""PostgreSQL: the server's clock, row locks, several writers at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlunsplit

from genba.domain.clock import Clock
from genba.domain.url import mask_password, scrub_password, split_url
from genba.errors import BadOption, StoreError, StoreUnreachable
from genba.signal_safe import defer_stop
from genba.storage.engines.database import AnswerLost, DiskInfo, QueryCall, Row
from genba.storage.engines.postgres.arrays import register
from genba.storage.engines.postgres.deadline import ANSWER_SECONDS, connection_class
from genba.storage.engines.postgres.idle_connections import IdleConnections
from genba.storage.engines.postgres.job_ids import JobIdBlocks
from genba.storage.engines.postgres.job_transaction import PostgresJobTransaction
from genba.storage.engines.postgres.libpq import MAX_PREPARED, BoundStatement, LibpqConnection
from genba.storage.engines.postgres.schema import MIGRATION_LOCK, PostgresSchema
from genba.storage.engines.postgres.transaction import (
    CursorTransaction,
    PostgresSnapshot,
    PostgresTransaction,
)
from genba.storage.engines.queries import PARAMETER, Query

# statement_timestamp() is the same for the whole statement; as a sub-select it is computed once,
# not per row.
NOW = "(SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)"
# Every statement of ours uses an index. Before the first ANALYZE the planner does not know that,
# and reads the whole table; and it need not plan again for each batch.
SESSION = {
    "statement_timeout": "10s",
    "lock_timeout": "5s",
    # A suspended process keeps its row locked, while other nodes want to declare it dead.
    "idle_in_transaction_session_timeout": "10s",
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
# For transactions with user code: more time for its statements, and the server's planner settings.
JOB_TRANSACTION_SESSION = {
    "statement_timeout": "60s",
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "60s",
    # So that no statement of a killed worker keeps the job's row locked.
    "client_connection_check_interval": "500ms",
}
# How PgBouncer refuses our settings.
_UNKNOWN_PARAMETER = "unsupported startup parameter"


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
        self.tuples: Any = psycopg.rows.tuple_row
        self.literal_cursor: Any = psycopg.ClientCursor
        self.queries: Mapping[str, Query] = {
            name: _translated(query, clock is not None) for name, query in queries.items()
        }
        self.clock = clock  # None: the server's; tests set their own
        self._url, self._pooler = _without_pooler(url)
        self.pooler_found = False
        self._idle = IdleConnections(psycopg)
        self._idle_for_jobs = IdleConnections(psycopg)  # for transactions with user code
        self._job_ids = JobIdBlocks()
        self._pid = os.getpid()
        self._inherited: list[Any] = []  # a child must never close a connection of its parent

    # connections

    @property
    def pooled(self) -> bool:
        """Whether a pooler gives us a session of the server for one transaction at a time."""
        return self._pooler == "transaction"

    def connect(self, **settings: Any) -> Any:
        """Open a new connection, with deadlines on everything."""
        try:
            conn = self._connections.connect(
                self._url, autocommit=True, **{**self._deadlines(), **settings}
            )
        except self._psycopg.Error as error:
            if self._pooler is None and _UNKNOWN_PARAMETER in str(error):
                self._pooler, self.pooler_found = "transaction", True
                settings.pop("options", None)
                return self.connect(**settings)
            self._raise_unreachable(error)
        try:
            self._set_up(conn)
        except self._psycopg.Error as error:
            conn.close()
            self._raise_unreachable(error)
        except BaseException:
            conn.close()
            raise
        return conn

    def _set_up(self, conn: Any) -> None:
        conn.prepared_max = MAX_PREPARED
        register(conn.adapters)
        if self._pooler is None:
            self.pooler_found = _is_pooled(conn)
            self._pooler = "transaction" if self.pooler_found else "none"
        if self.pooled:
            conn.prepare_threshold = None

    def _raise_unreachable(self, error: Exception) -> NoReturn:
        said = str(error).strip()
        text = scrub_password(said, self._url)
        unreachable = StoreUnreachable(f"cannot reach {mask_password(self._url)}: {text}")
        # The original error is attached only if it does not contain the password.
        raise unreachable from (error if text == said else None)

    def _deadlines(self) -> dict[str, Any]:
        in_url = self._psycopg.conninfo.conninfo_to_dict(self._url)
        # A pooled session is shared, so it gets no settings of ours.
        left_out = {*in_url, "options"} if self.pooled else in_url
        return {name: value for name, value in DEADLINES.items() if name not in left_out}

    def _forget_parent(self) -> None:
        """In a forked child, put aside the connections that belong to the parent."""
        if self._pid != os.getpid():
            self._inherited += [self._idle, self._idle_for_jobs]
            self._idle, self._idle_for_jobs = (
                IdleConnections(self._psycopg, closed=idle.closed)
                for idle in (self._idle, self._idle_for_jobs)
            )
            self._job_ids, self._pid = JobIdBlocks(), os.getpid()

    @contextmanager
    def _direct_connection(self) -> Iterator[LibpqConnection]:
        self._forget_parent()
        direct = self._idle.take() or self._new_connection()
        try:
            yield direct
        except self._psycopg.Error as error:
            raise self.as_store_error(direct.conn, error) from error
        finally:
            self._idle.put_back(direct)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        with self._direct_connection() as direct:
            yield direct.conn

    def _new_connection(self, **settings: Any) -> LibpqConnection:
        conn = self.connect(**settings)
        return LibpqConnection(self._psycopg, conn, prepare=not self.pooled)

    def give_back(self, direct: LibpqConnection) -> None:
        """Keep a connection of a job's transaction for the next one."""
        self._idle_for_jobs.put_back(direct)

    def close(self) -> None:
        if self._pid == os.getpid():
            self._idle.close()
            self._idle_for_jobs.close()

    # errors

    def as_store_error(self, conn: Any, error: Exception) -> StoreError:
        if conn.closed or conn.broken:
            # The other connections are probably lost too: each would need its whole deadline to
            # find out.
            self._idle.drop()
            return AnswerLost(
                f"{mask_password(self._url)}: {scrub_password(str(error).strip(), self._url)}"
            )
        return self._error_on_open_connection(error)

    def _error_on_open_connection(self, error: Exception) -> StoreError:
        text = scrub_password(str(error).strip(), self._url) or type(error).__name__
        if isinstance(error, self._psycopg.OperationalError):
            return StoreUnreachable(f"{mask_password(self._url)}: {text}")
        return StoreError(f"{mask_password(self._url)}: {text}")

    # transactions

    def bound(self, query: Query, values: Mapping[str, Any]) -> BoundStatement:
        text = query.text
        for literal in query.literals:
            text = text.replace(f"%({literal})s", str(int(values[literal])))
        if self.clock is not None:
            values = {**values, "now": self.clock.now(), "boot": self.clock.boot()}
        return text, values

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._direct_connection() as direct:
            direct.begin()
            try:
                yield PostgresTransaction(direct, self)
            except BaseException:  # even a stop signal must not leave it open; raised again
                direct.rollback()
                raise
            direct.commit()

    @contextmanager
    def single_write(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._direct_connection() as direct:
            yield PostgresTransaction(direct, self)

    def pipeline(self, *calls: QueryCall) -> list[list[Row]]:
        # A query without text is not needed on this engine, and returns no rows.
        places = [place for place, (name, _) in enumerate(calls) if self.queries[name].text]
        statements = [
            self.bound(self.queries[name], values)
            for name, values in (calls[place] for place in places)
        ]
        with defer_stop, self._direct_connection() as direct:
            results = dict(zip(places, direct.pipeline(statements), strict=True))
        return [results[place].rows if place in results else [] for place in range(len(calls))]

    @contextmanager
    def statement(self) -> Iterator[PostgresTransaction]:
        with defer_stop, self._direct_connection() as direct:
            yield PostgresTransaction(direct, self)

    @contextmanager
    def snapshot(self) -> Iterator[PostgresSnapshot]:
        with self._connection() as conn, _without_deadline(conn), conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # Reading everything may take long, and so may the reader between two rows.
            conn.execute("SET LOCAL statement_timeout = 0")
            conn.execute("SET LOCAL idle_in_transaction_session_timeout = '60s'")
            for way in ("seqscan", "hashjoin", "mergejoin"):
                conn.execute(f"SET LOCAL enable_{way} = on")
            yield PostgresSnapshot(conn, self.queries)

    @contextmanager
    def adopt(self, conn: Any) -> Iterator[PostgresTransaction]:
        if not isinstance(conn, self._psycopg.Connection):
            kind = f"{type(conn).__module__}.{type(conn).__name__}"
            raise StoreError(f"conn must be a psycopg connection, not {kind}")
        idle = self._psycopg.pq.TransactionStatus.IDLE
        if conn.autocommit and conn.info.transaction_status == idle:
            raise StoreError(
                "conn has no open transaction: use `with conn.transaction():` or autocommit=False"
            )
        try:
            yield CursorTransaction(conn, self)
        except self._psycopg.Error as error:
            raise self._error_on_open_connection(error) from error

    @defer_stop
    def job_transaction(self, within: float) -> PostgresJobTransaction:
        self._forget_parent()
        direct = self._idle_for_jobs.take()
        if direct is None:
            options = " ".join(
                f"-c {name}={value}" for name, value in JOB_TRANSACTION_SESSION.items()
            )
            direct = self._new_connection(**({} if self.pooled else {"options": options}))
        conn = direct.conn
        try:
            # The user's statements have no deadline of ours.
            conn.row_factory, conn.limit = self.tuples, None
            if not self.pooled:
                conn.execute("RESET ALL")  # the settings of the last user
            return PostgresJobTransaction(self, direct)
        except self._psycopg.Error as error:
            conn.close()
            raise self._error_on_open_connection(error) from error

    def ids(self, tx: PostgresTransaction, count: int) -> list[int]:
        def next_blocks(blocks: int) -> list[int]:
            text = "SELECT nextval('genba.job_id') FROM generate_series(1, %(blocks)s)"
            return sorted(start for (start,) in tx.execute(text, {"blocks": blocks}).fetchall())

        return self._job_ids.take(count, next_blocks)

    # the schema

    @contextmanager
    def schema(self) -> Iterator[PostgresSchema]:
        with defer_stop, self._connection() as conn:
            yield PostgresSchema(conn)

    @contextmanager
    def migrations(self) -> Iterator[PostgresSchema]:
        with defer_stop, self._connection() as conn, _without_deadline(conn), conn.transaction():
            conn.execute("SET LOCAL lock_timeout = '60s'")
            conn.execute("SET LOCAL statement_timeout = '60s'")
            conn.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            conn.execute("SET LOCAL lock_timeout = '5s'")
            # If this process is killed, other processes do not have to wait.
            conn.execute("SET LOCAL client_connection_check_interval = '500ms'")
            yield PostgresSchema(conn)

    # facts

    def disk(self) -> DiskInfo:
        return DiskInfo()

    def writing_process(self, *, any_holder: bool = False) -> None:
        return None  # many write at once

    def write_marker(self) -> object:
        return object()


@contextmanager
def _without_deadline(conn: Any) -> Iterator[None]:
    """Allow more time than a statement of ours takes; the server has its own limits for it."""
    before, conn.limit = getattr(conn, "limit", ANSWER_SECONDS), None
    try:
        yield
    finally:
        conn.limit = before


def _without_pooler(url: str) -> tuple[str, str | None]:
    """Split the URL into the driver's URL and the pooler mode; None if it names no mode."""
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


def _is_pooled(conn: Any) -> bool:
    """Test for a pooler: statements then run in other sessions than the one that greeted us."""
    pids = {conn.execute("SELECT pg_backend_pid()", prepare=False).fetchone()[0] for _ in range(4)}
    return pids != {conn.info.backend_pid}


def _translated(query: Query, own_clock: bool) -> Query:
    text = query.text.replace("%", "%%")
    text = text.replace("/* now */", ":now" if own_clock else NOW)
    text = text.replace("/* boot */", ":boot" if own_clock else NOW)
    text = text.replace("/* lock */", "FOR UPDATE SKIP LOCKED").replace("/* args */", "args")
    return Query(query.name, PARAMETER.sub(r"%(\1)s", text), query.columns, query.literals)
