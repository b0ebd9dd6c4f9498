"""Fixtures of the contract suite: as everywhere, but on PostgreSQL its tests share one database.

Making a database takes longer than most of these tests; deleting all rows does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.storage.builders import install
from tests.support import Databases, sqlite_url

from genba.storage.engines.database import TABLES


@pytest.fixture(scope="session")
def shared_database(databases: Databases) -> Iterator[str]:
    with databases.fresh() as name:
        install(databases.url(name))
        yield databases.url(name)


@pytest.fixture
def url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if engine == "sqlite":
        install(sqlite_url(tmp_path))
        return sqlite_url(tmp_path)
    shared: str = request.getfixturevalue("shared_database")
    with psycopg.connect(shared, autocommit=True) as conn:
        for table in sorted(TABLES - {"migration", "sequence", "argument"}):
            conn.execute(f"DELETE FROM genba.{table}")
    return shared
