"""The two drivers for SQLite: apsw, and the standard library's sqlite3."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from genba.storage.engines.database import Row

log = logging.getLogger("genba")


class ApswDriver:
    """apsw, which brings its own SQLite, newer and sounder than that of most systems."""

    def __init__(self) -> None:
        import apsw

        self.errors: tuple[type[Exception], ...] = (apsw.Error,)
        self.version = apsw.sqlite_lib_version()
        self._apsw = apsw

    def connect(self, path: str, busy_seconds: float) -> Any:
        flags = self._apsw.SQLITE_OPEN_READWRITE | self._apsw.SQLITE_OPEN_CREATE
        conn = self._apsw.Connection(path, flags=flags, statementcachesize=200)
        conn.set_busy_timeout(int(busy_seconds * 1000))
        # Otherwise SQLite compiles a statement again for each new value: 105 µs instead of 4 for a
        # claim.
        conn.config(self._apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        return conn

    @staticmethod
    def run(conn: Any, text: str, values: Mapping[str, Any]) -> int:
        conn.execute(text, values).fetchall()
        return int(conn.changes())

    @staticmethod
    def batch(conn: Any, text: str, rows: Sequence[Row]) -> list[Row]:
        return conn.executemany(text, rows).fetchall()  # type: ignore[no-any-return]

    @staticmethod
    def changes(conn: Any) -> int:
        """Count the rows changed since the connection was opened."""
        return int(conn.total_changes())

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


class Sqlite3Driver:
    """Python's `sqlite3`, for processes that have the file open with it anyway."""

    def __init__(self) -> None:
        import sqlite3

        self.errors: tuple[type[Exception], ...] = (sqlite3.Error,)
        self.version = sqlite3.sqlite_version
        self._sqlite3 = sqlite3

    def connect(self, path: str, busy_seconds: float) -> Any:
        return self._sqlite3.connect(
            path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
        )

    @staticmethod
    def run(conn: Any, text: str, values: Mapping[str, Any]) -> int:
        cursor = conn.execute(text, values)
        cursor.fetchall()
        return max(0, int(cursor.rowcount))

    @staticmethod
    def batch(conn: Any, text: str, rows: Sequence[Row]) -> list[Row]:
        if "RETURNING" not in text and not text.startswith("SELECT"):
            conn.executemany(text, rows)
            return []
        return [returned for row in rows for returned in conn.execute(text, row).fetchall()]

    @staticmethod
    def changes(conn: Any) -> int:
        return int(conn.total_changes)

    @staticmethod
    def in_transaction(conn: Any) -> bool:
        return bool(conn.in_transaction)


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Test for SQLite's WAL-reset bug: since 3.7.0, fixed in 3.51.3, 3.50.7 and 3.44.6."""
    backports = ((3, 50, 7), (3, 44, 6))
    return (3, 7) <= version < (3, 51, 3) and not any(
        fixed <= version < (3, fixed[1] + 1) for fixed in backports
    )


@cache
def warn_of_wal_reset_bug(version: str) -> None:
    """Warn once per process.

    Genba's own writers never write at the same moment, because they queue; other programs may.
    """
    log.warning(
        "SQLite %s may corrupt a file that two connections write at the same moment: processes of "
        "genba take turns, but other programs that have it open do not. Leave ?driver=sqlite3 out "
        "of the URL (apsw brings a SQLite without the bug), or use a Python with SQLite 3.51.3 or "
        "later",
        version,
    )
