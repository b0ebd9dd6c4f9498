"""What stands around the runs of a worker: lifespans, middleware, the resolver."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, lines, load_module

_HEAD = """
import asyncio, contextlib, os, signal, sys, time
from genba import FailJob, Genba, RetryJob, current_job

app = Genba()
log_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "log")

def tell(*words):
    fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@app.task
def plain() -> int:
    tell("plain", os.getpid())
    return os.getpid()

@app.task
async def later() -> int:
    await asyncio.sleep(0)
    tell("later", os.getpid())
    return os.getpid()
"""

_LIFESPANS = (
    _HEAD
    + """
state = {}

@app.lifespan
def first():
    tell("enter", "first", os.getpid())
    state["first"] = 1
    yield
    tell("leave", "first", os.getpid())

@app.lifespan
@contextlib.contextmanager
def second():
    tell("enter", "second", os.getpid())
    yield
    tell("leave", "second", os.getpid())

@app.lifespan
async def third():
    async with asyncio.timeout(3600):   # must be left in the task that entered it
        state["loop"] = asyncio.get_running_loop()
        tell("enter", "third", os.getpid())
        yield
    tell("leave", "third", os.getpid())

@app.task
async def same_loop() -> bool:
    return state["loop"] is asyncio.get_running_loop() and state["first"] == 1
"""
)

_BROKEN = (
    _HEAD
    + """
@app.lifespan
def connect():
    if not os.path.exists(log_path + ".repaired"):
        raise ConnectionError("no database at 10.0.0.7")
    yield
"""
)

_MIDDLEWARE = (
    _HEAD
    + """
@app.middleware
def outer(job, call_next):
    tell("outer", "in", job.id, job.task)
    try:
        return call_next()
    finally:
        tell("outer", "out", job.id)

@app.middleware
def inner(job, call_next):
    tell("inner", "in", job.id)
    result = call_next()
    tell("inner", "out", job.id)
    return result

@app.middleware
async def awaiting(job, call_next):
    tell("awaiting", "in", job.id)
    await asyncio.sleep(0)
    result = await call_next()
    tell("awaiting", "out", job.id)
    return -result

@app.task
def fails() -> None:
    raise LookupError("lost")

@app.task
def own_loop() -> int:
    async def body():
        return 7
    return asyncio.run(body())

@app.task
def sleeps() -> None:
    tell("sleeps")
    time.sleep(60)

@app.task
async def sleeps_later() -> None:
    tell("sleeps")
    await asyncio.sleep(60)
"""
)

_SLOW_MIDDLEWARE = (
    _HEAD
    + """
@app.middleware
def slow(job, call_next):
    tell("slow")
    time.sleep(60)
"""
)

_RESOLVER = (
    _HEAD
    + """
class Mailer:
    def __init__(self, host):
        self.host = host

@app.task(name="mail")
class Mail:
    def __init__(self, mailer):
        self.mailer = mailer

    def run(self, to: str) -> str:
        return f"{to} by {self.mailer.host}"

@app.task(name="broken")
class Broken:
    def run(self) -> None: ...

def make(owner):
    if owner.__name__ == "Broken":
        raise RuntimeError("no such service")
    return owner(Mailer("mx1"))

app.resolver = make
"""
)


@pytest.fixture
def shop(url, start_node, tmp_path):
    """An app of its own on a node; gives the module, the node, and the path of its log."""
    modules: list[Any] = []

    def start(text: str, *args: str) -> tuple[Any, Any, Path]:
        (tmp_path / "around.py").write_text(text)
        module = load_module("around", tmp_path, url)
        modules.append(module)
        node = start_node("around:app", url, *args)
        eventually(module.app.nodes, within=15)
        return module, node, tmp_path / "log"

    yield start
    for module in modules:
        module.app.close()


# lifespans


def test_a_lifespan_is_entered_before_the_first_job_and_left_when_the_node_drains(shop):
    module, node, log_path = shop(_LIFESPANS, "--min", "1", "--max", "1")
    pid = str(module.plain.enqueue().result(timeout=10))
    assert module.later.enqueue().result(timeout=10) == int(pid)
    assert module.same_loop.enqueue().result(timeout=10) is True
    node.stop()

    assert lines(log_path) == [
        ["enter", "first", pid], ["enter", "second", pid], ["enter", "third", pid],
        ["plain", pid], ["later", pid],
        ["leave", "third", pid], ["leave", "second", pid], ["leave", "first", pid],
    ]  # fmt: skip


def test_each_worker_has_its_own_lifespan(shop):
    module, node, log_path = shop(_LIFESPANS, "--pool", "ondemand", "--max", "2")
    pids = {module.plain.enqueue().result(timeout=10) for _ in range(3)}
    node.stop()

    assert len(pids) == 3
    count = Counter((words[0], words[-1]) for words in lines(log_path) if "first" in words)
    assert {("enter", str(pid)) for pid in pids} <= count.keys()
    assert {("leave", str(pid)) for pid in pids} <= count.keys()
    assert set(count.values()) == {1}


def test_an_idle_worker_that_gets_a_stray_sigterm_leaves_its_lifespan(shop):
    module, _, log_path = shop(_LIFESPANS, "--min", "1", "--max", "1")
    pid = module.plain.enqueue().result(timeout=10)
    os.kill(pid, signal.SIGTERM)

    assert eventually(lambda: ["leave", "first", str(pid)] in lines(log_path), within=5)
    assert module.plain.enqueue().result(timeout=10) != pid


def test_a_lifespan_that_fails_ends_the_worker_and_counts_for_no_job(shop):
    module, node, log_path = shop(_BROKEN, "--min", "2", "--max", "2")
    job = module.plain.enqueue()
    eventually(lambda: node.log.count("could not be entered") >= 2, within=10)

    assert "the lifespan around.connect could not be entered: ConnectionError" in node.log
    assert "no database at 10.0.0.7" in node.log
    assert "Traceback" in node.log
    assert eventually(lambda: job.refresh().state == "waiting", within=5)
    assert job.attempts == []

    Path(f"{log_path}.repaired").touch()
    assert job.result(timeout=15)
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


# middleware


def test_middleware_surrounds_plain_and_async_runs_in_the_order_of_registration(shop):
    module, _, log_path = shop(_MIDDLEWARE, "--max", "1")
    for task in (module.plain, module.later):
        log_path.unlink(missing_ok=True)
        job = task.enqueue()
        id = str(job.id)
        pid = -job.result(timeout=10)  # the innermost has changed it
        assert lines(log_path) == [
            ["outer", "in", id, task.name], ["inner", "in", id], ["awaiting", "in", id],
            [task.__name__, str(pid)],
            ["awaiting", "out", id], ["inner", "out", id], ["outer", "out", id],
        ]  # fmt: skip


def test_an_exception_passes_through_middleware_and_is_the_jobs(shop):
    module, _, log_path = shop(_MIDDLEWARE, "--max", "1")
    job = module.fails.enqueue()
    eventually(lambda: job.refresh().state == "failed", within=10)

    assert job.error["type"] == "LookupError"
    assert [words[:2] for words in lines(log_path)] == [
        ["outer", "in"], ["inner", "in"], ["awaiting", "in"], ["outer", "out"]
    ]  # fmt: skip


def test_a_plain_task_inside_async_middleware_may_run_a_loop_of_its_own(shop):
    module, _, _ = shop(_MIDDLEWARE, "--max", "1")

    assert module.own_loop.enqueue().result(timeout=10) == -7


@pytest.mark.parametrize("name", ["sleeps", "sleeps_later"])
def test_a_run_inside_middleware_stops_when_it_is_asked_to(shop, name):
    module, _, log_path = shop(_MIDDLEWARE, "--max", "1")
    job = getattr(module, name).using(grace="30s").enqueue()
    eventually(lambda: ["sleeps"] in lines(log_path), within=10)
    job.cancel()

    eventually(lambda: job.refresh().state == "cancelled", within=5)
    assert ["outer", "out", str(job.id)] in lines(log_path)


def test_middleware_itself_is_stopped_too(shop):
    module, _, log_path = shop(_SLOW_MIDDLEWARE, "--max", "1")
    job = module.plain.using(timeout="300ms", grace="30s").enqueue()

    eventually(lambda: job.refresh().state == "timed_out", within=5)
    assert lines(log_path) == [["slow"]]


# the resolver


def test_the_resolver_makes_the_instances_and_what_it_raises_is_the_jobs(shop):
    module, _, _ = shop(_RESOLVER, "--max", "1")
    assert module.Mail.enqueue("ann").result(timeout=10) == "ann by mx1"
    job = module.Broken.enqueue()
    eventually(lambda: job.refresh().state == "failed", within=10)

    assert (job.error["type"], job.error["message"]) == ("RuntimeError", "no such service")
