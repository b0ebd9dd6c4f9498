"""Databases for tests: a SQLite file, or fresh ones on a PostgreSQL server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import LiteralString
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


def sqlite_url(directory: Path) -> str:
    return f"sqlite:///{directory / 'genba.db'}"


class Databases:
    """Makes and drops databases on one PostgreSQL server, given as a URL with the right to do so."""

    def __init__(self, server: str) -> None:
        self._server = server

    def url(self, name: str) -> str:
        server = urlsplit(self._server)
        query = f"?{server.query}" if server.query else ""
        return f"{server.scheme}://{server.netloc}/{name}{query}"

    @contextmanager
    def fresh(self, template: str = "template1") -> Iterator[str]:
        """The name of a database that exists inside the `with` and no longer."""
        name = f"genba_test_{uuid.uuid4().hex[:12]}"
        self._run("CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield name
        finally:
            self._run("DROP DATABASE {} WITH (FORCE)", name)

    def _run(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
