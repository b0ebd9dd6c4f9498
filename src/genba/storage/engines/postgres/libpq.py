"""Statements straight through libpq.

A psycopg cursor spends more time around a statement than it takes to send it, and a single enqueue
is little else; most of that is not needed for our statements. psycopg's own adapters still write
the values and read the rows. BEGIN travels with the first statement of its transaction.
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

# Statements that stay prepared on a connection: all that we have, and the sizes of claims.
MAX_PREPARED = 400
_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")

# The text with %(name)s for its values, as a cursor takes it, and the values.
BoundStatement = tuple[str, Mapping[str, Any]]


class StatementResult:
    """The result of one statement, with the part of a cursor's interface that we use."""

    __slots__ = ("description", "rowcount", "rows")

    def __init__(self, rows: list[Row], rowcount: int, description: bool) -> None:
        self.rows = rows
        self.rowcount = rowcount
        self.description = description  # whether the statement returns rows at all

    def fetchall(self) -> list[Row]:
        return self.rows

    def fetchone(self) -> Row | None:
        return self.rows[0] if self.rows else None


class _Statement(NamedTuple):
    """A statement in the form that libpq sends; without a name it is not prepared."""

    name: bytes | None
    text: bytes
    params: Sequence[Any]
    types: tuple[int, ...]
    formats: Sequence[Any] | None


class LibpqConnection:
    """One connection, used by one thread at a time.

    `prepare` unless a pooler may run each statement in another session.
    """

    def __init__(self, psycopg: Any, conn: Any, *, prepare: bool) -> None:
        self._psycopg = psycopg
        self.conn = conn
        self._pgconn = conn.pgconn
        self._values = psycopg.adapt.Transformer(conn)
        self._auto = psycopg.adapt.PyFormat.AUTO
        self._binary = psycopg.pq.Format.BINARY
        self._success = (psycopg.pq.ExecStatus.TUPLES_OK, psycopg.pq.ExecStatus.COMMAND_OK)
        self._prepare = prepare
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}  # by text and types
        self._begin_pending = False  # BEGIN is sent with the next statement
        self._poll = select.poll()
        self._poll.register(conn.pgconn.socket, select.POLLIN)

    @property
    def _limit(self) -> float | None:
        # Connections of an older psycopg have no limit of their own.
        return getattr(self.conn, "limit", ANSWER_SECONDS)

    def execute(self, text: str, values: Mapping[str, Any]) -> StatementResult:
        statement = self._prepared(text, values)
        if self._begin_pending:
            self._begin_pending = False
            return self._read(self._send_together([_BEGIN, statement])[1])
        self._send(statement)
        return self._read(self._result())

    def pipeline(self, bound: Sequence[BoundStatement]) -> list[StatementResult]:
        """Run a whole transaction in one round trip."""
        statements = [self._prepared(text, values) for text, values in bound]
        try:
            results = self._send_together([_BEGIN, *statements, _COMMIT])
            return [self._read(result) for result in results[1:-1]]
        except BaseException:  # even a stop signal must not leave it open; raised again
            self.rollback()
            raise

    def begin(self) -> None:
        self._begin_pending = True

    def begin_now(self) -> None:
        """Send a pending BEGIN, because the next statement goes through a cursor."""
        if self._begin_pending:
            self._begin_pending = False
            self._command(_BEGIN)

    def commit(self) -> None:
        if not self._begin_pending:  # otherwise no statement was sent
            result = self._command(_COMMIT)
            # If a statement has failed, PostgreSQL answers ROLLBACK.
            if result.command_status != b"COMMIT":
                raise self._psycopg.InternalError(
                    "a statement had failed, and all of the transaction was undone"
                )
        self._begin_pending = False

    def rollback(self) -> None:
        """Roll back if possible; a connection that was interrupted in a statement is closed."""
        self._begin_pending = False
        status = self._psycopg.pq.TransactionStatus
        if self._pgconn.transaction_status in (status.INTRANS, status.INERROR):
            try:
                self._command(_ROLLBACK)
            except self._psycopg.Error:
                self._pgconn.finish()

    def _prepared(self, text: str, values: Mapping[str, Any]) -> _Statement:
        numbered, names = _numbered(text)
        params = self._values.dump_sequence(
            [values[name] for name in names], (self._auto,) * len(names)
        )
        types, formats = self._values.types or (), self._values.formats
        name = self._names.get((text, types))
        if name is None and self._prepare and len(self._names) < MAX_PREPARED:
            name = b"genba_%d" % len(self._names)
            self._pgconn.send_prepare(name, numbered, types)
            self._result()
            self._names[text, types] = name
        return _Statement(name, numbered, params, types, formats)

    def _send(self, statement: _Statement) -> None:
        if statement.name is None:
            self._pgconn.send_query_params(
                statement.text, statement.params, statement.types, statement.formats, self._binary
            )
        else:
            self._pgconn.send_query_prepared(
                statement.name, statement.params, statement.formats, self._binary
            )

    def _command(self, statement: _Statement) -> Any:
        self._send(statement)
        return self._result()

    def _send_together(self, statements: Sequence[_Statement]) -> list[Any]:
        """Return the results of all, in one round trip; raise the error of the first failure."""
        self._pgconn.enter_pipeline_mode()
        for statement in statements:
            self._send(statement)
        self._pgconn.pipeline_sync()
        until = self._until()
        self._flush(until)
        results = []
        for _ in statements:
            results.append(self._next(until))
            self._next(until)  # None, after each result
        self._next(until)  # the end of the pipeline
        self._pgconn.exit_pipeline_mode()
        for result in results:
            self._check(result)
        return results

    def _result(self) -> Any:
        """Return the result of the one statement that was sent; raise errors as a cursor does."""
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
        if result.status not in self._success:
            raise self._psycopg.errors.error_from_result(result)

    def _next(self, until: float | None) -> Any:
        while self._pgconn.is_busy():
            self._wait(until)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _flush(self, until: float | None) -> None:
        # More than the kernel takes at once; meanwhile the server's output may have to be read.
        while self._pgconn.flush():
            self._poll.modify(self._pgconn.socket, select.POLLIN | select.POLLOUT)
            self._wait(until)
            self._pgconn.consume_input()
            self._poll.modify(self._pgconn.socket, select.POLLIN)

    def _until(self) -> float | None:
        return None if self._limit is None else time.monotonic() + self._limit

    def _wait(self, until: float | None) -> None:
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not self._poll.poll(left):
            self._pgconn.finish()  # it is unknown whether the statement was executed
            raise self._psycopg.OperationalError(f"no answer within {self._limit:g} s")


_BEGIN, _COMMIT, _ROLLBACK = (
    _Statement(None, text, [], (), None) for text in (b"BEGIN", b"COMMIT", b"ROLLBACK")
)


@lru_cache(maxsize=1000)
def _numbered(text: str) -> tuple[bytes, tuple[str, ...]]:
    """Replace names by $1, $2 … as libpq wants it; return the text, and the names in order."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}" if match[1] else "%"

    return _PLACEHOLDER.sub(number, text).encode(), tuple(numbers)
