"""The way to PostgreSQL fails: sessions are ended by the server, and a proxy accepts all and passes nothing on."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from tests.chaos.network import Network, Proxy, no_network_of_our_own
from tests.support import eventually, load_jobs

from genba import Genba
from genba.errors import StoreUnreachable
from genba.storage.engines.postgres import database, deadline

HANG_UP = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


def test_a_call_through_a_stalled_proxy_comes_back_in_time_and_the_next_one_works(
    proxied, monkeypatch
):
    assert deadline.ANSWER_SECONDS <= 12, "the promise; the test takes a shorter one"
    monkeypatch.setattr(deadline, "ANSWER_SECONDS", 2.0)
    proxy, _ = proxied
    app = Genba(proxy.url)
    app.enqueue("x")
    proxy.stall()

    began = time.monotonic()
    with pytest.raises(StoreUnreachable):
        app.enqueue("x")
    took = time.monotonic() - began
    proxy.flow()

    assert (
        took < 30
    )  # the call, and what it tries when it was cut off: to look whether it had happened
    eventually(lambda: app.count() >= 1, within=30)
    app.close()


def test_a_call_into_a_network_that_drops_all_comes_back_in_time_and_the_next_one_works(
    databases, template, monkeypatch
):
    if why := no_network_of_our_own():
        pytest.skip(why)
    monkeypatch.setattr(deadline, "ANSWER_SECONDS", 2.0)
    with ExitStack() as stack:
        name = stack.enter_context(databases.fresh(template))
        network = Network()
        stack.callback(network.close)
        proxy = Proxy(databases.url(name), network.listen())
        stack.callback(proxy.close)
        app = Genba(proxy.url)
        stack.callback(app.close)
        stack.enter_context(network.at_node())
        app.enqueue("x")
        network.cut()

        with pytest.raises(StoreUnreachable):
            app.enqueue("x")
        network.heal()

        eventually(lambda: app.count() >= 1, within=30)


def test_a_node_behind_a_proxy_that_stalls_loses_nothing_and_goes_on(proxied, start_node, tmp_path):
    proxy, direct = proxied
    jobs = load_jobs(direct, tmp_path)
    start_node("jobs:app", proxy.url, "--max", "2")
    first = jobs.app.enqueue_many([jobs.add.call(n) for n in range(20)])
    first.wait(timeout=60)

    proxy.stall()
    second = jobs.app.enqueue_many([jobs.add.call(n) for n in range(20)])
    time.sleep(3)  # what is under way hangs
    proxy.flow()

    second.wait(timeout=60)
    assert jobs.app.verify().faults == []
    jobs.app.close()


def test_jobs_go_on_while_the_server_ends_sessions_again_and_again(
    databases, template, start_node, tmp_path
):
    with databases.fresh(template) as name:
        jobs = load_jobs(databases.url(name), tmp_path)
        start_node("jobs:app", databases.url(name), "--max", "2")
        eventually(jobs.app.nodes, within=30)
        group = jobs.app.enqueue_many([jobs.add.call(n) for n in range(400)])
        ended = 0
        with psycopg.connect(databases.url(name), autocommit=True) as conn:
            while ended < 20:
                ended += sum(row[0] for row in conn.execute(HANG_UP).fetchall())
                if _settled(conn):
                    break
        group.wait(timeout=60)

        assert ended
        assert jobs.app.count(state="succeeded") == 400
        assert jobs.app.verify().faults == []
        jobs.app.close()


def _settled(conn: Any) -> bool:
    return (
        conn.execute("SELECT 1 FROM genba.job WHERE finished_at IS NULL LIMIT 1").fetchone() is None
    )


@pytest.mark.parametrize("engine", ["postgres"])
def test_a_connection_that_breaks_before_its_first_use_is_closed(url, monkeypatch):
    """Otherwise Python says so some time later, in a test or a program that has nothing to do with it."""
    opened = []

    def broken(conn: Any) -> bool:
        opened.append(conn)
        raise psycopg.OperationalError("no answer within 11 s")

    monkeypatch.setattr(database, "_is_pooled", broken)
    with closing(Genba(url)) as app, pytest.raises(StoreUnreachable, match="no answer"):
        app.count()

    assert opened
    assert all(conn.closed for conn in opened)
