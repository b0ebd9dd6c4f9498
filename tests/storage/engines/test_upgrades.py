"""A rolling deploy: old and new code on one database, in whatever order, and a migration that is cut off."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from tests.storage.builders import claimed, connection, finish, install, joined, one, rows, state
from tests.support import eventually

from genba.errors import SchemaTooNew
from genba.storage.engines import migrate
from genba.storage.store import Store, open_store

ADD = "ALTER TABLE genba.job ADD COLUMN note TEXT;\n"
ADDS = (2, "note", f"-- serves: 1\n{ADD}CREATE TABLE genba.extra (id INTEGER);\n")
BREAKS = (2, "break", ADD)
real = migrate.scripts


def code_of(monkeypatch: pytest.MonkeyPatch, *more: tuple[int, str, str]) -> None:
    """From here on this process is a release with these migrations too."""
    monkeypatch.setattr(migrate, "scripts", lambda dialect: [*real(dialect), *more])


def fresh(url: str) -> Any:
    """As a process that starts now."""
    return closing(open_store(url))


def works(store: Store, node: int) -> None:
    joined(store, node, name=f"n{node}")
    finish(store, one(store), node=node)


def test_old_code_goes_on_and_may_start_on_a_schema_that_only_adds(empty_url, monkeypatch):
    install(empty_url)
    with fresh(empty_url) as old:
        waiting = one(old)
        works(old, 1)
        code_of(monkeypatch, ADDS)
        with fresh(empty_url) as new:
            assert new.upgrade() == ["note"]
            works(old, 2)
            works(new, 3)
        code_of(monkeypatch)
        with fresh(empty_url) as late:
            works(late, 4)
            assert late.upgrade() == []
            assert late.verify().faults == []
            assert state(late, waiting) in ("waiting", "succeeded")
    assert rows(empty_url, "SELECT version FROM genba.migration ORDER BY version") == [(1,), (2,)]


def test_new_code_brings_an_old_schema_up_to_date_with_its_first_call_and_jobs_stay(
    empty_url, monkeypatch
):
    with fresh(empty_url) as old:
        joined(old)
        running, waiting = one(old), one(old)
        (job,) = claimed(old)
        code_of(monkeypatch, ADDS)
        with fresh(empty_url) as new:
            assert new.job(waiting) is not None
            assert rows(empty_url, "SELECT note FROM genba.job WHERE note IS NOT NULL") == []
            assert job.id == running
            assert (state(new, running), state(new, waiting)) == ("running", "waiting")


def test_old_code_refuses_a_schema_that_does_not_serve_it(empty_url, monkeypatch):
    code_of(monkeypatch, BREAKS)
    install(empty_url)
    code_of(monkeypatch)

    with (
        fresh(empty_url) as old,
        pytest.raises(SchemaTooNew, match="schema 2, and this genba knows up to 1"),
    ):
        one(old)


SLOW = {
    "sqlite": "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1e12) SELECT max(i) FROM n",
    "postgres": "SELECT pg_sleep(600)",
}
CHILD = """
import sys
from genba.storage.engines import migrate
from genba.storage.store import open_store

real = migrate.scripts
text = "-- serves: 1\\nCREATE TABLE genba.extra (id INTEGER);\\nDELETE FROM genba.job;\\n" + sys.argv[2] + ";\\n"
migrate.scripts = lambda dialect: [*real(dialect), (2, "slow", text)]
store = open_store(sys.argv[1])
store.upgrade()
"""


def test_a_migration_that_is_killed_in_the_middle_leaves_all_as_it_was(
    empty_url, engine, monkeypatch
):
    install(empty_url)
    with fresh(empty_url) as store:
        job = one(store)
    child = subprocess.Popen([sys.executable, "-c", CHILD, empty_url, SLOW[engine]])
    try:
        eventually(lambda: _in_the_middle(empty_url, engine), within=30)
    finally:
        child.kill()
        child.wait()

    code_of(monkeypatch, ADDS)
    eventually(lambda: not _in_the_middle(empty_url, engine), within=30)
    with fresh(empty_url) as new:
        assert new.upgrade() == ["note"]
        works(new, 1)
        assert state(new, job) in ("waiting", "succeeded")
        assert new.verify().faults == []


def _in_the_middle(url: str, engine: str) -> bool:
    with connection(url) as conn:
        if engine == "postgres":
            found = conn.execute(
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
            )
            return found.fetchone() is not None
        import apsw

        conn.set_busy_timeout(0)
        try:
            conn.execute("BEGIN IMMEDIATE").fetchall()
        except apsw.BusyError:
            return True
        conn.execute("ROLLBACK")
        return False
