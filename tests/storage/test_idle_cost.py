"""What lies around costs an idle node nothing: counted in steps of SQLite and pages of PostgreSQL, not in time."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.storage.builders import (
    TASK,
    claimed,
    connection,
    install,
    joined,
    one,
    rows,
    spoken,
    success,
)
from tests.storage.jobs.test_prune import sweep
from tests.support import eventually, sqlite_url

from genba.domain.clock import SystemClock
from genba.domain.duration import DAY, SECOND
from genba.node.database.events import LeaseRenewed
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.storage.store import open_store

FILL = """
INSERT INTO genba.job (id, rank, due_at, created_at, finished_at, attempt, priority,
                       namespace, queue, task, state, args)
SELECT 1000000000 + {first} + n, {first} + n, {due}, 0, {finished}, 1, 0,
       'default', 'default', '{task}', '{state}', NO_ARGS FROM {source}
"""


@pytest.fixture
def url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database for one test: what is filled would slow down those after it, and a vacuum would be counted."""
    if engine == "sqlite":
        install(sqlite_url(tmp_path))
        yield sqlite_url(tmp_path)
        return
    databases = request.getfixturevalue("databases")
    with databases.fresh(request.getfixturevalue("template")) as name:
        with connection(databases.url(name)) as conn:
            ours = conn.execute(
                "SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'genba'"
            )
            for (table,) in ours.fetchall():
                conn.execute(f"ALTER TABLE genba.{table} SET (autovacuum_enabled = off)")
        yield databases.url(name)


def fill(
    url: str, count: int, state: str, task: str = TASK, finished: str = "NULL", first: int = 0
) -> None:
    lite = url.startswith("sqlite")
    numbers = f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s"
    source = f"({numbers})" if lite else f"generate_series(1, {count}) AS s (n)"
    far = SystemClock().now() + 365 * DAY
    given = {
        "first": first,
        "due": f"{far} + n",
        "finished": finished,
        "task": task,
        "state": state,
    }
    text = FILL.format(source=source, **given)
    with connection(url) as conn:
        conn.execute(spoken(url, text))
        conn.execute("ANALYZE")


class Counted:
    """How much was read: of SQLite the most steps of any statement, of PostgreSQL pages, in so many transactions."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = defaultdict(int)
        self.pages = 0
        self.transactions = 0

    def __str__(self) -> str:
        costly = sorted(self.steps.items(), key=lambda item: -item[1])[:3]
        words = [f"{self.pages} pages in {self.transactions} transactions"] if self.pages else []
        return "; ".join([*words, *(f"{steps} steps: {text[:300]}" for text, steps in costly)])

    @property
    def cost(self) -> float:
        """Steps of the most costly statement, or pages of a transaction."""
        return self.pages / self.transactions if self.pages else max(self.steps.values())


@contextmanager
def counted(url: str) -> Iterator[Counted]:
    """Count what connections read that open and close inside the `with`."""
    found = Counted()
    if url.startswith("sqlite"):

        def note(event: dict[str, Any]) -> None:
            steps = event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
            found.steps[event["sql"]] = max(found.steps[event["sql"]], steps)

        def watch(conn: apsw.Connection) -> None:
            conn.trace_v2(apsw.SQLITE_TRACE_PROFILE, note)

        apsw.connection_hooks.append(watch)
        try:
            yield found
        finally:
            apsw.connection_hooks.remove(watch)
        return
    before = pages(url)
    yield found
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    eventually(
        lambda: rows(url, others) == [(0,)], within=30
    )  # a session tells what it has read when it ends
    found.pages, found.transactions = (
        now - then for now, then in zip(pages(url), before, strict=True)
    )


def pages(url: str) -> tuple[int, int]:
    text = """SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read),
                     (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())
                FROM pg_statio_user_tables WHERE schemaname = 'genba'"""
    read, transactions = rows(url, text)[0]
    return int(read), int(transactions)


def an_idle_while(url: str, node: int) -> Counted:
    """Run maintenance of a node that has nothing to do, until its lease was renewed three times."""
    beats, done = 0, threading.Event()
    with counted(url) as found, closing(open_store(url)) as store:
        joined(store, node)

        def post(what: Any) -> None:
            nonlocal beats
            beats += isinstance(what, LeaseRenewed)
            if beats == 3:
                done.set()

        maintenance = Maintenance(
            store, node, lease=2 * SECOND, poll=SECOND // 20, queues=["default"], tasks=[TASK], conditions=[],
            keep={TASK: 0}, schedules=[], boot_id=None, clock=SystemClock(),
            lost_claims=LostClaims(SystemClock()), post=post,
        )  # fmt: skip
        maintenance.start()
        assert done.wait(30)
        maintenance.finish(10)
        store.nodes.leave(node)
    return found


def compare(url: str, count: int) -> None:
    empty = an_idle_while(url, 1)
    fill(url, count, "scheduled")
    full = an_idle_while(url, 2)
    print(f"{count:,} scheduled: {full.cost:.0f} against {empty.cost:.0f} without them ({full})")
    assert full.cost < 2 * empty.cost + 5, (str(empty), str(full))  # one walk would be much more


def test_a_hundred_thousand_scheduled_jobs_cost_an_idle_node_nothing(url):
    compare(url, 100_000)


@pytest.mark.soak
def test_a_million_scheduled_jobs_cost_an_idle_node_nothing(url):
    compare(url, 1_000_000)


def test_a_backlog_costs_a_keeper_no_more_than_its_front(url):
    fill(url, 5_000, "waiting")
    short = an_idle_while(url, 1)
    fill(url, 100_000, "waiting", first=5_000)
    long = an_idle_while(url, 2)

    assert long.cost < 2 * short.cost + 5, (str(short), str(long))


def keep_none(url: str, count: int) -> None:
    """Sweeps that delete a few at once, beside so many of another task that are kept."""
    fill(url, count, "succeeded", task="other", finished=f"{SystemClock().now() - DAY} + n")
    keeps = {TASK: 0, "other": 7 * DAY}
    with counted(url) as first, closing(open_store(url)) as store:
        joined(store)
        assert sweep(store, keeps) == 0  # the first step looks at all
    with counted(url) as both, closing(open_store(url)) as store:
        store.install()
        assert sweep(store, keeps) == 0
        both.steps.clear()  # from here on it looks at what is new
        for _ in range(5):
            one(store)
            (job,) = claimed(store)
            store.finish(1, [success(job)])
            eventually(lambda: sweep(store, keeps) == 1)
    cost = both.pages - first.pages if both.pages else both.cost
    print(
        f"{count:,} kept: five sweeps of one job each cost {cost:.0f}, the look at all {first} ({both})"
    )
    assert cost < 3000, str(both)


def test_what_is_kept_costs_a_sweep_nothing(url):
    keep_none(url, 50_000)


@pytest.mark.soak
def test_two_millions_that_are_kept_cost_a_sweep_nothing(url):
    keep_none(url, 2_000_000)
