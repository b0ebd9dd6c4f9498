"""What is wrong is found: each judgement by what was seen, and what is seen by what is really there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.storage.builders import connection, joined, one

from genba.reports.doctor import Finding, examine, findings
from genba.storage.doctor_facts import StoreFacts
from genba.storage.engines.database import DiskInfo, WritingProcess
from genba.storage.engines.sqlite.drivers import has_wal_reset_bug
from genba.storage.records import NodeRecord
from genba.storage.store import open_store

MINUTE = 60_000_000
NODE = NodeRecord(
    id=1,
    name="web1",
    host="web1",
    boot_id="b",
    pid=7,
    state="live",
    beat_at=100,
    lease_until=200,
    lease=15_000_000,
    seen_at=101,
    queues='["default"]',
    tasks='["shop.pay"]',
    slots=2,
    hungry=False,
    started_at=1,
    version="0.1.0",
)
WELL = StoreFacts(
    now=100 * MINUTE,
    skew=0,
    engine="PostgreSQL",
    version="18.1",
    home=DiskInfo(),
    writer=None,
    waste=[],
    long_transactions=[],
    nodes=[NODE],
    deaf=frozenset(),
    echo=True,
    queues=[("default", 3, 100 * MINUTE)],
    parked=[],
    overdue=(0, None),
    held=[],
    late_schedules=[],
    stopped_schedules=[],
    abandoned=[],
)


def wrong(**seen: Any) -> list[str]:
    return [one.kind for one in findings(replace(WELL, **seen)) if one.wrong]


def notes(**seen: Any) -> list[str]:
    return [one.kind for one in findings(replace(WELL, **seen)) if not one.wrong]


def test_what_is_well_is_not_wrong():
    assert wrong() == []
    assert notes() == ["engine", "clock", "nodes"]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("engine", {"engine": "SQLite", "version": "3.40.1"}),
        ("engine", {"version": "13.9 (Debian)"}),
        ("file_system", {"home": DiskInfo("nfs4", 10**12)}),
        ("file_system", {"home": DiskInfo("fuse.sshfs", 10**12)}),
        ("disk", {"home": DiskInfo("ext4", 10**6)}),
        ("clock", {"skew": 2_000_000}),
        ("clock", {"skew": -2_000_000}),
        ("bloat", {"waste": [("job", 10**9, 6 * 10**8)]}),
        ("writer", {"writer": WritingProcess(9, 1, stopped=True)}),
        ("transaction", {"long_transactions": [(9, "psql", 400, "idle in transaction")]}),
        ("listener", {"echo": False}),
        ("listener", {"deaf": frozenset({1})}),
        ("nodes", {"nodes": []}),
        ("beat", {"nodes": [replace(NODE, seen_at=100 + 8_000_000)]}),
        ("task", {"parked": [("unknown task shop.old", "default", 4)]}),
        ("queue", {"queues": [("slow", 2, 99 * MINUTE)]}),
        ("overdue", {"overdue": (5, 98 * MINUTE)}),
        ("schedule", {"late_schedules": [("nightly", 50 * MINUTE)]}),
        ("abandoned", {"abandoned": [(7, "web9")]}),
    ],
)
def test_each_thing_that_goes_wrong_is_named_with_what_to_do(kind, seen):
    (found,) = [one for one in findings(replace(WELL, **seen)) if one.wrong]

    assert found.kind == kind
    assert found.todo
    assert found.todo in str(found)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("queue", {"queues": [("default", 9, 10 * MINUTE)]}),
        ("parked", {"parked": [("queue paused", "default", 4)]}),
        ("held", {"held": [("panic", 2)]}),
        ("paused", {"stopped_schedules": [("nightly", "the printer is broken")]}),
        ("versions", {"nodes": [NODE, replace(NODE, id=2, name="web2", version="0.2.0")]}),
        ("bloat", {"waste": [("job", 10**9, 10**8)]}),
        ("nodes", {"nodes": [], "queues": []}),
    ],
)
def test_what_people_should_know_is_no_fault(kind, seen):
    assert wrong(**seen) == []
    if kind != "bloat":  # a tenth is how a table lives
        assert kind in notes(**seen)


def test_a_task_that_another_node_knows_is_on_its_way():
    assert wrong(parked=[("unknown task shop.pay", "default", 4)]) == []


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_a_sqlite_that_loses_commits_is_known_by_its_version(version, bad):
    assert has_wal_reset_bug(version) is bad


def kinds(found: list[Finding]) -> set[str]:
    return {one.kind for one in found if one.wrong}


def test_a_real_store_is_seen_as_it_is(url):
    store = open_store(url)
    try:
        assert kinds(examine(store)) == set()  # nothing waits: that no node is alive is no fault

        one(store)
        assert kinds(examine(store)) == {"nodes"}

        joined(store, name="deaf", queues={"other": 1})  # a row without a process behind it
        assert kinds(examine(store)) == {"listener", "queue"}

        one(store, task="shop.old")
        store.parked.park_unknown("default", ["shop.pay"])
        assert "task" in kinds(examine(store))
    finally:
        store.close()


def test_what_should_have_happened_long_ago_is_found(store, clock):
    joined(store)
    one(store, delay=1_000_000)
    store.now()
    clock.advance("1h")

    assert "overdue" in kinds(examine(store))


def test_a_transaction_that_is_left_open_is_found(url):
    if url.startswith("sqlite"):
        pytest.skip("a file knows no sessions")
    store = open_store(url)
    try:
        with connection(url) as conn:
            conn.execute("BEGIN")
            pid = conn.info.backend_pid
            seen = store.doctor_facts.collect([], [], 0)
            conn.execute("ROLLBACK")
        assert pid in [row[0] for row in seen.long_transactions]
    finally:
        store.close()


def test_the_clock_of_another_machine_is_compared_with_the_stores(url):
    store = open_store(url)
    try:
        store.install()
        skew = store.doctor_facts.collect([], [], 60).skew
        assert abs(skew) < 30_000_000  # the same machine, however busy
    finally:
        store.close()
