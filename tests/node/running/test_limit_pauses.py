"""A limit holds while its worker, its node, or a whole machine is paused, and while the database is away.

Each job tries the limit with a lock of the kernel (limited_tasks.py): a paused process keeps that, a dead one does not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support import NodeProcess, eventually, gone, lines, load_app, started
from tests.support.postgres_server import a_server

from genba.errors import StoreError

LEASE = {"GENBA_LEASE": "2"}


@pytest.fixture
def limited_tasks(url: str, tmp_path: Path) -> Iterator[Any]:
    module = load_app("limited_tasks", url, tmp_path)
    yield module
    module.app.close()


def test_a_paused_worker_keeps_its_slot_until_it_is_dead(
    limited_tasks, url, start_node, tmp_path, path
):
    start_node("limited_tasks:app", url, "--max", "3")
    first = limited_tasks.solo.using(timeout="1s", grace="100ms").enqueue(str(tmp_path), str(path))
    [(_, _, pid)] = started(path, 1)
    os.kill(int(pid), signal.SIGSTOP)
    others = [limited_tasks.solo.enqueue(str(tmp_path), str(path)) for _ in range(2)]
    assert [job.refresh().record.parked_on for job in others] == ["limit solo"] * 2

    second = started(path, 2)[1]
    assert second[0] == str(others[0].id)
    assert gone(pid)  # stopped, it could not end by itself: it was killed first
    path.touch()
    limited_tasks.app.wait([first, *others], timeout=20)
    assert (first.refresh().state, others[1].refresh().state) == ("timed_out", "succeeded")
    assert lines(tmp_path / "broken") == []


def test_of_a_paused_node_the_tree_is_dead_before_another_has_the_slot(
    limited_tasks, url, start_node, tmp_path, path
):
    first = start_node("limited_tasks:app", url, "--max", "2", env=LEASE)
    job = limited_tasks.solo.enqueue(str(tmp_path), str(path))
    other = limited_tasks.solo.enqueue(str(tmp_path), str(path))
    [(_, _, pid)] = started(path, 1)
    start_node("limited_tasks:app", url, "--max", "2", env=LEASE)
    eventually(lambda: len(limited_tasks.app.nodes()) == 2, within=15)

    first.signal(signal.SIGSTOP)
    again = started(path, 2)[1]
    assert gone(pid)
    first.signal(signal.SIGCONT)
    path.touch()

    limited_tasks.app.wait([job, other], timeout=30)
    assert {job.refresh().state, other.refresh().state} == {"succeeded"}
    assert int(again[2]) not in first.tree()
    assert lines(tmp_path / "broken") == []


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)])
def test_a_tree_that_wakes_past_its_lease_dies_at_once_and_writes_nothing(
    limited_tasks, url, start_node, tmp_path, path
):
    """A whole machine is frozen: nothing there can end a job, and a slot cannot be kept for ever."""
    first = start_node("limited_tasks:app", url, "--max", "1", env=LEASE)
    job = limited_tasks.solo.enqueue(str(tmp_path), str(path))
    [(_, _, pid)] = started(path, 1)
    frozen = freeze(first)
    start_node("limited_tasks:app", url, "--max", "2", env=LEASE)
    runs = started(path, 2, within=40)
    assert runs[1][:2] == [str(job.id), "2"]

    for (
        process
    ) in frozen:  # the worker first: it has the start that it would have on a machine that wakes
        process.resume()
    eventually(lambda: gone(pid), within=1 + 2)  # a second is promised; two more for a busy machine
    path.touch()

    assert job.result(timeout=20) >= 2
    assert [attempt.cause for attempt in job.attempts][0 :: len(job.attempts) - 1] == [
        "node lost",
        "returned",
    ]


def freeze(node: NodeProcess) -> list[psutil.Process]:
    """All of it, workers first."""
    tree = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)][::-1]
    for process in tree:
        process.suspend()
    return tree


def test_a_limit_holds_when_the_database_crashes_and_comes_back(start_node, tmp_path):
    with a_server() as server:
        limited_tasks = load_app("limited_tasks", server.url, tmp_path)
        for _ in "ab":
            start_node("limited_tasks:app", server.url, "--max", "3")
        eventually(lambda: len(limited_tasks.app.nodes()) == 2, within=20)
        calls = [
            limited_tasks.app.call(
                f"limited_tasks.crowd{1 + i % 3}", (str(tmp_path), i % 4, 0.02), {}
            )
            for i in range(240)
        ]
        group = limited_tasks.app.enqueue_many(calls)
        eventually(lambda: limited_tasks.app.count(state="succeeded") >= 40, within=30)

        server.start(server.crash())

        eventually(lambda: ended(limited_tasks, group), within=60, every=0.1)
        limited_tasks.app.close()
    assert lines(tmp_path / "broken") == []


def ended(limited_tasks: Any, group: Any) -> bool:
    with suppress(StoreError):  # connections that the crash has cut
        return bool(limited_tasks.app.count(state="succeeded") == len(group))
    return False
