"""Change many jobs at once, or one that has not started, through the public API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support import eventually

from genba.errors import BadOption
from genba.storage.jobs.bulk import BATCH


def test_many_are_cancelled_held_resumed_requeued_and_deleted_by_what_they_are(jobs: Any) -> None:
    app = jobs.app
    app.enqueue_many([jobs.add.using(tags=["x"]).call(i) for i in range(30)])
    other = jobs.write.enqueue("p", "w")

    assert (
        app.cancel_many(task="jobs.add", state="waiting", dry_run=True)
        == app.count(task="jobs.add")
        == 30
    )
    assert app.hold_many(reason="wait for Ann", tag="x") == 30
    assert app.resume_many(tag="x") == 30
    assert app.cancel_many(task="jobs.add", state="waiting", reason="no") == 30
    assert app.count(state="cancelled", since="1h") == 30
    assert app.requeue_many(task="jobs.add") == 30
    assert app.cancel_many(task="jobs.add") == 30
    assert app.delete_many(task="jobs.add") == 30
    assert [job.id for job in app.jobs(state="any")] == [other.id]
    with pytest.raises(BadOption, match="did you mean task"):
        app.cancel_many(tsk="jobs.add")


def test_flush_leaves_what_runs_unless_it_is_asked_for(shop: Any, path: Any) -> None:
    app = shop.app
    running = shop.jobs.wait_for.enqueue(str(path))
    eventually(lambda: running.refresh().state == "running")
    done = shop.jobs.add.enqueue(1)
    done.wait(timeout=10)
    shop.jobs.add.using(delay="1h").enqueue(1)
    shop.jobs.add.using(after=[running]).enqueue(1)

    assert app.flush() == 2
    assert [job.id for job in app.jobs()] == [running.id]
    assert app.flush(running=True, schedules=True) == 1
    assert running.wait(timeout=10).state == "cancelled"
    assert done.refresh().state == "succeeded"


def test_flush_deletes_jobs_that_wait_for_others_too_however_many_there_are(jobs: Any) -> None:
    calls = [jobs.add.call(i) for i in range(BATCH + 1)]
    jobs.app.enqueue_many(
        [*calls, jobs.add.using(after=calls[:1]).call(0), jobs.add.using(after=calls[-1:]).call(0)]
    )

    assert jobs.app.flush() == BATCH + 3
    assert jobs.app.count(state="any") == 0


def test_a_job_that_has_not_started_is_updated(jobs: Any) -> None:
    job = jobs.add.using(timeout="5s", retry=2).enqueue(1)

    assert job.update(priority=3, timeout="90s", delay="1h")
    job.refresh()
    assert (job.state, job.priority) == ("scheduled", 3)
    assert '"timeout":90000000' in job.record.options
    assert '"times":2' in job.record.options
    assert job.update(at="now", nice=4, queue="slow", expires="1h")
    assert (job.refresh().state, job.priority, job.queue) == ("waiting", -4, "slow")
    job.cancel()
    assert not job.update(priority=1)
    wrong: Any = (
        ({}, "nothing to change"),
        ({"key": "x"}, "key of a job"),
        ({"priority": "high"}, "priority"),
    )
    for changes, message in wrong:
        with pytest.raises(BadOption, match=message):
            job.update(**changes)


def test_the_async_twins_do_the_same(jobs: Any) -> None:
    async def steer() -> None:
        app = jobs.app
        job = await jobs.add.aenqueue(1)
        assert await job.aupdate(priority=2)
        assert await app.ahold_many(reason="why") == 1
        assert await app.aresume_many() == 1
        assert await app.acancel_many() == 1
        assert await app.arequeue_many() == 1
        assert await app.adelete_many(state="waiting", dry_run=True) == 1
        assert await app.aflush() == 1

    asyncio.run(steer())
