"""current_job(): what running code may ask."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from genba.errors import GenbaError
from genba.wire import NOTE_LIMIT, Job, Slate

_current: ContextVar[RunningJob | None] = ContextVar("genba_job", default=None)
_only: list[Callable[[], RunningJob] | None] = [None]  # of a worker that runs one job at a time, for its threads too


class RunningJob:
    """The job that this code is part of."""

    def __init__(self, job: Job, place: int, slate: Slate, deps: Callable[[int], dict[int, Any]]) -> None:
        self._job = job
        self._place = place
        self._slate = slate
        self._deps = deps
        self._extra = job.extra or (None, 0, 0, None)

    @property
    def id(self) -> int:
        return self._job.id

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self._job.attempt

    @property
    def task(self) -> str:
        return self._job.task

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, as plain JSON values."""
        return msgspec.json.decode(self._job.args, type=dict[str, Any])

    @property
    def options(self) -> dict[str, Any]:
        """What this job has that differs from the defaults."""
        return msgspec.json.decode(self._extra[0], type=dict[str, Any]) if self._extra[0] else {}

    @property
    def retries(self) -> int:
        """How many retries of the budget are used."""
        return int(self._extra[1])

    @property
    def crashes(self) -> int:
        """How often an attempt at this job died."""
        return int(self._extra[2])

    @property
    def fence(self) -> tuple[int, int, int]:
        """(id, attempt, claim): no two attempts ever have the same."""
        return self._job.id, self._job.attempt, self._job.claim

    @property
    def deps(self) -> dict[int, Any]:
        """The results of the jobs that this one waited for, by id."""
        return self._deps(self._job.id)

    @property
    def should_stop(self) -> bool:
        """True when this job was asked to stop, or its node drains: finish what is at hand and return."""
        return self._slate.should_stop(self._place)

    @property
    def cancel_requested(self) -> bool:
        """True when this very job was asked to stop."""
        return self._slate.asked_to_stop() == self._place

    def progress(self, done: float, total: float = 100, note: str | None = None) -> None:
        """Tell how far it is; cheap enough for every turn of a loop."""
        if not 0 <= done <= total:
            raise ValueError(f"progress must lie between 0 and {total}, not {done!r}")
        text = b"" if note is None else note.encode(errors="replace")[:NOTE_LIMIT]
        self._slate.note(self._place, done, total, text)

    def heartbeat(self) -> None:
        """Say that it is alive, and leave the progress alone."""
        self._slate.beat()


def current_job() -> RunningJob:
    """The job that is running here; GenbaError outside of one."""
    found = _current.get()
    if found is not None:
        return found
    make = _only[0]
    if make is None:
        raise GenbaError("current_job() is for code that runs as a job; here none is running")
    return make()


def enter(make: Callable[[], RunningJob] | None) -> None:
    """For a worker that runs one job at a time: who to ask for it (made only if asked)."""
    _only[0] = make
