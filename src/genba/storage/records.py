"""The frozen values that go into the store and come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgspec

from genba.domain.limits import LimitRule, SlotNeeds
from genba.domain.untrusted_json import UNREADABLE, read_json

Micros = int
JobId = int
# As `due_from`: the moment itself was given, and nothing moves it.
EXACT_MOMENT = 0
# In the options of a job whose task keeps final states only.
QUIET = '"history":"final"'


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to insert.  Moments are absolute, or counted from the store's clock.

    A Struct, because a bulk enqueue makes ten thousand of them: it costs a tenth of a dataclass.
    """

    task: str
    args: bytes
    namespace: str = "default"
    queue: str = "default"
    priority: int = 0
    due_at: Micros | None = None
    delay: Micros = 0
    expires_at: Micros | None = None
    expires_in: Micros | None = None
    key: str | None = None
    identity: str | None = None
    once_waiting: bool = False
    unique_for: Micros | None = None
    on_conflict: str = "return"
    parent_id: JobId | None = None
    tags: tuple[str, ...] = ()
    options: str | None = None
    fair_key: str | None = None  # takes turns with other keys in a fair queue
    fair_by: str | None = None  # makes its queue a fair one
    after: tuple[Edge, ...] = ()
    needs: SlotNeeds = ()
    rules: tuple[LimitRule, ...] = ()  # of the templates that it needs
    capped: bool = False  # counts towards its task's max_waiting
    max_waiting: int | None = None  # refused if so many wait
    ready: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Tell whether its row is all that must be inserted."""
        plain = self.identity is None and not self.after and not self.tags and not self.ready
        return plain and not self.limited and self.fair_key is None

    @property
    def simple(self) -> bool:
        """Tell whether it is like most jobs.

        It may start at once, and has no options but its task's.
        """
        if self.due_at is not None or self.delay or self.parent_id is not None or not self.plain:
            return False
        options = (self.key, self.expires_at, self.expires_in, self.unique_for)
        return options == (None,) * 4 and not is_quiet(self.options)

    @property
    def limited(self) -> bool:
        return bool(self.needs) or self.capped


class UniformJobs(list[NewJob]):
    """Jobs that differ only in their arguments, as most of a bulk enqueue do."""


class Edge(NamedTuple):
    """An edge to the job to run after: its id, or (with `inside`) its index in the same call."""

    job: int
    wants: str = "success"
    inside: bool = False


class Enqueued(NamedTuple):
    id: JobId
    created: bool


class Claimed(NamedTuple):
    """A job that a claim has leased to us (in the order of the query)."""

    rank: int
    id: JobId
    attempt: int
    task: str
    args: bytes
    options: str | None
    priority: int
    retries: int
    crashes: int
    losses: int
    saved: bytes | None
    due_at: Micros
    open_deps: int
    claimed_at: Micros
    expires_at: Micros | None
    queue: str = "default"
    buckets: str | None = None


def is_quiet(options: str | None) -> bool:
    """Tell from a job's options whether only final states go into its history."""
    return options is not None and QUIET in options


class Success(NamedTuple):
    """An attempt that returned (in the order of the query)."""

    id: JobId
    attempt: int
    claim: int
    result: bytes | None
    claimed: Micros | None
    started: Micros | None
    ended: Micros | None  # None: no record of the attempt is kept
    pid: int | None
    cpu: Micros | None
    peak: int | None
    quiet: bool = False  # its task keeps final states only; not written
    limited: bool = False  # it may have slots to free; not written

    def without_run(self) -> Success:
        """Drop what describes the run, for a task that keeps final states only."""
        return self._replace(started=None, ended=None, pid=None, cpu=None, peak=None)

    def as_ending(self) -> Ending:
        return Ending(
            id=self.id,
            attempt=self.attempt,
            claim=self.claim,
            state="succeeded",
            cause="returned",
            result=self.result,
            started=self.started,
            ended=self.ended,
            pid=self.pid,
            cpu=self.cpu,
            peak=self.peak,
            quiet=self.quiet,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """An attempt that ended in another way, and what becomes of its job."""

    id: JobId
    attempt: int
    claim: int
    state: str
    cause: str
    retries: int = 0
    crashes: int = 0
    losses: int = 0
    due_at: Micros | None = None  # a moment that the job's code gave
    wait: Micros | None = None  # otherwise, counted from the moment of writing
    rank_priority: int = 0  # with either: the priority that its rank is computed from
    reason: str | None = None
    error: str | None = None
    result: bytes | None = None
    progress: str | None = None
    log: str | None = None
    started: Micros | None = None
    ended: Micros | None = None
    pid: int | None = None
    cpu: Micros | None = None
    peak: int | None = None
    clones: tuple[bytes, ...] = ()  # jobs that are enqueued with the success
    happened: bool = True  # False: the attempt never started, and leaves no trace
    locks: bool = False  # it may hold locks, or wait for locks
    start_recorded: bool = False  # its start is in the history already
    quiet: bool = False  # only a final state goes into the history
    has_on_final: bool = False  # its task has an `on_final` hook
    task: str = ""  # for logs and metrics; not written
    queue: str = ""

    @property
    def put_off(self) -> bool:
        """Tell whether the job gets a new due moment."""
        return self.due_at is not None or self.wait is not None

    def due(self, now: Micros) -> Micros | None:
        """Give the job's new due moment, None if it keeps the old one."""
        return self.due_at if self.wait is None else now + self.wait


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as last seen in the store; changing it changes nothing."""

    id: JobId
    namespace: str
    queue: str
    task: str
    state: str
    rank: int
    due_at: Micros
    created_at: Micros
    finished_at: Micros | None
    claimed_at: Micros | None
    started_mark: Micros | None
    expires_at: Micros | None
    priority: int
    attempt: int
    claim_id: int | None
    node: int | None
    parked_on: str | None
    cancel_requested: str | None
    open_deps: int
    retries: int
    crashes: int
    losses: int
    version: int
    parent_id: JobId | None
    schedule_id: int | None
    moment: Micros | None
    key: str | None
    tags: str | None
    options: str | None
    reason: str | None
    progress: str | None
    error: str | None
    args: bytes
    result: bytes | None


# Every attempt that has ended.  The one that returned is described by the row of its job, the
# others have rows of their own.
HISTORY = """(
    SELECT job_id, attempt, claimed_at, started_at, ended_at, cause, node, pid, cpu, peak,
           error, log
      FROM genba.attempt
     UNION ALL
    SELECT id, attempt, claimed_at, ran_from, ran_until, 'returned', ran_on, ran_pid, ran_cpu,
           ran_peak, NULL, NULL
      FROM genba.job WHERE ran_until IS NOT NULL)"""
# What a priority is worth, as in domain/rank.py; the product of the largest ones would not fit into
# 64 bits.
BOOST = """(
    CASE WHEN {priority} BETWEEN -(8070450532247928832 / CAST(:age_step AS bigint))
                             AND 8070450532247928832 / CAST(:age_step AS bigint)
         THEN {priority} * CAST(:age_step AS bigint)
         WHEN {priority} > 0 THEN 8070450532247928832 ELSE -8070450532247928832 END)"""
JOB_COLUMNS = ", ".join(
    "/* args */" if field.name == "args" else field.name for field in fields(JobRecord)
)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt that has ended."""

    attempt: int
    claimed_at: Micros | None
    started_at: Micros | None
    ended_at: Micros
    cause: str
    node: int | None
    pid: int | None
    cpu: Micros | None
    peak: int | None
    error: str | None
    log: str | None


class Command(NamedTuple):
    """Something that a node is asked to do."""

    seq: int
    job_id: JobId | None
    attempt: int | None
    verb: str
    data: str | None


@dataclass(frozen=True, slots=True)
class NodeRecord:
    id: int
    name: str
    host: str
    boot_id: str
    pid: int
    state: str
    beat_at: Micros
    lease_until: Micros
    lease: Micros
    seen_at: Micros
    queues: str
    tasks: str
    slots: int
    hungry: bool
    started_at: Micros
    version: str
    pool: str | None = None  # JSON: its pool, min and max

    @property
    def serves(self) -> list[str]:
        """Read the names of its queues."""
        return read_json(self.queues, list[str], [UNREADABLE])

    @property
    def knows(self) -> list[str]:
        """Read the names of its tasks."""
        return read_json(self.tasks, list[str], [UNREADABLE])

    @property
    def expired(self) -> bool:
        return self.lease_until <= self.seen_at


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNode:
    id: int
    name: str
    host: str
    boot_id: str
    pid: int
    slots: int
    lease: Micros
    queues: tuple[str, ...]
    tasks: tuple[dict[str, Any], ...]
    version: str
    pool: Mapping[str, Any] | None = None  # None: it cannot be changed
