"""Nodes are replaced one after the other while jobs run; `make soak` does it a hundred times on each engine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, lines

JOBS = 30  # for each restart


@pytest.mark.parametrize("restarts", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_while_nodes_are_replaced_no_job_is_lost_and_none_that_fits_the_grace_runs_twice(
    jobs, url, start_node, path, restarts
):
    old, grace = start_node("jobs:app", url, "--name", "n0", "--max", "2", "--grace", "30s"), 30
    eventually(jobs.app.nodes, within=600)
    group, took, late, signalled = [], [], [], {}
    for turn in range(1, restarts + 1):
        next_grace = 2 if turn % 2 else 30
        calls = [jobs.write_slowly.call(str(path), str(n), 0.03) for n in range(JOBS)]
        group += jobs.app.enqueue_many(calls)
        new = start_node(
            "jobs:app", url, "--name", f"n{turn}", "--max", "2", "--grace", f"{next_grace}s"
        )
        eventually(partial(is_there, jobs.app, f"n{turn}"), within=600)
        group += jobs.app.enqueue_many(calls)  # so that the old one has something in its hands
        eventually(partial(more_than, len(lines(path)), path), within=600)
        [number] = [node.id for node in jobs.app.nodes() if node.name == f"n{turn - 1}"]
        family = old.tree()  # a look at all processes of the machine takes its time
        began, signalled[number] = time.monotonic(), datetime.now(UTC)
        if turn % 2:
            old.signal(signal.SIGTERM)
        else:
            tell_all(family)
        assert old.wait(within=60) == 0
        took.append(time.monotonic() - began)
        late.append(took[-1] - grace)
        assert old.tree() == []
        old, grace = new, next_grace
    jobs.app.wait(group, timeout=600)

    ran = [int(words[1]) for words in lines(path)]
    assert sorted(ran) == sorted(job.id for job in group)  # each has run, and once
    assert {job.refresh().state for job in group} == {"succeeded"}
    assert all(len(job.attempts) == 1 for job in group)
    claims = [attempt for job in group for attempt in job.attempts if attempt.node in signalled]
    claimed = max((one.claimed - signalled[one.node]).total_seconds() for one in claims)
    print(
        f"{restarts} restarts, ended within {sorted(took)[len(took) // 2]:.2f} s (median), {max(took):.2f} s (worst)"
    )
    print(
        f"the last claim of a job that ran came {claimed * 1000:.0f} ms after the signal, at worst"
    )
    patient = restarts < 100  # beside other tests
    assert max(late) < (60 if patient else 2)  # seconds after its grace
    assert claimed < (60 if patient else 0.1)


def is_there(app: Any, name: str) -> bool:
    return name in {node.name for node in app.nodes()}


def more_than(count: int, path: Path) -> bool:
    return len(lines(path)) > count


def tell_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
