"""Migrations: numbered files, applied once, under a lock.

A file may begin with `-- serves: N`: code that knows the schema up to N also works with the new
schema, because the file only adds to it. So nodes of an old release go on, and may be started,
while a new release is rolled out. A schema that is newer than this code and does not serve it is
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files

from genba.errors import SchemaTooNew
from genba.storage.engines.database import Database, Schema

_CREATED = re.compile(r"^CREATE (?:TABLE|SEQUENCE) (?:IF NOT EXISTS )?genba\.(\w+)", re.MULTILINE)
_SERVES = re.compile(r"^-- serves: (\d+)$", re.MULTILINE)
_FILE = re.compile(r"(\d{4})_(\w+)\.sql")


def scripts(dialect: str) -> list[tuple[int, str, str]]:
    """Return (version, name, text) of every migration, in order."""
    migrations = []
    for file in (files("genba.storage") / "migrations" / dialect).iterdir():
        if match := _FILE.fullmatch(file.name):
            migrations.append((int(match[1]), match[2], file.read_text()))
    return sorted(migrations)


def upgrade(
    database: Database, tell: Callable[[int, int], None] = lambda done, of: None
) -> list[str]:
    """Apply the missing migrations; return their names.

    `tell` is called before each with how many are applied, of how many.
    """
    known = scripts(database.dialect)
    # Without the lock first: most calls find nothing to do, and need not wait for it.
    with database.schema() as schema:
        if not _missing(known, schema):
            return []
    with database.migrations() as schema:
        missing = _missing(known, schema)
        for done, (version, name, text) in enumerate(missing):
            tell(done, len(missing))
            serves = _SERVES.search(text)
            schema.apply(version, name, text, int(serves[1]) if serves else version)
        return [name for _, name, _ in missing]


def _missing(known: Sequence[tuple[int, str, str]], schema: Schema) -> list[tuple[int, str, str]]:
    """Return the migrations that are not applied.

    SchemaTooNew if the schema is newer than this code can work with.
    """
    applied = schema.applied()
    latest = known[-1][0]
    newer = [
        version
        for version, serves in schema.serves().items()
        if version > latest and serves > latest
    ]
    if newer:
        raise SchemaTooNew(
            f"the database has schema {max(newer)}, and this genba knows up to {latest}: "
            "upgrade genba here before you use this database"
        )
    return [script for script in known if script[0] not in applied]


def objects(database: Database) -> list[str]:
    """Name the tables and sequences that the applied migrations have created."""
    if not version(database):
        return []
    created = {name for _, _, text in scripts(database.dialect) for name in _CREATED.findall(text)}
    return sorted(
        f"genba{'_' if database.dialect == 'sqlite' else '.'}{name}"
        for name in {"migration", *created}
    )


def uninstall(database: Database) -> list[str]:
    """Remove our objects and no others; return their names."""
    with database.migrations() as schema:
        return schema.drop_all()


def version(database: Database) -> int:
    with database.schema() as schema:
        return max(schema.applied(), default=0)
