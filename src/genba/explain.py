"""Why a job is not running: true reasons, in words and as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from genba.domain.duration import to_datetime
from genba.domain.states import FINAL, State
from genba.storage.records import JobRecord
from genba.storage.store import Store


@dataclass(frozen=True, slots=True)
class Reason:
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Explanation:
    """`reasons`, the first of them the one to remove first; `start` is when it will start, where that is known."""

    job_id: int
    state: str
    reasons: list[Reason]
    start: datetime | None = None

    def __str__(self) -> str:
        return f"job {self.job_id} is {self.state}: " + "; ".join(map(str, self.reasons))


def explain(store: Store, job: JobRecord) -> Explanation:
    """What keeps this job from running, as the database has it now."""
    reasons, start = _reasons(store, job)
    return Explanation(job.id, job.state, reasons, start)


def _reasons(store: Store, job: JobRecord) -> tuple[list[Reason], datetime | None]:
    if job.state in FINAL:
        return [Reason("final", f"it ended {job.state}" + (f" ({job.reason})" if job.reason else ""))], None
    if job.state == State.RUNNING:
        name = store.nodes.names().get(job.node or 0, "?")
        since = to_datetime(job.claimed_at or 0)
        return [Reason("running", f"it runs on node {name} since {since:%H:%M:%S} UTC", {"node": name})], since
    if job.state == State.HELD:
        return [Reason("held", f"it is held for a person: {job.reason}", {"reason": job.reason})], None
    if job.state == State.BLOCKED:
        parents = store.open_parents(job.id)
        listed = ", ".join(f"{parent} ({state or 'deleted'})" for parent, state in parents)
        data = {"jobs": [parent for parent, _ in parents]}
        return [Reason("blocked", f"it waits for job {listed}" if parents else "its dependencies are done", data)], None
    if job.state == State.SCHEDULED:
        due = to_datetime(job.due_at)
        return [Reason("scheduled", f"it is not due until {due:%Y-%m-%d %H:%M:%S} UTC", {"at": job.due_at})], due
    return _waiting(store, job), None


def _waiting(store: Store, job: JobRecord) -> list[Reason]:
    nodes = store.nodes.live()
    if job.task not in store.nodes.known_tasks():
        if not nodes:
            return [Reason("no_node", f"no live node knows task {job.task!r}: no node is running")]
        names = ", ".join(node.name for node in nodes)
        return [Reason("unknown_task", f"no live node knows task {job.task!r} (live: {names})", {"task": job.task})]
    if not any(f'"{job.queue}"' in node.queues for node in nodes):
        return [Reason("unserved_queue", f"no live node serves queue {job.queue!r}", {"queue": job.queue})]
    ahead = store.ahead(job)
    many = "10,000 or more" if ahead >= 10_000 else str(ahead)
    return [Reason("no_slot", f"no free slot yet, {many} jobs of queue {job.queue!r} are ahead", {"ahead": ahead})]
