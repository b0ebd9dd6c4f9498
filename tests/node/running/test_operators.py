"""Operators steer tasks and queues while a node works: off, on, changed, paused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support import eventually, lines

from genba import TaskDisabled
from genba.cli import main
from genba.errors import BadOption, UnknownTask


@pytest.fixture(autouse=True)
def _as_before(shop: Any) -> Any:
    yield
    for task in shop.app.tasks.values():
        task.enable()
        task.reset()
    for queue in shop.app.queues.values():
        queue.resume()


def test_usecase_43_a_disabled_task_ends_what_runs_by_itself_and_starts_nothing_more(
    shop: Any, tmp_path: Path
) -> None:
    """Use case 43: flipping it off stops the chain while there is more to do; on again, it goes on."""
    running = shop.jobs.stop_when_asked.enqueue(str(tmp_path / "out"))
    eventually(lambda: lines(tmp_path / "out.started"))
    task = shop.app.tasks["jobs.stop_when_asked"]

    assert task.disable("too loud")
    assert not task.enabled
    with pytest.raises(TaskDisabled, match=r"task 'jobs\.stop_when_asked' is disabled"):
        shop.jobs.stop_when_asked.enqueue("x")
    assert running.wait(timeout=10).state == "succeeded"  # it saw should_stop; it was not cancelled
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2

    assert task.enable()
    again = shop.jobs.stop_when_asked.enqueue(str(tmp_path / "again"))
    eventually(lambda: lines(tmp_path / "again.started"))
    again.cancel()
    assert again.wait(timeout=15).state == "cancelled"


def test_jobs_that_wait_of_a_disabled_task_say_so_and_run_when_it_is_enabled(shop: Any) -> None:
    shop.app.queues["default"].pause()
    waiting = shop.app.enqueue_many([shop.jobs.add.call(i) for i in range(20)])
    shop.app.tasks["jobs.add"].disable()
    shop.app.queues["default"].resume()
    other = shop.jobs.about_me.enqueue()

    other.wait(timeout=10)
    assert {job.refresh().state for job in waiting} == {"waiting"}
    assert waiting[3].explain().reasons[0].kind == "task_disabled"

    shop.app.tasks["jobs.add"].enable()
    shop.app.wait(waiting, timeout=10)
    assert [job.result() for job in waiting] == list(range(1, 21))


def test_a_paused_queue_starts_nothing_and_a_pause_for_a_time_ends_by_itself(shop: Any) -> None:
    queue = shop.app.queues["default"]
    queue.pause(until="1.5s")
    assert queue.paused
    assert queue.paused_until is not None
    job = shop.jobs.add.enqueue(1)

    assert job.explain().reasons[0].kind == "queue_paused"
    assert job.result(timeout=10) == 2
    assert not queue.paused
    assert (job.refresh().attempts[0].claimed - job.enqueued).total_seconds() >= 1


def test_an_operators_change_beats_the_code_until_it_is_taken_back(shop: Any) -> None:
    task = shop.app.tasks["jobs.about_me"]
    code = task.settings
    assert task.set(priority=3, timeout="90s", retry=2) == {
        "priority": 3,
        "timeout": "90s",
        "retry": 2,
    }

    job = shop.jobs.about_me.enqueue()
    mine = shop.jobs.about_me.using(priority=-7).enqueue()
    graph = shop.app.enqueue_many(
        [(a := shop.jobs.about_me.call()), shop.jobs.add.using(after=[a]).call(1)]
    )
    assert (job.priority, mine.priority, graph[0].priority) == (3, -7, 3)
    assert '"timeout":90000000' in job.record.options
    shop.app.wait([job, mine, *graph], timeout=10)
    assert graph[1].refresh().state == "succeeded"

    assert task.set(timeout=None) == {"priority": 3, "timeout": None, "retry": 2}
    assert shop.jobs.about_me.enqueue().record.options.count("timeout") == 0
    assert task.reset("priority") == {"timeout": None, "retry": 2}
    assert task.reset() == {}
    assert task.settings == code
    assert shop.jobs.about_me.enqueue().record.options is None


def test_tasks_and_queues_can_be_looked_through(shop: Any) -> None:
    eventually(lambda: "default" in shop.app.queues)
    assert "jobs.add" in shop.app.tasks
    assert len(shop.app.tasks) == len(list(shop.app.tasks)) > 10
    add = shop.app.tasks["jobs.add"]
    assert (add.name, add.queue, add.enabled, add.override) == ("jobs.add", "default", True, {})
    assert add.definition["name"] == "jobs.add"
    assert add in shop.app.tasks.values()
    assert shop.app.queues["default"] in shop.app.queues.values()


def test_what_is_wrong_is_said_at_once(shop: Any) -> None:
    task = shop.app.tasks["jobs.add"]
    for changes, message in (
        ({}, "nothing to change"),
        ({"timeot": 5}, "did you mean timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"name": "x"}, "name cannot be changed"),
        ({"key": "x"}, "key cannot be changed"),
    ):
        with pytest.raises(BadOption, match=message):
            task.set(**changes)
    with pytest.raises(BadOption, match="is not changed"):
        task.reset("timeout")
    with pytest.raises(BadOption, match="not a valid name of a queue"):
        shop.app.queues["a b"]
    for verb in (shop.app.tasks["no.such"].disable, shop.app.tasks["no.such"].reset):
        with pytest.raises(UnknownTask, match=r"no\.such"):
            verb()


def test_the_async_twins_do_the_same(shop: Any) -> None:
    async def steer() -> None:
        task, queue = shop.app.tasks["jobs.add"], shop.app.queues["default"]
        assert await task.adisable()
        with pytest.raises(TaskDisabled):
            await shop.jobs.add.aenqueue(1)
        assert await task.aenable()
        assert await task.aset(priority=2) == {"priority": 2}
        assert await task.areset() == {}
        await queue.apause()
        assert await queue.aresume()

    asyncio.run(steer())


def test_an_attempt_is_shown_with_the_name_of_its_node(shop: Any) -> None:
    job = shop.jobs.add.enqueue(1)
    job.result(timeout=30)

    assert shop.app.node_names()[job.attempts[0].node] == "shop"
    done = CliRunner().invoke(main, ["job", "show", str(job.id), "--url", shop.url])
    assert done.exit_code == 0, done.output
    assert " shop " in done.output
    assert str(job.attempts[0].node) not in done.output
