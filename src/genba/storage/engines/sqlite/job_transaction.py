"""A SQLite transaction that a job's user code and genba share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from genba.errors import StoreError
from genba.signal_safe import defer_stop
from genba.storage.engines.sqlite.transaction import SqliteTransaction, StatementSource
from genba.storage.engines.sqlite.write_queue import WriteQueue, close_connection

_RETRY_SECONDS = 0.01  # between two tries to close a connection that runs a statement


class SqliteJobTransaction:
    """A transaction on a connection of its own.

    The connection is closed at the end, so that settings made by the user do not last.

    While it is open no other process can write. So after the time limit a thread closes the
    connection, whatever the user's code is doing; after a mere rollback the user's next statements
    would commit one by one.
    """

    def __init__(
        self,
        source: StatementSource,
        conn: Any,
        queue: WriteQueue | None,
        within: float,
        store_errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.connection = conn
        self.expired = ""
        self._source = source
        self._queue = queue
        self._store_errors = store_errors
        self._ending = threading.Lock()
        self._over = False
        self._timer = threading.Timer(within, self._expire, (within,))
        self._timer.name, self._timer.daemon = "genba-transaction", True
        try:
            conn.execute("BEGIN IMMEDIATE")
            self._timer.start()
        except (
            BaseException
        ):  # even a stop signal must not leave the transaction open; raised again
            self._close()
            raise

    @contextmanager
    def own_statements(self) -> Iterator[SqliteTransaction]:
        with self._store_errors():
            yield SqliteTransaction(self.connection, self._source)

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
            except self._source.driver.errors:  # a statement of the user is being interrupted
                time.sleep(_RETRY_SECONDS)

    def _close(self) -> None:
        close_connection(self.connection)
        if self._queue:
            self._queue.release()

    def _stop_timer(self) -> bool:
        """Stop the time limit; return False if it has passed."""
        with self._ending:
            if self._over:
                return False
            self._over = True
        self._timer.cancel()
        self._timer.join()
        return True

    @defer_stop
    def reclaim(self) -> None:
        if not self._stop_timer():
            raise StoreError(self.expired)
        if not self._source.driver.in_transaction(self.connection):
            raise StoreError(
                "the transaction was ended inside its block: leave COMMIT and ROLLBACK to the block"
            )

    @defer_stop
    def commit(self) -> None:
        try:
            with self._store_errors():
                self.connection.execute("COMMIT")
        finally:
            self._close()

    @defer_stop
    def rollback(self) -> None:
        """Close the connection, which rolls back; does nothing after the time limit."""
        if self._stop_timer() or not self.expired:
            with suppress(*self._source.driver.errors):
                self._close()
