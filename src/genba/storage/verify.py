"""Verify an installation by its own history.

Replay its events, and compare the result with its rows.

Everything is read in one snapshot, row by row; a live installation may go on in the meantime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from genba.domain.events import unfold
from genba.domain.history_check import Fault, FaultKind, HistoryCheck
from genba.domain.limits import LIMIT, ORDERED, RATE, SlotNeeds, read_needs
from genba.domain.states import FINAL, State
from genba.domain.untrusted_json import UNREADABLE
from genba.storage.engines.database import Database, DatabaseSnapshot, Row
from genba.storage.records import JobId, Micros

MOST_FAULTS = 1000  # that are kept with their texts; all are counted
SLACK_US: Micros = 50_000  # between the clocks of two machines, as far as they are corrected
ATTEMPT_SLACK_US: Micros = 1_000_000
SET_BACK_US: Micros = 5_000_000  # events that are older by this mean that the clock was set back
KEPT_ATTEMPTS = 100  # of a job that is tried for ever

_STATES = frozenset(map(str, State))
_FINAL = frozenset(map(str, FINAL))
_QUIET = '"history":"final"'


@dataclass
class VerifyReport:
    """What was read, and the faults in it."""

    jobs: int = 0
    attempts: int = 0
    events: int = 0
    complete: bool = True  # no event was pruned, so every job was followed from its enqueue on
    counts: Counter[str] = field(default_factory=Counter)  # of faults, by kind
    faults: list[Fault] = field(default_factory=list)  # the first thousand
    notes: list[str] = field(default_factory=list)  # what could not be checked

    @property
    def sound(self) -> bool:
        return not self.counts

    def add(self, fault: Fault | None) -> None:
        if fault is not None:
            self.counts[fault.kind] += 1
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(fault)

    def add_fault(self, kind: FaultKind, which: str, words: str) -> None:
        self.add(Fault(kind, which, words))


class _Job(NamedTuple):
    """(in the order of the query)"""

    id: JobId
    state: str
    attempt: int
    claim_id: int | None
    node: int | None
    finished_at: Micros | None
    open_deps: int
    parked_on: str | None
    reason: str | None
    options: str | None
    buckets: str | None
    granted_at: Micros | None
    claimed_at: Micros | None
    ran_until: Micros | None

    @property
    def silent(self) -> bool:
        return self.options is not None and _QUIET in self.options


class _Attempt(NamedTuple):
    """(in the order of the query)"""

    job_id: JobId
    attempt: int
    claimed_at: Micros | None
    ended_at: Micros
    cause: str
    known: bool


def verify(database: Database, namespace: str) -> VerifyReport:
    """Check that no job was lost or finished twice, no limit exceeded, and no move illegal."""
    report = VerifyReport()
    with database.snapshot() as snapshot:
        _read_file(snapshot, report)
        for id, words in snapshot.rows("verify_arguments", namespace=namespace):
            report.add_fault(FaultKind.LOST, f"job {id}", words)
        replay = _replay(snapshot, namespace, report)
        held = _read_jobs(snapshot, namespace, replay, report)
        for fault in replay.lost_jobs():
            report.add(fault)
        _read_buckets(snapshot, namespace, held, report)
        if not report.notes:
            _read_runs(snapshot, namespace, report)
        for name, moment, first, last in snapshot.rows("verify_ticks", namespace=namespace):
            report.add_fault(
                FaultKind.TWICE,
                f"schedule {name}",
                f"its moment {moment} was run by job {first} and job {last}",
            )
    return report


def _read_file(snapshot: DatabaseSnapshot, report: VerifyReport) -> None:
    for (said,) in snapshot.rows("verify_file"):
        if said != "ok":
            report.add_fault(FaultKind.DAMAGED, "the file", str(said))


def _replay(snapshot: DatabaseSnapshot, namespace: str, report: VerifyReport) -> HistoryCheck:
    pruned = next(snapshot.rows("verify_since", namespace=namespace), (0,))[0]
    report.complete = not pruned
    replay = HistoryCheck(report.complete)
    latest = back = 0
    for at, kind, job_id, data in snapshot.rows("verify_events", namespace=namespace):
        report.events += 1
        back += at < latest - SET_BACK_US
        latest = at
        for job, event_kind in _job_events(at, kind, job_id, data, report):
            report.add(replay.check_event(job, event_kind))
    if back:
        report.notes.append(
            "the clock of the database was set back: whether attempts overlapped cannot be judged"
        )
    return replay


def _job_events(
    at: Micros, kind: str, job_id: JobId | None, data: bytes | None, report: VerifyReport
) -> Iterator[tuple[JobId, str]]:
    for event in unfold(kind, at, job_id, data):
        if event.data.get("data") == UNREADABLE or "jobs" in event.data:
            report.add_fault(
                FaultKind.DAMAGED,
                "an event",
                f"the data of the {kind} event of {at} cannot be read",
            )
        elif event.job_id is not None and event.job_id >= 0:
            yield event.job_id, event.kind


def _read_jobs(
    snapshot: DatabaseSnapshot, namespace: str, replay: HistoryCheck, report: VerifyReport
) -> Counter[str]:
    """Check every job with its attempts and edges.

    Gives how many jobs have a slot of each bucket.
    """
    attempts = _grouped(snapshot.rows("verify_attempts", namespace=namespace))
    edges = _grouped(snapshot.rows("verify_edges"))
    next_attempts, next_edges = next(attempts, None), next(edges, None)
    slots: Counter[str] = Counter()
    for row in snapshot.rows("verify_jobs", namespace=namespace):
        job = _Job(*row)
        report.jobs += 1
        while next_attempts is not None and next_attempts[0] < job.id:
            _orphaned(next_attempts, report)
            next_attempts = next(attempts, None)
        while next_edges is not None and next_edges[0] < job.id:
            next_edges = next(edges, None)
        mine: Sequence[Row] = ()
        if next_attempts is not None and next_attempts[0] == job.id:
            mine, next_attempts = next_attempts[1], next(attempts, None)
        waits = next_edges[1][0][1] if next_edges is not None and next_edges[0] == job.id else 0
        history = [_Attempt(*one) for one in mine]
        if job.ran_until is not None:
            history.append(
                _Attempt(job.id, job.attempt, job.claimed_at, job.ran_until, "returned", True)
            )
        report.attempts += len(history)
        report.add(replay.check_row(job.id, job.state, final_only=job.silent))
        for words in _damage(job, waits):
            report.add_fault(FaultKind.DAMAGED, f"job {job.id}", words)
        _compare(job, history, report)
        if job.granted_at is not None and job.state not in _FINAL:
            slots.update(need.name for need in _needs(job.buckets) if need.kind == LIMIT)
    while next_attempts is not None:
        _orphaned(next_attempts, report)
        next_attempts = next(attempts, None)
    return slots


def _grouped(rows: Iterator[Row]) -> Iterator[tuple[JobId, list[Row]]]:
    """Group rows by their first column, the id of a job, in whose order they come."""
    group: list[Row] = []
    for row in rows:
        if group and group[0][0] != row[0]:
            yield group[0][0], group
            group = []
        group.append(row)
    if group:
        yield group[0][0], group


def _orphaned(group: tuple[JobId, list[Row]], report: VerifyReport) -> None:
    report.attempts += len(group[1])
    if not _Attempt(*group[1][0]).known:
        count = len(group[1])
        report.add_fault(
            FaultKind.LOST,
            f"job {group[0]}",
            f"it is gone, and its history of {count} attempts is there",
        )


def _damage(job: _Job, waits: int) -> Iterator[str]:
    """Yield what is wrong with a row by itself."""
    if job.state not in _STATES:
        yield f"there is no state {job.state!r}"
        return
    running, final = job.state == State.RUNNING, job.state in _FINAL
    if running != (job.claim_id is not None) or running != (job.node is not None):
        yield f"it is {job.state}, with claim {job.claim_id} of node {job.node}"
    if final != (job.finished_at is not None):
        yield f"it is {job.state}, and its end is {job.finished_at}"
    if job.ran_until is not None and job.state != State.SUCCEEDED:
        yield f"it is {job.state}, and its row tells of an attempt that it returned from"
    if job.attempt < 0:
        yield f"it has had {job.attempt} attempts"
    if job.parked_on is not None and (running or final):
        yield f"it is {job.state}, and parked on {job.parked_on!r}"
    if job.state == State.HELD and not job.reason:
        yield "it is held without a reason"
    if not final and job.open_deps != waits:
        yield f"it counts {job.open_deps} jobs that it waits for, and there are {waits}"
    elif not final and (job.state == State.BLOCKED) != (waits > 0) and job.state != State.HELD:
        yield f"it is {job.state}, and waits for {waits} jobs"


def _compare(job: _Job, attempts: Sequence[_Attempt], report: VerifyReport) -> None:
    """Compare a job with its history."""
    which = f"job {job.id}"
    last = job.attempt - (job.state == State.RUNNING)
    numbers = [one.attempt for one in attempts]
    if numbers and numbers[-1] > last:
        words = f"attempt {numbers[-1]} is in its history, and it has had {last}"
        report.add_fault(FaultKind.DAMAGED, which, words)
    elif not job.silent and last > 0:
        first = numbers[0] if numbers and last > KEPT_ATTEMPTS else 1
        there = set(numbers)
        missing = next((number for number in range(first, last + 1) if number not in there), None)
        if missing is not None:
            report.add_fault(
                FaultKind.LOST, which, f"attempt {missing} of {last} is not in its history"
            )
    if job.state == State.SUCCEEDED and last <= 0:
        report.add_fault(FaultKind.DAMAGED, which, "it has succeeded, and no attempt was made")
    elif (
        job.state == State.SUCCEEDED
        and numbers
        and numbers[-1] == last
        and attempts[-1].cause != "returned"
    ):
        report.add_fault(
            FaultKind.DAMAGED,
            which,
            f"it has succeeded, and its last attempt ended by {attempts[-1].cause}",
        )
    if report.notes:
        return
    for before, after in pairwise(attempts):
        if after.claimed_at is not None and after.claimed_at < before.ended_at - ATTEMPT_SLACK_US:
            words = f"attempt {after.attempt} began before attempt {before.attempt} had ended"
            report.add_fault(FaultKind.TOGETHER, which, words)


def _read_buckets(
    snapshot: DatabaseSnapshot, namespace: str, held: Counter[str], report: VerifyReport
) -> None:
    for name, taken, ordered, per, _ in snapshot.rows("verify_buckets", namespace=namespace):
        if per is None and not ordered and taken != held.get(name, 0):
            words = f"it counts {taken} slots that are taken, and {held.get(name, 0)} jobs have one"
            report.add_fault(FaultKind.LIMIT, f"bucket {name}", words)


def _read_runs(snapshot: DatabaseSnapshot, namespace: str, report: VerifyReport) -> None:
    """Check of each bucket how many attempts ran at a time, in the order in which they began."""
    most: dict[str, int] = dict(snapshot.rows("verify_limits", namespace=namespace))
    under_way: dict[str, list[Micros]] = {}
    exceeded: set[str] = set()
    for row, (id, buckets, began, ended) in enumerate(
        snapshot.rows("verify_runs", namespace=namespace)
    ):
        if row % 10_000 == 0:  # forget buckets that are empty
            under_way = {name: ends for name, ends in under_way.items() if max(ends) > began}
        for need in _needs(buckets):
            allowed = 1 if need.kind == ORDERED else most.get(need.template)
            if need.kind == RATE or allowed is None or need.name in exceeded:
                continue
            ends = under_way.setdefault(need.name, [])
            while ends and ends[0] <= began:
                heappop(ends)
            heappush(ends, ended - SLACK_US if ended is not None else _NEVER)
            if len(ends) > allowed:
                exceeded.add(need.name)
                words = f"with job {id} {len(ends)} ran at a time, and {allowed} may"
                report.add_fault(FaultKind.LIMIT, f"bucket {need.name}", words)


_NEVER = 1 << 62


def _needs(written: str | None) -> SlotNeeds:
    return read_needs(written) if written else ()
