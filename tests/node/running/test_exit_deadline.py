"""A node that is asked to end is gone soon after its grace, whatever it is still waiting for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.chaos.network import Proxy
from tests.support import NodeProcess, eventually, lines, load_module

GRACE = 1.0
BOUND = GRACE + 2
SLACK = 6.0  # for a machine that others want; what is awaited here would take 10 s and more, or for ever


class Way:
    """Between a node and its database, until it is closed."""

    def __init__(self, url: str, close: Callable[[], None], open: Callable[[], None]) -> None:
        self.url, self.close, self.open = url, close, open


@pytest.fixture
def way(engine: str, url: str, tmp_path: Path) -> Iterator[Way]:
    """On SQLite another process has the file; on PostgreSQL a proxy takes all and passes nothing on."""
    if engine == "sqlite":
        with closing(
            apsw.Connection(str(tmp_path / "genba.db"))
        ) as conn:  # as the client of this process has it
            yield Way(
                url, lambda: execute(conn, "BEGIN IMMEDIATE"), lambda: execute(conn, "ROLLBACK")
            )
        return
    proxy = Proxy(url)
    try:
        yield Way(proxy.url, proxy.stall, proxy.flow)
    finally:
        proxy.close()


def execute(conn: Any, text: str) -> None:
    conn.set_busy_timeout(10_000)
    conn.execute(text)


def seconds_to_end(node: NodeProcess) -> tuple[float, int]:
    began = time.monotonic()
    code = node.stop(within=60)
    return time.monotonic() - began, code


def test_a_node_leaves_in_time_though_its_database_does_not_answer_and_its_jobs_go_to_others(
    jobs, way, url, start_node, path
):
    first = start_node("jobs:app", way.url, "--name", "first", "--grace", f"{GRACE}s", "--max", "2")
    done, unfinished = [jobs.wait_for.enqueue(str(path) + word) for word in ("", ".never")]
    eventually(
        lambda: len(lines(f"{path}.started")) + len(lines(f"{path}.never.started")) == 2, within=30
    )
    way.close()
    path.touch()  # it has ended, and its end cannot be written

    took, code = seconds_to_end(first)

    assert took < BOUND + SLACK
    assert code == 1  # something was left undone
    assert "other nodes take over" in first.log
    eventually(lambda: first.tree() == [], within=30)  # its guard sees to that
    way.open()
    Path(f"{path}.never").touch()
    start_node("jobs:app", url, "--name", "second")
    assert [job.result(timeout=60) for job in (done, unfinished)] == ["opened"] * 2


_SLOW_TO_LEAVE = """
import time
from genba import Genba

app = Genba()

@app.lifespan
def surroundings():
    yield
    time.sleep(600)

@app.task
def add(x: int) -> int:
    return x + 1
"""


def test_a_worker_that_does_not_come_to_an_end_is_ended_soon_after_the_grace(
    url, start_node, tmp_path
):
    (tmp_path / "slow_to_leave.py").write_text(_SLOW_TO_LEAVE)
    module = load_module("slow_to_leave", tmp_path, url)
    with closing(module.app):
        node = start_node("slow_to_leave:app", url, "--name", "slow", "--grace", f"{GRACE}s")
        assert module.add.enqueue(1).result(timeout=30) == 2

        took, code = seconds_to_end(node)

    assert took < BOUND + SLACK
    assert code == 0  # nothing was left undone
    assert node.tree() == []
