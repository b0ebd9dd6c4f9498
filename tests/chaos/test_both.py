"""A node and its guard are killed at the same instant, so other nodes have to end its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.fire import kill_at_once
from tests.support import NodeProcess, eventually, lines, load_module

from genba.storage.nodes.take_over import judge_with_jitter

APP = """
import os, subprocess, time
from genba import Genba, Limit, current_job

app = Genba()

def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

@app.task(limits=[Limit("one", 1)])
def alone(path: str) -> None:
    with open(path, "a+") as file:
        file.seek(0)
        before = [pid for line in file.read().splitlines() for pid in line.split()[1:3]]
        left = sum(map(lives, before))
        grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
        file.write(f"{current_job().attempt} {os.getpid()} {grandchild.pid} {left}\\n")
    while not os.path.exists(f"{path}.end"):
        time.sleep(0.02)
"""


@pytest.fixture
def app(url: str, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "both.py").write_text(APP)
    module = load_module("both", tmp_path, url)
    yield module
    module.app.close()


@pytest.fixture
def begun(
    app: Any, url: str, start_node: Callable[..., NodeProcess], tmp_path: Path
) -> tuple[Any, NodeProcess, Path]:
    """A job that runs on a node, and where it tells of itself."""
    node = start_node("both:app", url, "--max", "2", "--name", "doomed")
    path = tmp_path / "log"
    job = app.alone.enqueue(str(path))
    eventually(lambda: lines(path), within=60)
    return job, node, path


def another(app: Any, url: str, start_node: Callable[..., NodeProcess]) -> NodeProcess:
    node = start_node("both:app", url, "--max", "2", "--name", "other")
    eventually(lambda: any(one.name == "other" for one in app.app.nodes()), within=60)
    return node


def last_beat(app: Any, name: str) -> int:
    return next(one.beat_at for one in app.app.nodes() if one.name == name)


def bury_from_elsewhere(app: Any) -> None:
    """As a node of another machine does it, which cannot end anything here."""
    nodes = app.app.store.nodes
    nodes.declare_dead(
        next(one.id for one in app.app.nodes() if one.name == "doomed"), judge_with_jitter
    )


def old_processes(path: Path) -> list[int]:
    _, worker, grandchild, _ = lines(path)[0]
    return [pid for pid in map(int, (worker, grandchild)) if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_node_and_guard_killed_at_once_left_is_gone_before_its_job_starts_again(
    app, begun, url, start_node
):
    job, node, path = begun
    other = another(app, url, start_node)
    kill_at_once(node)
    began = time.monotonic()
    assert len(old_processes(path)) == 2

    eventually(lambda: len(lines(path)) == 2, within=60)
    print(f"killed at once, the job ran again after {time.monotonic() - began:.1f} s")

    assert [line[3] for line in lines(path)] == [
        "0",
        "0",
    ]  # what lived of the attempt before, when it started
    eventually(lambda: "processes that a dead node had left behind" in other.log)
    Path(f"{path}.end").touch()
    job.wait(timeout=30)
    assert [attempt.cause for attempt in job.attempts] == ["node lost", "returned"]
    assert app.app.verify().faults == []


def test_leftover_processes_are_ended_also_if_another_machine_has_declared_the_node_dead(
    app, begun, url, start_node
):
    _, node, path = begun
    other = another(app, url, start_node)
    for _ in range(2):  # the first report comes before it has looked for nodes on this machine
        beat = last_beat(app, "other")
        eventually(lambda: last_beat(app, "other") != beat, within=30)  # noqa: B023  asked at once
    kill_at_once(node)
    bury_from_elsewhere(app)

    eventually(lambda: old_processes(path) == [], within=15)
    eventually(lambda: "processes that a dead node had left behind" in other.log)


def test_a_node_that_starts_ends_what_dead_ones_left_and_nothing_else(app, begun, url, start_node):
    _, node, path = begun
    kill_at_once(node)
    bury_from_elsewhere(app)
    stranger = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "GENBA_INCARNATION": "1234567"}
    )
    try:
        assert len(old_processes(path)) == 2

        new = another(app, url, start_node)

        assert old_processes(path) == []
        assert "processes that dead nodes had left behind" in new.log
        assert _lives(stranger.pid)  # no incarnation that this database knows
        third = start_node("both:app", url, "--max", "2", "--name", "third")
        eventually(lambda: len(app.app.nodes()) == 2, within=60)
        eventually(lambda: len(lines(path)) == 2, within=30)
        assert "left behind" not in third.log
        assert _lives(int(lines(path)[1][1]))  # of a node that lives
        assert [line[3] for line in lines(path)] == ["0", "0"]
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()
