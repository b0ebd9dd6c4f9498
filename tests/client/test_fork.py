"""A web server that loads the app once and forks its workers (gunicorn --preload)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from tests.support import PATIENCE, eventually

# Python warns of forks in a process with threads, which is what preloading servers do.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def forked(work: Callable[[], object]) -> int:
    """The pid of a child that does `work` and ends without running anything of the parent's."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(30)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended_well(*pids: int) -> None:
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


def test_children_of_a_process_that_uses_the_app_enqueue_on_connections_of_their_own(jobs):
    jobs.add.enqueue(0)
    assert jobs.app.count() == 1

    def serve() -> None:
        made = [jobs.add.enqueue(i) for i in range(10)]
        made += jobs.app.enqueue_many([jobs.add.call(i) for i in range(10)])
        assert len({job.id for job in made}) == 20
        assert all(job.refresh().state == "waiting" for job in made)

    children = [forked(serve) for _ in range(4)]
    mine = [jobs.add.enqueue(i) for i in range(10)]
    ended_well(*children)

    assert jobs.app.count() == 1 + 4 * 20 + 10
    assert len({job.id for job in jobs.app.jobs(limit=200)}) == 91
    assert all(job.refresh().state == "waiting" for job in mine)


def test_a_child_may_close_the_app_and_the_parent_goes_on(jobs):
    first = jobs.add.enqueue(1)

    def leave() -> None:
        jobs.app.close()
        assert jobs.app.job(first.id).cancel("by the child")
        jobs.app.close()

    ended_well(forked(leave))

    assert first.refresh().state == "cancelled"
    assert jobs.add.enqueue(2).refresh().state == "waiting"


def test_a_child_of_a_process_that_used_async_twins_has_threads_of_its_own(jobs):
    asyncio.run(jobs.add.aenqueue(1))

    async def several() -> None:
        await asyncio.gather(*(jobs.add.aenqueue(i) for i in range(20)))

    ended_well(forked(lambda: asyncio.run(several())))

    assert jobs.app.count() == 21


def test_a_grandchild_enqueues_too(jobs):
    jobs.add.enqueue(0)

    def serve() -> None:
        jobs.add.enqueue(1)
        ended_well(forked(lambda: jobs.add.enqueue(2)))

    began = time.monotonic()
    ended_well(forked(serve))
    assert jobs.app.count() == 3
    assert time.monotonic() - began < PATIENCE * 5


def test_a_fork_while_another_thread_enqueues_does_not_hang(jobs):
    jobs.add.enqueue(0)
    over = threading.Event()
    made: list[Any] = []

    def produce() -> None:
        while not over.is_set():
            made.append(jobs.add.enqueue(len(made)))

    producer = threading.Thread(target=produce, name="producer")
    producer.start()
    try:
        eventually(lambda: len(made) >= 5)
        children = [forked(lambda: jobs.add.enqueue(1)) for _ in range(6)]
        ended_well(*children)
    finally:
        over.set()
        producer.join()

    assert jobs.app.count() == 1 + len(made) + 6


def test_a_forked_child_gets_results_and_wakes_an_idle_node(shop):
    shop.jobs.add.enqueue(0).result(timeout=10)

    def serve() -> None:
        took = []
        for _ in range(5):
            began = time.monotonic()
            assert shop.jobs.add.enqueue(1).result(timeout=30) == 2
            took.append(time.monotonic() - began)
        assert median(took) < 0.9  # woken, not polled

    ended_well(forked(serve), forked(serve))
    assert shop.jobs.add.enqueue(2).result(timeout=10) == 3
