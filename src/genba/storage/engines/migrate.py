"""Numbered files, applied once, under a lock.

A file may begin with `-- serves: N`: code that knows the schema up to N works with what it makes, because it only adds.
So the nodes of an old release go on, and may be started, while a new one is rolled out.  A schema that is newer than
this code and does not serve it is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.resources import files

from genba.errors import SchemaTooNew
from genba.storage.engines.database import Database, Schema

_MADE = re.compile(r"^CREATE (?:TABLE|SEQUENCE) (?:IF NOT EXISTS )?genba\.(\w+)", re.MULTILINE)
_SERVES = re.compile(r"^-- serves: (\d+)$", re.MULTILINE)
_FILE = re.compile(r"(\d{4})_(\w+)\.sql")


def scripts(dialect: str) -> list[tuple[int, str, str]]:
    """(version, name, text) of every migration, in order."""
    found = []
    for file in (files("genba.storage") / "migrations" / dialect).iterdir():
        if match := _FILE.fullmatch(file.name):
            found.append((int(match[1]), match[2], file.read_text()))
    return sorted(found)


def upgrade(
    database: Database, tell: Callable[[int, int], None] = lambda done, of: None
) -> list[str]:
    """Apply what is missing; gives the names of what was applied.  `tell` hears how many are, of how many."""
    known = scripts(database.dialect)
    with database.schema() as schema:  # most find nothing to do, and need not wait until they may
        if not _missing(known, schema):
            return []
    with database.migrations() as schema:
        missing = _missing(known, schema)
        for done, (version, name, text) in enumerate(missing):
            tell(done, len(missing))
            found = _SERVES.search(text)
            schema.apply(version, name, text, int(found[1]) if found else version)
        return [name for _, name, _ in missing]


def _missing(known: Sequence[tuple[int, str, str]], schema: Schema) -> list[tuple[int, str, str]]:
    """What is not applied yet; SchemaTooNew if more is than this code can work with."""
    applied = schema.applied()
    latest = known[-1][0]
    foreign = [one for one, serves in schema.serves().items() if one > latest and serves > latest]
    if foreign:
        raise SchemaTooNew(
            f"the database has schema {max(foreign)}, and this genba knows up to {latest}: "
            "upgrade genba here before you use this database"
        )
    return [script for script in known if script[0] not in applied]


def objects(database: Database) -> list[str]:
    """The names of what the applied migrations have made."""
    if not version(database):
        return []
    made = {name for _, _, text in scripts(database.dialect) for name in _MADE.findall(text)}
    return sorted(
        f"genba{'_' if database.dialect == 'sqlite' else '.'}{name}"
        for name in {"migration", *made}
    )


def uninstall(database: Database) -> list[str]:
    """Remove our objects and nothing else; gives their names."""
    with database.migrations() as schema:
        return schema.drop_all()


def version(database: Database) -> int:
    with database.schema() as schema:
        return max(schema.applied(), default=0)
