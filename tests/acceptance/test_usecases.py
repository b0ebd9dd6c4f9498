"""Kōjō's fitness cases that are about execution, with assertions; the number in a name is that of the use case.

43 is tests/node/running/test_operators.py, 45 tests/worker/test_outcomes.py, 51 tests/worker/test_exactly_once.py.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from tests.support import NodeProcess, eventually, lines, load_module

APP = """
import os, time
from genba import Genba, current_job

app = Genba()

def tell(path, *words):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

def deep(n):
    if n:
        return deep(n - 1)
    try:
        return {}["message"]
    except KeyError as error:
        raise TypeError(f"a message of the wrong type") from error

@app.task(on_exception="hold", retry=5)
def consume(n: int) -> int:
    return deep(12) if n % 2 else n

@app.task(on_exception="hold")
def risky(how: str, left: int) -> None:
    if left:
        risky.enqueue(how, left - 1)   # its successor is there before the risky part
    raise {"exception": RuntimeError, "error": AssertionError, "exit": SystemExit}[how]("panic")

@app.task(max_crashes=3)
def endless(path: str) -> None:
    job = current_job()
    tell(path, job.id, job.attempt, os.getpid(), job.crashes)
    while not os.path.exists(path + ".end"):
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def office(home):
    url, folder = home
    (folder / "office.py").write_text(APP)
    module = load_module("office", folder, url)
    node = NodeProcess.start("office:app", url, "--max", "3", "--name", "office", cwd=folder)
    eventually(module.app.nodes, within=30)
    yield module, node
    print(node.log)
    node.end()
    module.app.close()


def at_rest(jobs):
    return eventually(
        lambda: all(job.refresh().state in ("held", "succeeded") for job in jobs), within=30
    )


def test_usecase_42_an_error_deep_in_user_code_is_reported_well_and_the_pool_stays_healthy(office):
    module, _ = office
    jobs = module.app.enqueue_many([module.consume.call(n) for n in range(20)])
    at_rest(jobs)

    for n, job in enumerate(jobs):
        if n % 2 == 0:
            assert (job.state, job.result()) == ("succeeded", n)
            continue
        assert (job.state, len(job.attempts), job.crashes) == ("held", 1, 0)
        assert job.reason == "panic: TypeError: a message of the wrong type"
        error = job.attempts[0].error
        assert (error["type"], error["message"]) == ("TypeError", "a message of the wrong type")
        assert "in deep" in error["traceback"]
        assert "Previous line repeated" in error["traceback"]  # to its full depth
        assert error["causes"] == [{"type": "KeyError", "message": "'message'"}]
    found = module.app.jobs(state="panicked", limit=100)
    assert jobs[1] in found
    assert all(job.reason.startswith("panic: ") for job in found)
    assert module.consume.enqueue(4).result(timeout=10) == 4


@pytest.mark.parametrize("how", ["exception", "error", "exit"])
def test_usecase_50_whatever_is_raised_holds_the_job_and_is_never_a_crash(office, how):
    module, node = office
    before = len(node.tree())
    first = module.risky.enqueue(how, 4)

    def held():
        return [
            job
            for job in module.app.jobs(task="office.risky", state="held", limit=500)
            if job.args["how"] == how
        ]

    eventually(lambda: len(held()) == 5, within=20)
    mine = held()
    assert first in mine
    by_age = sorted(mine, key=lambda job: -job.args["left"])
    assert [job.enqueued for job in by_age] == sorted(
        job.enqueued for job in mine
    )  # each made the next one
    assert {(len(job.attempts), job.attempts[0].cause, job.crashes) for job in mine} == {
        (1, "exception", 0)
    }
    assert all(job.reason.startswith("panic: ") for job in mine)
    assert len(node.tree()) >= before  # no worker has died of it


def run(path, attempt):
    """(id, attempt, pid, crashes) of an endless worker, once it runs."""
    found = eventually(
        lambda: [words for words in lines(path) if words[1] == str(attempt)], within=30
    )
    return [int(word) for word in found[0]]


def test_usecase_47_an_endless_worker_is_killed_in_every_way(office, tmp_path):
    module, node = office
    path = tmp_path / "endless"
    job = module.endless.enqueue(str(path))

    _, _, pid, crashes = run(path, 1)
    os.kill(pid, signal.SIGTERM)  # released, and nothing counted
    _, attempt, second, crashes = run(path, 2)
    assert (attempt, crashes) == (2, 0)

    os.kill(second, signal.SIGKILL)  # a crash, counted once
    _, _, third, crashes = run(path, 3)
    assert crashes == 1
    assert not psutil.pid_exists(second)

    eventually(
        lambda: [p for p in map(psutil.Process, node.tree()) if "/zygote" in " ".join(p.cmdline())],
        within=10,
    )
    os.kill(
        guard_of(node), signal.SIGKILL
    )  # for the lease: the worker ends with it, and nothing is counted
    eventually(lambda: not psutil.pid_exists(third), within=5)
    _, _, fourth, crashes = run(path, 4)
    assert crashes == 1

    os.kill(fourth, signal.SIGKILL)  # as the kernel does for want of memory
    _, _, fifth, crashes = run(path, 5)
    assert crashes == 2
    os.kill(fifth, signal.SIGKILL)
    eventually(lambda: job.refresh().state == "held", within=10)

    assert job.reason == "crashed 3 times, last by signal 9"
    causes = [attempt.cause for attempt in job.attempts]
    assert causes == ["drain", "signal 9", "collateral", "signal 9", "signal 9"]
    started = [attempt.started for attempt in job.attempts]
    ended = [attempt.ended for attempt in job.attempts]
    assert all(
        end <= start for end, start in zip(ended[:-1], started[1:], strict=True)
    )  # never two at once


def guard_of(node):
    return next(p.pid for p in psutil.Process(node.pid).children() if p.name() == "genba-guard")
