"""An app that is closed has nothing open, also if a thread was looking at that moment."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.support import eventually

from genba import WaitTimeout


def test_a_wait_that_was_given_up_opens_no_store_after_the_close(jobs: Any) -> None:
    job = jobs.add.enqueue(1)

    for _ in range(12):
        with pytest.raises(WaitTimeout):
            job.wait(timeout=0.001)
        jobs.app.close()
    eventually(
        lambda: "genba-waiter" not in {thread.name for thread in threading.enumerate()}, within=20
    )

    assert not jobs.app.is_open


def test_an_app_is_closed_from_a_loop_and_opens_again(jobs: Any) -> None:
    async def close() -> None:
        await jobs.add.aenqueue(1)
        await jobs.app.aclose()
        assert not jobs.app.is_open
        assert await jobs.app.acount() == 1
        await jobs.app.aclose()

    asyncio.run(close())
    assert not jobs.app.is_open
