"""What operators say of a task's policy, while a node runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tests.support import eventually, load_module

from genba.cli import main

_POLICY = """
import asyncio
import os
from genba import Genba

app = Genba()
there = 0

@app.task
async def meet(most: int) -> int:
    \"\"\"How many were here at once, of those it waits for.\"\"\"
    global there
    there += 1
    try:
        for _ in range(100):
            if there >= most:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return there
    finally:
        there -= 1

@app.task(cron="0 3 1 1 *")
def yearly() -> int:
    return os.getpid()
"""


def test_a_running_node_obeys_what_is_set_of_concurrency_and_of_a_tasks_schedule(
    url: str, tmp_path: Path, start_node: Any
) -> None:
    (tmp_path / "ruled.py").write_text(_POLICY)
    ruled = load_module("ruled", tmp_path, url)
    app = ruled.app
    start_node("ruled:app", url, "--max", "1")
    eventually(app.nodes, within=20)

    def together(count: int) -> int:
        group = app.enqueue_many([ruled.meet.call(count) for _ in range(count)])
        app.wait(group, timeout=20)
        return max(job.result() for job in group)

    def genba(*words: str) -> None:
        done = CliRunner().invoke(main, ["task", "set", *words, "--url", url])
        assert done.exit_code == 0, done.output

    assert together(2) == 1
    genba("ruled.meet", "concurrency=3")
    eventually(lambda: together(3) == 3, within=20)
    genba("ruled.meet", "--reset", "concurrency")
    eventually(lambda: together(2) == 1, within=20)

    genba("ruled.yearly", "every=-1")
    eventually(lambda: app.count(task="ruled.yearly", state="succeeded") > 2, within=20)
    genba("ruled.yearly", "--reset-all")
    assert app.schedule("ruled.yearly").rule.words() == "0 3 1 1 * (UTC)"
    eventually(lambda: app.count(task="ruled.yearly", state="open") == 0, within=10)
    app.close()
