"""What a client can ask for, and what it gets: through the public API, with a real node."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from statistics import median
from uuid import UUID

import msgspec
import pytest
from click.testing import CliRunner
from tests.storage.builders import CLAIM, ending, joined, rows
from tests.support import PATIENCE, eventually, lines, load_jobs, load_module

from genba import (
    BadOption,
    Dep,
    Genba,
    Group,
    Job,
    JobCancelled,
    JobFailed,
    JobGone,
    JobNotFound,
    JobTimedOut,
    KeyTaken,
    Limit,
    Retry,
    Task,
    WaitTimeout,
)
from genba.cli import main
from genba.client.client import Client
from genba.client.current_job import RequestedOutcome, RunningJob
from genba.client.node_handle import NodeHandle
from genba.client.task import TaskWithOptions
from genba.domain.clock import SystemClock
from genba.errors import BadTask
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.storage.records import NewJob

# ways in


def test_a_job_runs_and_gives_its_result(shop):
    job = shop.jobs.add.enqueue(1, y=2)

    assert job.created
    assert job.result(timeout=10) == 3
    assert job.state == "succeeded"
    assert job.progress == 100
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


def test_calling_a_task_just_calls_the_function(shop):
    assert shop.jobs.add(1, 2) == 3
    assert asyncio.run(shop.jobs.add_later(1, 2)) == 3


@pytest.mark.parametrize(
    ("task", "args", "result"),
    [("add", (1, 2), 3), ("add_later", (1, 2), 3), ("Greet", ("you",), "hello you")],
)
def test_functions_async_functions_and_classes_are_tasks(shop, task, args, result):
    assert getattr(shop.jobs, task).enqueue(*args).result(timeout=10) == result


def test_a_decorated_method_is_a_task_and_its_instance_is_made_in_the_worker(shop):
    assert shop.jobs.Counter.up.name == "jobs.Counter.up"
    assert shop.jobs.Counter.up.enqueue(5).result(timeout=10) == 15
    assert shop.jobs.Counter.up_later.enqueue(6).result(timeout=10) == 16
    assert shop.jobs.Counter().up(7) == 17


def test_arguments_and_results_keep_their_types(shop):
    order = shop.jobs.Order(7, Decimal("1.10"), datetime(2026, 1, 1, tzinfo=UTC))

    back = shop.jobs.typed.enqueue(order, (UUID(int=1), UUID(int=2)), {"a", "b"}).result(timeout=10)

    assert back == shop.jobs.Order(8, Decimal("2.20"), datetime(2026, 1, 1, tzinfo=UTC))


def test_a_job_can_be_enqueued_by_name_with_and_without_the_code(shop):
    assert shop.app.enqueue("jobs.add", 1, y=2).result(timeout=10) == 3
    with closing(Genba(shop.url)) as stranger:
        assert stranger.enqueue("jobs.add", 1, y=3).result(timeout=10) == 4
        assert stranger.enqueue("jobs.add", x=1).result(timeout=10) == 2


def test_a_task_of_the_app_may_stand_for_its_name(jobs):
    app = jobs.app

    assert app.enqueue(jobs.add, 1, y=5).args == {"x": 1, "y": 5}
    assert asyncio.run(app.aenqueue(jobs.add, 2)).args == {"x": 2, "y": 1}
    assert app.enqueue_many([app.call(jobs.add, (3,))])[0].task == "jobs.add"
    assert app.tasks[jobs.add] == app.tasks["jobs.add"]
    assert app.hold_many(task=jobs.add, reason="why") == 3
    assert app.cancel_many(task=[jobs.add]) == 3


def test_what_is_no_task_of_the_app_is_refused_with_what_to_do(jobs, url):
    @Genba(url).task(name="theirs")
    def theirs() -> None: ...

    with pytest.raises(BadOption, match="'theirs' belongs to another app"):
        jobs.app.enqueue(theirs)
    for strange in (None, 7, len, jobs.add.using(priority=1)):
        with pytest.raises(
            BadOption, match="enqueue takes a task of this app or the name of a task"
        ):
            jobs.app.enqueue(strange)
    assert jobs.app.count(state="any") == 0


def test_many_jobs_are_calls_and_a_task_is_none(jobs):
    for given in ([jobs.add], jobs.add, [jobs.add.call(1), jobs.add]):
        with pytest.raises(
            BadOption, match=r"enqueue_many takes calls, like add\.call\(…\), not <Task jobs\.add>"
        ):
            jobs.app.enqueue_many(given)
        with pytest.raises(BadOption, match=r"add\.call\(…\)"):
            asyncio.run(jobs.app.aenqueue_many(given))
    for given in ([1], "jobs.add", None, [jobs.add.enqueue(1)]):
        with pytest.raises(BadOption, match="enqueue_many takes calls"):
            jobs.app.enqueue_many(given)


def test_using_gives_options_for_the_next_calls_and_leaves_the_task_alone(shop):
    job = shop.jobs.add.using(priority=5).using(tags=["urgent"]).enqueue(1)

    assert (job.priority, job.tags) == (5, ["urgent"])
    assert (shop.jobs.add.options.priority, shop.jobs.add.options.tags) == (0, ())


def test_many_jobs_are_enqueued_at_once(shop):
    group = shop.app.enqueue_many([shop.jobs.add.call(i) for i in range(300)])

    assert len(group) == 300
    assert len(set(group)) == 300
    assert [job.result() for job in group.wait(timeout=20)] == [i + 1 for i in range(300)]
    assert isinstance(group[10:20], Group)
    assert [job.id for job in group[10:20]] == [job.id for job in list(group)[10:20]]


def test_nothing_enqueued_is_nothing(shop):
    group = shop.app.enqueue_many([])

    assert list(group.wait()) == []


# endings


def test_a_failure_has_the_remote_type_message_traceback_and_causes(shop):
    job = shop.jobs.fail.enqueue("broken")

    with pytest.raises(JobFailed, match="ValueError: broken") as caught:
        job.result(timeout=10)

    assert caught.value.type == "ValueError"
    assert caught.value.job_id == job.id
    assert "jobs.py" in (caught.value.traceback or "")
    assert "raise ValueError(text) from root" in (caught.value.traceback or "")
    assert caught.value.error["causes"] == [{"type": "KeyError", "message": "'the root'"}]
    assert job.state == "failed"
    assert job.attempts[-1].cause == "exception"


def test_a_failed_job_is_retried_as_often_as_its_budget_says(shop):
    quick = Retry(times=2, delay=0.01)

    ended_well = shop.jobs.fail_at_first.using(retry=quick).enqueue(2)
    ended_badly = shop.jobs.fail_at_first.using(retry=quick).enqueue(3)

    assert ended_well.result(timeout=10) == 3
    assert (ended_well.retries, ended_well.crashes) == (2, 0)
    with pytest.raises(JobFailed, match="attempt 3"):
        ended_badly.result(timeout=10)
    assert [attempt.number for attempt in ended_badly.attempts] == [1, 2, 3]


@pytest.mark.parametrize("delay", [0.01, "10ms", timedelta(milliseconds=10), None], ids=repr)
def test_retry_job_takes_from_the_budget(shop, delay):
    if isinstance(delay, timedelta):
        delay = delay.total_seconds()
    job = shop.jobs.ask_for_retry.using(retry=Retry(times=1, delay=0.01)).enqueue(1, delay)

    assert job.result(timeout=10) == 2
    assert job.retries == 1


def test_retry_job_without_budget_fails(shop):
    with pytest.raises(JobFailed, match="not yet"):
        shop.jobs.ask_for_retry.enqueue(1, 0.01).result(timeout=10)


def test_a_retry_with_a_delay_that_is_nonsense_fails_the_job_and_not_the_worker(shop):
    job = (
        shop.jobs.ask_for_retry.using(retry=Retry(times=1, delay=0))
        .enqueue(5, "nonsense")
        .wait(timeout=10)
    )

    assert job.crashes == 0
    assert job.state == "failed"
    assert "nonsense" in str(job.error)


def test_fail_job_ends_it_whatever_the_budget(shop):
    job = shop.jobs.fail_for_good.using(retry=5).enqueue("no use")

    with pytest.raises(JobFailed, match="no use"):
        job.result(timeout=10)
    assert len(job.attempts) == 1


def test_a_result_that_cannot_be_kept_does_not_fail_the_job(shop):
    job = shop.jobs.return_what_cannot_be_kept.enqueue()

    assert job.result(timeout=10) is None
    assert job.state == "succeeded"
    assert "could not be kept" in (job.reason or "")


def test_a_job_that_runs_too_long_is_timed_out(shop, path):
    job = shop.jobs.wait_for.using(timeout=0.2, grace=1).enqueue(str(path))

    with pytest.raises(JobTimedOut):
        job.result(timeout=10)
    assert job.state == "timed_out"
    assert job.attempts[-1].cause == "timeout"


# steering


def test_a_job_is_cancelled_before_it_starts(jobs):
    job = jobs.add.enqueue(1)

    assert job.cancel("not needed")
    assert job.refresh().state == "cancelled"
    assert not job.cancel()
    with pytest.raises(JobCancelled, match="not needed"):
        job.result(timeout=1)


@pytest.mark.parametrize("task", ["wait_for", "wait_for_later", "stop_when_asked"])
def test_a_running_job_is_cancelled(shop, path, task):
    job = getattr(shop.jobs, task).enqueue(str(path))
    eventually(lambda: lines(f"{path}.started"))

    assert job.cancel("enough")
    with pytest.raises(JobCancelled, match="enough"):
        job.result(timeout=3)
    assert job.attempts[-1].cause == "cancelled"
    if task == "stop_when_asked":
        assert lines(f"{path}.stopped") == [[str(job.id), "1", "True"]]


def test_a_running_job_is_killed_without_grace(shop, path):
    job = shop.jobs.ignore_sigterm.enqueue(str(path))
    eventually(lambda: lines(f"{path}.started"))

    assert job.kill()
    assert job.wait(timeout=3).state == "cancelled"
    assert job.reason == "killed"
    assert job.attempts[-1].cause == "killed"
    assert not any(os.path.exists(f"/proc/{pid}") for (pid,) in lines(f"{path}.children"))


def test_regression_22_a_final_job_runs_again_by_requeue_with_a_fresh_budget(shop):
    job = shop.jobs.fail_at_first.using(retry=Retry(times=1, delay=0.01)).enqueue(3)
    assert job.wait(timeout=10).state == "failed"

    queue = shop.app.queues["default"]
    queue.pause()  # or it might have ended again before we ask
    assert job.requeue()
    assert not job.requeue()
    queue.resume()
    assert job.result(timeout=10) == 4
    assert job.retries == 1


def test_a_held_job_does_not_start_until_it_is_resumed(shop):
    job = shop.jobs.add.using(delay="1h").enqueue(1)
    assert job.hold("let me look")
    assert (job.refresh().state, job.reason) == ("held", "let me look")
    assert not job.hold("again")
    later = shop.jobs.add.using(delay=0.05).enqueue(2)
    assert later.hold("a little")
    eventually(lambda: later.due < datetime.now(UTC))

    assert later.resume()
    assert later.result(timeout=10) == 3
    assert not later.resume()
    assert job.resume()
    assert job.refresh().state == "scheduled"


# uniqueness


def test_one_open_job_per_key(jobs):
    first = jobs.add.using(key="r:7").enqueue(1)
    second = jobs.add.using(key="r:7").enqueue(2)

    assert (first.created, second.created) == (True, False)
    assert first.id == second.id
    assert jobs.app.job(key="r:7") == first
    with pytest.raises(KeyTaken) as caught:
        jobs.add.using(key="r:7", on_conflict="raise").enqueue(3)
    assert caught.value.job_id == first.id
    replacing = jobs.add.using(key="r:7", on_conflict="replace").enqueue(4)
    assert replacing.created
    assert (first.refresh().state, replacing.refresh().state) == ("cancelled", "waiting")


def test_a_key_is_free_again_when_its_job_has_ended(shop):
    first = shop.jobs.add.using(key="again").enqueue(1)
    first.wait(timeout=10)
    second = shop.jobs.add.using(key="again").enqueue(2)
    assert second.created
    assert second.result(timeout=10) == 3


def test_a_running_job_that_is_replaced_ends_before_its_successor_starts(shop, path):
    first = shop.jobs.wait_for.using(key="r").enqueue(str(path))
    eventually(lambda: lines(f"{path}.started"))

    second = shop.jobs.add.using(key="r", on_conflict="replace").enqueue(1)

    assert second.result(timeout=10) == 2
    assert first.refresh().state == "cancelled"
    assert first.attempts[-1].ended <= (second.attempts[-1].started or first.attempts[-1].ended)


def test_regression_06_once_compares_task_and_bound_arguments(jobs):
    first = jobs.add.using(once=True).enqueue(1)

    assert jobs.add.using(once=True).enqueue(x=1, y=1) == first
    assert jobs.add.using(once=True).enqueue(1, 2) != first
    assert jobs.add.using(once="task").enqueue(5) == jobs.add.using(once="task").enqueue(6)
    assert jobs.add.enqueue(1) != first


# dependencies


def test_a_graph_is_enqueued_in_one_batch_and_runs_in_its_order(shop, path):
    a, b = (shop.jobs.write.call(str(path) + ".log", word) for word in "ab")
    c = shop.jobs.write.using(after=[a, b]).call(str(path) + ".log", "c")
    d = shop.jobs.write.using(after=[c]).call(str(path) + ".log", "d")

    group = shop.app.enqueue_many([a, b, c, d]).wait(timeout=10, throw=True)

    words = [line[0] for line in lines(f"{path}.log")]
    assert sorted(words[:2]) == ["a", "b"]
    assert words[2:] == ["c", "d"]
    assert {job.refresh().state for job in group} == {"succeeded"}


def test_a_job_sees_the_results_of_what_it_waited_for(shop):
    parents = [shop.jobs.add.enqueue(i) for i in range(3)]

    assert shop.jobs.sum_of_deps.using(after=parents).enqueue().result(timeout=10) == 1 + 2 + 3


def test_a_dependent_of_a_failed_job_is_cancelled_or_runs_or_is_held(shop):
    bad = shop.jobs.fail.enqueue("bad")

    cancelled = shop.jobs.add.using(after=[bad]).enqueue(1)
    run = shop.jobs.add.using(after=[bad], on_dependency_failure="run").enqueue(1)
    held = shop.jobs.add.using(after=[bad], on_dependency_failure="hold").enqueue(1)
    on_failure = shop.jobs.add.using(after=[Dep(bad, on="failure")]).enqueue(2)
    finished = shop.jobs.add.using(after=[Dep(bad, on="finished")]).enqueue(3)

    assert cancelled.wait(timeout=10).state == "cancelled"
    assert str(bad.id) in (cancelled.reason or "")
    assert [job.result(timeout=10) for job in (run, on_failure, finished)] == [2, 3, 4]
    eventually(lambda: held.refresh().state == "held")


def test_a_dependency_that_is_over_does_not_block(shop):
    parent = shop.jobs.add.enqueue(1).wait(timeout=10)

    assert shop.jobs.add.using(after=[parent.id]).enqueue(5).result(timeout=10) == 6


# progress and time


def test_progress_is_seen_while_it_runs(shop, path):
    job = shop.jobs.count_to.enqueue(str(path), 10)

    eventually(lambda: job.refresh().progress == 50)
    assert (job.progress.done, job.progress.total, job.progress.note) == (5, 10, "step 5")
    path.touch()
    assert job.wait(timeout=10).progress == 100


def test_a_job_that_failed_shows_how_far_it_came(shop, path):
    job = shop.jobs.count_to.using(timeout=0.8, grace=1).enqueue(str(path), 10)

    assert job.wait(timeout=10).state == "timed_out"
    assert job.progress == 50


@pytest.mark.parametrize(
    "options",
    [{"delay": 0.5}, {"delay": timedelta(milliseconds=500)}, {"at": "+0.5s"}, {"delay": "500ms"}],
    ids=repr,
)
def test_a_scheduled_job_does_not_start_too_early(shop, options):
    before = datetime.now(UTC)
    job = shop.jobs.add.using(**options).enqueue(1)
    assert job.state == "scheduled"

    assert job.result(timeout=10) == 2
    assert (job.attempts[0].started or before) - before >= timedelta(seconds=0.5)


def test_scheduled_jobs_start_at_their_moments_not_when_the_node_looks_once_a_second(shop):
    jobs = [shop.jobs.add.using(delay=0.5 + 0.2 * i).enqueue(i) for i in range(5)]

    assert [job.result(timeout=10) for job in jobs] == [1, 2, 3, 4, 5]
    late = [started - job.due for job in jobs if job.due and (started := job.attempts[0].started)]
    assert median(late) < timedelta(seconds=0.3)  # looks once a second would make it 0.4 to 0.6


def test_a_moment_may_be_a_datetime(jobs):
    due = datetime(2040, 5, 6, 7, 8, 9, tzinfo=UTC)

    assert jobs.add.using(at=due).enqueue(1).due == due
    assert jobs.add.using(at="2040-05-06T07:08:09").enqueue(1).due == due
    assert jobs.add.using(at=due.timestamp()).enqueue(1).due == due


def test_a_job_that_could_not_start_in_time_expires(shop):
    job = shop.jobs.add.using(queue="nobody", expires=0.1).enqueue(1)

    assert job.wait(timeout=10).state == "cancelled"
    assert "expired" in (job.reason or "")


# looking


def test_jobs_are_found_and_counted_by_what_they_are(jobs):
    app = jobs.app
    one = jobs.add.using(tags=["x", "y"], queue="slow").enqueue(1)
    two = jobs.add.using(tags=["x"], delay="1h", key="k").enqueue(2)
    other = jobs.write.enqueue("p", "w")
    gone = jobs.add.enqueue(3)
    gone.cancel()

    def found(**wanted: object) -> list[int]:
        assert app.count(**wanted) == len(app.jobs(**wanted))
        return [job.id for job in app.jobs(**wanted)]

    assert found() == [other.id, two.id, one.id]
    assert found(state="any") == [gone.id, other.id, two.id, one.id]
    assert found(state="final") == found(state="cancelled") == [gone.id]
    assert found(state=["scheduled", "cancelled"]) == [gone.id, two.id]
    assert found(tag="x") == [two.id, one.id]
    assert found(tag="y") == found(queue="slow") == [one.id]
    assert found(task="jobs.write") == [other.id]
    assert found(task=["jobs.write", "jobs.add"], state="scheduled") == [two.id]
    assert found(task=jobs.write) == found(task=[jobs.write]) == [other.id]
    assert found(task=["jobs.write", jobs.add]) == found()
    assert found(key="k") == [two.id]
    assert found(since="1h") == found(since=datetime.now(UTC) - timedelta(hours=1)) == found()
    assert found(since=datetime.now(UTC) + timedelta(hours=1)) == []
    first = app.jobs(state="any", limit=3)
    assert [job.id for job in app.jobs(state="any", limit=3, before=first[-1].id)] == [one.id]


def test_panicked_jobs_are_those_that_are_held_for_a_panic(jobs):
    app = jobs.app
    panicked, doubted, failed = [jobs.add.using(queue="q").enqueue(i) for i in range(3)]
    panicked.hold("panic: ValueError: no")  # as a node writes it
    doubted.hold("no panic, but look at it")
    failed.cancel()

    def found(*state: str) -> list[int]:
        assert app.count(state=iter(state)) == len(app.jobs(state=state, queue="q"))
        return [job.id for job in app.jobs(state=state)]

    assert found("panicked") == [panicked.id]
    assert found("panicked", "cancelled") == [failed.id, panicked.id]
    assert found("panicked", "held") == found("panicked", "open") == [doubted.id, panicked.id]
    assert [
        job.id for job in app.jobs(state="panicked", key="no") + app.jobs(state="panicked")
    ] == [panicked.id]
    assert app.resume_many(state="panicked") == 1
    assert found("held") == [doubted.id]


def test_a_job_is_found_by_id_and_one_that_is_not_there_is_not_found(jobs):
    job = jobs.add.enqueue(1)

    assert jobs.app.job(job.id) == job
    assert jobs.app.job(job.id).args == {"x": 1, "y": 1}
    for missing in ({"id": job.id + 99_999}, {"key": "none"}):
        with pytest.raises(JobNotFound):
            jobs.app.job(**missing)
    with pytest.raises(BadOption):
        jobs.app.job()


# waiting


def test_waiting_for_any_gives_those_that_are_final(shop, path):
    quick, slow = shop.jobs.add.enqueue(1), shop.jobs.wait_for.enqueue(str(path))

    assert shop.app.wait([quick, slow], timeout=10, until="any") == [quick]
    path.touch()
    assert shop.app.wait([quick, slow], timeout=10) == [quick, slow]


def test_waiting_never_raises_for_how_a_job_ended_unless_asked(shop):
    group = shop.app.enqueue_many([shop.jobs.add.call(1), shop.jobs.fail.call("bad")])

    assert len(shop.app.wait(group, timeout=10)) == 2
    with pytest.raises(JobFailed, match="bad"):
        shop.app.wait(group, throw=True)
    with pytest.raises(JobFailed, match="bad"):
        group.wait(throw=True)


def test_waiting_takes_jobs_groups_and_iterables_of_them(shop):
    one, two = shop.jobs.add.enqueue(1), shop.jobs.add.enqueue(2)
    group = shop.app.enqueue_many([shop.jobs.add.call(i) for i in range(2)])
    every = [one, two, *group]

    async def alike() -> None:
        assert await shop.app.await_(one, timeout=10) == [one]
        assert await shop.app.await_(one, [two, group], timeout=10) == every

    assert shop.app.wait(one, timeout=10) == [one]
    assert shop.app.wait(one, two, group, timeout=10) == every
    assert shop.app.wait((job for job in (one, [two, {"g": group}.values()])), timeout=10) == every
    assert shop.app.wait() == shop.app.wait([]) == []
    asyncio.run(alike())


def test_waiting_for_what_is_no_job_is_refused(jobs):
    for strange in (7, "jobs.add", None, {1: 2}, jobs.add.call(1), [7]):
        with pytest.raises(BadOption, match="wait takes jobs"):
            jobs.app.wait(strange)


def test_one_job_may_be_waited_for_with_throw(shop):
    failed = shop.jobs.fail.enqueue("no")

    async def alike() -> None:
        await failed.await_(timeout=10, throw=True)

    assert failed.wait(timeout=10).state == "failed"
    with pytest.raises(JobFailed, match="no"):
        failed.wait(timeout=10, throw=True)
    with pytest.raises(JobFailed, match="no"):
        asyncio.run(alike())


def test_a_wait_that_takes_too_long_is_a_timeout(jobs):
    job = jobs.add.enqueue(1)

    before = time.monotonic()
    with pytest.raises(WaitTimeout):
        job.wait(timeout=0.1)
    with pytest.raises(TimeoutError):
        job.result(timeout="50ms")
    assert time.monotonic() - before < PATIENCE * 1


def test_a_wait_for_what_is_not_there_says_so(jobs):
    job = jobs.add.enqueue(1)
    job.cancel()
    assert jobs.app.delete_many() == 1
    with pytest.raises(JobGone):
        job.wait(timeout=5)
    with pytest.raises(BadOption):
        jobs.app.wait([jobs.add.enqueue(1)], until="some")


# why it does not run


def test_a_job_says_why_it_does_not_run_when_there_is_no_node(jobs):
    def kinds(job: Job) -> list[str]:
        return [reason.kind for reason in job.explain().reasons]  # the first one first

    waiting = jobs.add.enqueue(1)
    assert kinds(waiting) == ["no_node"]
    assert "no node" in str(waiting.explain())

    scheduled = jobs.add.using(at="2040-05-06T07:08:09").enqueue(1)
    assert kinds(scheduled) == ["scheduled", "no_node"]
    assert scheduled.explain().start == datetime(2040, 5, 6, 7, 8, 9, tzinfo=UTC)
    assert "2040-05-06 07:08:09" in str(scheduled.explain())

    blocked = jobs.add.using(after=[scheduled]).enqueue(1)
    assert kinds(blocked)[0] == "blocked"
    assert blocked.explain().reasons[0].data == {"jobs": [scheduled.id]}
    assert str(scheduled.id) in str(blocked.explain())

    scheduled.hold("the moon is full")
    assert kinds(scheduled) == ["held"]
    assert "the moon is full" in str(scheduled.explain())

    waiting.cancel("no longer")
    assert kinds(waiting) == ["final"]
    assert "no longer" in str(waiting.explain())


def test_a_job_says_why_it_does_not_run_when_there_is_a_node(shop, tmp_path, path):
    def kind(job: Job) -> str:
        return job.explain().reasons[0].kind

    unknown = shop.app.enqueue("unknown.task")
    assert kind(unknown) == "unknown_task"
    assert "shop" in str(unknown.explain())
    assert "unknown.task" in str(unknown.explain())
    unserved = shop.jobs.add.using(queue="nobody").enqueue(1)
    assert kind(unserved) == "unserved_queue"
    assert "nobody" in str(unserved.explain())
    for job in (unknown, unserved):
        job.cancel()

    busy = [shop.jobs.wait_for.enqueue(str(path)) for _ in range(4)]
    eventually(lambda: len(lines(f"{path}.started")) == 4)
    assert kind(busy[0]) == "running"
    assert "shop" in str(busy[0].explain())
    ahead = shop.jobs.add.using(priority=1).enqueue(1)
    behind = shop.jobs.add.enqueue(2)
    assert eventually(lambda: kind(behind) == "no_slot")
    eventually(lambda: behind.explain().reasons[0].data == {"ahead": 1})
    path.touch()
    assert [ahead.result(10), behind.result(10)] == [2, 3]


# in the caller's own transaction


class Till:
    """The caller's own table, on a connection of the caller's own."""

    def __init__(self, conn: object, begin: bool) -> None:
        self.conn, self._begin = conn, begin
        self("CREATE TABLE sale (number integer)")
        self("COMMIT") if not begin else None

    def __call__(self, statement: str) -> list[tuple]:
        cursor = self.conn.execute(statement)  # type: ignore[attr-defined]
        return cursor.fetchall() if statement.startswith("SELECT") else []

    def begin(self) -> None:
        if self._begin:
            self("BEGIN IMMEDIATE")
        self("INSERT INTO sale VALUES (7)")


@pytest.fixture(params=["psycopg", "apsw", "sqlite3"])
def till(request, tmp_path):
    """A client with a connection of each kind, and its tasks."""
    if request.param == "psycopg":
        import psycopg

        databases = request.getfixturevalue("databases")
        with databases.fresh(request.getfixturevalue("template")) as name:
            jobs = load_jobs(databases.url(name), tmp_path)
            with closing(jobs.app), psycopg.connect(databases.url(name)) as conn:
                yield jobs, Till(conn, begin=False)
        return
    driver = "?driver=sqlite3" if request.param == "sqlite3" else ""
    jobs = load_jobs(f"sqlite:///{tmp_path / 'genba.db'}{driver}", tmp_path)
    jobs.app.install()
    with closing(jobs.app), closing(_sqlite(request.param, tmp_path / "genba.db")) as conn:
        yield jobs, Till(conn, begin=True)


def _sqlite(driver: str, path: Path):
    if driver == "apsw":
        import apsw

        conn = apsw.Connection(str(path))
        conn.set_busy_timeout(5000)
        return conn
    import sqlite3

    return sqlite3.connect(path, isolation_level=None)


def test_a_job_of_a_transaction_is_there_when_it_is_committed_and_runs(till, start_node, tmp_path):
    jobs, sale = till
    start_node("jobs:app", jobs.app.url)
    eventually(jobs.app.nodes, within=15)

    sale.begin()
    parent = jobs.add.using(conn=sale.conn).enqueue(1)
    child = jobs.sum_of_deps.using(conn=sale.conn, after=[parent]).enqueue()
    group = jobs.app.enqueue_many([jobs.add.call(i) for i in range(3)], conn=sale.conn)
    assert jobs.app.count(state="any") == 0
    sale("COMMIT")
    jobs.app.wake()

    assert parent.result(timeout=10) == 2
    assert child.result(timeout=10) == 2
    assert [job.result(timeout=10) for job in group] == [1, 2, 3]
    assert sale("SELECT number FROM sale") == [(7,)]


def test_a_job_of_a_transaction_that_is_rolled_back_never_was(till):
    jobs, sale = till

    sale.begin()
    job = jobs.add.using(conn=sale.conn, key="k").enqueue(1)
    sale("ROLLBACK")

    assert jobs.app.count(state="any") == 0
    assert sale("SELECT number FROM sale") == []
    with pytest.raises(JobGone):
        job.refresh()
    assert jobs.add.using(key="k").enqueue(1).created


@pytest.mark.parametrize("again", [False, True], ids=["by the call", "by both"])
def test_many_calls_go_through_the_connection_that_one_of_them_names(till, again):
    jobs, sale = till
    calls = [
        jobs.add.call(0),
        jobs.add.using(conn=sale.conn).call(1),
        jobs.app.call("jobs.add", (2,)),
    ]

    sale.begin()
    gone = jobs.app.enqueue_many(calls, conn=sale.conn if again else None)
    sale("ROLLBACK")
    assert jobs.app.count(state="any") == 0
    with pytest.raises(JobGone):
        gone[0].refresh()

    sale.begin()
    group = jobs.app.enqueue_many(calls, conn=sale.conn if again else None)
    sale("COMMIT")
    assert jobs.app.count(state="any") == len(group) == 3


def test_many_async_calls_go_through_the_connection_that_one_of_them_names(
    databases, template, tmp_path
):
    import psycopg

    with databases.fresh(template) as name, psycopg.connect(databases.url(name)) as conn:
        jobs = load_jobs(databases.url(name), tmp_path)
        with closing(jobs.app):
            asyncio.run(jobs.app.aenqueue_many([jobs.add.using(conn=conn).call(1)]))
            conn.rollback()
            assert jobs.app.count(state="any") == 0


def test_calls_that_name_different_connections_are_refused(till):
    jobs, sale = till
    here, there = jobs.add.using(conn=sale.conn).call(1), jobs.add.using(conn=object()).call(2)

    with pytest.raises(BadOption, match="different connections"):
        jobs.app.enqueue_many([here, there])
    with pytest.raises(BadOption, match="different connections"):
        jobs.app.enqueue_many([here], conn=object())


def test_a_connection_of_another_kind_is_refused(till, tmp_path):
    jobs, sale = till
    import sqlite3

    import apsw

    wrong = (
        sqlite3.connect(tmp_path / "other.db")
        if "apsw" in type(sale.conn).__module__
        else apsw.Connection("")
    )
    with closing(wrong), pytest.raises((BadOption, Exception), match="conn"):
        jobs.add.using(conn=wrong).enqueue(1)
    assert jobs.app.count(state="any") == 0


# async twins


def test_every_async_twin_does_what_its_sync_one_does(shop, path):
    async def all_of_them() -> None:
        job = await shop.jobs.add.aenqueue(1)
        assert await job.aresult(timeout=10) == 2
        assert (await job.arefresh()).state == "succeeded"
        assert (
            await (await shop.jobs.add.using(tags=["a"]).aenqueue(2)).await_(timeout=10)
        ).tags == ["a"]
        assert await (await shop.app.aenqueue("jobs.add", 5)).aresult(timeout=10) == 6
        group = await shop.app.aenqueue_many([shop.jobs.add.call(i) for i in range(3)])
        assert await group.await_(timeout=10) is group
        assert await shop.app.await_(group, until="all") == list(group)
        assert await shop.app.ajob(job.id) == job
        assert await shop.app.acount(tag="a", state="any") == 1
        assert len(await shop.app.ajobs(tag="a", state="any")) == 1
        assert [node.name for node in await shop.app.anodes()] == ["shop"]
        await shop.app.awake()
        assert await job.arequeue()
        await job.await_(timeout=10)
        later = await shop.jobs.add.using(delay="1h").aenqueue(1)
        assert await later.ahold("why")
        assert await later.aresume()
        assert (await later.aexplain()).state == "scheduled"
        assert await later.acancel("done")
        assert not await later.akill()
        with pytest.raises(JobCancelled, match="done"):
            await later.aresult(timeout=1)
        with pytest.raises(WaitTimeout):
            await (await shop.jobs.add.using(delay="1h").aenqueue(1)).aresult(timeout=0.05)

    asyncio.run(all_of_them())


def test_many_async_waits_share_a_few_threads(shop):
    async def all_of_them() -> list[int]:
        jobs = await asyncio.gather(*(shop.jobs.add.aenqueue(i) for i in range(50)))
        return await asyncio.gather(*(job.aresult(timeout=20) for job in jobs))

    assert asyncio.run(all_of_them()) == [i + 1 for i in range(50)]


_TWIN_OF = {"await_": "wait"}
_ONLY_ASYNC = {"threads", "adeps", "aoptions"}  # the twins of properties


@pytest.mark.parametrize(
    "kind",
    [Genba, Client, Task, TaskWithOptions, Job, Group, RunningJob, RequestedOutcome, NodeHandle],
    ids=lambda kind: kind.__name__,
)
def test_the_signatures_of_twins_are_equal(kind):
    twins = [
        n
        for n, member in vars(kind).items()
        if inspect.iscoroutinefunction(member) and n not in _ONLY_ASYNC
    ]
    assert twins
    for name in twins:
        twin = _TWIN_OF.get(name, name.removeprefix("a"))
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(kind, twin)), (
            name
        )


def test_every_blocking_call_has_a_twin():
    blocking = {
        Genba: [
            "enqueue",
            "enqueue_many",
            "submit",
            "job",
            "jobs",
            "count",
            "nodes",
            "wait",
            "wake",
            "close",
        ],
        NodeHandle: ["run"],
        Task: ["enqueue"],
        TaskWithOptions: ["enqueue"],
        Job: [
            "refresh",
            "explain",
            "wait",
            "result",
            "cancel",
            "kill",
            "hold",
            "resume",
            "requeue",
        ],
        Group: ["wait"],
        RunningJob: ["save", "inbox", "clone", "deps", "options"],
        RequestedOutcome: ["apply"],
    }
    lacking = [
        f"{kind.__name__}.{name}"
        for kind, names in blocking.items()
        for name in names
        if not hasattr(kind, f"a{name}") and not hasattr(kind, f"a{name}_")
    ]
    assert lacking == []


def test_the_priority_of_a_job_tells_how_often_it_has_crashed(url):
    app = Genba(url)

    @app.task(name="frail", priority=5)
    def frail() -> None: ...

    node = joined(app.store, tasks=(frail.describe(),))
    job = frail.enqueue()

    def crash(state: str, crashes: int) -> int:
        (claimed,) = app.store.claim(node, CLAIM, {"default": 1}, ["frail"])
        app.store.end(
            node,
            [
                ending(
                    claimed, state, "signal 9", wait=0, crashes=crashes, rank_priority=5 - crashes
                )
            ],
        )
        return job.refresh().priority

    assert (job.priority, crash("waiting", 1), crash("waiting", 2)) == (5, 4, 3)
    shown = CliRunner().invoke(main, ["job", "show", str(job.id), "--url", url]).output
    assert "priority 3 (5, less 2 for its crashes)" in shown
    described = (
        CliRunner().invoke(main, ["job", "show", str(job.id), "--url", url, "--json"]).output
    )
    assert json.loads(described)["priority"] == 3
    copy = msgspec.msgpack.decode(app.clone(job.id, {}), type=NewJob)
    assert (copy.priority, app.options_of(job.id)["priority"]) == (5, 5)  # what was given
    assert job.update(timeout="5s")
    assert (job.refresh().priority, job.record.priority) == (3, 5)
    assert job.update(priority=8)
    assert job.refresh().priority == 6
    assert job.hold("look at it")
    assert job.resume()
    assert job.refresh().priority == 8
    assert crash("failed", 1) == 7
    assert job.requeue()
    assert job.refresh().priority == 8
    app.close()


def test_unique_for_needs_something_that_is_unique(url):
    app = Genba(url)

    @app.task(name="plain")
    def plain() -> None: ...

    @app.task(name="kept", unique_for="1h")
    def kept() -> None: ...

    unknown = app.call("elsewhere", options={"unique_for": "1h"})
    for wrong in (plain.using(unique_for="1h").call(), kept.call(), unknown):
        with pytest.raises(BadOption, match="give key= or once="):
            app.enqueue_many([plain.call(), wrong])
    with pytest.raises(BadOption, match="give key= or once="):
        app.recur("s", kept.call(), every="1h")
    assert app.count() == 0
    for right in (
        kept.using(key="k"),
        kept.using(once=True),
        plain.using(key="other", unique_for="1h"),
    ):
        assert right.enqueue().created
    app.set_defaults(unique_for="2h")  # for those that are unique
    assert plain.enqueue().created
    app.close()


def test_new_defaults_hold_for_all_tasks_from_the_next_call_on(url):
    """The call's word first, then the task's, then the app's; a job that is there stays as it was."""
    app = Genba(url, defaults={"queue": "old"})

    @app.task(name="plain")
    def plain(tenant: str = "x") -> None: ...

    @app.task(name="own", nice=-1, timeout=None)
    def own() -> None: ...

    fast = plain.using(tags=["fast"])
    before, made = plain.enqueue(), plain.call()
    fast.enqueue()
    app.set_defaults(priority=5, queue="new", timeout="5s", max_running=2, on_exception="hold")

    def described(job):
        options = json.loads(job.refresh().record.options or "{}")
        return job.record.priority, job.queue, options.get("timeout"), options.get("on_exception")

    new = (5, "new", 5_000_000, "hold")
    assert described(before) == described(app.enqueue_many([made])[0]) == (0, "old", None, None)
    assert (
        described(plain.enqueue())
        == described(app.enqueue("plain"))
        == described(app.enqueue("unknown.task"))
        == new
    )
    assert described(fast.enqueue()) == described(fast.using(key="k").enqueue()) == new
    assert described(own.enqueue()) == (1, "new", None, "hold")
    assert described(plain.using(priority=7, queue="old").enqueue())[:2] == (7, "old")
    assert app.tasks["plain"].definition["max_running"] == 2
    assert [one["priority"] for one in app.hello()["tasks"]] == [5, 1]
    app.close()


def test_defaults_that_one_task_cannot_have_change_nothing(url):
    app = Genba(url)

    @app.task(name="shared", concurrency=4)
    async def shared() -> None: ...

    @app.task(name="alone")
    def alone() -> None: ...

    with pytest.raises(BadTask, match=r"alone: concurrency is for tasks that are `async def`"):
        app.set_defaults(concurrency=2, priority=5)
    with pytest.raises(BadTask, match=r"fair_by names 'tenant'"):
        app.set_defaults(fair_by="tenant")
    with pytest.raises(BadTask, match=r"bucket 'g\{x\}' needs an argument 'x'"):
        app.set_defaults(limits=[Limit("g{x}", 1)])
    assert (shared.options.priority, alone.options.priority) == (0, 0)
    app.set_defaults(limits=[Limit("gpu", 1)])
    app.set_defaults(
        limits=[Limit("gpu", 2)]
    )  # it is the same bucket, which means something else now
    assert alone.enqueue().created
    app.close()


def test_a_default_hook_tells_of_the_ends_of_all_tasks_also_of_those_before_it(url):
    app = Genba(url)
    described: list[str] = []

    @app.task(name="first")
    def first() -> None: ...

    @app.task(name="own", on_final=lambda job: described.append(f"own {job.task}"))
    def own() -> None: ...

    app.set_defaults(on_final=lambda job: described.append("never"))
    app.set_defaults(on_final=lambda job: described.append(job.task))

    @app.task(name="last")
    def last() -> None: ...

    with app.testing() as q:
        for task in (first, own, last):
            task.enqueue()
        q.run()
    assert sorted(described) == ["first", "last", "own own"]


def _with_tasks(url):
    app = Genba(url)

    @app.task(name="nightly", cron="0 3 * * *", tz="Europe/Zurich")
    def nightly(depth: int = 1) -> None: ...

    @app.task(name="often", every="1h")
    def often() -> None: ...

    @app.task(name="render", queue="pictures")
    async def render(tenant: str) -> None: ...

    @app.task(name="notify")
    def described(job: int) -> None: ...

    joined(app.store, tasks=tuple(task.describe() for task in app.task_table().values()))
    app.store.schedules.declare(app.declared_schedules())
    return app


@pytest.mark.parametrize("code", [True, False], ids=["with the code", "by name"])
def test_operators_change_the_schedule_of_a_task_and_give_it_back(url, code):
    app = _with_tasks(url)
    client = app if code else Genba(url)

    def rule(name):
        return client.schedule(name).rule.words()

    before = [(one.name, one.rule, one.record.definition) for one in client.schedules()]
    nightly, often, described = (client.tasks[name] for name in ("nightly", "often", "notify"))
    assert nightly.set(cron="30 4 * * *") == {"cron": "30 4 * * *"}
    assert rule("nightly") == "30 4 * * * (Europe/Zurich)"
    assert nightly.set(tz="Asia/Tokyo") == {"cron": "30 4 * * *", "tz": "Asia/Tokyo"}
    assert rule("nightly") == "30 4 * * * (Asia/Tokyo)"
    assert client.schedule("nightly").args == {"depth": 1}
    assert nightly.set(every="10m") == {"every": "10m"}
    assert rule("nightly") == "every 10m"
    assert nightly.reset() == {}
    assert often.set(cron="* * * * *") == {"cron": "* * * * *"}
    assert (rule("often"), client.count(task="often")) == (
        "* * * * * (UTC)",
        0,
    )  # the run that waited is gone
    assert often.reset("cron") == {}
    assert [(one.name, one.rule, one.record.definition) for one in client.schedules()] == before

    nightly.set(cron=None)
    assert [one.name for one in client.schedules()] == ["often"]
    with pytest.raises(BadOption, match="needs 'job'"):
        described.set(every="5m")
    with pytest.raises(BadOption, match="tz is the time zone of cron"):
        often.set(tz="Asia/Tokyo")
    with pytest.raises(BadOption, match="cron and every exclude each other"):
        often.set(cron="* * * * *", every="5m")
    with pytest.raises(BadOption, match="cron"):
        often.set(cron="61 * * * *")
    client.schedule("often").set(every="2h")
    with pytest.raises(BadOption, match="by hand"):
        often.set(every="5m")
    assert (described.override, often.override, nightly.reset()) == ({}, {}, {})
    assert len(client.schedules()) == 2
    app.close()
    client.close()


def test_a_task_that_code_does_not_schedule_gets_a_schedule_and_loses_it(url):
    app = Genba(url)

    @app.task(name="sweep", queue="slow")
    def sweep(deep: bool = False) -> None: ...

    with app.testing() as q:
        app.tasks["sweep"].set(every="10m", priority=3)
        (schedule,) = app.schedules()
        assert (schedule.name, schedule.queue, schedule.args) == ("sweep", "slow", {"deep": False})
        assert not schedule.by_hand
        assert len(q.run_until_idle(within="30m")) == 4
        app.tasks["sweep"].reset()
        assert app.schedules() == []
        q.advance("1h")
        assert q.run() == []
        app.recur("sweep", sweep.call(), every="1h")
        with pytest.raises(BadOption, match="by hand"):
            app.tasks["sweep"].set(every="5m")


def test_a_node_that_starts_declares_what_operators_say(url):
    app = _with_tasks(url)
    app.tasks["nightly"].set(tz="Asia/Tokyo")
    app.tasks["often"].set(every=None)
    seen = [(one.name, one.record.version) for one in app.schedules()]
    clock = SystemClock()
    maintenance = Maintenance(
        app.store, 1, lease=15_000_000, poll=1_000_000, queues=["default"], tasks=sorted(app.task_table()), keep={},
        conditions=[], schedules=app.declared_schedules(), boot_id=None, clock=clock, lost_claims=LostClaims(clock),
        post=lambda what: None,
    )  # fmt: skip
    maintenance.step()

    assert [
        (one.name, one.record.version) for one in app.schedules()
    ] == seen  # the same again changes nothing
    assert seen[0][0] == "nightly"
    other = Genba(url)
    policy = other.store.operators
    policy.override(
        "often", lambda old: {}, "somebody", None
    )  # and dies before the schedule is written
    policy.override("nightly", lambda old: {"cron": None}, "somebody", None)
    for _ in range(2):
        maintenance.step()
    assert [(one.name, one.rule.words()) for one in app.schedules()] == [("often", "every 1h")]
    app.close()
    other.close()


def test_operators_change_fairness_and_the_hook(url):
    app = _with_tasks(url)
    render = app.task_table()["render"]
    app.tasks["render"].set(fair_by="tenant", on_final="notify", concurrency=8)
    for each in (render.enqueue(tenant="a"), app.enqueue("render", tenant="b")):
        assert json.loads(each.record.options) == {"on_final": "notify"}
    assert app.queues["pictures"].fair_by == "tenant"
    app.jobs(task="render")[0].cancel()
    assert app.jobs(task="notify")[0].args == {
        "job": app.jobs(task="render", state="cancelled")[0].id
    }
    app.tasks["render"].reset()
    assert render.enqueue(tenant="a").record.options is None

    for changes, described in (
        ({"fair_by": "nobody"}, "fair_by: the task has no argument 'nobody'"),
        ({"on_final": lambda job: None}, "only a decorator can give a function"),
        ({"name": "other"}, "jobs, schedules and callers refer to it"),
        ({"concurrency": 0}, "concurrency"),
    ):
        with pytest.raises(BadOption, match=described):
            app.tasks["render"].set(**changes)
    with pytest.raises(BadOption, match="concurrency must be 1"):
        app.tasks["notify"].set(concurrency=2)
    app.middleware(lambda job, call_next: call_next())
    with pytest.raises(BadTask, match="must be `async def`"):
        app.tasks["render"].set(concurrency=2)
    assert app.tasks["render"].override == {}
    app.close()


def test_a_call_by_name_has_the_options_of_the_task_wherever_its_code_is(url):
    """The call's own word first, then the operator's, then the decorator's, which a node has persisted."""
    code, client = Genba(url, defaults={"grace": "3s"}), Genba(url, defaults={"timeout": "9m"})

    @code.condition(name="disk.ok")
    def disk_ok() -> bool:
        return True

    @code.task(
        name="render",
        queue="pictures",
        priority=4,
        timeout="5m",
        retry=Retry(times=2, delay="1s"),
        tags=["slow"],
        keep={"succeeded": "1h", "failed": None},
        once=True,
        on_exception="hold",
        memory="100MB",
        expires="2h",
        on_final=lambda job: None,
        ready=["disk.ok"],
    )
    def render(scene: str) -> None: ...

    joined(code.store, tasks=tuple(task.describe() for task in code.task_table().values()))
    there = render.enqueue(scene="duck")
    assert client.enqueue("render", scene="duck").id == there.id  # once: it is the same job
    there.cancel()
    mine, here = render.enqueue(scene="duck").record, client.enqueue("render", scene="swan").record

    assert (here.queue, here.priority, here.tags) == ("pictures", 4, mine.tags)
    assert here.options == mine.options
    assert here.expires_at is not None

    client.tasks["render"].set(priority=7, timeout="1m")
    (call,) = client.submit(
        [client.call("render", (), {"scene": "goose"}, {"priority": 9, "queue": "default"})]
    )
    assert (call.priority, call.queue) == (9, "default")
    stored = json.loads(call.record.options or "{}")
    assert (stored["timeout"], stored["retry"]["times"]) == (60_000_000, 2)
    for app in (code, client):
        app.close()


# many alike take a shorter way in, which must not be visible


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queue": "side", "priority": 7, "history": "final"},
        {"delay": "PT1H", "expires": "PT2H"},
        {"tags": ["a", "b"]},
        {"max_waiting": 100},
        {"fair_by": "{n}"},
        {"timeout": "PT5S", "retry": 3},
    ],
)
def test_jobs_in_bulk_are_those_that_would_have_come_one_by_one(url, options):
    with closing(Genba(url)) as app:
        one = app.task(name="one", **options)(lambda n: n)
        other = app.task(name="other")(lambda n: n)

        def calls():
            return [one.call(n) for n in range(3)]

        singly = [app.submit([call])[0] for call in [*calls(), other.call(5), *calls()]]
        mixed = app.enqueue_many([*calls(), other.call(5), *calls()])
        alike = [
            *app.enqueue_many(calls()),
            *app.enqueue_many([other.call(5)]),
            *app.enqueue_many(calls()),
        ]
        by_task = [
            *app.enqueue_many([one.call(1), one.call(2)]),
            *app.enqueue_many([other.call(1), other.call(2)]),
        ]

        assert [_seen(job) for job in mixed] == [_seen(job) for job in singly]
        assert [_seen(job) for job in alike] == [_seen(job) for job in singly]
        assert [job.task for job in by_task] == ["one", "one", "other", "other"]
        assert len({job.id for job in [*singly, *mixed, *alike, *by_task]}) == 25
        assert one.using(priority=2).enqueue(1).record.priority == 2
        described = {event.job.id for event in app.events(kinds=["waiting", "scheduled"])}
        quiet = options.get("history") == "final"
        assert ({job.id for job in alike if job.task == "one"} <= described) is not quiet


def _seen(job):
    record = job.record
    described = {
        name: getattr(record, name)
        for name in ("queue", "task", "state", "priority", "options", "args", "tags")
    }
    return {
        **described,
        "waits": record.due_at - record.created_at,
        "expires": record.expires_at is not None,
    }


def test_what_an_operator_says_holds_for_the_next_in_bulk(url):
    with closing(Genba(url)) as app, closing(Genba(url)) as operator:
        task = app.task(name="one")(lambda n: n)
        operator.task(name="one")(lambda n: n)
        app.enqueue_many([task.call(1), task.call(2)])
        operator.tasks["one"].set(priority=9)

        assert [job.record.priority for job in app.enqueue_many([task.call(1), task.call(2)])] == [
            9,
            9,
        ]
        assert task.enqueue(3).record.priority == 9


# arguments by name

VARIADIC = """
from genba import Genba, Limit, current_job

app = Genba()

@app.condition
def is_mine(job):
    return job.args["tenant"] == "acme"

@app.task(
    ready=["variadic.is_mine", lambda job: job.args["rest"] == [1, 2]],
    limits=Limit("tenant:{tenant}", 1), queue="fair", fair_by="tenant",
)
def send(tenant: str, *rest: int) -> dict:
    return current_job().args
"""


def test_what_a_variadic_task_takes_is_known_by_name_everywhere(url, tmp_path, start_node):
    (tmp_path / "variadic.py").write_text(VARIADIC)
    code, client = load_module("variadic", tmp_path, url), Genba(url)
    with closing(code.app), closing(client):
        start_node("variadic:app", url, "-q", "fair")
        eventually(code.app.nodes, within=15)
        here, there = code.send.enqueue("acme", 1, 2), client.enqueue("variadic.send", "acme", 1, 2)
        named = {"tenant": "acme", "rest": [1, 2]}

        assert here.result(timeout=15) == there.result(timeout=15) == named
        assert here.args == there.args == client.job(here.id).args == named
        code.app.recur("daily", code.send.call("acme"), cron="0 3 * * *")
        assert client.schedule("daily").args == {"tenant": "acme", "rest": []}
        found = rows(
            url, f"SELECT fair_key, buckets FROM genba.job WHERE id IN ({here.id}, {there.id})"
        )
        assert [key for key, _ in found] == ["acme", "acme"]
        assert all('"tenant:acme"' in needs for _, needs in found)
