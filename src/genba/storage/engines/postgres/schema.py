"""The migrations of a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genba.storage.engines.database import TABLES

SEQUENCES = ("job_id", "token")
MIGRATION_LOCK = 0x67656E6261  # "genba"


class PostgresSchema:
    """The schema; all pending migrations are one transaction, under a lock that ends with it."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def applied(self) -> Mapping[int, str]:
        if self._conn.execute("SELECT to_regclass('genba.migration')").fetchone()[0] is None:
            return {}
        return dict(self._conn.execute("SELECT version, name FROM genba.migration").fetchall())

    def serves(self) -> Mapping[int, int]:
        if not self.applied():
            return {}
        return dict(
            self._conn.execute(
                "SELECT version, COALESCE(serves, version) FROM genba.migration"
            ).fetchall()
        )

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        self._conn.execute("CREATE SCHEMA IF NOT EXISTS genba")
        self._conn.execute(
            "CREATE TABLE IF NOT EXISTS genba.migration "
            "(version bigint PRIMARY KEY, name text NOT NULL, "
            "applied_at timestamptz NOT NULL DEFAULT now(), serves bigint)"
        )
        self._conn.execute(script)
        self._conn.execute(
            "INSERT INTO genba.migration (version, name, serves) VALUES (%s, %s, %s)",
            (version, name, serves),
        )

    def drop_all(self) -> list[str]:
        """Drop our tables and sequences.

        Without CASCADE, so that objects that users built on our tables, or put beside them, are not
        lost.
        """
        tables = [name for name in self._relations("r") if name in TABLES]
        if not tables:
            return []
        self._conn.execute(f"DROP TABLE {', '.join(f'genba.{name}' for name in tables)}")
        sequences = [name for name in self._relations("S") if name in SEQUENCES]
        for name in sequences:
            self._conn.execute(f"DROP SEQUENCE genba.{name}")
        others = "SELECT 1 FROM pg_class WHERE relnamespace = to_regnamespace('genba')"
        if not self._conn.execute(others).fetchone():
            self._conn.execute("DROP SCHEMA genba")
        return [f"genba.{name}" for name in (*tables, *sequences)]

    def _relations(self, kind: str) -> list[str]:
        text = (
            "SELECT relname FROM pg_class "
            "WHERE relnamespace = to_regnamespace('genba') AND relkind = %s ORDER BY 1"
        )
        return [name for (name,) in self._conn.execute(text, (kind,)).fetchall()]
