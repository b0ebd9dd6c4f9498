"""Jobs that wait for jobs, many at a time: what can run is never refused."""

from __future__ import annotations

import pytest
from tests.support import eventually, load_module

from genba import JobFailed

MODULE = """
import asyncio
import time
from genba import Genba, current_job

app = Genba()

@app.task
def child(x: int) -> int:
    time.sleep(0.02)
    return x + 1

@app.task
def parent(x: int, queue: str = "default") -> int:
    return child.using(queue=queue).enqueue(x).result(timeout=120)

@app.task(concurrency=20)
async def async_parent(x: int) -> int:
    return await (await child.aenqueue(x)).aresult(timeout=120)

@app.task
async def gathering(x: int) -> int:
    quick = await child.aenqueue(x)
    slow = await child.using(delay="1s").aenqueue(x)
    return sum(await asyncio.gather(quick.aresult(timeout=120), slow.aresult(timeout=120)))

@app.task
def nest(depth: int) -> int:
    return 0 if depth == 0 else nest.enqueue(depth - 1).result(timeout=120) + 1

@app.task(dedicated=True)
def dedicated_nest(depth: int) -> int:
    return 0 if depth == 0 else dedicated_nest.enqueue(depth - 1).result(timeout=120) + 1

@app.task(dedicated=True)
def dedicated_parent(x: int) -> int:
    return child.enqueue(x).result(timeout=120)
"""


@pytest.fixture
def family(url, tmp_path, start_node):
    (tmp_path / "family.py").write_text(MODULE)
    module = load_module("family", tmp_path, url)

    def start(name: str, *args: str) -> None:
        start_node("family:app", url, "--name", name, *args)
        eventually(lambda: name in [node.name for node in module.app.nodes()], within=60)

    module.start = start
    yield module
    module.app.close()


def results(group) -> list[object]:
    return [job.result(timeout=120) for job in group]


def test_more_parents_than_slots_to_lend_all_get_their_results(family):
    family.start("one", "--max", "2")

    group = family.app.enqueue_many([family.parent.call(i) for i in range(12)])

    assert results(group) == list(range(1, 13))


def test_parents_whose_children_run_on_another_node_are_not_refused(family):
    family.start("one", "--max", "2")
    family.start("other", "--max", "1", "-q", "children")

    group = family.app.enqueue_many([family.parent.call(i, queue="children") for i in range(12)])

    assert results(group) == list(range(1, 13))


def test_parents_on_a_node_with_idle_workers_are_not_refused(family):
    family.start("one", "--pool", "static", "--max", "14")

    group = family.app.enqueue_many([family.parent.call(i) for i in range(12)])

    assert results(group) == list(range(1, 13))


def test_async_parents_in_one_worker_are_not_refused(family):
    family.start("one", "--max", "1")

    group = family.app.enqueue_many([family.async_parent.call(i) for i in range(20)])

    assert results(group) == list(range(1, 21))


def test_a_job_that_waits_for_several_at_once_lends_its_slot_until_the_last(family):
    family.start("one", "--max", "1")

    assert family.gathering.enqueue(1).result(timeout=60) == 4


def test_dedicated_parents_are_not_refused(family):
    family.start("one", "--max", "1")

    group = family.app.enqueue_many([family.dedicated_parent.call(i) for i in range(4)])

    assert results(group) == list(range(1, 5))


@pytest.mark.parametrize("task", ["nest", "dedicated_nest"])
def test_a_chain_that_is_longer_than_the_workers_is_a_deadlock(family, task):
    family.start("one", "--max", "1")

    with pytest.raises(JobFailed, match="WaitWouldDeadlock"):
        getattr(family, task).enqueue(12).result(timeout=120)
