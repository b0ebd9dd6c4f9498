"""A worker that forks for each of its jobs: real processes on a real line, without a node."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import reaped

from genba import wire
from genba.node.processes.channel import Channel
from genba.node.processes.pool import AppImported, LeftoversSwept, Pool, WorkerEnded, WorkerStarted

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the process tree is built on Linux calls"
)

WITHIN = 60.0  # never waited for when all is well

APP = """
import ctypes, os, random, signal, subprocess, sys, time
from genba import Genba

app = Genba()

@app.task
def pids() -> list[int]:
    return [os.getpid(), os.getppid()]

@app.task
def die(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(int(how))

@app.task
def stay() -> None:
    time.sleep(60)

@app.task
def work() -> None:
    while True:
        pass

@app.task
def draw() -> float:
    return random.random()

@app.task
def many(count: int) -> str:
    print("so many")
    return "x" * count

@app.task
def leave_behind() -> int:
    deaf = "os.setsid(); print(os.getpid(), flush=True); os.close(1); time.sleep(60)"
    orphan = [sys.executable, "-c", f"import os, time\\nif os.fork() == 0: {deaf}"]
    return int(subprocess.run(orphan, stdout=subprocess.PIPE).stdout)
"""

# It registers a fork handler, as some libraries do.
WATCHFUL = (
    """
import os

forks = []
os.register_at_fork(after_in_child=lambda: forks.append(os.getpid()))
"""
    + APP
    + """
@app.task
def heard() -> bool:
    return forks[-1] == os.getpid()
"""
)


class Ward:
    """One worker after the other, with its line."""

    def __init__(self, folder: Path, app: str = APP) -> None:
        (folder / "each.py").write_text(app)
        env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        self.pool = Pool("each:app", env=env, node_title="/node[0]")
        self._poll = select.poll()
        self._poll.register(self.pool.sockets[0], select.POLLIN)
        self._events: list[Any] = []
        self.slot = 0
        self.pool.start()
        self.next(AppImported)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Ward]:
        self.slot += 1
        self.line = Channel(self.slot)
        self.results: list[wire.JobResult] = []
        self.pid = 0
        try:
            yield self
        finally:
            self.pool.signal(self.slot, signal.SIGKILL)
            self.line.close()

    def next(self, kind: Any) -> Any:
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            self._poll.poll(100)
            self._events += self.pool.ready()
        raise AssertionError(f"no {kind.__name__} within {WITHIN} s")

    def run(self, *calls: tuple[str, dict[str, Any]]) -> None:
        """Give them, tell the worker to leave after them, and start it."""
        jobs = [
            wire.JobMessage(n, 1, 7, f"each.{task}", msgspec.json.encode(args), None)
            for n, (task, args) in enumerate(calls, start=1)
        ]
        self.line.give(3, jobs, each=True)
        self.line.send((wire.EXIT,))
        assert self.pool.spawn(self.slot, *self.line.worker_ends())
        self.next(WorkerStarted)

    def read(self) -> None:
        select.select([self.line.sock], [], [], 0.05)
        found, ready = self.line.receive()
        self.results += [wire.JobResult(*each) for each in found]
        self.pid = ready or self.pid

    def until(self, count: int) -> list[wire.JobResult]:
        deadline = time.monotonic() + WITHIN
        while len(self.results) < count and time.monotonic() < deadline:
            self.read()
        assert len(self.results) >= count, self.results
        return self.results

    def runs(self, index: int) -> int:
        """Waits until that job runs; gives the process in which it does."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            self.read()
            if self.line.memory.status() == (wire.place(3, index), wire.RUNNING):
                return self.line.memory.pid()
        raise AssertionError(f"job {index} does not run")

    def ended(self) -> WorkerEnded:
        end = self.next(WorkerEnded)
        assert end.slot == self.slot
        self.read()
        assert isinstance(end, WorkerEnded)
        return end


@pytest.fixture(scope="module")
def ground(tmp_path_factory) -> Iterator[Ward]:
    made = Ward(tmp_path_factory.mktemp("each"))
    yield made
    made.pool.end()


@pytest.fixture
def ward(ground) -> Iterator[Ward]:
    with ground.worker() as made:
        yield made


def test_each_job_has_a_process_and_the_last_one_has_the_workers_own(ward):
    ward.run(*[("pids", {})] * 4)
    assert ward.ended().status == 0
    *forked, last = ward.until(4)
    whos = [msgspec.json.decode(result.payload or b"") for result in (*forked, last)]

    assert [pid for pid, _ in whos] == [*(result.extra["pid"] for result in forked), ward.pid]
    assert len({pid for pid, _ in whos}) == 4
    assert {parent for _, parent in whos[:3]} == {ward.pid}
    assert last.extra is None


@pytest.mark.parametrize(
    ("how", "status"), [("segfault", 11), ("kill", 9), ("7", 7 << 8), ("0", 0)]
)
def test_a_worker_dies_as_its_job_has_died_and_what_is_behind_it_never_started(ward, how, status):
    ward.run(("pids", {}), ("die", {"how": how}), ("pids", {}), ("pids", {}))
    end = ward.ended()

    assert end.status is not None
    assert end.status & ~0x80 == status  # with or without a core
    assert [result.at for result in ward.results] == [0]
    assert ward.line.memory.status() == (wire.place(3, 1), wire.RUNNING)
    assert ward.line.memory.pid() not in (0, ward.pid, ward.results[0].extra["pid"])
    assert ward.line.take_back() == 2


def test_a_signal_to_the_worker_stops_the_job_and_the_next_one_runs(ward):
    ward.run(("stay", {}), ("pids", {}))
    ward.runs(0)
    ward.line.memory.ask_to_stop(wire.place(3, 0))
    ward.pool.signal(ward.slot, signal.SIGTERM)

    assert [result.outcome for result in ward.until(2)] == [wire.STOPPED, wire.RETURNED]
    assert ward.ended().status == 0


def test_a_doomed_job_is_killed_by_its_worker_which_reports_its_usage(ward):
    ward.run(("work", {}), ("pids", {}))
    pid = ward.runs(0)
    deadline = time.monotonic() + WITHIN
    while used(pid) < 20 and time.monotonic() < deadline:  # hundredths of a second
        ward.read()
    ward.line.memory.ask_to_stop(wire.place(3, 0))
    ward.line.memory.mark_for_kill(wire.place(3, 0))
    ward.pool.signal(ward.slot, signal.SIGTERM)
    end = ward.ended()

    assert end.status == signal.SIGKILL
    assert end.cpu_micros >= 200_000
    assert ward.line.take_back() == 1


def test_the_job_of_a_killed_worker_goes_with_the_sweep(ward):
    ward.run(("stay", {}), ("pids", {}))
    pid = ward.runs(0)
    ward.pool.signal(ward.slot, signal.SIGKILL)
    assert ward.ended().status == signal.SIGKILL
    ward.pool.sweep(5)

    assert ward.next(LeftoversSwept).token == 5
    assert reaped(pid)


def test_leftover_processes_of_a_forked_job_are_killed_before_its_result_is_sent(ward):
    ward.run(("leave_behind", {}), ("pids", {}))
    first = ward.until(1)[0]

    assert reaped(int(first.payload or b"0"))
    assert first.extra["strays"] == 1


def test_each_job_draws_its_own_random_numbers(ward):
    ward.run(*[("draw", {})] * 6)

    assert len({result.payload for result in ward.until(6)}) == 6


def test_results_of_any_size_come_with_what_was_printed(ward):
    ward.run(*[("many", {"count": count}) for count in (1, 900_000, 2, 3)])
    results = ward.until(4)

    assert [
        len(result.payload or b"") - 2 for result in sorted(results, key=lambda one: one.at)
    ] == [1, 900_000, 2, 3]
    assert {result.extra["log"] for result in results} == {"so many\n"}


def test_fork_handlers_of_an_app_run(tmp_path):
    watchful = Ward(tmp_path, WATCHFUL)
    with watchful.worker() as ward:
        ward.run(*[("heard", {})] * 4)

        assert [result.payload for result in ward.until(4)] == [b"true"] * 4
    watchful.pool.end()


def used(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
