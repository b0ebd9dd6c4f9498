"""Where the benchmark works: databases of its own, made for one measurement and then dropped."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import LiteralString

from tests.support.postgres_server import own_server, postgres_is_here

from genba.domain.url import scrub_password, split_url
from genba.errors import GenbaError, StoreUnreachable

__all__ = ["Databases", "postgres_databases", "postgres_is_here", "sqlite_databases"]

Databases = Callable[[], AbstractContextManager[str]]


@contextmanager
def sqlite_databases(folder: Path | None = None) -> Iterator[Databases]:
    """Fresh files in a folder that is removed in the end; `folder` says on which disk."""
    try:
        home = Path(tempfile.mkdtemp(prefix="genba-bench-", dir=folder))
    except OSError as error:
        raise StoreUnreachable(f"cannot make a folder in {folder}: {error.strerror}") from error

    @contextmanager
    def fresh() -> Iterator[str]:
        place = Path(tempfile.mkdtemp(dir=home))
        try:
            yield f"sqlite:///{place / 'genba.db'}"
        finally:
            shutil.rmtree(place, ignore_errors=True)

    try:
        yield fresh
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def postgres_databases(server: str | None = None) -> Iterator[Databases]:
    """Fresh databases on `server`, where we must be allowed to make them; without one, on a server of our own."""
    if server is not None:
        yield lambda: _fresh_database(server)
        return
    with own_server() as url:
        yield lambda: _fresh_database(url)


@contextmanager
def _fresh_database(server: str) -> Iterator[str]:
    parts = split_url(server)
    name = f"genba_bench_{uuid.uuid4().hex[:12]}"
    query = f"?{parts.query}" if parts.query else ""
    _run(server, "CREATE DATABASE {}", name)
    try:
        yield f"{parts.scheme}://{parts.netloc}/{name}{query}"
    finally:
        _run(server, "DROP DATABASE {} WITH (FORCE)", name)


def _run(server: str, statement: LiteralString, name: str) -> None:
    try:
        import psycopg
    except ImportError as error:
        raise GenbaError("PostgreSQL needs psycopg: pip install 'genba[postgres]'") from error
    try:
        with psycopg.connect(server, autocommit=True, connect_timeout=5) as conn:
            conn.execute(psycopg.sql.SQL(statement).format(psycopg.sql.Identifier(name)))
    except psycopg.Error as error:
        text = scrub_password(str(error).strip(), server)
        raise StoreUnreachable(
            f"cannot make a database of our own on that server: {text}"
        ) from None
