"""Statements straight through libpq.

What a cursor of psycopg does around a statement takes longer than the statement needs to be sent, and a single enqueue
is little else; most of it is not needed for ours.  Values and rows are still psycopg's: its own adapters write and read
them.  BEGIN travels with the first statement of its transaction.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from genba.storage.engines.database import Row
from genba.storage.engines.postgres.deadline import ANSWER_SECONDS

MAX_PREPARED = (
    400  # statements that stay prepared on a connection: all that we have, and the sizes of claims
)
_PLACE = re.compile(r"%\((\w+)\)s|%%")

BoundStatement = tuple[
    str, Mapping[str, Any]
]  # the text has %(name)s for its values, as a cursor would take it


class StatementResult:
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


class _Ready(NamedTuple):
    """A statement that can be sent; without a name it is not prepared."""

    name: bytes | None
    text: bytes
    params: Sequence[Any]
    types: tuple[int, ...]
    formats: Sequence[Any] | None


class LibpqConnection:
    """One connection that nobody else uses meanwhile; `prepare` unless each statement may meet another session."""

    def __init__(self, psycopg: Any, conn: Any, *, prepare: bool) -> None:
        self._psycopg = psycopg
        self.conn = conn
        self._pgconn = conn.pgconn
        self._values = psycopg.adapt.Transformer(conn)
        self._auto = psycopg.adapt.PyFormat.AUTO
        self._binary = psycopg.pq.Format.BINARY
        self._good = (psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK)
        self._prepare = prepare
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}  # by text and types
        self._begin = False  # with the next statement
        self._poll = select.poll()
        self._poll.register(conn.pgconn.socket, select.POLLIN)

    @property
    def _limit(self) -> float | None:
        return getattr(
            self.conn, "limit", ANSWER_SECONDS
        )  # connections of an older psycopg have none of their own

    def execute(self, text: str, values: Mapping[str, Any]) -> StatementResult:
        ready = self._made_ready(text, values)
        if self._begin:
            self._begin = False
            return self._read(self._at_once([_BEGIN, ready])[1])
        self._send(ready)
        return self._read(self._result())

    def pipeline(self, asked: Sequence[BoundStatement]) -> list[StatementResult]:
        """A whole transaction at once."""
        ready = [self._made_ready(text, values) for text, values in asked]
        try:
            return [self._read(result) for result in self._at_once([_BEGIN, *ready, _COMMIT])[1:-1]]
        except BaseException:  # also a stop must not leave it open; raised again
            self.rollback()
            raise

    def begin(self) -> None:
        self._begin = True

    def begun(self) -> None:
        """For whoever goes on with a cursor: from here on the transaction is open."""
        if self._begin:
            self._begin = False
            self._command(_BEGIN)

    def commit(self) -> None:
        if not self._begin:  # else there was no statement
            done = self._command(_COMMIT)
            if (
                done.command_status != b"COMMIT"
            ):  # of one in which a statement has failed PostgreSQL says ROLLBACK
                raise self._psycopg.InternalError(
                    "a statement had failed, and all of the transaction was undone"
                )
        self._begin = False

    def rollback(self) -> None:
        """As well as it can be: a connection that was cut off in a statement is of no use any more."""
        self._begin = False
        status = self._psycopg.pq.TransactionStatus
        if self._pgconn.transaction_status in (status.INTRANS, status.INERROR):
            try:
                self._command(_ROLLBACK)
            except self._psycopg.Error:
                self._pgconn.finish()

    def _made_ready(self, text: str, values: Mapping[str, Any]) -> _Ready:
        numbered, places = _numbered(text)
        params = self._values.dump_sequence(
            [values[place] for place in places], (self._auto,) * len(places)
        )
        types, formats = self._values.types or (), self._values.formats
        name = self._names.get((text, types))
        if name is None and self._prepare and len(self._names) < MAX_PREPARED:
            name = b"genba_%d" % len(self._names)
            self._pgconn.send_prepare(name, numbered, types)
            self._result()
            self._names[text, types] = name
        return _Ready(name, numbered, params, types, formats)

    def _send(self, ready: _Ready) -> None:
        if ready.name is None:
            self._pgconn.send_query_params(
                ready.text, ready.params, ready.types, ready.formats, self._binary
            )
        else:
            self._pgconn.send_query_prepared(ready.name, ready.params, ready.formats, self._binary)

    def _command(self, ready: _Ready) -> Any:
        self._send(ready)
        return self._result()

    def _at_once(self, steps: Sequence[_Ready]) -> list[Any]:
        """The answers to all of them, in one round trip; the error of the first that has failed."""
        self._pgconn.enter_pipeline_mode()
        for ready in steps:
            self._send(ready)
        self._pgconn.pipeline_sync()
        until = self._until()
        self._flush(until)
        results = []
        for _ in steps:
            results.append(self._next(until))
            self._next(until)  # each is followed by None
        self._next(until)  # and all by the end of the pipeline
        self._pgconn.exit_pipeline_mode()
        for result in results:
            self._check(result)
        return results

    def _result(self) -> Any:
        """The answer to the one statement that was sent; an error as a cursor would raise it."""
        until = self._until()
        self._flush(until)
        last = result = self._next(until)
        while result is not None:
            last, result = result, self._next(until)
        self._check(last)
        return last

    def _read(self, result: Any) -> StatementResult:
        rows: list[Row] = []
        if result.ntuples:
            self._values.set_pgresult(result)
            rows = self._values.load_rows(0, result.ntuples, tuple)
            self._values.set_pgresult(None)  # it may be large
        return StatementResult(rows, result.command_tuples or 0, result.nfields > 0)

    def _check(self, result: Any) -> None:
        if result is None:
            raise self._psycopg.OperationalError("the connection was lost")
        if result.status not in self._good:
            raise self._psycopg.errors.error_from_result(result)

    def _next(self, until: float | None) -> Any:
        while self._pgconn.is_busy():
            self._wait(until)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _flush(self, until: float | None) -> None:
        while (
            self._pgconn.flush()
        ):  # more than the kernel takes at once; the server may have to be read meanwhile
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


_BEGIN, _COMMIT, _ROLLBACK = (
    _Ready(None, text, [], (), None) for text in (b"BEGIN", b"COMMIT", b"ROLLBACK")
)


@lru_cache(maxsize=1000)
def _numbered(text: str) -> tuple[bytes, tuple[str, ...]]:
    """The text with $1, $2 … as libpq wants it, and the names in that order."""
    places: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        return f"${places.setdefault(found[1], len(places) + 1)}" if found[1] else "%"

    return _PLACE.sub(place, text).encode(), tuple(places)
