"""The way to PostgreSQL fails: sessions are ended by the server, and a proxy accepts all and passes nothing on."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from tests.support import eventually, load_jobs

from genba import Genba
from genba.errors import StoreUnreachable
from genba.storage import deadline

HANG_UP = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


class Proxy:
    """Passes bytes on, both ways, until it is told to stall: then it takes them, as a kernel does, and keeps them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        asked = parse_qs(parts.query)
        self._target = f"{asked['host'][0]}/.s.PGSQL.{asked.get('port', ['5432'])[0]}"
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = f"postgresql://{parts.username or 'postgres'}@127.0.0.1:{port}{parts.path}"
        self._stalled = threading.Event()
        self._ended = False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def stall(self) -> None:
        self._stalled.set()

    def flow(self) -> None:
        self._stalled.clear()

    def _run(self) -> None:
        while not self._ended:
            ready, _, _ = select.select([self._listening, *self._pairs], [], [], 0.05)
            for one in ready:
                if one is self._listening:
                    client, _ = self._listening.accept()
                    server = socket.socket(socket.AF_UNIX)
                    server.connect(self._target)
                    self._pairs[client], self._pairs[server] = server, client
                elif one in self._pairs and not self._stalled.is_set():
                    self._pass_on(one)
            if self._stalled.is_set():
                time.sleep(0.02)

    def _pass_on(self, one: socket.socket) -> None:
        other = self._pairs[one]
        try:
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for end in (one, other):
            self._pairs.pop(end, None)
            end.close()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for end in (self._listening, *self._pairs):
            end.close()


@pytest.fixture
def proxied(databases: Any, template: str) -> Iterator[tuple[Proxy, str]]:
    with databases.fresh(template) as name:
        proxy = Proxy(databases.url(name))
        try:
            yield proxy, databases.url(name)
        finally:
            proxy.close()


def test_a_call_through_a_stalled_proxy_comes_back_in_time_and_the_next_one_works(proxied, monkeypatch):
    assert deadline.LIMIT <= 12, "the promise; here a shorter one, so that nobody has to wait for it"
    monkeypatch.setattr(deadline, "LIMIT", 2.0)
    proxy, _ = proxied
    app = Genba(proxy.url)
    app.enqueue("x")
    proxy.stall()

    began = time.monotonic()
    with pytest.raises(StoreUnreachable):
        app.enqueue("x")
    took = time.monotonic() - began
    proxy.flow()

    assert took < 30  # the call, and what it tries when it was cut off: to look whether it had happened
    eventually(lambda: app.count() >= 1, within=30)
    app.close()


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


def test_jobs_go_on_while_the_server_ends_sessions_again_and_again(databases, template, start_node, tmp_path):
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
    return conn.execute("SELECT 1 FROM genba.job WHERE finished_at IS NULL LIMIT 1").fetchone() is None
