"""A thread of a node dies of an unforeseen error: the node ends, loudly, and others go on with its jobs."""

from __future__ import annotations

import os
import time

import pytest
from tests.support import eventually, without_settings

# Python imports it by itself, in the node too.  SystemExit ends a thread without a word.
INTRUDER = """
import os, sys
if "genba.cli" in " ".join(sys.orig_argv):
    from genba.node.database.writer import Writer
    from genba.node.database.maintenance import Maintenance

    def until_signalled(step):
        def intruded(*args):
            if os.path.exists(os.environ["INTRUDER"]):
                raise SystemExit
            return step(*args)
        return intruded

    Maintenance._round = until_signalled(Maintenance._round)
    Writer._write = until_signalled(Writer._write)
"""


@pytest.mark.parametrize("thread", ["maintenance", "writer"])
def test_a_node_whose_thread_dies_ends_and_another_goes_on(jobs, url, start_node, tmp_path, thread):
    (tmp_path / "intruder").mkdir()
    (tmp_path / "intruder" / "sitecustomize.py").write_text(INTRUDER)
    sign = tmp_path / "now"
    path = os.pathsep.join([str(tmp_path / "intruder"), without_settings(os.environ)["PYTHONPATH"]])
    node = start_node("jobs:app", url, env={"PYTHONPATH": path, "INTRUDER": str(sign)})
    jobs.add.enqueue(1).result(timeout=60)

    sign.touch()
    began = time.monotonic()
    if thread == "writer":  # it sleeps until there is something to write
        jobs.add.enqueue(2)
    code = node.wait(10)
    took = time.monotonic() - began

    assert code != 0
    assert "has died; this node ends" in node.log
    assert eventually(lambda: not node.tree(), within=5)
    start_node("jobs:app", url)
    assert jobs.add.enqueue(3).result(timeout=60) == 4
    eventually(lambda: jobs.app.count(state=["waiting", "running", "scheduled"]) == 0, within=60)
    assert jobs.app.verify().faults == []
    print(f"{url.partition(':')[0]}: its node ended {took:.2f} s after the {thread} could die")
