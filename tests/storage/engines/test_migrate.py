"""The schema: made once, by the first process that comes, beside other tables of the database."""

from __future__ import annotations

import shutil
from contextlib import closing
from urllib.parse import urlsplit

import psycopg
import pytest
from tests.storage.builders import (
    a_job,
    connection,
    in_processes,
    install,
    one,
    rows,
    state,
    together,
)

from genba.domain.clock import SystemClock
from genba.errors import SchemaTooNew, StoreError
from genba.storage.engines import migrate
from genba.storage.engines.database import Database
from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.engines.queries import load_queries
from genba.storage.engines.sqlite.database import SqliteDatabase
from genba.storage.engines.sqlite.file_checks import SqliteLocation
from genba.storage.store import open_store


@pytest.fixture
def database(empty_url, engine, tmp_path):
    made: Database
    if engine == "sqlite":
        made = SqliteDatabase(
            SqliteLocation(tmp_path / "genba.db"), load_queries("sqlite"), SystemClock()
        )
    else:
        made = PostgresDatabase(empty_url, load_queries("postgres"), None)
    with closing(made):
        yield made


def names(engine: str, url: str) -> set[str]:
    """Every object that a person could see in the database."""
    if engine == "sqlite":
        return {
            row[0]
            for row in rows(url, "SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'")
        }
    query = (
        "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname NOT LIKE 'pg_%' AND n.nspname <> 'information_schema'"
        " UNION SELECT 'schema ' || nspname FROM pg_namespace UNION SELECT 'type ' || typname FROM pg_type"
        " WHERE typnamespace = 'public'::regnamespace"
    )
    return {row[0] for row in rows(url, query)}


def test_a_second_upgrade_finds_nothing_to_apply(database, engine, empty_url):
    applied = migrate.upgrade(database)
    after = names(engine, empty_url)

    assert applied == [name for _, name, _ in migrate.scripts(engine)]
    assert migrate.upgrade(database) == []
    assert names(engine, empty_url) == after
    assert migrate.version(database) == len(applied)


def test_the_first_call_that_needs_the_schema_makes_it(empty_url):
    with closing(open_store(empty_url)) as store:
        assert state(store, one(store)) == "waiting"


def test_ten_processes_install_at_once(engine, empty_url):
    known = len(migrate.scripts(engine))

    assert in_processes(10, install, empty_url) == [known] * 10


def test_ten_threads_install_at_the_same_moment(engine, empty_url):
    known = len(migrate.scripts(engine))

    assert together(10, lambda _: install(empty_url)) == [known] * 10


def test_both_engines_have_the_same_tables_and_migrations():
    def made(dialect: str) -> set[str]:
        text = "".join(script for _, _, script in migrate.scripts(dialect))
        return {
            line.split("genba.")[1].split(" ")[0]
            for line in text.splitlines()
            if line.startswith("CREATE TABLE")
        }

    assert made("sqlite") - {"sequence", "argument"} == made("postgres")
    assert [head[:2] for head in migrate.scripts("sqlite")] == [
        head[:2] for head in migrate.scripts("postgres")
    ]


def test_a_newer_schema_is_left_alone(database, engine, empty_url):
    migrate.upgrade(database)
    with connection(empty_url) as conn:
        if engine == "sqlite":
            conn.execute(
                "INSERT INTO genba_migration (version, name, applied_at) VALUES (9999, 'of_tomorrow', 0)"
            )
        else:
            conn.execute("INSERT INTO genba.migration (version, name) VALUES (9999, 'of_tomorrow')")
    before = names(engine, empty_url)

    with pytest.raises(SchemaTooNew, match=r"9999.*upgrade genba"):
        migrate.upgrade(database)
    with closing(open_store(empty_url)) as store, pytest.raises(SchemaTooNew):
        store.enqueue([a_job()])

    assert names(engine, empty_url) == before
    assert rows(empty_url, "SELECT count(*) FROM genba.job")[0][0] == 0


def test_what_was_in_the_database_survives_install_and_uninstall(database, engine, empty_url):
    """Exotic column types of others are none of our business (USECASES 44)."""
    with connection(empty_url) as conn:
        if engine == "sqlite":
            conn.execute('CREATE TABLE pet (name TEXT, mood ENUM(1, 2), weird "STRANGE TYPE")')
            conn.execute("CREATE TABLE genba_notes (text TEXT)")  # not ours, whatever its name
            conn.execute("INSERT INTO pet VALUES ('rex', 'glad', 1)")
        else:
            conn.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
            conn.execute("CREATE DOMAIN age AS integer CHECK (VALUE > 0)")
            conn.execute(
                "CREATE TABLE pet (name text, mood mood, age age, spans tstzrange[], at point)"
            )
            conn.execute("INSERT INTO pet (name, mood, age) VALUES ('rex', 'glad', 3)")
            conn.execute("CREATE TABLE job (id text)")
    before = names(engine, empty_url)

    migrate.upgrade(database)
    assert migrate.upgrade(database) == []
    with closing(open_store(empty_url)) as store:
        one(store)
    gone = migrate.uninstall(database)

    assert names(engine, empty_url) == before
    assert rows(empty_url, "SELECT name, mood FROM pet") == [("rex", "glad")]
    assert any(name.endswith("job") for name in gone)
    assert migrate.uninstall(database) == []
    assert len(migrate.upgrade(database)) == len(migrate.scripts(engine))


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_an_uninstall_takes_nothing_that_others_built_upon_our_tables(database, engine, empty_url):
    migrate.upgrade(database)
    with connection(empty_url) as conn:
        conn.execute("CREATE VIEW report AS SELECT state, count(*) FROM genba.job GROUP BY state")

    with pytest.raises(StoreError, match="report"):
        migrate.uninstall(database)
    assert rows(empty_url, "SELECT * FROM report") == []

    with connection(empty_url) as conn:
        conn.execute("DROP VIEW report")
        conn.execute("CREATE TABLE genba.mine (x integer)")
    migrate.uninstall(database)
    assert names(engine, empty_url) >= {"genba.mine", "schema genba"}


def test_a_migration_that_fails_leaves_nothing(database, engine, empty_url):
    before = names(engine, empty_url)

    with pytest.raises(StoreError), database.migrations() as schema:
        schema.apply(
            1,
            "broken",
            "CREATE TABLE genba.half (x integer);\nCREATE TABLE genba.half (x integer);",
        )

    assert names(engine, empty_url) == before
    assert migrate.upgrade(database) != []


def test_a_copy_of_the_file_is_a_database_of_its_own(tmp_path):
    with closing(open_store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        id = one(store)
    shutil.copy(tmp_path / "a.db", tmp_path / "b.db")
    with closing(open_store(f"sqlite:///{tmp_path / 'b.db'}")) as copy:
        copy.cancel(id, None)
    with closing(open_store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        assert state(store, id) == "waiting"


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_user_without_the_right_to_create_gets_an_error(empty_url, engine):
    with connection(empty_url) as conn:
        conn.execute("CREATE ROLE genba_poor LOGIN")
    try:
        parts = urlsplit(empty_url)
        poor = parts._replace(netloc="genba_poor@" + parts.netloc.rpartition("@")[2]).geturl()
        with (
            closing(open_store(poor)) as store,
            pytest.raises(StoreError, match="permission denied"),
        ):
            store.install()
    finally:
        with psycopg.connect(empty_url, autocommit=True) as conn:
            conn.execute("DROP ROLE genba_poor")
