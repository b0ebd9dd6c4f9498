"""Statements straight through libpq.

A cursor of psycopg takes a hundred microseconds of Python for each statement, as much as a commit may take; a single
enqueue is little else.  What a cursor offers beyond this is not needed for most of ours.  Values and rows are still
psycopg's: its own adapters write and read them.  BEGIN travels with the first statement of its transaction.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from genba.storage.database import Row
from genba.storage.deadline import LIMIT

PREPARED = 400  # statements that stay prepared on a connection: all that we have, and the sizes of claims
_PLACE = re.compile(r"%\((\w+)\)s|%%")


class Answer:
    """What a cursor would say of one statement."""

    __slots__ = ("description", "rowcount", "rows")

    def __init__(self, rows: list[Row], rowcount: int, description: bool) -> None:
        self.rows = rows
        self.rowcount = rowcount
        self.description = description  # whether it gives rows at all

    def fetchall(self) -> list[Row]:
        return self.rows

    def fetchone(self) -> Row | None:
        return self.rows[0] if self.rows else None


class Direct:
    """One connection that nobody else uses meanwhile; `prepare` unless each statement may meet another session."""

    def __init__(self, psycopg: Any, conn: Any, *, prepare: bool) -> None:
        self._psycopg = psycopg
        self._conn = conn
        self._pgconn = conn.pgconn
        self._values = psycopg.adapt.Transformer(conn)
        self._auto = psycopg.adapt.PyFormat.AUTO
        self._binary = psycopg.pq.Format.BINARY
        self._prepare = prepare
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}  # by text and types
        self._begin = False  # with the next statement
        self._poll = select.poll()
        self._poll.register(conn.pgconn.socket, select.POLLIN)

    @property
    def _limit(self) -> float | None:
        return getattr(self._conn, "limit", LIMIT)  # older connections of psycopg have none of their own

    def execute(self, text: str, values: Mapping[str, Any]) -> Answer:
        """`text` has %(name)s for its values, as a cursor would take it."""
        numbered, places = _numbered(text)
        params = self._values.dump_sequence([values[place] for place in places], (self._auto,) * len(places))
        types, formats = self._values.types or (), self._values.formats
        name = self._names.get((text, types))
        if name is None and self._prepare and len(self._names) < PREPARED:
            name = b"genba_%d" % len(self._names)
            self._pgconn.send_prepare(name, numbered, types)
            self._result()
            self._names[text, types] = name
        begin, self._begin = self._begin, False
        if begin:
            self._pgconn.enter_pipeline_mode()
            self._pgconn.send_query_params(b"BEGIN", None)
        if name is None:
            self._pgconn.send_query_params(numbered, params, types, formats, self._binary)
        else:
            self._pgconn.send_query_prepared(name, params, formats, self._binary)
        return self._read(self._last_of_pipeline() if begin else self._result())

    def begin(self) -> None:
        self._begin = True

    def begun(self) -> None:
        """For whoever goes on with a cursor: from here on the transaction is open."""
        if self._begin:
            self._begin = False
            self._command(b"BEGIN")

    def commit(self) -> None:
        if not self._begin:  # else there was no statement
            self._command(b"COMMIT")
        self._begin = False

    def rollback(self) -> None:
        """As well as it can be: a connection that was cut off in a statement is of no use any more."""
        self._begin = False
        status = self._psycopg.pq.TransactionStatus
        if self._pgconn.transaction_status in (status.INTRANS, status.INERROR):
            try:
                self._command(b"ROLLBACK")
            except self._psycopg.Error:
                self._pgconn.finish()

    def _command(self, text: bytes) -> None:
        self._pgconn.send_query(text)
        self._result()

    def _last_of_pipeline(self) -> Any:
        """The answer to the second of two statements that were sent at once."""
        self._pgconn.pipeline_sync()
        until = self._until()
        self._flush(until)
        results = [self._next(until) for _ in range(5)]  # each is followed by None, and all by the end of the pipeline
        self._pgconn.exit_pipeline_mode()
        for result in results[:4:2]:
            self._check(result)
        return results[2]

    def _read(self, result: Any) -> Answer:
        rows: list[Row] = []
        if result.ntuples:
            self._values.set_pgresult(result)
            rows = self._values.load_rows(0, result.ntuples, tuple)
            self._values.set_pgresult(None)  # it may be large
        return Answer(rows, result.command_tuples or 0, result.nfields > 0)

    def _result(self) -> Any:
        """The answer to the one statement that was sent; an error as a cursor would raise it."""
        until = self._until()
        self._flush(until)
        last = result = self._next(until)
        while result is not None:
            last, result = result, self._next(until)
        self._check(last)
        return last

    def _check(self, result: Any) -> None:
        good = self._psycopg.pq.ExecStatus
        if result is None:
            raise self._psycopg.OperationalError("the connection was lost")
        if result.status not in (good.TUPLES_OK, good.COMMAND_OK):
            raise self._psycopg.errors.error_from_result(result)

    def _next(self, until: float | None) -> Any:
        while self._pgconn.is_busy():
            self._wait(until)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _flush(self, until: float | None) -> None:
        while self._pgconn.flush():  # more than the kernel takes at once; the server may have to be read meanwhile
            self._poll.modify(self._pgconn.socket, select.POLLIN | select.POLLOUT)
            self._wait(until)
            self._pgconn.consume_input()
            self._poll.modify(self._pgconn.socket, select.POLLIN)

    def _until(self) -> float | None:
        return None if self._limit is None else time.monotonic() + self._limit

    def _wait(self, until: float | None) -> None:
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not self._poll.poll(left):
            self._pgconn.finish()  # nobody knows whether it has happened
            raise self._psycopg.OperationalError(f"no answer within {self._limit:g} s")


@lru_cache(maxsize=1000)
def _numbered(text: str) -> tuple[bytes, tuple[str, ...]]:
    """The text with $1, $2 … as libpq wants it, and the names in that order."""
    places: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        return f"${places.setdefault(found[1], len(places) + 1)}" if found[1] else "%"

    return _PLACE.sub(place, text).encode(), tuple(places)
