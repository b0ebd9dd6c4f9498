"""The idle connections of one process to a PostgreSQL server."""

from __future__ import annotations

import select
import threading
from typing import Any

from genba.storage.engines.postgres.libpq import LibpqConnection


class IdleConnections:
    def __init__(self, psycopg: Any, *, closed: bool = False) -> None:
        self._idle_status = psycopg.pq.TransactionStatus.IDLE
        self._idle: list[LibpqConnection] = []
        self._lock = threading.Lock()
        self.closed = closed  # a connection that is put back later is closed

    def take(self) -> LibpqConnection | None:
        """Take a connection that still lives.

        A server that went away has closed its end, which then is readable.
        """
        while True:
            with self._lock:
                direct = self._idle.pop() if self._idle else None
            if direct is None:
                return None
            conn = direct.conn
            if (
                not conn.closed
                and not conn.broken
                and not select.select([conn.pgconn.socket], [], [], 0)[0]
            ):
                return direct
            conn.close()

    def put_back(self, direct: LibpqConnection) -> None:
        """Keep it for the next use; close it if a signal has interrupted a statement."""
        conn = direct.conn
        if conn.closed or conn.broken:
            return
        is_idle = conn.pgconn.transaction_status == self._idle_status
        with self._lock:
            keep = is_idle and not self.closed
            if keep:
                self._idle.append(direct)
        if not keep:
            conn.close()

    def drop(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for direct in idle:
            direct.conn.close()

    def close(self) -> None:
        with self._lock:
            self.closed = True
        self.drop()
