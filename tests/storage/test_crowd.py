"""A crowd of jobs that wait for something costs a claim nothing: buffers on PostgreSQL, VM steps on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import apsw
import pytest
from tests.storage.builders import TASK, connection, enqueued, joined, one

from genba.storage.database import load_queries
from genba.storage.postgres import PostgresDatabase
from genba.storage.store import Store, open_store

MANY = 10_000
CLAIMED = 64

CROWD = """
INSERT INTO genba.job (id, rank, due_at, created_at, priority, open_deps, parked_on,
                       namespace, queue, task, state, args)
SELECT 10000000 + n, n, n, n, 0, {deps}, {parked}, 'default', 'default', '{task}', '{state}', '{{}}' FROM {source}
"""
EDGES = """
INSERT INTO genba.dependency (child_id, parent_id, wants) SELECT 10000000 + n, {parent}, 'success' FROM {source}
"""


def series(url: str, count: int) -> str:
    if url.startswith("sqlite"):
        return f"(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s)"
    return f"generate_series(1, {count}) AS s (n)"


def run(url: str, *statements: str) -> None:
    with connection(url) as conn:
        for text in statements:
            conn.execute(text.replace("genba.", "genba_") if url.startswith("sqlite") else text)


def on_a_dependency(store: Store, url: str, count: int) -> None:
    source, parent = series(url, count), one(store, delay=10**12)
    run(
        url,
        CROWD.format(deps=1, parked="NULL", task=TASK, state="blocked", source=source),
        EDGES.format(parent=parent, source=source),
    )


def on_a_question(store: Store, url: str, count: int) -> None:
    run(url, CROWD.format(deps=0, parked="'question x'", task=TASK, state="waiting", source=series(url, count)))


@contextmanager
def costs(store: Store, url: str) -> Iterator[Callable[[], int]]:
    """What a claim of 64 jobs costs, each time it is called."""
    if url.startswith("sqlite"):
        steps = [0]

        def count() -> bool:
            steps[0] += 1
            return False

        def watched(conn: apsw.Connection) -> None:
            conn.set_progress_handler(count, 10)

        apsw.connection_hooks.append(watched)
        try:
            with closing(open_store(url)) as other:

                def spent() -> int:
                    steps[0] = 0
                    assert len(other.claim(1, 7, {"default": CLAIMED}, [TASK])) == CLAIMED
                    return steps[0]

                yield spent
        finally:
            apsw.connection_hooks.remove(watched)
        return
    word = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
    queries = load_queries("postgres").items()
    asked = {name: replace(query, text=query.text and word + query.text) for name, query in queries}
    with closing(PostgresDatabase(url, asked, None)) as database:

        def buffers() -> int:
            with database.statement() as tx:
                given: dict[str, Any] = {"namespace": "default", "queue": "default", "node": 1, "claim": 7}
                given |= {"tasks": tx.names([TASK]), "epoch": store.policy.refresh().epoch}
                ((plan,),) = tx.all("claim", limit=CLAIMED, **given)
            top = plan[0]["Plan"]
            assert top["Actual Rows"] == CLAIMED
            return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

        yield buffers


def check(store: Store, url: str, crowd: Callable[[Store, str, int], None], count: int, ended: int = 0) -> None:
    """`ended` jobs are there before: in an all but empty table a million rows make the primary key one level deeper."""
    joined(store, lease=10**16)
    if ended:
        text = CROWD.replace("10000000", "20000000").replace("priority,", "priority, finished_at,")
        text = text.replace("0, {deps}", "0, n, {deps}")
        run(url, text.format(deps=0, parked="NULL", task=TASK, state="succeeded", source=series(url, ended)))
    enqueued(store, CLAIMED * 6)
    analyse = "ANALYZE" if url.startswith("sqlite") else "VACUUM ANALYZE genba.job"
    run(url, analyse)
    with costs(store, url) as cost:
        cost()
        alone = min(cost(), cost())
        crowd(store, url, count)
        run(url, analyse)
        cost()
        among_many = min(cost(), cost())

    assert among_many < alone * 1.1, (alone, among_many)


@pytest.mark.parametrize("crowd", [on_a_dependency, on_a_question])
def test_jobs_that_wait_outside_of_the_claim_index_cost_a_claim_nothing(store, url, crowd):
    check(store, url, crowd, MANY)


@pytest.mark.soak
@pytest.mark.parametrize("crowd", [on_a_dependency, on_a_question])
def test_a_million_jobs_that_wait_cost_a_claim_nothing(store, url, crowd):
    check(store, url, crowd, 1_000_000, ended=200_000)
