"""A node that is started from Python: it ends with its caller, and by the signals that the caller gets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, without_settings


@pytest.fixture
def node(jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(tmp_path)  # where its node finds jobs.py
    return jobs.app.node("jobs:app", name="mine", max=1, log_format="json")


@pytest.mark.parametrize("call", ["node.run()", "asyncio.run(node.arun())"], ids=["run", "arun"])
def test_a_signal_to_its_caller_drains_the_node(
    url: str, jobs: Any, tmp_path: Path, call: str
) -> None:
    made = "import asyncio; from jobs import app; node = app.node('jobs:app', max=1)"
    program = f"{made}; print('ended with', {call})"
    env = {**without_settings(os.environ), "GENBA_URL": url}
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, stdout=subprocess.PIPE
    )
    try:
        assert jobs.add.enqueue(1).result(timeout=20) == 2
        caller.send_signal(signal.SIGTERM)
        output, _ = caller.communicate(timeout=20)
    finally:
        caller.kill()
    assert output.splitlines()[-1:] == [b"ended with 0"]
    assert jobs.app.nodes() == []


def test_a_node_drains_when_its_run_is_cancelled(jobs: Any, node: Any) -> None:
    async def run() -> None:
        running = asyncio.create_task(node.arun())
        job = await jobs.add.aenqueue(1)
        assert await job.aresult(timeout=20) == 2
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await jobs.app.anodes() == []

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(run())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_node_is_run_from_another_thread_and_loop(jobs: Any, node: Any) -> None:
    async def run() -> int:
        running = asyncio.create_task(asyncio.to_thread(asyncio.run, node.arun()))
        await jobs.add.enqueue(1).aresult(timeout=20)
        jobs.app.tell_node("mine", "stop")
        return await running

    assert asyncio.run(run()) == 0
    assert eventually(lambda: jobs.app.nodes() == [])
