"""What a writer has to do, gathered until its next transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.node.decide.actions import CheckAwaited, ClaimAwaited
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest
from genba.storage.records import Ending, JobId, Success

LARGEST = 2000  # attempts in one transaction
MANY = 512  # attempts that make a commit worth while, although more are expected soon

Start = tuple[JobId, int, int, int]  # job, attempt, claim, moment
Progress = tuple[JobId, int, int, str]  # job, attempt, claim, text
Event = tuple[str, dict[str, Any]]  # kind, details


@dataclass(slots=True)
class PendingWrites:
    """What a writer has to do.

    Each part is emptied when it is done, so that the rest can be tried again.
    """

    starts_first: list[Start] = field(default_factory=list)  # the jobs wait for it
    successes: list[Success] = field(default_factory=list)
    patience: float = 0  # seconds that the successes may wait for more
    wants: dict[str, int] = field(default_factory=dict)  # jobs to claim of each queue
    only: Sequence[str] | None = None  # of these tasks; None: all that the node has
    endings: list[Ending] = field(default_factory=list)
    not_ready: list[ConditionAnswer] = field(default_factory=list)
    slots_wanted: list[SlotRequest] = field(default_factory=list)
    conditions_hold: list[str] = field(default_factory=list)  # keys
    starts: list[Start] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    dedicated: tuple[Sequence[str], int] | None = None  # claim so many from these queues
    awaited: list[ClaimAwaited | CheckAwaited] = field(default_factory=list)
    draining: bool = False
    resized: tuple[int, dict[str, Any]] | None = None  # slots and pool settings of the node
    events: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        about_node = self.events or self.conditions_hold or self.draining
        return self.about_jobs or bool(about_node) or self.resized is not None

    @property
    def about_jobs(self) -> bool:
        """Whether there is something that must not be left undone."""
        written = self.successes or self.endings or self.starts or self.starts_first
        answered = self.progress or self.not_ready or self.slots_wanted
        return bool(written or answered or self.wants or self.dedicated or self.awaited)

    @property
    def urgent(self) -> bool:
        """Whether a worker or another job waits for it."""
        waited_for = self.endings or self.starts_first or self.wants or self.dedicated
        return bool(
            waited_for
            or self.awaited
            or self.not_ready
            or self.slots_wanted
            or self.conditions_hold
        )

    @property
    def can_wait(self) -> bool:
        """Whether more successes will come, and nothing is urgent."""
        return bool(self.patience) and len(self.successes) < MANY and not self.urgent

    def split(self) -> tuple[PendingWrites, PendingWrites]:
        """Give what goes into the next transaction, and the rest."""
        rest = PendingWrites(successes=self.successes[LARGEST:])
        self.successes = self.successes[:LARGEST]
        return self, rest
