"""Create the database itself, if it does not exist yet."""

from __future__ import annotations

import os
from contextlib import closing
from urllib.parse import unquote

from genba.domain.url import mask_password, scrub_password, split_url
from genba.errors import BadOption, StoreError, StoreUnreachable
from genba.storage.engines.postgres.database import PostgresDatabase

_EXISTS = "SELECT 1 FROM pg_database WHERE datname = %s"


def create_database(url: str) -> None:
    """Create the database, connected to the database `postgres`; for SQLite, create the folder."""
    parts = split_url(url)
    name = unquote(parts.path)[1:]
    if parts.scheme == "sqlite":
        try:
            os.makedirs(os.path.dirname(os.path.abspath(name)), exist_ok=True)
        except OSError as error:
            raise StoreUnreachable(
                f"cannot create the folder of {name}: {error.strerror}"
            ) from error
        return
    if not name:
        raise BadOption(
            f"{mask_password(url)} does not name a database: use postgresql://host/NAME"
        )
    query = f"?{parts.query}" if parts.query else ""
    server = PostgresDatabase(f"{parts.scheme}://{parts.netloc}/postgres{query}", {}, None)
    with closing(server.connect()) as conn:
        try:
            if not conn.execute(_EXISTS, (name,)).fetchone():
                conn.execute('CREATE DATABASE "{}"'.format(name.replace('"', '""')))
        except server.errors as error:
            # Another process may have created it meanwhile.
            if not conn.execute(_EXISTS, (name,)).fetchone():
                raise StoreError(
                    f"cannot create {mask_password(url)}: {scrub_password(str(error), url)}"
                ) from error
