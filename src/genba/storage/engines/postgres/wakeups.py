"""Wake-ups through a PostgreSQL server: an advisory lock and LISTEN, on a session of their own.

Behind a pooler in transaction mode neither outlives a transaction: there are no wake-ups, and nodes
and clients poll.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.records import NodeRecord
from genba.storage.wakeups import NoReceiver, WakeupReceiver

_DELIVERY_SECONDS = 2.0  # how long a wake-up may take


class PostgresNodeWakeups:
    def __init__(self, database: PostgresDatabase) -> None:
        self._db = database
        self._conn: Any = None
        self.times_connected = 0
        self._locked = False
        self._node = 0

    def register(self, node: int) -> None:
        self._node = node
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return
        try:
            conn.execute(f'LISTEN "genba_{int(node)}"')
            self._locked = self._lock(conn)
        except self._db.errors as error:
            conn.close()
            raise self._db.as_store_error(conn, error) from error
        self._conn = conn
        self.times_connected += 1

    def _lock(self, conn: Any) -> bool:
        """Take the node's lock without waiting.

        A dead session of ours may hold it as long as the server does not notice.
        """
        return bool(
            conn.execute("SELECT pg_try_advisory_lock(%s::bigint)", (self._node,)).fetchone()[0]
        )

    def check(self, within: float) -> bool:
        """Ask the server through the listening session: a dead one is silent, not closed."""
        if self._conn is None:
            return True
        self._conn.limit = within
        try:
            if self._locked:
                self._conn.execute("SELECT 1")
            else:
                self._locked = self._lock(self._conn)
            return True
        except self._db.errors:
            with contextlib.suppress(Exception):  # it is broken; closing may raise that again
                self._conn.close()
            self.register(self._node)
            return False

    def fileno(self) -> int:
        return self._conn.fileno() if self._conn is not None and not self._conn.closed else -1

    def clear(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(*self._db.errors):
                for _ in self._conn.notifies(timeout=0):
                    pass

    def unregister(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def lock_is_free(self, node: NodeRecord) -> bool:
        return _lock_is_free(self._db, node.id)

    def is_unreachable(self, node: NodeRecord) -> bool:
        return self.lock_is_free(node)  # the lock and LISTEN belong to the same session

    def are_delivered(self) -> bool:
        """Send a wake-up to ourselves.

        A pooler in transaction mode gives the listening session to other clients. If the URL names
        such a pooler, the answer is True, because wake-ups are not expected.
        """
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return not self._db.pooler_found
        try:
            channel = f"genba_echo_{os.getpid()}"
            conn.execute(f'LISTEN "{channel}"')
            with self._db.statement() as tx:
                tx.all("notify_channel", channel=channel)
            return any(True for _ in conn.notifies(timeout=_DELIVERY_SECONDS, stop_after=1))
        finally:
            conn.close()

    def wake_nodes(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        if self._db.pooled:
            return
        served = f'"{queue}"' if queue else ""
        with self._db.statement() as tx:
            tx.all("wake_hungry_nodes", namespace=namespace, queue=served, jobs=jobs)

    def wake_node(self, node: int) -> None:
        if self._db.pooled:
            return
        with self._db.statement() as tx:
            tx.all("wake_node", node=node)

    def close(self) -> None:
        pass


class PostgresClientWakeups:
    def __init__(self, database: PostgresDatabase) -> None:
        self._db = database

    def open_receiver(self, id: int) -> WakeupReceiver:
        conn = self._db.connect()
        if self._db.pooled:
            conn.close()
            return NoReceiver()
        return _SessionReceiver(self._db, id, conn)

    def wake_clients(self, ids: Iterable[int]) -> None:
        with self._db.statement() as tx:
            if not self._db.pooled:
                tx.all("wake_clients", bells=tx.numbers(list(ids)))

    def lock_is_free(self, id: int) -> bool:
        return _lock_is_free(self._db, id)

    def remove(self, id: int) -> None:
        pass

    def remove_stale(self) -> None:
        pass


class _SessionReceiver:
    def __init__(self, database: PostgresDatabase, id: int, conn: Any) -> None:
        self._db = database
        self._id = id
        self._conn: Any = None
        self._open(conn)

    def _open(self, conn: Any) -> None:
        try:
            conn.execute("SELECT pg_try_advisory_lock(%s::bigint)", (self._id,))
            conn.execute(f'LISTEN "genba_{int(self._id)}"')
        except BaseException:
            conn.close()
            raise
        self._conn = conn

    def fileno(self) -> int:
        return -1 if self._conn.closed else int(self._conn.fileno())

    def clear(self) -> None:
        try:
            for _ in self._conn.notifies(timeout=0):
                pass
            if not self._conn.closed:
                return
        except self._db.errors:
            self._conn.close()
        self._open(self._db.connect())

    def close(self) -> None:
        self._conn.close()


def _lock_is_free(database: PostgresDatabase, id: int) -> bool:
    with database.statement() as tx:
        lock = {"high": id >> 32, "low": id & 0xFFFFFFFF}
        return not database.pooled and tx.one("advisory_lock_holder", **lock) is None
