"""Waiting for jobs from outside: what a look costs, and what a timeout says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support import eventually

from genba import Genba, JobCancelled, JobGone, WaitTimeout
from genba.errors import StoreError
from genba.storage.store import Store


def looks(job: Any, group: Any, app: Genba) -> dict[str, Callable[[], Any]]:
    """All ways to look once whether jobs are final."""
    return {
        "wait": lambda: job.wait(timeout=0),
        "result": lambda: job.result(timeout=0),
        "text": lambda: job.wait(timeout="0s"),
        "await_": lambda: asyncio.run(job.await_(timeout=0)),
        "aresult": lambda: asyncio.run(job.aresult(timeout=0)),
        "group": lambda: group.wait(timeout=0),
        "agroup": lambda: asyncio.run(group.await_(timeout=0)),
        "app.wait": lambda: app.wait(job, group, timeout=0),
        "app.await_": lambda: asyncio.run(app.await_(job, group, timeout=0)),
        "any": lambda: app.wait(job, group, timeout=0, until="any"),
    }


WAYS = list(looks(None, None, None))  # type: ignore[arg-type]


@pytest.fixture
def queries(monkeypatch) -> list[str]:
    """The reads of jobs that were made."""
    made: list[str] = []

    def count(name: str) -> None:
        read = getattr(Store, name)

        def counted(self: Store, *args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return read(self, *args, **kwargs)

        monkeypatch.setattr(Store, name, counted)

    for name in ("job", "states", "write_marker"):
        count(name)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_look_at_finished_jobs_asks_the_database_once(shop, queries, way):
    job = shop.jobs.add.enqueue(1)
    group = shop.app.enqueue_many([shop.jobs.add.call(i) for i in range(3)])
    shop.app.wait(job, group, timeout=30)
    eventually(lambda: not any(t.name == "genba-waiter" for t in threading.enumerate()), within=10)
    queries.clear()

    found = looks(job, group, shop.app)[way]()

    assert len(queries) == 1, queries
    assert found == {"result": 2, "aresult": 2, "group": group, "agroup": group}.get(
        way, [job, *group] if way in ("app.wait", "app.await_", "any") else job
    )


@pytest.mark.parametrize("timeout", [0, 0.000001])
def test_a_finished_job_never_times_out(shop, timeout):
    # Each short event loop is closed while the wait thread may still look for its wait.
    job = shop.jobs.add.enqueue(1)
    job.wait(timeout=30)

    for _ in range(30):
        assert job.result(timeout=timeout) == 2
        assert asyncio.run(job.aresult(timeout=timeout)) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_timeout_says_that_no_node_is_running(jobs, way):
    job = jobs.add.enqueue(1)
    group = jobs.app.enqueue_many([jobs.add.call(i) for i in range(3)])

    with pytest.raises(WaitTimeout, match="no node is running") as caught:
        looks(job, group, jobs.app)[way]()

    first = group[0] if "group" in way else job
    assert caught.value.job_id == first.id
    assert caught.value.explanation == first.explain()
    assert str(caught.value.explanation) in str(caught.value)


def test_a_timeout_explains_the_first_job_that_is_not_final(jobs):
    ended, later, last = [jobs.add.enqueue(i) for i in range(3)]
    ended.cancel()

    for timeout in (0, 0.05):
        with pytest.raises(WaitTimeout, match="2 of 3 jobs were not final") as caught:
            jobs.app.wait([ended, last, later], timeout=timeout)
        assert caught.value.explanation.job_id == last.id
        with pytest.raises(WaitTimeout, match="no node is running"):
            asyncio.run(jobs.app.await_([ended, last, later], timeout=timeout))


def test_a_timeout_is_raised_although_it_cannot_be_explained(jobs, monkeypatch):
    def fail(*_: object) -> None:
        raise StoreError("the database is away")

    job = jobs.add.enqueue(1)
    monkeypatch.setattr("genba.client.job.explain", fail)

    for timeout in (0, 0.05):
        with pytest.raises(WaitTimeout) as caught:
            job.wait(timeout=timeout)
        assert str(caught.value) == f"1 of 1 jobs were not final after {timeout}"
        assert caught.value.explanation is None


def test_a_look_says_how_a_job_ended_or_that_it_is_gone(jobs):
    job = jobs.add.enqueue(1)
    job.cancel("not needed")

    assert job.wait(timeout=0).state == "cancelled"
    with pytest.raises(JobCancelled, match="not needed"):
        job.wait(timeout=0, throw=True)
    with pytest.raises(JobCancelled, match="not needed"):
        jobs.app.wait(job, timeout=0, throw=True)
    assert jobs.app.delete_many() == 1
    for look in (lambda: job.wait(timeout=0), lambda: jobs.app.wait(job, timeout=0)):
        with pytest.raises(JobGone):
            look()
