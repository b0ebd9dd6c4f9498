"""What a single job costs nodes that have nothing to do: where many are far apart, one of them is woken."""

from __future__ import annotations

import time
from urllib.request import urlopen

from tests.support import NodeProcess, eventually

NODES, WORKERS, JOBS = 3, 8, 30


def claims(node: NodeProcess) -> int:
    """How often it has asked the database for work."""
    (announced,) = [line for line in node.log.splitlines() if "metrics are at" in line]
    with urlopen(announced.split()[-1], timeout=30) as answer:
        found = [
            line
            for line in answer.read().decode().splitlines()
            if line.startswith("genba_claim_seconds_count")
        ]
    return int(float(found[0].split()[-1]))


def test_a_job_for_idle_nodes_is_asked_for_twice_by_each_that_is_woken(jobs, url, start_node):
    options = (
        "--metrics",
        "0",
        "--log-format",
        "pretty",
        "--pool",
        "static",
        "--min",
        str(WORKERS),
    )
    nodes = [start_node("jobs:app", url, "--name", f"n{i}", *options) for i in range(NODES)]
    eventually(lambda: len(jobs.app.nodes()) == NODES, within=90)
    eventually(lambda: all("metrics are at" in node.log for node in nodes), within=90)
    jobs.add.enqueue(0).wait(60)
    before, began = [claims(node) for node in nodes], time.monotonic()

    for n in range(JOBS):
        jobs.add.enqueue(n).wait(60)

    asked = [claims(node) - was for node, was in zip(nodes, before, strict=True)]
    print(f"{JOBS} jobs, one at a time, {NODES} nodes of {WORKERS} idle workers: claims {asked}")
    woken = NODES if url.startswith("sqlite") else 1
    looks = NODES * (time.monotonic() - began + 1)  # of maintenance, once a second
    assert sum(asked) <= 2 * (JOBS * woken + looks)
