"""A node at work: real processes, real signals, both databases."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from datetime import timedelta

import psutil
import pytest
from tests.storage.builders import rows
from tests.support import eventually, gone, lines, load_module, started

_OTHER = """
from genba import Genba

app = Genba()

@app.task(name="unknown.task")
def learned() -> str:
    return "known now"
"""


_AGED = """
from genba import Genba, Retry

app = Genba(age_step=10)

@app.task(priority=5, retry=Retry(times=1, delay=3600))
def once_more() -> None:
    raise ValueError
"""


@pytest.fixture
def node(jobs, url, start_node):
    """Starts a node and waits until it is there."""

    def start(*args: str, target: str = "jobs:app", **options: object):
        before = len(jobs.app.nodes())
        started = start_node(target, url, *args, **options)
        eventually(lambda: len(jobs.app.nodes()) > before, within=15)
        return started

    return start


# what runs


def test_client_and_node_rank_by_the_age_step_of_the_app(url, tmp_path, start_node):
    """Enqueued, due or retried, the place of a job is the same."""
    (tmp_path / "aged.py").write_text(_AGED)
    aged = load_module("aged", tmp_path, url)
    app, once_more = aged.app, aged.once_more
    app.queues["later"].pause()
    waits = once_more.using(queue="later").enqueue()
    due = once_more.using(queue="later", delay=0.1).enqueue()
    again = once_more.enqueue()
    start_node("aged:app", url, "-q", "default,later")
    eventually(
        lambda: due.refresh().state == "waiting" and again.refresh().state == "scheduled", within=20
    )

    ranks = rows(
        url, f"SELECT due_at - rank FROM genba.job WHERE id IN ({waits.id}, {due.id}, {again.id})"
    )
    assert ranks == [(50_000_000,)] * 3
    app.close()


def test_a_node_runs_functions_coroutines_classes_and_methods(shop):
    jobs = shop.jobs
    wanted = {
        jobs.add.enqueue(1): 2,
        jobs.add_later.enqueue(2): 3,
        jobs.Greet.enqueue("you"): "hello you",
        jobs.Counter.up.enqueue(1): 11,
        jobs.Counter.up_later.enqueue(2): 12,
    }

    assert {job: job.result(timeout=10) for job in wanted} == wanted


def test_a_job_that_comes_while_the_node_is_idle_starts_at_once(shop):
    jobs = shop.jobs
    jobs.add.enqueue(0).result(timeout=10)
    waits = []
    for i in range(5):
        job = jobs.add.enqueue(i)
        assert job.result(timeout=5) == i + 1
        waits.append(job.attempts[0].started - job.enqueued)

    assert sorted(waits)[2] < timedelta(seconds=0.2)


def test_a_scheduled_job_starts_on_time_while_the_node_is_idle(shop):
    jobs = shop.jobs
    jobs.add.enqueue(0).result(timeout=10)

    job = jobs.add.using(delay=1.3).enqueue(1)
    assert job.result(timeout=5) == 2
    assert timedelta(0) <= job.attempts[0].started - job.due < timedelta(seconds=0.25)


def test_on_demand_every_job_has_a_process_of_its_own_and_none_stays(jobs, node):
    started_node = node("--pool", "ondemand", "--max", "2")
    group = jobs.app.enqueue_many([jobs.where.call() for _ in range(6)]).wait(timeout=20)

    assert len({job.result() for job in group}) == 6
    eventually(lambda: gone(*(job.result() for job in group)))
    assert len(started_node.tree()) == 3  # node, guard, zygote


def test_a_static_pool_has_its_workers_before_there_is_work(jobs, node):
    started_node = node("--pool", "static", "--min", "3")

    eventually(lambda: len(started_node.tree()) == 6)


def test_two_nodes_share_the_jobs_and_none_runs_twice(jobs, node, path):
    node("--name", "one")
    node("--name", "two")

    group = jobs.app.enqueue_many(
        [jobs.write_slowly.call(str(path), str(i), 0.008) for i in range(500)]
    )
    group.wait(timeout=60)

    entries = lines(path)
    assert sorted(int(word) for word, *_ in entries) == list(range(500))
    assert {attempt for _, _, attempt, *_ in entries} == {"1"}
    assert jobs.app.count(state="succeeded") == 500
    assert len({job.attempts[-1].node for job in group[::7]}) == 2


def test_a_task_that_no_node_knows_waits_and_says_so_and_starts_when_one_knows_it(
    jobs, node, tmp_path
):
    first = node()
    job = jobs.app.enqueue("unknown.task")
    jobs.add.enqueue(1).result(timeout=10)

    assert job.refresh().state == "waiting"
    assert "no live node knows task 'unknown.task'" in str(job.explain())
    busy = psutil.Process(first.pid)
    used, began = sum(busy.cpu_times()[:2]), time.monotonic()
    assert jobs.add.using(delay=1).enqueue(1).result(timeout=10) == 2
    assert (sum(busy.cpu_times()[:2]) - used) / (time.monotonic() - began) < 0.2  # not spun on
    assert job.refresh().state == "waiting"
    (tmp_path / "other.py").write_text(_OTHER)
    node(target="other:app")
    assert job.result(timeout=10) == "known now"
    assert len(job.attempts) == 1


# stopping one job


def test_a_node_whose_code_has_changed_task_definitions_logs_it_once(jobs, node, tmp_path):
    code = _OTHER.replace('"unknown.task"', '"unknown.task", timeout="5s"')
    (tmp_path / "other.py").write_text(_OTHER)
    first = node(target="other:app")
    (tmp_path / "other.py").write_text(code)
    second, third = node(target="other:app"), node(target="other:app")

    assert "changed tasks: unknown.task (timeout)" in second.log
    assert not [one for one in (first, third) if "changed tasks" in one.log]
    [event] = jobs.app.events(kinds="task_changed")
    assert (event.data["task"], event.data["diff"]) == (
        "unknown.task",
        {"timeout": [None, 5_000_000]},
    )


def test_a_deaf_job_is_ended_with_all_its_descendants_when_its_time_is_over(shop, path):
    jobs = shop.jobs
    job = jobs.ignore_sigterm.using(timeout=1, grace=0.3).enqueue(str(path))

    assert job.wait(timeout=10).state == "timed_out"
    [(_, _, pid)] = started(path)
    assert job.attempts[-1].cause == "timeout"
    assert gone(pid, *(child for (child,) in lines(f"{path}.children")))


def test_a_deaf_job_is_ended_with_all_its_descendants_when_it_is_cancelled(shop, path):
    jobs = shop.jobs
    job = jobs.ignore_sigterm.using(grace=0.3).enqueue(str(path))
    [(_, _, pid)] = started(path)

    assert job.cancel("enough")
    assert job.wait(timeout=5).state == "cancelled"
    assert gone(pid, *(child for (child,) in lines(f"{path}.children")))
    assert jobs.add.enqueue(1).result(timeout=10) == 2


def test_what_a_job_leaves_behind_is_ended_before_it_is_finished(shop, path):
    jobs = shop.jobs
    job = jobs.leave_children.enqueue(str(path))

    assert job.result(timeout=10) == "returned"
    children = [child for (child,) in lines(f"{path}.children")]
    assert len(children) == 2
    assert gone(*children)
    entries = [
        event.data
        for event in eventually(lambda: [*shop.app.events(job=job, kinds=["strays_killed"])])
    ]
    assert entries == [{"attempt": 1, "processes": 2}]


# how attempts die


def test_an_exit_is_a_crash_and_at_the_cap_the_job_is_held(shop):
    jobs = shop.jobs
    job = jobs.exit_with.enqueue(3)

    eventually(lambda: job.refresh().state == "held", within=10)
    assert [attempt.cause for attempt in job.attempts] == ["exit 3", "exit 3"]
    assert (job.crashes, job.retries) == (2, 0)
    assert "exit 3" in job.reason
    assert "exit 3" in str(job.explain())
    first, second = job.attempts
    assert second.claimed - first.ended >= timedelta(seconds=0.4)  # it was given time


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_the_cause_of_death(shop, number):
    jobs = shop.jobs
    job = jobs.die_of.enqueue(int(number))

    eventually(lambda: job.refresh().state == "held", within=10)
    assert job.attempts[-1].cause == f"signal {int(number)}"
    assert job.attempts[-1].pid
    assert jobs.add.enqueue(1).result(timeout=10) == 2


def test_an_at_most_once_job_that_died_is_not_run_again(shop, path):
    jobs = shop.jobs
    job = jobs.once_only.enqueue(str(path))

    assert job.wait(timeout=10).state == "failed"
    assert job.attempts[-1].cause == "maybe_ran"
    assert lines(path) == [["run", "1"]]


def test_what_a_killed_worker_had_in_advance_is_not_harmed(jobs, node, path):
    """Short jobs travel in bunches; the death of the first must not count for the others."""
    node("--max", "1")
    jobs.app.enqueue_many([jobs.add.call(i) for i in range(200)]).wait(
        timeout=20
    )  # now it takes many at once
    calls = [jobs.write.call(str(path), str(i)) for i in range(100)]
    calls.insert(50, jobs.die_at_first.call(f"{path}.died"))

    group = jobs.app.enqueue_many(calls).wait(timeout=20)

    assert {job.state for job in jobs.app.jobs(state="any", task="jobs.write", limit=200)} == {
        "succeeded"
    }
    assert [job.crashes for job in group if job.crashes] == [1]
    assert group[50].refresh().attempts[0].cause == "signal 9"
    assert len(group[50].attempts) == 2
    entries = lines(path)
    assert sorted(int(word) for word, *_ in entries) == list(range(100))
    assert {len(job.attempts) for job in group[:50]} == {1}


# stopping the node


def test_a_drained_node_lets_short_work_end_and_leaves_nothing(jobs, node, path, tmp_path):
    started_node = node()
    job = jobs.wait_for.enqueue(str(path))
    started(path)
    started_node.signal(signal.SIGTERM)
    later = jobs.add.enqueue(1)
    eventually(lambda: "draining" in started_node.log)
    path.touch()

    assert started_node.wait() == 0
    assert (job.refresh().state, job.result()) == ("succeeded", "opened")
    assert later.refresh().state == "waiting"
    assert started_node.tree() == []
    assert jobs.app.nodes() == []
    assert not (tmp_path / "genba.db-nodes").exists()


def test_a_drain_releases_what_does_not_end_in_time_unharmed_and_uncounted(jobs, node, path):
    first = node("--grace", "0.5s", "--max", "2")
    long = [jobs.wait_for.enqueue(str(path)) for _ in range(2)]
    more = [jobs.add.enqueue(i) for i in range(5)]
    started(path, 2)

    assert first.stop() == 0
    assert first.tree() == []
    assert {job.refresh().state for job in [*long, *more]} == {"waiting"}
    assert {(job.crashes, job.retries, job.record.losses) for job in [*long, *more]} == {(0, 0, 0)}
    path.touch()
    node()
    assert [job.result(timeout=10) for job in [*long, *more]] == ["opened"] * 2 + [1, 2, 3, 4, 5]


def test_a_job_can_see_that_its_node_drains(jobs, node, path):
    started_node = node()
    job = jobs.stop_when_asked.enqueue(str(path))
    started(path)

    assert started_node.stop() == 0
    assert job.refresh().state == "succeeded"
    assert lines(f"{path}.stopped") == [[str(job.id), "1", "False"]]


def test_a_second_signal_hurries(jobs, node, path):
    started_node = node("--grace", "60s")
    job = jobs.wait_for.enqueue(str(path))
    started(path)
    started_node.signal(signal.SIGTERM)
    eventually(lambda: "draining" in started_node.log)
    began = time.monotonic()
    started_node.signal(signal.SIGTERM)

    assert started_node.wait(within=60) == 0
    assert time.monotonic() - began < 30  # half of its grace
    assert (job.refresh().state, job.crashes) == ("waiting", 0)


@pytest.mark.parametrize("task", ["wait_for", "wait_for_later"])
def test_a_sigterm_to_all_processes_of_a_node_is_a_drain_like_any_other(jobs, node, path, task):
    """As a service manager sends it."""
    started_node = node("--grace", "60s")
    job = getattr(jobs, task).enqueue(str(path))
    started(path)
    for pid in reversed(started_node.tree()):  # the workers first
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: "draining" in started_node.log)
    path.touch()

    assert started_node.wait() == 0
    assert job.refresh().state == "succeeded"
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


def test_a_stray_sigterm_to_a_worker_is_a_release(shop, path):
    jobs = shop.jobs
    job = jobs.wait_for.enqueue(str(path))
    [(_, _, pid)] = started(path)

    os.kill(int(pid), signal.SIGTERM)
    assert started(path, 2)[1][:2] == [str(job.id), "2"]
    path.touch()
    assert job.result(timeout=10) == "opened"
    assert (job.crashes, job.retries) == (0, 0)


# the machinery


@pytest.mark.parametrize("role", ["guard", "zygote"])
def test_regression_12_a_node_survives_the_death_of_its_helpers(jobs, node, path, role):
    started_node = node()
    job = jobs.wait_for.enqueue(str(path))
    [(_, _, pid)] = started(path)
    zygote = psutil.Process(int(pid)).parent()
    assert zygote is not None
    guard = zygote.parent()
    assert guard is not None
    assert guard.parent() == psutil.Process(started_node.pid)

    (guard if role == "guard" else zygote).kill()

    if role == "guard":
        started(path, 2)  # all died with it, and no job counts that as its crash
    path.touch()
    assert job.result(timeout=10) == "opened"
    assert jobs.add.enqueue(1).result(timeout=10) == 2
    assert Counter(attempt.cause for attempt in job.attempts)["returned"] == 1
    assert (job.crashes, job.retries) == (0, 0)
    assert started_node.stop() == 0
    assert started_node.tree() == []
