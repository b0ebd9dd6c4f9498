"""What a node tells of itself: the text for Prometheus, and whether it lives and is ready."""

from __future__ import annotations

import re
from typing import Any

from tests.storage.builders import ending

from genba import wire
from genba.node.watch.counters import Counters
from genba.node.watch.http import dead, unready
from genba.node.watch.metrics import NodeStatus, text
from genba.storage.jobs.counts import OpenJobCounts, StateCount
from genba.storage.records import Claimed

SECOND = 1_000_000
SAMPLE = re.compile(
    r'genba_\w+(\{\w+="([^"\\\n]|\\["\\n])*"(,\w+="([^"\\\n]|\\["\\n])*")*\})? -?[0-9.e+-]+'
)


def claimed(task: str = "render", queue: str = "default", due_at: int = 0) -> Claimed:
    return Claimed(0, 1, 1, task, b"{}", None, 0, 0, 0, 0, None, due_at, 0, 0, None, queue)


def samples(exported: str) -> dict[str, float]:
    found = {}
    for row in exported.splitlines():
        if not row.startswith("#"):
            assert SAMPLE.fullmatch(row), row
            name, value = row.rsplit(" ", 1)
            assert name not in found
            found[name] = float(value)
    return found


def levels(*jobs: StateCount, **given: Any) -> OpenJobCounts:
    return OpenJobCounts(
        **{
            "now": 100 * SECOND,
            "jobs": list(jobs),
            "more": frozenset(),
            "locks": 0,
            "lock_waiters": 0,
            "lock_waiting_since": None,
            **given,
        }
    )


def test_runs_and_waits_are_counted_by_how_long_they_were():
    counters = Counters()
    counters.count_run(claimed(), 2 * SECOND, 30_000, wire.RETURNED, True)
    counters.count_run(claimed(), 20 * SECOND, 10_000 * SECOND, wire.RAISED, False)

    exported = samples(text(NodeStatus("n1"), counters, None))

    run = 'genba_run_seconds_bucket{queue="default",task="render",le="%s"}'
    assert [exported[run % le] for le in ("0.01", "0.05", "7200", "+Inf")] == [0, 1, 1, 2]
    assert exported['genba_run_seconds_sum{queue="default",task="render"}'] == 10_000.03
    assert exported['genba_run_seconds_count{queue="default",task="render"}'] == 2
    wait = 'genba_wait_seconds_bucket{queue="default",le="%s"}'
    assert [exported[wait % le] for le in ("1", "5", "15", "60", "+Inf")] == [0, 1, 1, 2, 2]


def test_attempts_are_counted_by_what_the_job_came_to():
    counters = Counters()
    counters.count_run(claimed(), 0, 1, wire.RETURNED, True)
    counters.count_run(claimed(), 0, 1, wire.APPLIED, False)
    named = {"task": "render", "queue": "default"}
    counters.count_endings(
        [ending(claimed(), "failed", **named), ending(claimed(), "scheduled", "signal 9", **named)]
    )
    counters.count_endings([ending(claimed(), "waiting", "drain", happened=False, **named)])

    exported = samples(text(NodeStatus("n1"), counters, None))

    attempts = 'genba_attempts_total{queue="default",task="render",state="%s"}'
    assert {
        state: exported[attempts % state]
        for state in ("succeeded", "ended_itself", "failed", "scheduled")
    } == {
        "succeeded": 1,
        "ended_itself": 1,
        "failed": 1,
        "scheduled": 1,
    }
    assert attempts % "waiting" not in exported
    assert exported['genba_deaths_total{cause="signal 9"}'] == 1


def test_waiting_jobs_are_reported_by_queue_with_the_age_of_the_oldest():
    seen = levels(
        StateCount("waiting", "slow", "a", 3, 40 * SECOND),
        StateCount("waiting", "slow", "b", 2, 70 * SECOND),
        StateCount("held", "slow", "a", 1, 0),
        more=frozenset({("waiting", "slow")}),
        lock_waiters=2,
        lock_waiting_since=90 * SECOND,
    )

    exported = samples(text(NodeStatus("n1"), Counters(), seen))

    assert exported['genba_jobs{state="held",queue="slow",task="a"}'] == 1
    assert exported['genba_waiting_jobs{queue="slow"}'] == 5
    assert exported['genba_oldest_waiting_seconds{queue="slow"}'] == 60
    assert exported['genba_jobs_bounded{state="waiting",queue="slow"}'] == 1
    assert (exported["genba_lock_waiters"], exported["genba_lock_wait_seconds"]) == (2, 10)
    assert exported["genba_database_up"] == 1
    locked = samples(text(NodeStatus("n1", trouble="the file is locked"), Counters(), seen))
    assert locked["genba_database_up"] == 0
    assert locked['genba_waiting_jobs{queue="slow"}'] == 5


def test_without_the_database_the_node_still_tells_of_itself():
    exported = samples(text(NodeStatus('n"1\\', gate="load per CPU 9"), Counters(), None))

    assert exported["genba_database_up"] == 0
    assert exported["genba_gate_closed"] == 1
    assert exported[r'genba_node_info{node="n\"1\\",namespace="",version=""}'] == 1
    assert not any(name.startswith("genba_jobs") for name in exported)


def test_a_node_lives_while_its_loop_comes_round():
    assert dead(NodeStatus("n1", loop_at=100.0), 12.0, 111.0) is None
    assert (
        dead(NodeStatus("n1", loop_at=100.0), 12.0, 113.0) == "the loop has not come round for 13 s"
    )


def test_a_node_is_ready_when_it_could_run_a_job_now():
    fine: dict[str, Any] = {"loop_at": 100.0, "database_at": 100.0, "workers": 1}

    assert unready(NodeStatus("n1", **fine), 12.0, 101.0) is None
    assert (
        unready(NodeStatus("n1", **{**fine, "database_at": None}), 12.0, 101.0)
        == "the node has not joined yet"
    )
    assert "not answered for 13 s" in str(unready(NodeStatus("n1", **fine), 12.0, 113.0))
    assert "gone away" in str(unready(NodeStatus("n1", **fine, trouble="gone away"), 12.0, 101.0))
    assert unready(NodeStatus("n1", **{**fine, "workers": 0}), 12.0, 101.0) == "no worker is ready"
    assert (
        unready(NodeStatus("n1", **{**fine, "workers": 0}, needs_workers=False), 12.0, 101.0)
        is None
    )
    assert unready(NodeStatus("n1", **fine, draining=True), 12.0, 101.0) == "the node drains"
