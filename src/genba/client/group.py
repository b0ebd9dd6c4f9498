"""Group: the handle of the jobs of one `enqueue_many`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection
from genba.client.job import Job, await_for, wait_for
from genba.domain.duration import Duration
from genba.domain.states import FINAL
from genba.errors import BadOption
from genba.options.parse import parse_reason

R = TypeVar("R")

Jobs: TypeAlias = "Job[Any] | Iterable[Jobs]"


def each_job(jobs: object) -> Iterator[Job[Any]]:
    """Yield the jobs of a job, a group, or any iterable of such."""
    if isinstance(jobs, Job):
        yield jobs
    elif isinstance(jobs, Iterable) and not isinstance(jobs, str | bytes | Mapping):
        for item in jobs:
            yield from each_job(item)
    else:
        raise BadOption(f"wait takes jobs, a group or any iterable of them, not {jobs!r:.80}")


class GroupProgress(float):
    """How much of a group has ended, in percent, with the number of jobs in each state."""

    done: int
    total: int
    states: Mapping[str, int]

    @classmethod
    def of(cls, states: Mapping[str, int], total: int) -> GroupProgress:
        done = sum(count for state, count in states.items() if state in FINAL)
        progress = cls(done / total * 100 if total else 100.0)
        progress.done, progress.total, progress.states = done, total, dict(states)
        return progress


class Group(Sequence[Job[R]]):
    """The jobs of one `enqueue_many`, in its order."""

    def __init__(self, connection: ClientConnection, jobs: Sequence[Job[R]]) -> None:
        self._connection = connection
        self._jobs = jobs

    @overload
    def __getitem__(self, index: int) -> Job[R]: ...

    @overload
    def __getitem__(self, index: slice) -> Group[R]: ...

    def __getitem__(self, index: int | slice) -> Job[R] | Group[R]:
        if isinstance(index, slice):
            return Group(self._connection, self._jobs[index])
        return self._jobs[index]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job[R]]:
        return iter(self._jobs)

    def __repr__(self) -> str:
        return f"<Group of {len(self)} jobs>"

    def _ids(self) -> list[int]:
        return [job.id for job in self]

    @property
    def progress(self) -> GroupProgress:
        """How many of them have ended, and how, as it is now."""
        states = self._connection.store.states(self._ids())
        return GroupProgress.of(Counter(states.values()), len(self))

    def cancel(self, reason: str | None = None) -> int:
        """Cancel all that have not ended, and ask running ones to stop; returns their number."""
        return self._connection.store.cancel_all(self._ids(), parse_reason(reason))

    acancel = async_method(cancel)

    def requeue(self) -> int:
        """Run the failed ones again; jobs that were cancelled with them wait for them again."""
        return self._connection.store.requeue_failed(self._ids())

    arequeue = async_method(requeue)

    def wait(
        self, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> Group[R]:
        """Wait until all (or "any") are final."""
        wait_for(self._connection, self._jobs, timeout, until, throw)
        return self

    async def await_(
        self, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> Group[R]:
        await await_for(self._connection, self._jobs, timeout, until, throw)
        return self
