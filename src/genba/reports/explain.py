"""Why a job is not running: true reasons, in words and as data.

Each fact that can keep a job from running has one small asker below; what the database says now is all they know.
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

_MANY = 10_000  # more jobs in front are not counted


@dataclass(frozen=True, slots=True)
class Reason:
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    start: Micros | None = None  # when this one will probably be out of the way

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Explanation:
    """`reasons`, the first of them the one to remove first; `start` is when it will probably start, if known."""

    job_id: int
    state: str
    reasons: list[Reason]
    start: datetime | None = None

    def __str__(self) -> str:
        said = f"job {self.job_id} is {self.state}: " + "; ".join(map(str, self.reasons))
        soon = self.state in (State.BLOCKED, State.WAITING) and self.start is not None
        return f"{said}; it will probably start at {_clock(self.start)}" if soon else said


def explain(store: Store, job: JobRecord, test: Collection[str] | None = None) -> Explanation:
    """What keeps this job from running, as the database has it now.

    `test`: the tasks of an app under test, which runs its jobs itself, of all queues, when it is told to.
    """
    facts = Facts(store, job, test)
    reasons = [
        reason for ask in _ASKERS.get(State(job.state), (_strange,)) for reason in ask(facts)
    ]
    starts = [reason.start for reason in reasons]
    known = [start for start in starts if start is not None]
    # What is in its way today need not be there when its moment comes.
    start = (
        max(known)
        if known and (len(known) == len(starts) or job.state == State.SCHEDULED)
        else None
    )
    return Explanation(job.id, job.state, reasons, None if start is None else to_datetime(start))


class Facts:
    """A job, and what several askers want to know about the rest."""

    def __init__(self, store: Store, job: JobRecord, test: Collection[str] | None) -> None:
        self.store = store
        self.job = job
        self.test = test

    @cached_property
    def now(self) -> Micros:
        return self.store.now()

    @cached_property
    def nodes(self) -> list[NodeRecord]:
        """Those that claim."""
        return [node for node in self.store.nodes.live() if node.state == "live"]

    @cached_property
    def serving(self) -> list[NodeRecord]:
        return [node for node in self.nodes if self.job.queue in node.serves]

    @cached_property
    def steered(self) -> list[Reason]:
        """What an operator has decided."""
        job, rules = self.job, self.store.policy.refresh()
        found = []
        if job.task in rules.disabled:
            found.append(
                Reason("task_disabled", f"its task {job.task!r} is disabled", {"task": job.task})
            )
        if job.queue in rules.paused:
            found.append(_pause(self))
        return found

    def usual(self, task: str | None = None) -> Micros | None:
        """How long a job of this task, or of this job's queue, takes lately."""
        return self.store.search.usual_duration(task, None if task else self.job.queue)


Asker = Callable[[Facts], Sequence[Reason]]


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
    """It runs, and waits for somebody else to let go."""
    waiting = next((row for row in facts.store.locks.waiters() if row.job_id == facts.job.id), None)
    if waiting is None:
        return []
    holders = [row for row in facts.store.locks.holders() if row.name == waiting.name]
    told = [
        f"job {row.job_id}" if row.job_id else f"process {row.pid} on {row.host or '?'}"
        for row in holders
    ]
    text = f"it waits for lock {waiting.name!r} since {_clock(to_datetime(waiting.since))}"
    held = f", held by {_list(told)}" if told else ""
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
    told, starts = [], []
    for parent in parents:
        state = parent.state or "deleted"
        since = (
            f" since {_clock(to_datetime(parent.claimed_at))}"
            if state == "running" and parent.claimed_at
            else ""
        )
        told.append(f"{parent.id} ({state}{since})")
        usual = facts.usual(parent.task) if state == "running" else None
        starts.append(
            None if usual is None else max(facts.now, (parent.claimed_at or facts.now) + usual)
        )
    start = None if None in starts else max(start for start in starts if start is not None)
    word = "job" if len(parents) == 1 else "jobs"
    return [
        Reason(
            "blocked",
            f"it waits for {word} {_list(told)}",
            {"jobs": [p.id for p in parents]},
            start,
        )
    ]


def _moment(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    if job.due_at <= facts.now:
        due = f"it is due since {_clock(to_datetime(job.due_at))}, nodes move it to those that wait"
        if job.state != State.SCHEDULED or facts.test is not None:
            return []
        return [Reason("due", due, {"at": job.due_at}, facts.now)]
    if job.state == State.WAITING:  # it was due, before the clock was set back
        return []
    again = ""
    if job.attempt and job.crashes:
        again = f", after {job.crashes} crashes"
    elif job.attempt:
        again = f", after attempt {job.attempt}"
    text = f"it is not due until {to_datetime(job.due_at):%Y-%m-%d %H:%M:%S} UTC{again}"
    return [Reason("scheduled", text, {"at": job.due_at}, job.due_at)]


def _steered(facts: Facts) -> Sequence[Reason]:
    """What an operator has decided."""
    return facts.steered


def _pause(facts: Facts) -> Reason:
    queue = facts.job.queue
    until = next(
        (row.paused_until for row in facts.store.policy.queues() if row.name == queue), None
    )
    if until is None:
        return Reason("queue_paused", f"its queue {queue!r} is paused", {"queue": queue})
    text = f"its queue {queue!r} is paused until {to_datetime(until):%Y-%m-%d %H:%M:%S} UTC"
    return Reason("queue_paused", text, {"queue": queue, "until": until}, max(until, facts.now))


def _task(facts: Facts) -> Sequence[Reason]:
    """Whether anybody could run it."""
    task = facts.job.task
    if facts.test is not None:
        text = f"in a test nobody else runs jobs, and this app has no task {task!r}"
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
    """It stands in line."""
    job = facts.job
    line = facts.store.limits.line(job.id, job.rank, job.parked_on)
    if line is None:
        return []
    place, usual = line.ahead + 1, facts.usual(job.task)
    data: dict[str, Any] = {"bucket": line.bucket, "n": line.n, "place": place}
    if line.per is not None:
        ripe = line.ripe_at or facts.now
        if line.holders and ripe <= facts.now:
            let_go = [f"job {holder.job}" for holder in line.holders]
            have = "which has" if len(let_go) == 1 else "which have"
            text = f'bucket "{line.bucket}" has let go {_list(let_go)}, {have} not started, {_nth(place)} in line'
            return [Reason("rate", text, {**data, "jobs": [holder.job for holder in line.holders]})]
        text = f'the rate of bucket "{line.bucket}" is used up until {_clock(to_datetime(ripe))}, {_nth(place)} in line'
        return [Reason("rate", text, data, ripe + line.ahead * line.per // max(1, line.n))]
    told = [
        f"job {holder.job}"
        + (f" on node {holder.node}" if holder.node else "")
        + f" since {_clock(to_datetime(holder.claimed_at or holder.granted_at))}"
        for holder in line.holders
    ]
    held = f" (held by {_list(told)})" if told else ""
    start = None if usual is None or not line.n else facts.now + place * usual // line.n
    full = "is full" if line.n else "lets none start (its n is 0)"
    text = f'bucket "{line.bucket}" {full}{held}, {_nth(place)} in line'
    return [
        Reason(
            "bucket_full", text, {**data, "jobs": [holder.job for holder in line.holders]}, start
        )
    ]


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
    question = facts.store.conditions.question(parked.removeprefix("question "))
    if question is None:
        return [Reason("condition", "its conditions are about to be asked", start=facts.now)]
    names = ", ".join(read_json(question.conditions, list[str], [UNREADABLE]))
    look = max(question.look_at, facts.now)
    data = {
        "conditions": names.split(", "),
        "said": question.said,
        "at": question.said_at,
        "next": question.look_at,
    }
    if question.said_at is None:
        return [Reason("condition", f"condition {names} has not been asked yet", data, look)]
    said = (
        f"{question.said} at"
        if " raised " in (question.said or "")
        else f"{question.said} said no at"
    )
    text = f"condition {said} {_clock(to_datetime(question.said_at))}, next look at {_clock(to_datetime(look))}"
    return [Reason("condition", text, data, look)]


def _strange(facts: Facts) -> Sequence[Reason]:
    return [
        Reason(
            "state",
            f"{facts.job.state!r} is no state that genba knows: somebody has written it by hand",
        )
    ]


def _elsewhere(facts: Facts) -> Sequence[Reason]:
    """Parked on something that no other asker speaks of."""
    parked = facts.job.parked_on
    if parked is None or parked.startswith(_SPOKEN_OF):
        return []
    return [Reason("parked", f"it is put aside: {parked}", {"parked_on": parked})]


def _slots(facts: Facts) -> Sequence[Reason]:
    job = facts.job
    if job.parked_on is not None or not facts.serving or facts.test is not None:
        return []
    ahead = facts.store.ahead(job)
    if facts.steered and not ahead:
        return []  # slots are not what it lacks
    many = f"{_MANY:,} or more" if ahead >= _MANY else str(ahead)
    usual, slots = facts.usual(), sum(node.slots for node in facts.serving)
    lasts = None if usual is None or not slots else (ahead + 1) * usual // slots
    if facts.steered:
        begin = max(reason.start or facts.now for reason in facts.steered)  # at the earliest
        text = "1 job of it is ahead" if ahead == 1 else f"{many} jobs of it are ahead"
        return [Reason("no_slot", text, {"ahead": ahead}, begin + (lasts or 0))]
    start = None if lasts is None else facts.now + lasts
    text = f"no free slot yet, {many} jobs of queue {job.queue!r} are ahead"
    return [Reason("no_slot", text, {"ahead": ahead}, start)]


def _untold(facts: Facts) -> Sequence[Reason]:
    """Nothing is in its way, but in a test nothing happens by itself."""
    job = facts.job
    if (
        facts.test is None
        or job.parked_on is not None
        or job.due_at > facts.now
        or _steered(facts)
        or _task(facts)
    ):
        return []
    return [Reason("test", "in a test jobs run when they are told to: q.run()")]


_SPOKEN_OF = ("unknown ", "question ", "disabled ", "limit ")
_WAITING: Sequence[Asker] = (
    _steered,
    _task,
    _queue,
    _bucket,
    _condition,
    _elsewhere,
    _slots,
    _untold,
)
_ASKERS: dict[State, Sequence[Asker]] = {
    **{State(state): (_final,) for state in FINAL},
    State.RUNNING: (_running,),
    State.HELD: (_held,),
    State.BLOCKED: (_dependencies, _moment, _steered, _task, _queue),
    State.SCHEDULED: (_moment, _steered, _task, _queue, _untold),
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
