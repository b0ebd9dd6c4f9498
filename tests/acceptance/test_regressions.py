"""Bugs of the ancestors, about execution, that must never be ours; the number in a name is that of USECASES.

Others of the 25 stand with what they are about: look for `regression_` in tests/.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.support import (
    PATIENCE,
    NodeProcess,
    eventually,
    genba_command,
    lines,
    load_module,
    own_pid_namespace,
    without_settings,
)

APP = """
import ctypes, os, signal, subprocess, sys, threading, time
from genba import Genba, current_job

app = Genba()

def tell(path, *words):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

def die(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)

@app.task
def fail_and_die(after: float) -> int:
    job = current_job()
    if job.retries == 0 and job.crashes == 0:
        threading.Thread(target=die, args=(after,)).start()
        raise ValueError("first")
    return job.attempt

@app.task
def sleep_in_c(seconds: int) -> str:
    ctypes.PyDLL(None).sleep(seconds)   # without a word, and with the interpreter's lock
    return "slept"

@app.task
def wait(path: str) -> str:
    job = current_job()
    tell(path, job.id, job.attempt, os.getpid())
    while not os.path.exists(path + ".end"):
        time.sleep(0.01)
    return "opened"

@app.task
def crash() -> None:
    ctypes.string_at(0)

@app.task
def brief(n: int) -> int:
    time.sleep(0.005)
    return n

@app.task
def start_others() -> list[int]:
    quick = [subprocess.Popen([sys.executable, "-S", "-c", f"import sys; sys.exit({n})"]) for n in range(3)]
    return [one.wait() for one in quick]

@app.task(explicit_outcome=True)
def say_nothing() -> None:
    pass

@app.task
def eat(megabytes: int) -> int:
    return len(bytearray(os.urandom(1 << 20)) * megabytes)
"""


@pytest.fixture(scope="module")
def office(home):
    url, folder = home
    (folder / "bugs.py").write_text(APP)
    module = load_module("bugs", folder, url)
    env = {"GENBA_LEASE": "2"}
    node = NodeProcess.start("bugs:app", url, "--max", "3", "--name", "bugs", cwd=folder, env=env)
    eventually(module.app.nodes, within=30)
    yield module, node
    print(node.log)
    node.end()
    module.app.close()


@pytest.mark.parametrize("after", [0.0, 0.001, 0.003])
def test_regression_01_a_worker_killed_around_its_failure_does_not_lose_the_retry(office, after):
    module, _ = office
    jobs = [
        module.fail_and_die.using(retry={"times": 1, "delay": 0}).enqueue(after) for _ in range(5)
    ]
    module.app.wait(jobs, timeout=30)

    for job in jobs:
        assert job.refresh().state == "succeeded"
        causes = [attempt.cause for attempt in job.attempts]
        assert causes[-1] == "returned"
        assert set(causes[:-1]) <= {"exception", "signal 9"}


def test_regression_10_a_long_silent_sleep_in_c_is_not_taken_for_death(office):
    """Longer than the lease, and than a heartbeat of any kind."""
    module, _ = office
    job = module.sleep_in_c.enqueue(5)

    assert job.result(timeout=20) == "slept"
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


def test_regression_13_a_crash_loop_stops_at_its_cap_and_priority_never_underflows(office):
    """Poison among others: it kills three workers and is held, and no other job notices."""
    module, _ = office
    calls = [module.brief.call(n) for n in range(100)]
    calls[20:20] = calls[70:70] = [module.crash.call()]
    jobs = module.app.enqueue_many(calls)
    lowest = module.crash.using(priority=-(2**31)).enqueue()
    poison = [lowest, *(job for job in jobs if job.refresh().task == "bugs.crash")]
    eventually(lambda: all(job.refresh().state == "held" for job in poison), within=40)

    for job in poison:
        assert ([attempt.cause for attempt in job.attempts], job.crashes) == (["signal 11"] * 3, 3)
    assert (lowest.priority, poison[1].priority) == (-(2**31), -3)
    for job in jobs:
        if job not in poison:
            assert [attempt.cause for attempt in job.wait(timeout=10).attempts] == ["returned"]


def test_regression_17_one_panic_is_counted_once_at_the_time_of_its_commit(office):
    module, _ = office
    job = module.say_nothing.enqueue()
    eventually(lambda: job.refresh().state == "held", within=10)

    assert job.reason == "panic: it returned no outcome"
    held = [event for event in module.app.events(job=job) if event.kind == "held"]
    assert len(held) == len(job.attempts) == 1
    assert (job.crashes, job.retries) == (0, 0)
    assert 0 <= (held[0].at - job.attempts[0].ended).total_seconds() < PATIENCE * 2


def test_regression_20_a_job_that_starts_processes_is_untouched_by_their_end(office):
    module, _ = office

    job = module.start_others.enqueue()

    assert job.result(timeout=20) == [0, 1, 2]
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


def test_regression_11_sigterm_to_pid_1_ends_or_releases_everything_first(office, home, tmp_path):
    inside = own_pid_namespace()
    module, _ = office
    url, folder = home
    env = {**without_settings(os.environ), "GENBA_URL": url}
    command = genba_command(
        "node", "start", "bugs:app", "-q", "inside", "--grace", "0.5s", "--name", "inside"
    )
    outer = subprocess.Popen([*inside, *command], cwd=folder, env=env)
    try:
        path = str(tmp_path / "inside")
        jobs = [module.wait.using(queue="inside").enqueue(path) for _ in range(2)]
        eventually(lambda: len(lines(path)) == 2, within=30)
        (node,) = psutil.Process(outer.pid).children()
        family = node.children(recursive=True)
        node.send_signal(signal.SIGTERM)

        assert outer.wait(60) == 0
        assert [process for process in family if process.is_running()] == []
        for job in jobs:
            assert (job.refresh().state, job.crashes, job.attempts[-1].cause) == (
                "waiting",
                0,
                "drain",
            )
    finally:
        outer.kill()
        outer.wait()


def test_a_job_that_the_kernel_kills_for_want_of_memory_says_so(home, tmp_path):
    """Not a limit of ours: the cgroup's, and the kernel's own killer."""
    room = (
        Path("/sys/fs/cgroup/memory")
        if Path("/sys/fs/cgroup/memory").is_dir()
        else Path("/sys/fs/cgroup")
    )
    limit = "memory.limit_in_bytes" if room.name == "memory" else "memory.max"
    cell = room / f"genba-test-{os.getpid()}"
    try:
        cell.mkdir()
        (cell / limit).write_text(str(200 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    url, folder = home
    (folder / "bugs.py").write_text(APP)
    module = load_module("bugs", folder, url)
    mine = next(
        line.split(":")[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if room.name != "memory" or ":memory:" in line
    )
    (cell / "cgroup.procs").write_text(str(os.getpid()))
    try:
        node = NodeProcess.start(
            "bugs:app", url, "-q", "small", "--max", "1", "--name", "small", cwd=folder
        )
    finally:
        (room / mine.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    try:
        job = module.eat.using(queue="small", tags=["oom"]).enqueue(400)
        attempt = eventually(lambda: job.attempts and job.attempts[0], within=40)

        assert attempt.cause == "out of memory"
        assert attempt.peak_memory > 60 << 20
        assert node.pid in node.tree()  # it was the worker that died, and only it
        job.cancel()
        assert module.eat.using(queue="small").enqueue(1).result(timeout=20) == 1 << 20
    finally:
        node.end()
        eventually(lambda: not (cell / "cgroup.procs").read_text().split(), within=10)
        cell.rmdir()
        module.app.close()
