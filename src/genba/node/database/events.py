"""What the database threads report to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from genba.storage.records import Claimed, Command, JobId, Micros, Success

# from writers


@dataclass(frozen=True, slots=True)
class JobsClaimed:
    jobs: list[Claimed]
    claim: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class DedicatedJobsClaimed:
    jobs: list[Claimed]
    claim: int


@dataclass(frozen=True, slots=True)
class AwaitedJobsClaimed:
    jobs: list[Claimed]
    claim: int


@dataclass(frozen=True, slots=True)
class AwaitedJobsChecked:
    """Whether anything can end the waits of this node's jobs."""

    can_end: bool


@dataclass(frozen=True, slots=True)
class SuccessesRefused:
    """Successes that the store did not take."""

    refused: list[Success]


@dataclass(frozen=True, slots=True)
class EndingsWritten:
    """Endings are written, or refused.

    With `again`, some of the jobs become due again later.
    """

    again: bool = False


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """Jobs that waited for a slot of a limit may start now."""


@dataclass(frozen=True, slots=True)
class StartsMarked:
    """The starts of `ours` are written; the `lost` jobs are not this node's any more."""

    ours: list[JobId]
    lost: list[JobId]


@dataclass(frozen=True, slots=True)
class LimitSlotsTaken:
    """`ours` have their limit slots; `lost` jobs wait for theirs, or belong to another node."""

    ours: list[JobId]
    lost: list[JobId]


# from maintenance


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The lease is renewed.

    `sent` is when the node asked, by its steady clock; `now` is the store's time.
    """

    sent: Micros
    now: Micros
    draining: bool


@dataclass(frozen=True, slots=True)
class DeclaredDead:
    """Other nodes have taken over this node's jobs."""


@dataclass(frozen=True, slots=True)
class CommandsReceived:
    commands: list[Command]


@dataclass(frozen=True, slots=True)
class TasksDisabled:
    """All tasks that operators have disabled."""

    tasks: frozenset[str]


@dataclass(frozen=True, slots=True)
class ConcurrencyChanged:
    """How many jobs of a task may run in one worker, where operators have changed it."""

    by_task: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkAvailable:
    """There may be jobs to claim."""


@dataclass(frozen=True, slots=True)
class LostClaimFound:
    """These jobs were claimed, but the answer was lost."""

    jobs: list[Claimed]
    claim: int
