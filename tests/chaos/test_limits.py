"""Limits while workers and nodes are killed: never one too many, and nothing lost.  Stripes: test_usecase52.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_kills import Killer
from tests.storage.builders import rows
from tests.support import eventually, lines, load_app


@pytest.fixture
def limited_tasks(url: str, tmp_path: Path) -> Any:
    module = load_app("limited_tasks", url, tmp_path)
    yield module
    module.app.close()


def under_fire(
    limited_tasks: Any, killer: Killer, calls: list[Any], kills: int, node_kills: int
) -> None:
    """Enqueues them, and kills while they run, spread over all of it."""
    app = limited_tasks.app
    eventually(lambda: len(app.nodes()) == 2, within=15)
    group = app.enqueue_many(calls)
    turns = [
        "node" if i % (kills // node_kills) == kills // node_kills // 2 else "worker"
        for i in range(kills)
    ]
    for turn, kind in enumerate(turns):
        wanted = turn * len(calls) // (kills + 3)
        eventually(partial(_succeeded, app, wanted), within=60, every=0.05)
        eventually(killer.kill_node if kind == "node" else killer.kill_worker, within=20)
    group.wait(timeout=240)
    assert app.count(state="succeeded") == len(calls)
    assert app.verify().faults == []


def _succeeded(app: Any, wanted: int) -> bool:
    return bool(app.count(state="succeeded") >= wanted)


def slots(url: str) -> set[tuple[Any, ...]]:
    return set(rows(url, "SELECT taken, owner FROM genba.bucket"))


@pytest.mark.parametrize(
    ("count", "kills", "node_kills"),
    [(500, 8, 1), pytest.param(5_000, 100, 10, marks=pytest.mark.soak)],
)
def test_no_limit_is_ever_exceeded_whatever_is_killed(
    limited_tasks, url, start_node, tmp_path, count, kills, node_kills
):
    """A hundred buckets with limits of 1 to 5; each job tries its limit with locks of the kernel."""
    killer = Killer(7, lambda: start_node("limited_tasks:app", url, "--max", "6"))
    calls = [
        limited_tasks.app.call(f"limited_tasks.crowd{1 + i % 5}", (str(tmp_path), i % 20, 0.01), {})
        for i in range(count)
    ]

    under_fire(limited_tasks, killer, calls, kills, node_kills)

    assert lines(tmp_path / "broken") == []
    assert slots(url) <= {(0, None)}
