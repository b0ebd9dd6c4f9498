"""The overview of everything in progress: queues, nodes, running jobs and recent failures.

Its cost does not depend on how many jobs wait or have finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic

from typing_extensions import TypeVar

from genba.domain.duration import to_datetime
from genba.storage.jobs.search import Filter
from genba.storage.records import JobRecord
from genba.storage.store import Store

J = TypeVar("J", default=Any)  # a job, as the caller wants to have it

_FAILURES = frozenset({"failed", "timed_out"})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue; `more` says that more jobs wait than were counted."""

    name: str
    paused: bool
    waiting: int
    more: bool
    parked: int
    scheduled: int
    running: int
    oldest: datetime | None  # when the first waiting job became due


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A live node."""

    name: str
    state: str
    host: str
    pid: int
    slots: int
    busy: int  # jobs that it has claimed, started or not
    queues: list[str]
    started: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview(Generic[J]):
    """The report; `running` and `failures` are the newest ones, `states` counts open jobs."""

    at: datetime
    states: dict[str, int]
    queues: list[QueueView]
    nodes: list[NodeView]
    running: list[J]
    failures: list[J]
    node_names: dict[int, str]


def read_overview(store: Store, limit: int, as_job: Callable[[JobRecord], J]) -> Overview[J]:
    """Look once; `as_job` makes the jobs of the overview from their records."""
    store.install()
    levels = store.counts.read()
    records = {record.name: record for record in store.operators.queues()}
    live = store.nodes.live()
    busy = store.search.busy_nodes()
    names = {
        level.queue for level in levels.jobs if level.state in ("waiting", "parked", "running")
    }
    states: dict[str, int] = {}
    for level in levels.jobs:
        states[level.state] = states.get(level.state, 0) + level.jobs

    def queue(name: str) -> QueueView:
        mine = [level for level in levels.jobs if level.queue == name]
        count = {
            state: sum(level.jobs for level in mine if level.state == state) for state in states
        }
        waiting = [level.oldest for level in mine if level.state == "waiting"]
        record = records.get(name)
        pause_over = (
            record is not None
            and record.paused_until is not None
            and record.paused_until <= levels.now
        )
        return QueueView(
            name=name,
            paused=record is not None and record.paused and not pause_over,
            waiting=count.get("waiting", 0),
            more=("waiting", name) in levels.more,
            parked=count.get("parked", 0),
            scheduled=count.get("scheduled", 0),
            running=count.get("running", 0),
            oldest=to_datetime(min(waiting)) if waiting else None,
        )

    return Overview(
        at=to_datetime(levels.now),
        states=states,
        queues=[queue(name) for name in sorted(records.keys() | names)],
        nodes=[
            NodeView(
                name=node.name,
                state=node.state,
                host=node.host,
                pid=node.pid,
                slots=node.slots,
                busy=busy.get(node.id, 0),
                queues=sorted(node.serves),
                started=to_datetime(node.started_at),
            )
            for node in live
        ],
        running=[as_job(record) for record in _newest(store, frozenset({"running"}), limit)],
        failures=[as_job(record) for record in _newest(store, _FAILURES, limit)],
        node_names={node.id: node.name for node in live},
    )


def _newest(store: Store, states: frozenset[str], limit: int) -> list[JobRecord]:
    return store.search.jobs(Filter(states=states), limit)
