"""Statements on one SQLite connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from genba.domain.clock import Clock
from genba.storage.engines.database import LONG_ARGUMENTS_BYTES, Row
from genba.storage.engines.queries import Query
from genba.storage.engines.sqlite.batch import ROWS_PER_STATEMENT, BatchStatement
from genba.storage.engines.sqlite.drivers import ApswDriver, Sqlite3Driver
from genba.storage.records import Claimed

_json = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(list[list[Any]]).decode

_ARGS, _SAVED = Claimed._fields.index("args"), Claimed._fields.index("saved")


class StatementSource(Protocol):
    """What a transaction needs of its database."""

    queries: Mapping[str, Query]
    batches: Mapping[str, BatchStatement]
    clock: Clock
    driver: ApswDriver | Sqlite3Driver


class SqliteTransaction:
    def __init__(self, conn: Any, source: StatementSource, *, begun: bool = False) -> None:
        self._conn = conn
        # The driver's change count while this transaction, just begun, has written nothing; or -1.
        self._untouched = source.driver.changes(conn) if begun else -1
        self._sql = source.queries
        self._clock = source.clock
        self._batches = source.batches
        self._driver = source.driver

    def _bound(self, values: dict[str, Any]) -> dict[str, Any]:
        values["now"] = self._clock.now()
        values["boot"] = self._clock.boot()
        return values

    def all(self, name: str, /, **values: Any) -> list[Row]:
        rows: list[Row] = self._conn.execute(self._sql[name].text, self._bound(values)).fetchall()
        return rows

    def one(self, name: str, /, **values: Any) -> Row | None:
        # No variable keeps the cursor: COMMIT fails while its statement is unfinished.
        row: Row | None = self._conn.execute(self._sql[name].text, self._bound(values)).fetchone()
        return row

    def run(self, name: str, /, **values: Any) -> int:
        if not self._sql[name].text:
            return 0
        return self._driver.run(self._conn, self._sql[name].text, self._bound(values))

    def all_json(self, name: str, /, **values: Any) -> list[Row]:
        ((packed,),) = self._conn.execute(self._sql[name].text, self._bound(values)).fetchall()
        return [tuple(row) for row in _unpack(packed)]

    # batches

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        batch = self._batches[name]
        if not rows or not batch.text:
            return []
        shared = self._bound(values)
        if not batch.wide:
            return self._driver.batch(self._conn, batch.text, batch.in_order(rows, shared))
        if not batch.returning:
            return self._run_wide(batch, rows, shared, "")
        returned = self._unless_all_match(batch, rows, shared)
        return [row[: batch.returned] for row in rows] if returned is None else returned

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        if not rows:
            return None
        return self._unless_all_match(self._batches[name], rows, self._bound(values))

    def _unless_all_match(
        self, batch: BatchStatement, rows: Sequence[Row], shared: Mapping[str, Any]
    ) -> list[Row] | None:
        """Run the batch; return None if every row matched, otherwise the rows returned.

        RETURNING costs half an update more, so the first run only counts the changed rows. If some
        are missing, it is rolled back and repeated with RETURNING.
        """
        conn, before = self._conn, self._driver.changes(self._conn)
        alone = before == self._untouched
        if not alone:
            conn.execute("SAVEPOINT genba_batch")
        self._run_wide(batch, rows, shared, "")
        complete = self._driver.changes(conn) - before == len(rows)
        if alone and not complete:
            # Without a savepoint, which would copy every page for this rare case.
            conn.execute("ROLLBACK")
            conn.execute("BEGIN IMMEDIATE")
            self._untouched = self._driver.changes(conn)
        elif not alone:
            conn.execute("RELEASE genba_batch" if complete else "ROLLBACK TO genba_batch")
            if not complete:
                conn.execute("RELEASE genba_batch")
        return None if complete else self._run_wide(batch, rows, shared, batch.returning)

    def _run_wide(
        self, batch: BatchStatement, rows: Sequence[Row], shared: Mapping[str, Any], returning: str
    ) -> list[Row]:
        returned: list[Row] = []
        start = 0
        for size in ROWS_PER_STATEMENT:
            while len(rows) - start >= size:
                values = batch.side_by_side(rows[start : start + size], shared)
                returned += self._conn.execute(batch.for_rows(size, returning), values).fetchall()
                start += size
        return returned

    # jobs

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        values = self._bound(values)
        ((packed,),) = self._conn.execute(self._sql["claim"].text, values).fetchall()
        try:
            rows = _as_bytes(_decode(packed))
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            rows = self._claim_row_by_row(packed, values)
        if rows:
            self._fetch_long_arguments(rows)
            values["ids"] = self.numbers([row[1] for row in rows])
            self._conn.execute(self._sql["mark_claimed"].text, values).fetchall()
        return rows

    def _claim_row_by_row(self, packed: bytes, values: Mapping[str, Any]) -> list[list[Any]]:
        """Read the same jobs without JSON: one of them has arguments that are not text."""
        try:
            text = self._sql["claim_row_by_row"].text
            return [list(row) for row in self._conn.execute(text, values).fetchall()]
        except UnicodeDecodeError:  # a column other than the arguments is not text either
            return _as_bytes(_unpack(packed))

    def _fetch_long_arguments(self, rows: Sequence[list[Any]]) -> None:
        """Add the arguments that are not stored in the job's row."""
        rows_without = {row[1]: row for row in rows if not row[_ARGS]}
        if rows_without:
            ids = self.numbers(list(rows_without))
            text = self._sql["long_arguments"].text
            for id, args in self._conn.execute(text, {"ids": ids}).fetchall():
                rows_without[id][_ARGS] = args

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
        names = ", ".join(columns)  # our own column names
        text = f"INSERT INTO genba_job ({names}) VALUES ({marks})"  # noqa: S608
        self._driver.batch(self._conn, text, rows)

    def insert_uniform_jobs(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        long = [row for row in rows if len(row[1]) > LONG_ARGUMENTS_BYTES]
        if long:
            self.batch("insert_long_arguments", long)
            rows = [(id, b"" if len(args) > LONG_ARGUMENTS_BYTES else args) for id, args in rows]
        self.batch("enqueue_uniform", rows, **dict(zip(columns[1:-1], same, strict=True)))

    # values

    def select(self, text: str, /, **values: Any) -> list[Row]:
        rows: list[Row] = self._conn.execute(text.replace("genba.", "genba_"), values).fetchall()
        return rows

    def names(self, values: Sequence[str]) -> Any:
        return _json.encode(values).decode()

    def numbers(self, values: Sequence[int]) -> Any:
        return _json.encode(values).decode()

    def ids(self, count: int) -> list[int]:
        ((last,),) = self.all("next_ids", count=count)
        return list(range(last - count + 1, last + 1))

    def now(self) -> int:
        return self._clock.now()


class SqliteSnapshot:
    def __init__(self, conn: Any, queries: Mapping[str, Query]) -> None:
        self._conn = conn
        self._sql = queries

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        yield from self._conn.execute(self._sql[name].text, values)


def _as_bytes(rows: list[list[Any]]) -> list[list[Any]]:
    """Encode arguments and checkpoints, which PostgreSQL's claim returns as bytes."""
    for row in rows:
        row[_ARGS] = row[_ARGS].encode()
        if row[_SAVED] is not None:
            row[_SAVED] = row[_SAVED].encode()
    return rows


def _unpack(packed: bytes) -> list[list[Any]]:
    try:
        return _decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # SQLite stores any bytes as text. Other jobs must not wait for a row that is not UTF-8.
        return _decode(packed.decode(errors="replace"))
