"""What a claim and a finish cost does not depend on how much lies around: the plans of the real statements.

The plans are asked for through the Database itself, with the types and literals that it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.storage.builders import CLAIM, TASK, claimed, connection, install, joined, one, spoken
from tests.support import Databases, sqlite_url

from genba.domain.clock import SystemClock
from genba.storage.engines.database import Database
from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.engines.sqlite.database import SqliteDatabase
from genba.storage.engines.sqlite.file_checks import SqliteLocation
from genba.storage.store import open_store, queries

STATES = (
    "waiting",
    "parked",
    "scheduled",
    "blocked",
    "held",
    "running",
    "succeeded",
    "failed",
    "cancelled",
)
EACH = 50_000 // len(STATES)

FILL = """
INSERT INTO genba.job (id, rank, due_at, created_at, claim_id, node, attempt, priority, finished_at, parked_on,
                       namespace, queue, task, state, args)
SELECT {n} * 10 + {i}, {n}, {n}, {n}, CASE WHEN '{state}' = 'running' THEN 77 END,
       CASE WHEN '{state}' = 'running' THEN 1 END, 1, 0,
       CASE WHEN '{state}' IN ('succeeded', 'failed', 'cancelled') THEN {n} END,
       CASE WHEN '{state}' = 'parked' THEN 'unknown task x' END,
       'default', 'default', '{task}', CASE WHEN '{state}' = 'parked' THEN 'waiting' ELSE '{state}' END, NO_ARGS
  FROM {source}
"""


def fill(url: str) -> None:
    lite = url.startswith("sqlite")
    source = (
        f"(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {EACH}) SELECT n FROM s)"
        if lite
        else f"generate_series(1, {EACH}) AS s (n)"
    )
    with connection(url) as conn:
        conn.execute("BEGIN")
        for i, state in enumerate(STATES):
            text = FILL.format(n="n", i=i, state=state, task=TASK, source=source)
            conn.execute(spoken(url, text))
        conn.execute("COMMIT")
        conn.execute("ANALYZE")


@pytest.fixture(scope="module")
def full_postgres(databases: Databases) -> Iterator[str]:
    with databases.fresh() as name:
        install(databases.url(name))
        fill(databases.url(name))
        yield databases.url(name)


@pytest.fixture(scope="module")
def full_sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = sqlite_url(tmp_path_factory.mktemp("plans"))
    install(url)
    fill(url)
    return url


@pytest.fixture
def database(engine: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Every query answers with its plan."""
    url: str = request.getfixturevalue(f"full_{engine}")
    word = "EXPLAIN QUERY PLAN " if engine == "sqlite" else "EXPLAIN "
    asked = {
        name: replace(query, text=query.text and word + query.text)
        for name, query in queries(engine).items()
    }
    made: Database
    if engine == "sqlite":
        made = SqliteDatabase(
            SqliteLocation(Path(url.removeprefix("sqlite:///"))), asked, SystemClock()
        )
    else:
        made = PostgresDatabase(url, asked, None)
    with closing(made):
        yield made


def words(plan: list[tuple]) -> str:
    return "\n".join(str(row[-1]) for row in plan)


def no_walk(plan: str) -> bool:
    """Whether no table of jobs or attempts is read as a whole, nor hashed."""
    walks = (
        "Seq Scan on job",
        "Seq Scan on attempt",
        "Seq Scan on dependency",
        "Hash Join",
        "SCAN genba_job",
    )
    return not any(walk in plan for walk in walks)


@pytest.mark.parametrize("size", [1, 64, 2048])
def test_a_claim_reads_the_claim_index_and_nothing_else(database, size):
    with database.statement() as tx:
        plan = words(
            tx.all(
                "claim",
                namespace="default",
                queue="default",
                node=1,
                claim=CLAIM,
                tasks=tx.names([TASK]),
                limit=size,
                epoch=0,
            )
        )

    assert "job_claim" in plan
    assert no_walk(plan), plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan


def test_what_sqlite_has_chosen_it_leases_by_the_primary_key(database, engine):
    if engine != "sqlite":
        pytest.skip("PostgreSQL chooses and leases in one statement")
    with database.statement() as tx:
        plan = words(tx.all("mark_claimed", ids=tx.numbers([*range(100)]), node=1, claim=CLAIM))

    assert "SEARCH genba_job USING INTEGER PRIMARY KEY" in plan
    assert no_walk(plan), plan


@pytest.mark.parametrize("size", [1, 100, 500])
def test_a_finish_goes_by_the_primary_key(database, engine, size):
    rows = [(i * 10, 1, CLAIM, b"1", 1, 2, 3, 4, 5, 6, False, False) for i in range(1, size + 1)]
    with database.statement() as tx:
        plan = words(tx.batch("succeed", rows, node=1))

    by_key = "job_pkey" if engine == "postgres" else "SEARCH genba_job USING INTEGER PRIMARY KEY"
    assert by_key in plan
    assert "job_running" not in plan
    assert no_walk(plan), plan


@pytest.mark.parametrize(
    ("query", "more"),
    [("attempts", {}), ("attempt_has_ended", {"attempt": 1}), ("first_claim", {})],
)
def test_the_history_of_a_job_is_found_by_its_id(database, query, more):
    with database.statement() as tx:
        plan = words(tx.all(query, id=70, **more))

    assert no_walk(plan), plan


def test_how_long_jobs_took_lately_is_asked_of_those_few_only(database):
    with database.statement() as tx:
        plan = words(tx.all("average_duration", namespace="default", task=TASK, queue=None))

    assert "job_finished" in plan
    assert no_walk(plan), plan
    assert "MATERIALIZE" not in plan


def test_waits_that_a_clock_set_back_has_made_longer_are_found_by_an_index(database):
    with database.statement() as tx:
        plan = words(tx.all("waits_set_back", namespace="default"))

    assert "job_counted" in plan
    assert no_walk(plan), plan
    assert "Sort" not in plan
    assert "TEMP B-TREE" not in plan


def test_so_are_jobs_that_wait_in_places_of_the_future(database, engine):
    with database.statement() as tx:
        plan = words(tx.all("waiting_since_future", namespace="default"))

    assert "job_claim" in plan
    assert "job_parked" in plan
    assert no_walk(plan.replace("SCAN genba_job USING INDEX", "")), plan


@pytest.mark.parametrize("size", [1, 100])
def test_other_ends_marks_and_progress_go_by_the_primary_key(database, engine, size):
    by_key = "job_pkey" if engine == "postgres" else "SEARCH genba_job USING INTEGER PRIMARY KEY"
    ends = [
        (i, 1, CLAIM, "failed", 1, None, None, None, 0, 0, 0, None, None, None, None)
        for i in range(size)
    ]
    with database.statement() as tx:
        for plan in (
            words(tx.batch("end_attempts", ends)),
            words(tx.batch("mark_started", [(i, 1, CLAIM, 5) for i in range(size)])),
            words(tx.batch("set_progress", [(i, 1, CLAIM, "p") for i in range(size)])),
        ):
            assert by_key in plan
            assert no_walk(plan), plan


@pytest.mark.parametrize(
    ("name", "index", "values"),
    [
        ("promote", "job_due", {"age_step": 1}),
        ("next_due", "job_due", {}),
        ("expire", "job_expires", {}),
        ("unknown_in_front", "job_claim", {"queue": "default", "tasks": ["x"], "front": 2000}),
        ("unpark", "job_parked", {"parked_on": "nothing"}),
        ("parked_reasons_after", "job_parked", {"after": "", "most": 5}),
        ("prune", "job_finished", {"before": 10}),
        ("ended_since", "job_finished", {"before": 10, "since": 5, "id": 0, "limit": 1000}),
        ("due_schedules", "schedule_next", {}),
        ("open_runs", "job_schedule", {"id": 5}),
        ("orphans", "job_running", {"node": 5}),
        ("job_with_key_hash", "job_unique", {"key_hash": "h"}),
    ],
)
def test_maintenance_reads_its_own_small_index(database, name, index, values):
    with database.statement() as tx:
        given = {**values, "namespace": "default"}
        if "tasks" in given:
            given["tasks"] = tx.names(given["tasks"])
        plan = words(tx.all(name, **given))

    assert index in plan, plan


@pytest.mark.parametrize(
    ("query", "index", "asked"),
    [
        ("waiting_queues", "job_claim", {}),
        ("count_waiting", "job_claim", {"queue": "default", "limit": 100}),
        ("count_parked", "job_parked", {"limit": 100}),
        ("count_scheduled", "job_due", {"limit": 100}),
        ("count_running", "job_running", {"limit": 100}),
        ("count_blocked_or_held", "job_aside", {"state": "held", "limit": 100}),
    ],
)
def test_a_look_at_what_is_open_reads_the_index_of_it(database, query, index, asked):
    with database.statement() as tx:
        plan = words(tx.all(query, namespace="default", **asked))

    assert index in plan, plan
    assert no_walk(plan), plan
    assert "Bitmap" not in plan  # it would read all of them before it stops at the first so many


def test_what_is_asked_on_postgres_is_parsed_and_planned_once(databases):
    with databases.fresh() as name, closing(open_store(databases.url(name))) as store:
        joined(store)
        for _ in range(3):
            one(store)
            assert claimed(store)
        with store._db.statement() as tx:
            found = tx.select(
                "SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements"
            )

    for words in ("INSERT INTO genba.job", "SET state = 'running'"):
        counts = [
            counts for text, *counts in found if words in text
        ]  # soon after another one a job has its own
        assert [sum(column) for column in zip(*counts, strict=True)] == [3, 0]
