"""How workers start: forked by the zygote, or, where a fork would break the app, as interpreters of their own.

`python benchmarks/processes.py forks` prints how long it takes.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, load_module

from genba import wire
from genba.node.processes.channel import Channel
from genba.node.processes.pool import (
    AppImported,
    ImportFailed,
    Pool,
    SpawnFailed,
    WorkerEnded,
    WorkerStarted,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the process tree is built on Linux calls"
)

WITHIN = 20.0  # never waited for when all is well

SMALL = """
import os, sys, threading, time
from genba import Genba, current_job

app = Genba()

@app.task
def about_process() -> dict:
    return {
        "pid": os.getpid(),
        "python": [sys.executable, sys.prefix, sys.version],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "group": os.getpgid(0),
        "worker": os.environ.get("GENBA_WORKER"),
        "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in open_fds()),
    }

def open_fds():
    listed = os.listdir("/proc/self/fd")
    return [fd for fd in listed if os.path.islink(f"/proc/self/fd/{fd}")]

@app.task
def sleep() -> None:
    time.sleep(60)
"""

# Twenty threads that allocate, log and take locks of the standard library.
THREADS = (
    SMALL
    + """
import logging

log = logging.getLogger("busy")
log.addHandler(logging.NullHandler())

def busy():
    while True:
        log.warning("%s", [bytes(n) for n in range(100)])
        time.sleep(0.002)

for n in range(20):
    threading.Thread(target=busy, name=f"busy-{n}", daemon=True).start()
"""
)

LARGE = (
    SMALL
    + """
held = bytearray(os.urandom(1 << 20)) * 200
small_things = [str(n) for n in range(500_000)]
"""
)

# What it holds, what of that is in huge pages, and whether it is still what it was.
HUGE = """
import hashlib, os, re
from genba.worker.process import use_huge_pages

held = bytearray(os.urandom(1 << 20)) * 100
before = hashlib.sha256(held).digest()
made = use_huge_pages(60)
with open("/proc/self/smaps_rollup") as file:
    huge = int(re.search(r"AnonHugePages: +(\\d+)", file.read())[1])
print(made, huge, hashlib.sha256(held).digest() == before)
"""

ONLY_ZYGOTE = (
    SMALL
    + """
if os.environ.get("GENBA_WORKER") and not os.path.exists("mended"):
    raise ConnectionError("not from here")
"""
)


class Starter:
    """A pool with the real zygote and real workers, without a node."""

    def __init__(self, folder: Path, text: str, forks: bool = True) -> None:
        (folder / "starts.py").write_text(text)
        env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        self.pool = Pool("starts:app", env=env, node_title="/node[0]")
        self.pool.forks = forks
        self._poll = select.poll()
        self._poll.register(self.pool.sockets[0], select.POLLIN)
        self.pool.start()
        self.hello = self._next(AppImported)

    def _next(self, kind: Any) -> Any:
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            self._poll.poll(100)
            for event in self.pool.ready():
                assert not isinstance(event, ImportFailed | SpawnFailed), event
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"no {kind.__name__} within {WITHIN} s")

    def round(self, slot: int) -> float:
        """Start a worker and end it; gives the seconds until it was ready for its first job."""
        line = Channel(slot)
        begun = time.perf_counter()
        assert self.pool.spawn(slot, *line.worker_ends())
        assert select.select([line.sock], [], [], WITHIN)[0], "the worker hangs"
        took = time.perf_counter() - begun
        assert line.receive()[1], "the worker is not ready"
        self._next(WorkerStarted)
        line.send((wire.EXIT,))
        assert self._next(WorkerEnded).status == 0
        line.close()
        return took


@contextlib.contextmanager
def starter(folder: Path, text: str, forks: bool = True) -> Iterator[Starter]:
    made = Starter(folder, text, forks)
    try:
        yield made
    finally:
        made.pool.end()


@pytest.fixture
def shop(url, start_node, tmp_path):
    """An app of its own on a node."""
    modules: list[Any] = []

    def start(text: str, *args: str) -> tuple[Any, Any]:
        (tmp_path / "starts.py").write_text(text)
        (tmp_path / "quiet").mkdir()
        (tmp_path / "quiet" / "starts.py").write_text(SMALL)  # the client needs no threads
        module = load_module("starts", tmp_path / "quiet", url)
        modules.append(module)
        node = start_node("starts:app", url, *args)
        eventually(module.app.nodes, within=15)
        return module, node

    yield start
    for module in modules:
        module.app.close()


def test_what_a_large_app_holds_is_in_huge_pages_and_unchanged():
    answer = subprocess.run(
        [sys.executable, "-c", HUGE], capture_output=True, text=True, check=True, timeout=120
    )
    made, huge, same = answer.stdout.split()

    assert same == "True"
    if int(made) == 0:
        pytest.skip("this kernel makes none")
    assert int(huge) >= int(made) * 2048 // 2  # kB; some may have been taken away again


@pytest.mark.parametrize("forks", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_forks_do_not_hang_while_node_and_app_have_twenty_threads(tmp_path, forks):
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=f"own-{n}") for n in range(20)]
    for thread in threads:
        thread.start()
    try:
        with starter(tmp_path, THREADS) as started:
            assert len(started.hello.contents["threads"]) == 20
            for slot in range(forks):
                started.round(slot)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_workers_of_an_app_with_threads_are_not_forked_and_a_warning_names_the_threads(shop):
    module, node = shop(THREADS, "--max", "1")
    answer = module.about_process.enqueue().result(timeout=20)

    assert "the app starts threads at import (busy-0, busy-1," in node.log
    assert "spawn=exec" in node.log
    assert "busy-19" in answer["threads"]  # after a fork they would be missing
    assert answer["pid"] == answer["group"]
    assert answer["worker"] == "1"
    assert answer["sockets"] == 1


def test_a_fork_that_is_asked_for_is_had_with_a_warning(shop):
    module, node = shop(THREADS, "--max", "1", "--spawn", "fork")
    answer = module.about_process.enqueue().result(timeout=20)

    assert answer["threads"] == ["MainThread"]
    assert "a lock they hold stays locked in workers" in node.log


@pytest.mark.parametrize("spawn", ["fork", "exec"])
def test_workers_run_in_the_interpreter_of_their_node(shop, spawn):
    module, _ = shop(SMALL, "--max", "1", "--spawn", spawn)

    assert module.about_process.enqueue().result(timeout=60)["python"] == [
        sys.executable,
        sys.prefix,
        sys.version,
    ]


def test_exec_may_be_asked_for_and_such_a_worker_is_stopped_like_any_other(shop):
    module, node = shop(SMALL, "--max", "1", "--spawn", "exec")
    first = module.about_process.enqueue().result(timeout=20)
    job = module.sleep.enqueue()
    eventually(lambda: job.refresh().state == "running", within=10)
    job.kill()
    eventually(lambda: job.refresh().state == "cancelled", within=10)

    assert module.about_process.enqueue().result(timeout=20)["pid"] != first["pid"]
    assert node.stop() == 0


def test_a_fresh_worker_that_cannot_import_the_app_counts_for_no_job(shop, tmp_path):
    module, node = shop(ONLY_ZYGOTE, "--max", "1", "--spawn", "exec")
    job = module.about_process.enqueue()
    eventually(lambda: node.log.count("ConnectionError: not from here") >= 2, within=15)
    assert job.attempts == []
    (tmp_path / "mended").touch()

    assert job.result(timeout=20)
    assert [attempt.cause for attempt in job.attempts] == ["returned"]
