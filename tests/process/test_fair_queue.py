"""A fair queue with a real node: the late tenant is served at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, load_module

from genba import Genba
from genba.errors import BadTask

SOURCE = """
import time
from genba import Genba

app = Genba()

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
    assert left > 500   # most of the flood is still there
    assert fair.app.queues["fair"].fair_by == "tenant"
    fair.app.cancel_many()
    fair.app.close()


def test_fair_by_must_name_an_argument() -> None:
    app = Genba("sqlite:///nowhere.db")
    with pytest.raises(BadTask, match="fair_by names 'tenant'"):

        @app.task(fair_by="tenant")
        def render(scene: str) -> None: ...
