"""Behind a pooler in transaction mode: no session of the server is ours for longer than a transaction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from tests.chaos.pgbouncer import PROGRAM, WANTED, PgBouncer
from tests.chaos.pooler import Pooler
from tests.support import eventually, load_jobs

from genba import Genba
from genba.errors import BadOption
from genba.storage.store import open_store

pytestmark = pytest.mark.parametrize("engine", ["postgres"])


@pytest.fixture
def pooler(url: str) -> Iterator[Pooler]:
    pooler = Pooler(url)
    yield pooler
    pooler.close()


@pytest.fixture(params=["named", "found"])
def pgbouncer(request: pytest.FixtureRequest, url: str) -> Iterator[str]:
    """The pooled URL; with `?pooler=transaction`, or without."""
    if PROGRAM is None:
        pytest.skip(WANTED)
    bouncer = PgBouncer(url, said=request.param == "named")
    yield bouncer.url
    bouncer.end()


@pytest.fixture
def pooled(pooler, tmp_path):
    module = load_jobs(pooler.url, tmp_path)
    yield module
    module.app.close()


def test_the_pooler_of_these_tests_forgets_the_settings_of_a_session(pooler):
    direct = pooler.url.partition("?")[0]
    with psycopg.connect(direct, autocommit=True, prepare_threshold=None) as conn:
        conn.execute("SET statement_timeout = '1s'")
        assert conn.execute("SHOW statement_timeout").fetchone() == ("0",)
        with conn.transaction():
            conn.execute("SET LOCAL statement_timeout = '1s'")
            assert conn.execute("SHOW statement_timeout").fetchone() == ("1s",)
        pids = {conn.execute("SELECT pg_backend_pid()").fetchone() for _ in range(30)}
    assert len(pids) == 3


def test_jobs_come_and_run_behind_a_pooler(pooled, pooler, start_node):
    node = start_node("jobs:app", pooler.url, "--max", "2")
    began = time.monotonic()
    assert pooled.add.enqueue(1).result(timeout=60) == 2
    first = time.monotonic() - began
    group = pooled.app.enqueue_many([pooled.add.call(n) for n in range(300)])
    group.wait(timeout=60)
    with pooled.app.mutex("one"):
        began = time.monotonic()
        assert pooled.add.enqueue(2).result(timeout=60) == 3
        idle = time.monotonic() - began
    assert pooled.app.verify().faults == []
    assert pooled.app.count(state="succeeded") == 302
    assert pooler.lent > 100
    assert "warning" not in node.log
    print(f"the first job ended after {first:.1f} s, one for an idle node after {idle:.2f} s")


def test_behind_a_pooler_the_jobs_of_a_killed_node_are_taken_over_after_its_lease(
    pooled, pooler, start_node, path
):
    settings = {"GENBA_LEASE": "2"}
    node = start_node("jobs:app", pooler.url, "--max", "1", env=settings)
    job = pooled.wait_for.enqueue(str(path))
    eventually(lambda: job.refresh().state == "running", within=60)
    start_node("jobs:app", pooler.url, "--max", "1", env=settings)
    eventually(lambda: len(pooled.app.nodes()) == 2, within=60)

    node.kill9()
    began = time.monotonic()
    eventually(lambda: len(pooled.app.nodes()) == 1, within=20)
    took = time.monotonic() - began
    path.touch()
    job.wait(timeout=60)

    assert job.refresh().state == "succeeded"
    assert pooled.app.verify().faults == []
    print(f"with a lease of 2 s it was declared dead after {took:.1f} s")


@pytest.mark.parametrize("strict", [True, False], ids=["refuses settings", "ignores settings"])
def test_a_pooler_that_is_not_configured_is_found(url, tmp_path, start_node, strict):
    pooler = Pooler(url, strict=strict, said=False)
    module = load_jobs(pooler.url, tmp_path)
    try:
        node = start_node("jobs:app", pooler.url, "--max", "2")
        module.app.enqueue_many([module.add.call(n) for n in range(50)]).wait(timeout=60)
        assert [module.add.enqueue(n).result(timeout=60) for n in range(5)] == [
            n + 1 for n in range(5)
        ]
        assert module.app.verify().faults == []
        assert node.log.count("behind a pooler no process can wake a node") == 1
        assert "listener" in {found.kind for found in module.app.doctor()}
    finally:
        module.app.close()
        pooler.close()


def test_jobs_come_and_run_behind_pgbouncer(pgbouncer, tmp_path, start_node):
    module = load_jobs(pgbouncer, tmp_path)
    try:
        node = start_node("jobs:app", pgbouncer, "--max", "2")
        module.app.enqueue_many([module.add.call(n) for n in range(300)]).wait(timeout=60)
        with module.app.mutex("one"):
            assert [module.add.enqueue(n).result(timeout=60) for n in range(5)] == [
                n + 1 for n in range(5)
            ]
        assert module.app.verify().faults == []
        assert module.app.count(state="succeeded") == 305
        assert ("behind a pooler no process can wake a node" in node.log) == (
            "pooler=" not in pgbouncer
        )
    finally:
        module.app.close()


def test_without_a_pooler_none_is_found(url):
    with closing(open_store(url)) as store:
        store.install()
        assert not store.pooler_found


def test_another_mode_of_a_pooler_is_refused(url):
    with pytest.raises(BadOption, match="pooler=statement is not known"):
        Genba(f"{url}&pooler=statement").count()
