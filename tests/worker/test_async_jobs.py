"""Async tasks with `concurrency=n`: several jobs at a time in one worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, lines, load_module

from genba import Genba, Job
from genba.errors import BadTask

_TASKS = """
import asyncio, contextvars, os, signal, subprocess, sys, time
from genba import Genba, RetryJob, current_job

app = Genba()
here = os.path.dirname(os.path.abspath(__file__))
running = []

def tell(name, *words):
    fd = os.open(os.path.join(here, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@app.task(concurrency=8)
async def fetch(n: int) -> list[int]:
    running.append(n)
    most = len(running)
    for _ in range(5):
        await asyncio.sleep(0.02)
        most = max(most, len(running))
        assert current_job().args == {"n": n}
    running.remove(n)
    return [os.getpid(), most]

@app.task(concurrency=4)
async def gate(name: str) -> str:
    job = current_job()
    print("this is", name)
    job.progress(1, 4, note=name)
    tell("started", job.id, os.getpid())
    try:
        while not os.path.exists(os.path.join(here, name)):
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        tell("cancelled", job.id)
        raise
    assert current_job() is job
    await asyncio.to_thread(print, "in a thread of", name)
    return name

@app.task(concurrency=4)
async def deaf(name: str) -> str:
    tell("started", current_job().id, os.getpid())
    while not os.path.exists(os.path.join(here, name)):
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            tell("deaf", current_job().id)
    return name

@app.task(concurrency=4)
async def polite() -> str:
    tell("started", current_job().id, os.getpid())
    while not current_job().should_stop:
        await asyncio.sleep(0.01)
    return "stopped"

@app.task(concurrency=4, retry=0)
async def dies(name: str) -> str:
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    tell("started", current_job().id, os.getpid())
    await asyncio.sleep(0.3)
    return name

@app.task(concurrency=4, retry=2)
async def fails(n: int) -> int:
    await asyncio.sleep(0.01)
    if n == 1:
        raise LookupError("one")
    if n == 2 and current_job().attempt == 1:
        raise RetryJob("again", delay=0.05)
    if n == 3:
        current_job().succeed(33)
    return n

@app.task(concurrency=4)
async def large(size: int) -> str:
    return "x" * size

@app.task(concurrency=4, at_most_once=True)
async def once() -> int:
    await asyncio.sleep(0.2)
    return len(running)

@app.task(concurrency=4)
async def beside() -> str:
    return type(asyncio.get_running_loop()).__module__

@app.task
async def by_itself() -> str:
    return type(asyncio.get_running_loop()).__module__

@app.task
def plain() -> int:
    return os.getpid()
"""


def choose_loop(folder: Path, loop: str) -> None:
    """Of the app in this folder; uvloop is installed here, as far as others see."""
    (folder / "uvloop.py").unlink(missing_ok=True)
    if loop == "asyncio":
        (folder / "uvloop.py").write_text("raise ImportError('not installed')")


@pytest.fixture
def shop(url, engine, start_node, tmp_path):
    """The tasks of this file on a node; each test meets both engines, and so both loops."""
    (tmp_path / "several.py").write_text(_TASKS)
    choose_loop(tmp_path, "asyncio" if engine == "sqlite" else "uvloop")
    module = load_module("several", tmp_path, url)

    def start(*args: str) -> Any:
        node = start_node("several:app", url, *args)
        eventually(module.app.nodes, within=15)
        return node

    module.start = start
    yield module
    module.app.close()


def started(folder: Path, count: int) -> list[list[str]]:
    return eventually(
        lambda: (entries := lines(folder / "started"))[: len(entries) * (len(entries) >= count)],
        within=15,
    )


def states(jobs: list[Any]) -> list[str]:
    return [str(job.refresh().state) for job in jobs]


def test_only_an_async_task_may_have_company():
    app = Genba("sqlite:///unused.db")

    with pytest.raises(BadTask, match="concurrency is for tasks that are `async def`"):

        @app.task(concurrency=2)
        def plain() -> None: ...


def test_plain_middleware_around_jobs_in_company_is_refused_at_the_start(start_node, url, tmp_path):
    (tmp_path / "several.py").write_text(
        _TASKS + "\n@app.middleware\ndef timed(job, call_next): return call_next()\n"
    )
    node = start_node("several:app", url)

    assert node.wait() == 2
    assert "the middleware timed must be `async def`" in node.log


def test_so_many_run_at_a_time_in_one_worker_and_no_more(shop):
    shop.start("--max", "1")
    group = shop.app.enqueue_many([shop.fetch.call(n) for n in range(40)])
    results = [job.result(timeout=20) for job in group]

    assert len({pid for pid, _ in results}) == 1
    assert max(most for _, most in results) == 8
    assert all([one.cause for one in job.attempts] == ["returned"] for job in group)


def test_jobs_beyond_one_worker_go_to_the_next(shop, tmp_path):
    shop.start("--max", "2")
    jobs = [shop.gate.enqueue("open") for _ in range(8)]
    entries = started(tmp_path, 8)
    (tmp_path / "open").touch()

    assert [job.result(timeout=10) for job in jobs] == ["open"] * 8
    assert sorted({pid: sum(p == pid for _, p in entries) for _, pid in entries}.values()) == [4, 4]


def has_progress(job: Job[Any], note: str) -> bool:
    return job.refresh().progress.note == note


def test_each_has_its_own_job_its_own_progress_and_its_own_log(shop, tmp_path):
    shop.start("--max", "1")
    jobs = {name: shop.gate.enqueue(name) for name in ("a", "b", "c")}
    started(tmp_path, 3)
    for name, job in jobs.items():
        eventually(partial(has_progress, job, name), within=5)
        assert job.state == "running"
        (tmp_path / name).touch()

    for name, job in jobs.items():
        assert job.result(timeout=10) == name
        assert job.attempts[0].log == f"this is {name}\nin a thread of {name}\n"


def test_a_cancelled_one_gets_cancelled_error_and_its_neighbours_nothing(shop, tmp_path):
    shop.start("--max", "1")
    jobs = [shop.gate.enqueue("open") for _ in range(4)]
    pid = started(tmp_path, 4)[0][1]
    jobs[1].cancel()
    eventually(lambda: jobs[1].refresh().state == "cancelled", within=5)
    (tmp_path / "open").touch()

    assert lines(tmp_path / "cancelled") == [[str(jobs[1].id)]]
    assert [jobs[i].result(timeout=10) for i in (0, 2, 3)] == ["open"] * 3
    assert {job.attempts[0].pid for job in jobs} == {int(pid)}


def test_one_that_runs_out_of_time_is_stopped_alone(shop, tmp_path):
    shop.start("--max", "1")
    slow = shop.gate.using(timeout="300ms").enqueue("never")
    other = shop.gate.enqueue("open")
    eventually(lambda: slow.refresh().state == "timed_out", within=10)
    (tmp_path / "open").touch()

    assert other.result(timeout=10) == "open"
    assert slow.attempts[0].cause == "timeout"
    assert len(other.attempts) == 1


def test_should_stop_is_true_for_the_one_that_was_asked(shop, tmp_path):
    shop.start("--max", "1")
    jobs = [shop.polite.using(grace="10s").enqueue() for _ in range(2)]
    started(tmp_path, 2)
    jobs[0].cancel()
    eventually(lambda: states(jobs) == ["cancelled", "running"], within=5)
    jobs[1].cancel()
    eventually(lambda: states(jobs) == ["cancelled", "cancelled"], within=5)


def test_to_force_one_out_ends_the_worker_and_its_neighbours_are_released_uncounted(shop, tmp_path):
    shop.start("--max", "1")
    stubborn = shop.deaf.using(grace="300ms").enqueue("never")
    other = shop.deaf.enqueue("open")
    started(tmp_path, 2)
    stubborn.cancel()
    eventually(lambda: stubborn.refresh().state == "cancelled", within=10)
    (tmp_path / "open").touch()

    assert lines(tmp_path / "deaf")  # it was asked before
    assert other.result(timeout=10) == "open"
    assert [one.cause for one in other.attempts] == ["collateral", "returned"]
    assert (other.record.retries, other.record.crashes, other.record.losses) == (0, 0, 0)


def test_after_a_crash_each_runs_alone_until_the_culprit_is_known(shop, tmp_path):
    shop.start("--max", "1")
    group = [shop.dies.enqueue("live"), shop.dies.enqueue("live")]
    started(tmp_path, 2)
    bad = shop.dies.enqueue("die")
    eventually(lambda: bad.refresh().state == "held", within=30)

    assert [job.result(timeout=20) for job in group] == ["live", "live"]
    assert bad.record.crashes == 3
    assert all(job.record.crashes <= 1 for job in (one.refresh() for one in group))


def test_exceptions_retries_and_outcomes_are_as_ever(shop):
    shop.start("--max", "1")
    jobs = [shop.fails.using(retry=0 if n == 1 else 2).enqueue(n) for n in range(4)]
    eventually(
        lambda: all(job.refresh().state in ("succeeded", "failed") for job in jobs), within=15
    )

    assert states(jobs) == ["succeeded", "failed", "succeeded", "succeeded"]
    assert [jobs[i].result() for i in (0, 2, 3)] == [0, 2, 33]
    assert jobs[1].error["type"] == "LookupError"
    assert len(jobs[2].attempts) == 2


def test_large_results_come_through(shop):
    shop.start("--max", "1")
    jobs = [shop.large.enqueue(900_000) for _ in range(6)]

    assert [len(job.result(timeout=20)) for job in jobs] == [900_000] * 6
    assert all(len(job.attempts) == 1 for job in jobs)


def test_other_tasks_run_in_a_worker_that_was_shared_before(shop):
    shop.start("--min", "1", "--max", "1")
    for _ in range(3):
        pid = shop.fetch.enqueue(1).result(timeout=10)[0]
        assert shop.plain.enqueue().result(timeout=10) == pid


def test_at_most_once_shares_no_worker(shop):
    shop.start("--max", "1")
    jobs = [shop.once.enqueue() for _ in range(2)] + [shop.fetch.enqueue(n) for n in range(4)]

    assert [job.result(timeout=15) for job in jobs[:2]] == [0, 0]


def test_a_drain_lets_them_end_and_gives_back_the_rest(shop, tmp_path):
    node = shop.start("--max", "1", "--grace", "500ms")
    jobs = [shop.polite.enqueue(), shop.gate.enqueue("never")]
    eventually(lambda: "running" in states(jobs), within=10)
    started(tmp_path, 1)
    assert node.stop() == 0

    assert all(state in ("waiting", "succeeded") for state in states(jobs))
    assert all(job.record.crashes == job.record.retries == 0 for job in jobs)


def test_a_stray_sigterm_gives_them_all_back(shop, tmp_path):
    shop.start("--max", "1")
    jobs = [shop.gate.enqueue("open") for _ in range(3)]
    pid = int(started(tmp_path, 3)[0][1])
    os.kill(pid, signal.SIGTERM)
    started(tmp_path, 6)
    (tmp_path / "open").touch()

    assert [job.result(timeout=10) for job in jobs] == ["open"] * 3
    assert all(job.record.crashes == job.record.retries == 0 for job in jobs)


def test_a_killed_worker_loses_no_job(shop, tmp_path):
    shop.start("--max", "2")
    group = [shop.fetch.enqueue(n) for n in range(30)]
    pid: Callable[[], Any] = lambda: [job.attempts for job in group if job.attempts]  # noqa: E731
    eventually(pid, within=10)
    os.kill(pid()[0][0].pid, signal.SIGKILL)

    assert all(job.result(timeout=30) for job in group)


def test_jobs_of_other_tasks_have_their_turn_beside_a_shared_worker(shop):
    shop.start("--min", "1", "--max", "1")
    group = shop.app.enqueue_many([shop.fetch.call(n) for n in range(300)])
    eventually(lambda: group[0].refresh().state == "succeeded", within=10)
    other = shop.plain.using(priority=1).enqueue()

    assert other.result(timeout=15)
    assert all(job.result(timeout=30) for job in group)
    ends = [job.refresh().finished for job in (other, group[-1])]
    assert ends == sorted(ends)  # it did not have to wait for all of them


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_async_jobs_run_on_uvloop_if_it_is_installed_and_the_log_says_so(shop, tmp_path, loop):
    choose_loop(tmp_path, loop)
    node = shop.start("--max", "1")

    assert shop.beside.enqueue().result(timeout=10).partition(".")[0] == loop
    assert shop.by_itself.enqueue().result(timeout=10).partition(".")[0] == loop
    assert f"async jobs run on {loop}" in node.log
