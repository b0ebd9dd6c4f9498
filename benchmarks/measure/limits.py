"""The limits: what the database gives to a plain loop with no job system around it.

The drain limit is one client that claims and finishes batches of 100 in a bare table.  The enqueue limits write
the rows that genba has written, again, under other ids, into the same table with the same indexes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

SHIFT = 1_000_000_000_000  # from the id of a job of genba's to the id of its copy

_WRITTEN = (
    "created_at, due_at, rank, state, expires_at, unique_until, parent_id, priority, open_deps, once_waiting, "
    "namespace, queue, task, key, key_hash, tags, options, args"
)  # what genba writes of a new job, besides its id


class Seen(NamedTuple):
    """A job and its history, as the tables have it."""

    id: int
    state: str
    args: bytes
    result: bytes | None
    finished_at: int | None
    tries: int
    cause: str | None
    pid: int | None
    claimed_at: int | None
    ended_at: int | None


_ENDED = """
SELECT (SELECT count(*) FROM genba.attempt) + (SELECT count(*) FROM genba.job WHERE ran_until IS NOT NULL)
"""
_SEEN = """
SELECT j.id, j.state, j.args, j.result, j.finished_at, count(a.job_id), min(a.cause), min(a.pid), min(a.claimed_at),
       max(a.ended_at)
  FROM genba.job j LEFT JOIN (
       SELECT job_id, cause, pid, claimed_at, ended_at FROM genba.attempt
        UNION ALL SELECT id, 'returned', ran_pid, claimed_at, ran_until FROM genba.job WHERE ran_until IS NOT NULL
       ) AS a ON a.job_id = j.id
 WHERE j.id < 1000000000000 AND j.state <> 'waiting'
 GROUP BY j.id
"""


class Raw(Protocol):
    """One plain connection; rates are rows per second."""

    version: str

    def drain(self, jobs: int) -> float:
        """Claim and finish that many rows of a bare table."""
        ...

    def copy_again(self, count: int) -> float:
        """The last `count` jobs once more, in one commit and the quickest way the engine has."""
        ...

    def commit_again(self, count: int) -> float:
        """The last `count` jobs once more, each in a commit of its own."""
        ...

    def is_final(self, id: int) -> bool: ...

    def finished(self) -> int:
        """How many attempts have ended."""
        ...

    def ended(self) -> int:
        """How many jobs are final."""
        ...

    def waiting(self) -> int: ...

    def seen(self) -> list[Seen]:
        """All jobs that have left the queue."""
        ...


@contextmanager
def raw(url: str) -> Iterator[Raw]:
    """A plain connection to `url`, as durable as genba's own."""
    if urlsplit(url).scheme == "sqlite":
        import apsw

        lite = apsw.Connection(unquote(urlsplit(url).path)[1:])
        try:
            yield RawSqlite(lite)
        finally:
            lite.close()
    else:
        import psycopg

        with psycopg.connect(url, autocommit=True) as conn:
            yield RawPostgres(conn)


class RawSqlite:
    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._turn = 0
        self.version = f"SQLite {conn.execute('SELECT sqlite_version()').fetchone()[0]}"
        conn.set_busy_timeout(10_000)
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "wal_autocheckpoint = 4000",
            "cache_size = -65536",
        ):
            conn.execute(f"PRAGMA {pragma}").fetchall()

    def drain(self, jobs: int) -> float:
        conn = self._conn
        conn.execute(
            "CREATE TABLE bare (id INTEGER PRIMARY KEY, rank INTEGER NOT NULL DEFAULT 0, state INTEGER NOT NULL "
            "DEFAULT 1, attempt INTEGER NOT NULL DEFAULT 0, claim TEXT, node INTEGER, task TEXT, args TEXT, "
            "result TEXT, started INTEGER, finished INTEGER, created INTEGER)"
        )
        conn.execute("CREATE INDEX bare_ready ON bare (rank, id) WHERE state = 1")
        with conn:
            rows = ((i, "number", f'{{"n":{i}}}') for i in range(jobs))
            conn.executemany("INSERT INTO bare (id, task, args, created) VALUES (?, ?, ?, 1)", rows)
        claim = (
            "UPDATE bare SET state = 2, attempt = attempt + 1, node = 1, claim = 'x' WHERE id IN "
            "(SELECT id FROM bare WHERE state = 1 ORDER BY rank, id LIMIT 100) RETURNING id, attempt, args"
        )
        finish = (
            "UPDATE bare SET state = 3, result = ?3, started = ?4, finished = ?5, claim = NULL "
            "WHERE id = ?1 AND attempt = ?2"
        )
        began, done = time.perf_counter(), 0
        claimed: list[Any] = []
        while True:
            conn.execute(
                "BEGIN IMMEDIATE"
            )  # the finish of one batch and the claim of the next share a commit
            if claimed:
                conn.executemany(
                    finish, [(id, attempt, str(id), 1, 2) for id, attempt, _ in claimed]
                )
                done += len(claimed)
            claimed = conn.execute(claim).fetchall()
            conn.execute("COMMIT")
            if not claimed:
                break
        seconds = time.perf_counter() - began
        conn.execute("DROP TABLE bare")
        return done / seconds

    def copy_again(self, count: int) -> float:
        rows = self._copies(count)
        began = time.perf_counter()
        with self._conn:
            self._conn.executemany(self._insert, rows)
        return count / (time.perf_counter() - began)

    def commit_again(self, count: int) -> float:
        rows = self._copies(count)
        began = time.perf_counter()
        for row in rows:
            self._conn.execute(self._insert, row)
        return count / (time.perf_counter() - began)

    def _copies(self, count: int) -> list[tuple[Any, ...]]:
        self._turn += 1  # copied before, they need ids of their own again
        new = f"id + {SHIFT * self._turn}"
        text = f"SELECT {new}, {_WRITTEN} FROM genba_job WHERE id < {SHIFT} ORDER BY id DESC LIMIT {count}"
        return sorted(self._conn.execute(text))

    @property
    def _insert(self) -> str:
        places = ", ".join("?" * (_WRITTEN.count(",") + 2))
        return f"INSERT INTO genba_job (id, {_WRITTEN}) VALUES ({places})"

    def is_final(self, id: int) -> bool:
        found = self._conn.execute(
            "SELECT finished_at FROM genba_job WHERE id = ?", (id,)
        ).fetchone()
        return found is not None and found[0] is not None

    def finished(self) -> int:
        return int(self._conn.execute(_ENDED.replace("genba.", "genba_")).fetchone()[0])

    def ended(self) -> int:
        return int(
            self._conn.execute(
                "SELECT count(*) FROM genba_job WHERE finished_at IS NOT NULL"
            ).fetchone()[0]
        )

    def waiting(self) -> int:
        text = f"SELECT count(*) FROM genba_job WHERE state = 'waiting' AND id < {SHIFT}"
        return int(self._conn.execute(text).fetchone()[0])

    def seen(self) -> list[Seen]:
        return [Seen(*row) for row in self._conn.execute(_SEEN.replace("genba.", "genba_"))]


class RawPostgres:
    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._turn = 0
        self.version = f"PostgreSQL {conn.execute('SHOW server_version').fetchone()[0].split()[0]}"

    def drain(self, jobs: int) -> float:
        conn = self._conn
        conn.execute(
            "CREATE TABLE bare (id bigint PRIMARY KEY, priority int NOT NULL DEFAULT 0, state smallint NOT NULL "
            "DEFAULT 1, attempt int NOT NULL DEFAULT 0, claim bigint, node int, task text NOT NULL, args text NOT "
            "NULL, result text, queue text NOT NULL DEFAULT 'default', created bigint NOT NULL DEFAULT 0, "
            "started bigint, finished bigint)"
        )
        conn.execute("CREATE INDEX bare_ready ON bare (queue, priority DESC, id) WHERE state = 1")
        conn.execute("CREATE INDEX bare_running ON bare (node) WHERE state = 2")
        with conn.cursor() as cursor, cursor.copy("COPY bare (id, task, args) FROM STDIN") as copy:
            for i in range(jobs):
                copy.write_row((i, "number", f'{{"n":{i}}}'))
        conn.execute("ANALYZE bare")
        claim = (
            "UPDATE bare SET state = 2, attempt = attempt + 1, node = 1, claim = %s WHERE id = ANY(ARRAY(SELECT id "
            "FROM bare WHERE state = 1 AND queue = 'default' ORDER BY priority DESC, id "
            "LIMIT 100 FOR UPDATE SKIP LOCKED)) RETURNING id, attempt, args"
        )
        finish = (
            "UPDATE bare SET state = 3, result = u.r, started = u.s, finished = u.f, node = NULL "
            "FROM unnest(%s::bigint[], %s::int[], %s::text[], %s::bigint[], %s::bigint[]) AS u (id, a, r, s, f) "
            "WHERE bare.id = u.id AND bare.attempt = u.a"
        )
        cursor = conn.cursor(binary=True)
        began, done = time.perf_counter(), 0
        while claimed := cursor.execute(claim, (done,), prepare=True).fetchall():
            ids, attempts, _ = zip(*claimed, strict=True)
            ones = [1] * len(ids)
            cursor.execute(
                finish, (list(ids), list(attempts), list(map(str, ids)), ones, ones), prepare=True
            )
            done += len(claimed)
        seconds = time.perf_counter() - began
        conn.execute("DROP TABLE bare")
        return done / seconds

    def copy_again(self, count: int) -> float:
        with self._conn.cursor() as cursor:
            with cursor.copy(f"COPY ({self._copies(count)}) TO STDOUT") as copy:
                rows = b"".join(copy)
            began = time.perf_counter()
            with cursor.copy(f"COPY genba.job (id, {_WRITTEN}) FROM STDIN") as copy:
                copy.write(rows)
            return count / (time.perf_counter() - began)

    def commit_again(self, count: int) -> float:
        places = ", ".join(["%s"] * (_WRITTEN.count(",") + 2))
        insert = f"INSERT INTO genba.job (id, {_WRITTEN}) VALUES ({places})"
        with self._conn.cursor(binary=True) as cursor:
            rows = sorted(cursor.execute(self._copies(count)).fetchall())
            began = time.perf_counter()
            for row in rows:
                cursor.execute(insert, row, prepare=True)
            return count / (time.perf_counter() - began)

    def _copies(self, count: int) -> str:
        self._turn += 1  # copied before, they need ids of their own again
        new = f"id + {SHIFT * self._turn}"
        return f"SELECT {new}, {_WRITTEN} FROM genba.job WHERE id < {SHIFT} ORDER BY id DESC LIMIT {count}"

    def is_final(self, id: int) -> bool:
        found = self._conn.execute(
            "SELECT finished_at FROM genba.job WHERE id = %s", (id,), prepare=True
        ).fetchone()
        return found is not None and found[0] is not None

    def finished(self) -> int:
        return int(self._conn.execute(_ENDED).fetchone()[0])

    def ended(self) -> int:
        return int(
            self._conn.execute(
                "SELECT count(*) FROM genba.job WHERE finished_at IS NOT NULL"
            ).fetchone()[0]
        )

    def waiting(self) -> int:
        text = f"SELECT count(*) FROM genba.job WHERE state = 'waiting' AND id < {SHIFT}"
        return int(self._conn.execute(text).fetchone()[0])

    def seen(self) -> list[Seen]:
        return [Seen(*row) for row in self._conn.execute(_SEEN)]
