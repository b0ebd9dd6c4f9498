"""Why a job is not running: true reasons, as text and as data.

Each fact that can keep a job from running has one small function below, which reads the present
state of the database and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from genba.domain.duration import Micros, to_datetime
from genba.domain.states import FINAL, State
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.storage.records import JobRecord, NodeRecord
from genba.storage.store import Store

_MAX_COUNTED = 10_000  # more jobs ahead are not counted


@dataclass(frozen=True, slots=True)
class Reason:
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    start: Micros | None = None  # when this reason will probably be gone

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons, the one to remove first at the front.

    `start` is the moment at which the job will probably start, if that is known.
    """

    job_id: int
    state: str
    reasons: list[Reason]
    start: datetime | None = None

    def __str__(self) -> str:
        text = f"job {self.job_id} is {self.state}: " + "; ".join(map(str, self.reasons))
        soon = self.state in (State.BLOCKED, State.WAITING) and self.start is not None
        return f"{text}; it will probably start at {_clock(self.start)}" if soon else text


def explain(store: Store, job: JobRecord, test: Collection[str] | None = None) -> Explanation:
    """Find what keeps this job from running, by the present state of the database.

    `test` has the tasks of an app under test.  Such an app runs the jobs of all queues itself, when
    the test calls it.
    """
    facts = Facts(store, job, test)
    checks = _CHECKS.get(State(job.state), (_unknown_state,))
    reasons = [reason for check in checks for reason in check(facts)]
    starts = [reason.start for reason in reasons]
    known = [start for start in starts if start is not None]
    # For a scheduled job, a reason of today may be gone when its moment comes.
    start = (
        max(known)
        if known and (len(known) == len(starts) or job.state == State.SCHEDULED)
        else None
    )
    return Explanation(job.id, job.state, reasons, None if start is None else to_datetime(start))


class Facts:
    """A job, and the facts that several checks need."""

    def __init__(self, store: Store, job: JobRecord, test: Collection[str] | None) -> None:
        self.store = store
        self.job = job
        self.test = test

    @cached_property
    def now(self) -> Micros:
        return self.store.now()

    @cached_property
    def nodes(self) -> list[NodeRecord]:
        """The nodes that claim jobs."""
        return [node for node in self.store.nodes.live() if node.state == "live"]

    @cached_property
    def serving(self) -> list[NodeRecord]:
        return [node for node in self.nodes if self.job.queue in node.serves]

    @cached_property
    def stopped_by_operator(self) -> list[Reason]:
        """The decisions of operators that stop this job."""
        job, rules = self.job, self.store.operators.refresh()
        reasons = []
        if job.task in rules.disabled:
            reasons.append(
                Reason("task_disabled", f"its task {job.task!r} is disabled", {"task": job.task})
            )
        if job.queue in rules.paused:
            reasons.append(_pause(self))
        return reasons

    def usual(self, task: str | None = None) -> Micros | None:
        """Return the recent duration of jobs of this task, or of this job's queue."""
        return self.store.search.usual_duration(task, None if task else self.job.queue)


ReasonCheck = Callable[[Facts], Sequence[Reason]]


def _final(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    return [Reason("final", f"it ended {job.state}" + (f" ({job.reason})" if job.reason else ""))]


def _running(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    name = facts.store.nodes.names().get(job.node or 0, "?")
    since = job.claimed_at or 0
    text = f"it runs on node {name} since {_clock(to_datetime(since))}"
    return [Reason("running", text, {"node": name}, since), *_lock(facts)]


def _lock(facts: Facts) -> Sequence[Reason]:
    """Explain a running job that waits for a lock."""
    waiting = next((row for row in facts.store.locks.waiters() if row.job_id == facts.job.id), None)
    if waiting is None:
        return []
    holders = [row for row in facts.store.locks.holders() if row.name == waiting.name]
    owners = [
        f"job {row.job_id}" if row.job_id else f"process {row.pid} on {row.host or '?'}"
        for row in holders
    ]
    text = f"it waits for lock {waiting.name!r} since {_clock(to_datetime(waiting.since))}"
    held = f", held by {_list(owners)}" if owners else ""
    data = {"lock": waiting.name, "jobs": [row.job_id for row in holders if row.job_id]}
    return [Reason("lock", text + held, data, waiting.since)]


def _held(facts: Facts) -> Sequence[Reason]:
    return [
        Reason("held", f"it is held for a person: {facts.job.reason}", {"reason": facts.job.reason})
    ]


def _dependencies(facts: Facts) -> Sequence[Reason]:
    parents = facts.store.dependencies.open_parents(facts.job.id)
    if not parents:
        return [Reason("blocked", "its dependencies are done", start=facts.now)]
    names, starts = [], []
    for parent in parents:
        state = parent.state or "deleted"
        since = (
            f" since {_clock(to_datetime(parent.claimed_at))}"
            if state == "running" and parent.claimed_at
            else ""
        )
        names.append(f"{parent.id} ({state}{since})")
        usual = facts.usual(parent.task) if state == "running" else None
        starts.append(
            None if usual is None else max(facts.now, (parent.claimed_at or facts.now) + usual)
        )
    start = None if None in starts else max(start for start in starts if start is not None)
    word = "job" if len(parents) == 1 else "jobs"
    return [
        Reason(
            "blocked",
            f"it waits for {word} {_list(names)}",
            {"jobs": [parent.id for parent in parents]},
            start,
        )
    ]


def _moment(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    if job.due_at <= facts.now:
        if job.state != State.SCHEDULED or facts.test is not None:
            return []
        text = (
            f"it is due since {_clock(to_datetime(job.due_at))}, and a node will move it to waiting"
        )
        return [Reason("due", text, {"at": job.due_at}, facts.now)]
    if job.state == State.WAITING:  # it was due before the clock was set back
        return []
    again = ""
    if job.attempt and job.crashes:
        again = f", after {job.crashes} crashes"
    elif job.attempt:
        again = f", after attempt {job.attempt}"
    text = f"it is not due until {to_datetime(job.due_at):%Y-%m-%d %H:%M:%S} UTC{again}"
    return [Reason("scheduled", text, {"at": job.due_at}, job.due_at)]


def _operators(facts: Facts) -> Sequence[Reason]:
    return facts.stopped_by_operator


def _pause(facts: Facts) -> Reason:
    queue = facts.job.queue
    until = next(
        (row.paused_until for row in facts.store.operators.queues() if row.name == queue), None
    )
    if until is None:
        return Reason("queue_paused", f"its queue {queue!r} is paused", {"queue": queue})
    text = f"its queue {queue!r} is paused until {to_datetime(until):%Y-%m-%d %H:%M:%S} UTC"
    return Reason("queue_paused", text, {"queue": queue, "until": until}, max(until, facts.now))


def _task(facts: Facts) -> Sequence[Reason]:
    """Check that some node, or the app under test, has the task."""
    task = facts.job.task
    if facts.test is not None:
        text = f"this app has no task {task!r}, and in a test no node runs jobs"
        return [] if task in facts.test else [Reason("unknown_task", text, {"task": task})]
    if not facts.nodes:
        return [Reason("no_node", f"no live node knows task {task!r}: no node is running")]
    if not any(task in node.knows for node in facts.nodes):
        names = ", ".join(node.name for node in facts.nodes)
        return [
            Reason(
                "unknown_task", f"no live node knows task {task!r} (live: {names})", {"task": task}
            )
        ]
    return []


def _queue(facts: Facts) -> Sequence[Reason]:
    queue = facts.job.queue
    if facts.serving or not facts.nodes or facts.test is not None:
        return []
    return [Reason("unserved_queue", f"no live node serves queue {queue!r}", {"queue": queue})]


def _bucket(facts: Facts) -> Sequence[Reason]:
    """Explain a job that waits in the line of a bucket."""
    job = facts.job
    line = facts.store.limits.line(job.id, job.rank, job.parked_on)
    if line is None:
        return []
    place = line.ahead + 1
    data: dict[str, Any] = {"bucket": line.bucket, "n": line.n, "place": place}
    holders = [holder.job for holder in line.holders]
    if line.per is not None:
        next_start = line.ripe_at or facts.now
        if holders and next_start <= facts.now:
            granted = [f"job {id}" for id in holders]
            have = "which has" if len(granted) == 1 else "which have"
            text = (
                f'bucket "{line.bucket}" has given its slot to {_list(granted)}, '
                f"{have} not started, {_nth(place)} in line"
            )
            return [Reason("rate", text, {**data, "jobs": holders})]
        text = (
            f'the rate of bucket "{line.bucket}" is used up until '
            f"{_clock(to_datetime(next_start))}, {_nth(place)} in line"
        )
        return [Reason("rate", text, data, next_start + line.ahead * line.per // max(1, line.n))]
    owners = [
        f"job {holder.job}"
        + (f" on node {holder.node}" if holder.node else "")
        + f" since {_clock(to_datetime(holder.claimed_at or holder.granted_at))}"
        for holder in line.holders
    ]
    held = f" (held by {_list(owners)})" if owners else ""
    usual = facts.usual(job.task)
    start = None if usual is None or not line.n else facts.now + place * usual // line.n
    full = "is full" if line.n else "lets none start (its n is 0)"
    text = f'bucket "{line.bucket}" {full}{held}, {_nth(place)} in line'
    return [Reason("bucket_full", text, {**data, "jobs": holders}, start)]


def _condition(facts: Facts) -> Sequence[Reason]:
    parked = facts.job.parked_on or ""
    if parked.startswith("unknown condition "):
        name = parked.removeprefix("unknown condition ")
        return [
            Reason(
                "unknown_condition", f"no live node knows condition {name!r}", {"condition": name}
            )
        ]
    if not parked.startswith("question "):
        return []
    question = facts.store.conditions.check(parked.removeprefix("question "))
    if question is None:
        return [Reason("condition", "its conditions are about to be checked", start=facts.now)]
    names = ", ".join(read_json(question.conditions, list[str], [UNREADABLE]))
    next_check = max(question.look_at, facts.now)
    data = {
        "conditions": names.split(", "),
        "said": question.said,
        "at": question.said_at,
        "next": question.look_at,
    }
    if question.said_at is None:
        text = f"condition {names} has not been checked yet"
        return [Reason("condition", text, data, next_check)]
    # After an exception, `said` is the name of the condition and its error.
    raised = " raised " in (question.said or "")
    answer = question.said if raised else f"{question.said} said no"
    text = (
        f"condition {answer} at {_clock(to_datetime(question.said_at))}, "
        f"next check at {_clock(to_datetime(next_check))}"
    )
    return [Reason("condition", text, data, next_check)]


def _unknown_state(facts: Facts) -> Sequence[Reason]:
    text = f"{facts.job.state!r} is not a state of genba; its row was changed by hand"
    return [Reason("state", text)]


def _otherwise_parked(facts: Facts) -> Sequence[Reason]:
    """Explain a job that is parked on something that no other check knows."""
    parked = facts.job.parked_on
    if parked is None or parked.startswith(_CHECKED_PREFIXES):
        return []
    return [Reason("parked", f"it is parked: {parked}", {"parked_on": parked})]


def _slots(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    if job.parked_on is not None or not facts.serving or facts.test is not None:
        return []
    ahead = facts.store.ahead(job)
    if facts.stopped_by_operator and not ahead:
        return []  # a free slot would not help
    many = f"{_MAX_COUNTED:,} or more" if ahead >= _MAX_COUNTED else str(ahead)
    usual, slots = facts.usual(), sum(node.slots for node in facts.serving)
    wait = None if usual is None or not slots else (ahead + 1) * usual // slots
    if facts.stopped_by_operator:
        earliest = max(reason.start or facts.now for reason in facts.stopped_by_operator)
        text = "1 job of it is ahead" if ahead == 1 else f"{many} jobs of it are ahead"
        return [Reason("no_slot", text, {"ahead": ahead}, earliest + (wait or 0))]
    start = None if wait is None else facts.now + wait
    text = f"no free slot yet, {many} jobs of queue {job.queue!r} are ahead"
    return [Reason("no_slot", text, {"ahead": ahead}, start)]


def _test_not_run(facts: Facts) -> Sequence[Reason]:
    """Explain a job that only waits for the test to run it."""
    job = facts.job
    if (
        facts.test is None
        or job.parked_on is not None
        or job.due_at > facts.now
        or _operators(facts)
        or _task(facts)
    ):
        return []
    return [Reason("test", "in a test, jobs run only when the test calls q.run()")]


_CHECKED_PREFIXES = ("unknown ", "question ", "disabled ", "limit ")  # of `parked_on`
_WAITING: Sequence[ReasonCheck] = (
    _operators,
    _task,
    _queue,
    _bucket,
    _condition,
    _otherwise_parked,
    _slots,
    _test_not_run,
)
_CHECKS: dict[State, Sequence[ReasonCheck]] = {
    **{State(state): (_final,) for state in FINAL},
    State.RUNNING: (_running,),
    State.HELD: (_held,),
    State.BLOCKED: (_dependencies, _moment, _operators, _task, _queue),
    State.SCHEDULED: (_moment, _operators, _task, _queue, _test_not_run),
    State.WAITING: _WAITING,
}


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _nth(place: int) -> str:
    ending = (
        {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
        if place % 100 not in (11, 12, 13)
        else "th"
    )
    return f"{place:,}{ending}"


def _clock(moment: datetime | None) -> str:
    return "?" if moment is None else f"{moment:%H:%M:%S} UTC"
