"""What `app.testing()` gives: a queue whose jobs run when the test says so.

`genba.testing` implements it.  The two are apart because it also needs what nodes and workers are
made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol

from genba.client.job import Job
from genba.domain.clock import ManualClock
from genba.domain.duration import Duration
from genba.enqueue.call import JobHandle

MAX_RUNS = 10_000  # of one call; more means that each job enqueues the next without end


class Testing(Protocol):
    """A queue under test; it runs jobs when you say so, and not before."""

    clock: ManualClock

    def __enter__(self) -> Testing: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def now(self) -> datetime: ...

    @property
    def task_names(self) -> Collection[str]: ...

    def advance(self, by: Duration) -> datetime: ...

    def run(self, limit: int = MAX_RUNS) -> list[Job[Any]]: ...

    async def arun(self, limit: int = MAX_RUNS) -> list[Job[Any]]: ...

    def run_until_idle(
        self, within: Duration | None = None, limit: int = MAX_RUNS
    ) -> list[Job[Any]]: ...

    async def arun_until_idle(
        self, within: Duration | None = None, limit: int = MAX_RUNS
    ) -> list[Job[Any]]: ...

    def wait(self, jobs: Iterable[JobHandle], until: str) -> None: ...

    def enqueued(self, task: Any = None, /, **arguments: Any) -> list[Job[Any]]: ...

    def assert_enqueued(
        self, task: Any, count: int | None = None, /, **arguments: Any
    ) -> list[Job[Any]]: ...
