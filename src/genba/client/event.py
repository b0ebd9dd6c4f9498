"""One thing that happened, as user code sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from genba.storage.events import EventPosition


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, to a job or to something else."""

    kind: str
    job_id: int | None
    at: datetime
    data: dict[str, Any]
    node: int | None  # the node that caused it; None: a client
    place: EventPosition = field(repr=False, compare=False)
    _handle: Callable[[int], Any] = field(repr=False, compare=False)

    @property
    def cursor(self) -> str:
        """The place after this event, for `events(after=cursor)` in any process."""
        return self.place.cursor

    @property
    def job(self) -> Any:
        """The handle of its job, read when it is used; None if it is not about a job."""
        return None if self.job_id is None else self._handle(self.job_id)
