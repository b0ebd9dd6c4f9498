"""The migrations of a SQLite database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genba.domain.clock import Clock
from genba.storage.engines.database import TABLES


class SqliteSchema:
    def __init__(self, conn: Any, clock: Clock) -> None:
        self._conn = conn
        self._clock = clock

    def applied(self) -> Mapping[int, str]:
        if not self._conn.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'genba_migration'"
        ).fetchone():
            return {}
        return dict(self._conn.execute("SELECT version, name FROM genba_migration").fetchall())

    def serves(self) -> Mapping[int, int]:
        if not self.applied():
            return {}
        return dict(
            self._conn.execute(
                "SELECT version, COALESCE(serves, version) FROM genba_migration"
            ).fetchall()
        )

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            self._conn.execute(
                "CREATE TABLE IF NOT EXISTS genba_migration (version INTEGER PRIMARY KEY, "
                "name TEXT NOT NULL, applied_at INTEGER NOT NULL, serves INTEGER)"
            )
            for statement in split_script(script):
                self._conn.execute(statement.replace("genba.", "genba_"))
            self._conn.execute(
                "INSERT INTO genba_migration (version, name, applied_at, serves) "
                "VALUES (?, ?, ?, ?)",
                (version, name, self._clock.now(), serves),
            )
            self._conn.execute("COMMIT")
        except (
            BaseException
        ):  # even a stop signal must not leave the transaction open; raised again
            self._conn.execute("ROLLBACK")
            raise

    def drop_all(self) -> list[str]:
        ours = [name for name in self._table_names() if name.removeprefix("genba_") in TABLES]
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            for name in ours:
                self._conn.execute(f'DROP TABLE "{name}"')
            self._conn.execute("COMMIT")
        except (
            BaseException
        ):  # even a stop signal must not leave the transaction open; raised again
            self._conn.execute("ROLLBACK")
            raise
        return ours

    def _table_names(self) -> list[str]:
        text = (
            "SELECT name FROM sqlite_schema "
            "WHERE type = 'table' AND name LIKE 'genba\\_%' ESCAPE '\\'"
        )
        return [row[0] for row in self._conn.execute(text).fetchall()]


def split_script(script: str) -> list[str]:
    """Split a migration into statements; its texts contain neither a semicolon nor two dashes."""
    bare = "\n".join(line.partition("--")[0] for line in script.splitlines())
    return [part.strip() for part in bare.split(";") if part.strip()]
