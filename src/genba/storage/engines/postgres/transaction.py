"""Statements on one PostgreSQL connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from genba.storage.engines.database import Row
from genba.storage.engines.postgres.arrays import BytesColumn, IntColumn, TextColumn, register
from genba.storage.engines.postgres.copy_format import copy_cell, copy_text
from genba.storage.engines.postgres.libpq import BoundStatement, LibpqConnection
from genba.storage.engines.queries import PARAMETER, Query

_COPY_ROWS = 2000  # per call of COPY


class StatementSource(Protocol):
    """What a transaction needs of its database."""

    queries: Mapping[str, Query]
    tuples: Any  # psycopg's row factory
    literal_cursor: Any  # psycopg's cursor that writes values into the text

    @property
    def pooled(self) -> bool: ...

    def bound(self, query: Query, values: Mapping[str, Any]) -> BoundStatement: ...

    def ids(self, tx: PostgresTransaction, count: int) -> list[int]: ...


class PostgresTransaction:
    """Statements straight through libpq."""

    def __init__(self, direct: LibpqConnection, source: StatementSource) -> None:
        self._direct = direct
        self._conn = direct.conn
        self._source = source
        self._sql = source.queries

    def _execute(self, query: Query, values: Mapping[str, Any]) -> Any:
        return self.execute(*self._source.bound(query, values))

    def execute(self, text: str, values: Mapping[str, Any]) -> Any:
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

    # batches

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        if not rows or not self._sql[name].text:
            return []
        result = self._batch(name, rows, values)
        return result.fetchall() if result.description else []

    def _batch(self, name: str, rows: Sequence[Row], values: dict[str, Any]) -> Any:
        query = self._sql[name]
        for column, cells in zip(query.columns, zip(*rows, strict=True), strict=True):
            values[column] = _column(cells)
        return self._execute(query, values)

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        if not rows:
            return None
        result = self._batch(name, rows, values)
        return None if result.rowcount == len(rows) else result.fetchall()

    # jobs

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        return self.all("claim", **values)

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        with self._cursor().copy(f"COPY genba.job ({', '.join(columns)}) FROM STDIN") as copy:
            for start in range(0, len(rows), _COPY_ROWS):
                copy.write(copy_text(rows[start : start + _COPY_ROWS]))

    def insert_uniform_jobs(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        middle = "\t".join(map(copy_cell, same))
        with self._cursor().copy(f"COPY genba.job ({', '.join(columns)}) FROM STDIN") as copy:
            for start in range(0, len(rows), _COPY_ROWS):
                part = rows[start : start + _COPY_ROWS]
                copy.write("".join([f"{id}\t{middle}\t\\\\x{args.hex()}\n" for id, args in part]))

    # values

    def select(self, text: str, /, **values: Any) -> list[Row]:
        text = PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))
        # The values are written into the text (force_generic_plan holds for parameters): one plan
        # for all values would treat a rare task like one that every second job has.
        self._begin_for_cursor()
        cursor = self._source.literal_cursor(self._conn, row_factory=self._source.tuples)
        return cursor.execute(text, values).fetchall()  # type: ignore[no-any-return]

    def names(self, values: Sequence[str]) -> Any:
        return TextColumn(values)

    def numbers(self, values: Sequence[int]) -> Any:
        return IntColumn(values)

    def ids(self, count: int) -> list[int]:
        return self._source.ids(self, count)

    def now(self) -> int:
        ((now,),) = self.all("now")
        return int(now)

    # cursors

    def _begin_for_cursor(self) -> None:
        """Send the BEGIN that would otherwise travel with the first statement."""
        self._direct.begin_now()

    def _cursor(self) -> Any:
        self._begin_for_cursor()
        return self._conn.cursor(binary=True, row_factory=self._source.tuples)


class CursorTransaction(PostgresTransaction):
    """Statements through psycopg's cursors.

    For a user's connection, where a cursor may have to begin a transaction.
    """

    def __init__(self, conn: Any, source: StatementSource) -> None:
        self._conn = conn
        self._source = source
        self._sql = source.queries

    def execute(self, text: str, values: Mapping[str, Any]) -> Any:
        return self._cursor().execute(text, values, prepare=not self._source.pooled)

    def _begin_for_cursor(self) -> None:
        pass

    def _cursor(self) -> Any:
        cursor = super()._cursor()
        register(cursor.adapters)
        return cursor


class PostgresSnapshot:
    def __init__(self, conn: Any, queries: Mapping[str, Query]) -> None:
        self._conn = conn
        self._sql = queries
        self._count = 0

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        self._count += 1
        with self._conn.cursor(f"genba_{self._count}") as cursor:
            cursor.itersize = 2000
            yield from cursor.execute(self._sql[name].text, values)


def _column(cells: tuple[Any, ...]) -> Any:
    """Wrap one array parameter; psycopg's dumper works per element, ten times slower."""
    for cell in cells:
        if cell is not None:
            if isinstance(cell, int):
                return IntColumn(cells)
            return BytesColumn(cells) if isinstance(cell, bytes) else TextColumn(cells)
    return TextColumn(cells)
