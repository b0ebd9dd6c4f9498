"""Many processes at once: writers of one file, a listener that is lost, an old snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg
import pytest
from tests.storage.builders import joined
from tests.support import eventually, without_settings

PRODUCERS = """
import os, sys, time, traceback
from genba import Genba

url, out, count, each = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def produce(i):
    app, took = Genba(url), []
    for n in range(each):
        began = time.monotonic()
        app.enqueue("jobs.add", i * each + n)
        took.append(time.monotonic() - began)
    fd = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, "".join(f"{one}\\n" for one in took).encode())

for i in range(count):
    if os.fork() == 0:
        try:
            produce(i)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(sum(os.wait()[1] != 0 for _ in range(count)))
"""


def produce(url: str, folder: Path, count: int, each: int) -> list[float]:
    """Seconds of each enqueue of so many processes, sorted; none of them may fail."""
    out = folder / "took"
    ended = subprocess.run(
        [sys.executable, "-c", PRODUCERS, url, str(out), str(count), str(each)],
        env=without_settings(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return sorted(float(line) for line in out.read_text().split())


@pytest.mark.parametrize("engine", ["sqlite"])
@pytest.mark.parametrize("each", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_sixteen_writers_and_two_nodes_share_one_file_without_a_locked_error(
    jobs, url, start_node, tmp_path, each
):
    nodes = [start_node("jobs:app", url, "--max", "2") for _ in "ab"]
    eventually(lambda: len(jobs.app.nodes()) == 2, within=60)

    took = produce(url, tmp_path, 16, each)

    assert len(took) == 16 * each
    eventually(lambda: jobs.app.count(state="succeeded") == 16 * each, within=120)
    assert jobs.app.verify().faults == []
    assert not [line for node in nodes for line in node.log.splitlines() if "locked" in line]
    half, most = quantiles(took, n=100)[49::49]
    print(
        f"16 writers, {each} jobs each: an enqueue took {half * 1e3:.1f} ms (p50), {most * 1e3:.1f} ms (p99)"
    )


@pytest.fixture
def server(url: str) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=True) as conn:
        yield conn


@pytest.mark.parametrize("engine", ["postgres"])
def test_a_node_whose_listening_session_is_ended_runs_what_comes_and_listens_again(
    jobs, url, start_node, server
):
    start_node("jobs:app", url)
    (node,) = eventually(jobs.app.nodes, within=60)

    def listening() -> set[int]:
        """The session that listens holds the node's lock."""
        asked = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND (classid, objid) = (%s, %s)"
        return {
            pid
            for (pid,) in server.execute(asked, [node.id >> 32, node.id & 0xFFFFFFFF]).fetchall()
        }

    before = eventually(listening, within=60)
    jobs.add.enqueue(1).result(timeout=60)
    for pid in before:
        server.execute("SELECT pg_terminate_backend(%s)", [pid])
    began = time.monotonic()
    jobs.add.enqueue(2).result(timeout=60)
    took = time.monotonic() - began

    assert eventually(lambda: listening() - before, within=60)
    print(f"a job of a node that did not listen ended after {took * 1e3:.0f} ms")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["postgres"])
def test_jobs_go_on_while_an_old_transaction_keeps_every_dead_row(jobs, url, start_node, server):
    """For as long as 20,000 jobs take: nothing that they leave can be vacuumed."""
    start_node("jobs:app", url, "--max", "2")
    eventually(jobs.app.nodes, within=60)
    pace = []
    for held in (False, True):
        if held:
            server.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            server.execute("SELECT count(*) FROM genba.job")
        for _ in range(4):
            began = time.monotonic()
            jobs.app.enqueue_many([jobs.add.call(n) for n in range(5_000)]).wait(timeout=300)
            pace.append(5_000 / (time.monotonic() - began))
    server.execute("ROLLBACK")

    assert jobs.app.verify().faults == []
    figures = [f"{one:.0f}" for one in pace]
    print(
        "jobs/s in rounds of 5,000:", *figures[:4], "and with the transaction open:", *figures[4:]
    )


RACE = """
import os, sys, time
from genba import Genba
from genba.storage.engines.postgres.wakeups import PostgresNodeWakeups

url, count, each, rings = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
if not rings:
    PostgresNodeWakeups.wake_nodes = lambda *args: None
ready, go = os.pipe(), os.pipe()
for i in range(count):
    if os.fork() == 0:
        os.close(go[1])
        app = Genba(url)
        app.enqueue("jobs.add", i)   # it is connected, and all is prepared
        os.write(ready[1], b".")
        os.read(go[0], 1)   # until all are there
        for n in range(each):
            app.enqueue("jobs.add", n)
        os._exit(0)
for _ in range(count):
    os.read(ready[0], 1)
began = time.monotonic()
os.close(go[1])
failed = sum(os.wait()[1] != 0 for _ in range(count))
print(count * each / (time.monotonic() - began))
sys.exit(failed)
"""


def race(url: str, count: int, each: int, rings: bool) -> float:
    """Jobs a second that so many producers enqueue."""
    ended = subprocess.run(
        [sys.executable, "-c", RACE, url, str(count), str(each), str(rings)],
        env=without_settings(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return float(ended.stdout)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["postgres"])
def test_wake_ups_cost_thirty_two_producers_little(store, url):
    """A node that is hungry again as soon as it was fed, as one that runs everything at once would be."""
    node, over, fed = joined(store), threading.Event(), Counter[bool]()

    def eat() -> None:
        while not over.is_set():
            hungry = store.nodes.live()[0].hungry
            fed[not hungry] += 1
            store.nodes.hungry(node, True)
            over.wait(0.002)

    eating = threading.Thread(target=eat, name="node")
    eating.start()
    pace: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(5):
            for rings in (True, False):
                pace[rings].append(race(url, 32, 100, rings))
    finally:
        over.set()
        eating.join()

    assert fed[True] > 20  # it was woken
    with_, without = median(pace[True]), median(pace[False])
    print(
        f"32 producers: {with_:.0f} jobs/s with wake-ups, {without:.0f} without: {with_ / without:.2f} of it"
    )
