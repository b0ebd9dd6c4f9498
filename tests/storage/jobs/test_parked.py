"""A job that waits for something else costs a claim nothing, however many of them there are.

Counted, not timed: the buffers that PostgreSQL touches for each claimed row, the steps of SQLite's machine.
20,000 lie in front here; `make soak` puts a million there (-s shows the figures).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.storage.builders import CLAIM, TASK, a_node, connection, spoken
from tests.support import Databases, sqlite_url

from genba.domain.clock import SystemClock
from genba.storage.engines.database import Database
from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.engines.queries import load_queries
from genba.storage.engines.sqlite.database import SqliteDatabase
from genba.storage.engines.sqlite.file_checks import SqliteLocation
from genba.storage.store import open_store

CLAIMS, SIZE = 8, 64
WAITING = CLAIMS * SIZE
PARENT = 1

PARKED_ON = {
    "a full bucket": "'limit tenant:acme'",
    "a dependency": "NULL",
    "a condition": "'question x'",
    "a disabled task": "'disabled task shop.old'",
    "an unknown task": "'unknown task shop.new'",
}
FILL = """
INSERT INTO genba.job (id, rank, due_at, created_at, priority, parked_on, namespace, queue, task, state, open_deps,
                       args)
SELECT n + {first}, n + {first}, 0, 0, 0, {parked_on}, 'default', 'default', '{task}', '{state}', {deps},
       NO_ARGS FROM {numbers}
"""
EDGES = """
INSERT INTO genba.dependency (child_id, parent_id, wants) SELECT n + {first}, {parent}, 'success' FROM {numbers}
"""


def numbers(engine: str, count: int) -> str:
    if engine == "postgres":
        return f"generate_series(1, {count}) AS s (n)"
    return f"(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s)"


def fill(url: str, engine: str, kind: str, count: int) -> None:
    """So many that wait for it, and behind them some that may start."""
    blocked = kind == "a dependency"
    in_the_way = {
        "parked_on": PARKED_ON[kind],
        "state": "blocked" if blocked else "waiting",
        "deps": int(blocked),
    }
    ready = {"parked_on": "NULL", "state": "waiting", "deps": 0}
    with connection(url) as conn:
        conn.execute("BEGIN")
        for first, many, values in ((PARENT, count, in_the_way), (PARENT + count, WAITING, ready)):
            texts = [FILL.format(first=first, task=TASK, numbers=numbers(engine, many), **values)]
            texts += [
                EDGES.format(first=first, parent=PARENT, numbers=numbers(engine, many))
            ] * bool(values["deps"])
            for text in texts if many else ():
                conn.execute(spoken(url, text))
        conn.execute("COMMIT")
        conn.execute("ANALYZE")


class Cost:
    """What the claims have cost so far."""

    def __init__(self) -> None:
        self.units = 0

    def explained(self, rows: Sequence[Any]) -> None:
        plan = rows[0][0][0]["Plan"]
        self.units += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    def stepped(self, event: dict[str, Any]) -> None:
        self.units += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]


@contextmanager
def counting(url: str, engine: str, cost: Cost) -> Iterator[Database]:
    queries = load_queries(engine)
    if engine == "postgres":
        words = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) "
        queries["claim"] = replace(queries["claim"], text=words + queries["claim"].text)
        made: Database = PostgresDatabase(url, queries, None)
    else:
        made = SqliteDatabase(
            SqliteLocation(Path(url.removeprefix("sqlite:///"))), queries, SystemClock()
        )

    def hook(conn: apsw.Connection) -> None:
        conn.trace_v2(apsw.SQLITE_TRACE_PROFILE, cost.stepped)

    apsw.connection_hooks.append(hook)
    try:
        yield made
    finally:
        apsw.connection_hooks.remove(hook)
        made.close()


def cost_of_a_row(url: str, engine: str, kind: str, count: int) -> float:
    store = open_store(url)
    store.install()
    store.nodes.join(a_node())
    store.close()
    fill(url, engine, kind, count)
    cost, claimed = Cost(), 0
    with counting(url, engine, cost) as database:
        for _ in range(CLAIMS):
            with database.transaction() as tx:
                rows = tx.claim(
                    namespace="default",
                    queue="default",
                    node=1,
                    claim=CLAIM,
                    tasks=tx.names([TASK]),
                    limit=SIZE,
                    epoch=0,
                )
            if engine == "postgres":
                cost.explained(rows)
            claimed += SIZE if engine == "postgres" else len(rows)
    with connection(url) as conn:
        table = "genba.job" if engine == "postgres" else "genba_job"
        ((running,),) = conn.execute(
            f"SELECT count(*) FROM {table} WHERE state = 'running'"
        ).fetchall()
    assert running == claimed == WAITING
    return cost.units / claimed


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", PARKED_ON)
def test_what_waits_for_something_else_costs_a_claim_nothing(
    engine, databases, tmp_path, kind, count
):
    costs = []
    for many in (20, count):
        with database(engine, databases, tmp_path / str(many)) as url:
            costs.append(cost_of_a_row(url, engine, kind, many))

    print(
        f"{engine}: {count:,} wait for {kind}: {costs[1]:.2f} instead of {costs[0]:.2f} for each claimed row"
    )
    assert costs[1] < 1.1 * costs[0]


@contextmanager
def database(engine: str, databases: Databases, folder: Path) -> Iterator[str]:
    if engine == "sqlite":
        folder.mkdir()
        yield sqlite_url(folder)
        return
    with databases.fresh() as name:
        yield databases.url(name)
