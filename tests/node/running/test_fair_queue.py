"""A fair queue with a real node: the late tenant is served at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.storage.builders import rows
from tests.support import eventually, load_module

from genba import Genba
from genba.errors import BadTask

SOURCE = """
import time
from genba import Genba

app = Genba()

@app.task(queue="fair", fair_by="tenant")
def quick(tenant: str) -> None:
    time.sleep(0.001)

@app.task(queue="fair", fair_by="tenant")
def render(tenant: str) -> None:
    time.sleep(0.002)
"""


def test_a_late_tenant_is_served_at_once(url: str, tmp_path: Path, start_node: Any) -> None:
    (tmp_path / "fair.py").write_text(SOURCE)
    fair = load_module("fair", tmp_path, url)
    fair.app.enqueue_many([fair.render.call("A") for _ in range(1500)])
    start_node("fair:app", url, "-q", "fair", "--max", "2")
    eventually(lambda: fair.app.count(state="succeeded") > 20, within=20)
    late = fair.app.enqueue_many([fair.render.call("B") for _ in range(6)])

    fair.app.wait(late, timeout=20)
    left = fair.app.count(task="fair.render")
    assert left > 500  # most of the flood is still there
    assert fair.app.queues["fair"].fair_by == "tenant"
    fair.app.cancel_many()
    fair.app.close()


@pytest.mark.soak
def test_after_a_flood_of_fifty_thousand_the_late_tenant_waits_a_fiftieth_of_its_time(
    url, tmp_path, start_node
):
    (tmp_path / "fair.py").write_text(SOURCE)
    fair = load_module("fair", tmp_path, url)
    for _ in range(5):
        fair.app.enqueue_many([fair.quick.call("A") for _ in range(10_000)])
    start_node("fair:app", url, "-q", "fair", "--max", "2")
    eventually(lambda: fair.app.count(state="succeeded") > 1000, within=60)
    fair.app.enqueue_many([fair.quick.call("B") for _ in range(100)])
    eventually(lambda: fair.app.count(state="open") == 0, within=600, every=0.5)

    ran = "FROM genba.job WHERE fair_key"
    # By the database's clock alone: a start is written by the node's.
    waits = [wait for (wait,) in rows(url, f"SELECT claimed_at - created_at {ran} = 'B'")]
    ((began, ended),) = rows(url, f"SELECT min(claimed_at), max(finished_at) {ran} = 'A'")
    share = median(waits) / (ended - began)
    print(
        f"B waits {median(waits) / 1e6:.3f} s (median), A takes {(ended - began) / 1e6:.1f} s: {share:.2%}"
    )
    assert len(waits) == 100
    assert share < 0.02
    fair.app.close()


@pytest.mark.soak
def test_four_tenants_share_a_node_alike(url, tmp_path, start_node):
    (tmp_path / "fair.py").write_text(SOURCE)
    fair = load_module("fair", tmp_path, url)
    for tenant in "ABCD":
        fair.app.enqueue_many([fair.quick.call(tenant) for _ in range(2_500)])
    start_node("fair:app", url, "-q", "fair", "--max", "2")
    eventually(lambda: fair.app.count(state="open") == 0, within=600, every=0.5)

    half = Counter(
        tenant
        for (tenant,) in rows(url, "SELECT fair_key FROM genba.job ORDER BY ran_from LIMIT 5000")
    )
    index = sum(half.values()) ** 2 / (4 * sum(count * count for count in half.values()))
    print(f"of the first half {dict(half)}: Jain's index is {index:.4f}")
    assert index >= 0.95
    fair.app.close()


def test_fair_by_must_name_an_argument() -> None:
    app = Genba("sqlite:///nowhere.db")
    with pytest.raises(BadTask, match="fair_by names 'tenant'"):

        @app.task(fair_by="tenant")
        def render(scene: str) -> None: ...
