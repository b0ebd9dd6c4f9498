"""A PostgreSQL transaction that a job's user code and genba share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from genba.errors import StoreError
from genba.signal_safe import defer_stop
from genba.storage.engines.postgres.libpq import LibpqConnection
from genba.storage.engines.postgres.transaction import CursorTransaction, StatementSource


class ConnectionOwner(StatementSource, Protocol):
    """What a job's transaction needs of its database."""

    errors: tuple[type[Exception], ...]

    def as_store_error(self, conn: Any, error: Exception) -> StoreError: ...

    def give_back(self, direct: LibpqConnection) -> None: ...


class PostgresJobTransaction:
    """A transaction with the server's own planner settings, for the user's statements.

    Only the time limits are ours.
    """

    expired = ""  # no time limit: a row lock of ours blocks no other writer

    def __init__(self, owner: ConnectionOwner, direct: LibpqConnection) -> None:
        self.connection = direct.conn
        self._direct = direct
        self._owner = owner
        self._block = direct.conn.transaction()
        self._block.__enter__()

    @contextmanager
    def own_statements(self) -> Iterator[CursorTransaction]:
        try:
            yield CursorTransaction(self.connection, self._owner)
        except self._owner.errors as error:
            raise self._owner.as_store_error(self.connection, error) from error

    def reclaim(self) -> None:
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
        except self._owner.errors as error:
            raise self._owner.as_store_error(self.connection, error) from error
        finally:
            self._owner.give_back(self._direct)

    @defer_stop
    def rollback(self) -> None:
        undo = RuntimeError("rolled back")
        # psycopg closes a connection that it cannot roll back.
        with suppress(RuntimeError, *self._owner.errors):
            self._block.__exit__(RuntimeError, undo, None)
        self._owner.give_back(self._direct)
