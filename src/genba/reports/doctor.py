"""What is wrong with an installation, and what to do about it.

Each problem that occurs in practice has one small check below.  The checks are pure: the facts that
they judge were read at one moment (`storage/doctor_facts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from genba.domain.duration import MINUTE, SECOND, Micros, format_duration
from genba.storage.doctor_facts import StoreFacts
from genba.storage.engines.sqlite.drivers import has_wal_reset_bug
from genba.storage.engines.sqlite.file_checks import NETWORK_FILE_SYSTEMS
from genba.storage.store import Store

MAX_CLOCK_SKEW: Micros = SECOND
LONG_TRANSACTION_SECONDS = 300
MAX_UNUSED_BYTES = 100 * 2**20  # reported only if this is also half of the table
MIN_FREE_BYTES = 500 * 2**20  # on the disk of a SQLite file
MAX_WAIT: Micros = 10 * MINUTE  # of a job whose queue a node serves


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: `wrong`, or only worth knowing; `todo` says what to do about it."""

    kind: str
    wrong: bool
    text: str
    todo: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text if self.todo is None else f"{self.text}: {self.todo}"


def examine(store: Store) -> list[Finding]:
    """Examine an installation; problems come first, then what was checked and is fine."""
    store.install()
    facts = store.doctor_facts.collect(
        store.nodes.live(), store.operators.parked(), LONG_TRANSACTION_SECONDS
    )
    return sorted(findings(facts), key=lambda finding: not finding.wrong)


def findings(facts: StoreFacts) -> list[Finding]:
    """Return the findings of all checks."""
    return [finding for check in CHECKS for finding in check(facts)]


DoctorCheck = Callable[[StoreFacts], Iterable[Finding]]


def _engine(facts: StoreFacts) -> Iterator[Finding]:
    data = {"engine": facts.engine, "version": facts.version}
    engine = f"{facts.engine} {facts.version}"
    numbers = tuple(map(int, re.findall(r"\d+", facts.version)[:3]))
    if facts.engine == "SQLite" and has_wal_reset_bug(numbers):
        todo = "use the default driver, apsw, which brings a version without this bug"
        yield Finding(
            "engine", True, f"{engine} may corrupt a file that two processes write", todo, data
        )
    elif facts.engine == "PostgreSQL" and numbers < (14,):
        yield Finding(
            "engine", True, f"{engine} is too old for genba", "upgrade it to 14 or later", data
        )
    else:
        yield Finding("engine", False, engine, None, data)


def _disk(facts: StoreFacts) -> Iterator[Finding]:
    kind, free = facts.home.file_system, facts.home.free
    if kind and any(kind == bad or kind.startswith(bad) for bad in NETWORK_FILE_SYSTEMS):
        text = f"the file is on a {kind} file system, where SQLite's locks cannot be trusted"
        yield Finding(
            "file_system",
            True,
            text,
            "move it to a local disk, or use PostgreSQL",
            {"file_system": kind},
        )
    elif kind:
        yield Finding("file_system", False, f"the file is on {kind}", None, {"file_system": kind})
    if free is not None and free < MIN_FREE_BYTES:
        yield Finding(
            "disk", True, f"only {free >> 20} MB are free on its disk", "make room", {"free": free}
        )


def _clock(facts: StoreFacts) -> Iterator[Finding]:
    ahead = facts.skew / SECOND
    wrong = abs(facts.skew) > MAX_CLOCK_SKEW
    direction = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's clock is {abs(ahead):.1f} s {direction} the database's"
    todo = (
        "synchronize both with the same time server; times without a zone use this clock"
        if wrong
        else None
    )
    yield Finding("clock", wrong, text, todo, {"seconds": ahead})


def _unused_space(facts: StoreFacts) -> Iterator[Finding]:
    for table, size, unused in facts.waste:
        if unused > MAX_UNUSED_BYTES and 2 * unused > size:
            text = f"{table}: {unused >> 20} of {size >> 20} MB are unused"
            todo = "VACUUM it, and look for long transactions, which prevent automatic vacuuming"
            data = {"what": table, "size": size, "empty": unused}
            yield Finding("bloat", True, text, todo, data)


def _writer(facts: StoreFacts) -> Iterator[Finding]:
    if facts.writer and facts.writer.stopped:
        pid = facts.writer.pid
        text = f"process {pid} is stopped in the middle of a write and blocks all other writers"
        todo = (
            f"continue it (kill -CONT {pid}), or end it (kill -KILL {pid}): "
            "its open transaction is rolled back"
        )
        yield Finding("writer", True, text, todo, {"pid": pid, "state": "stopped"})


def _transactions(facts: StoreFacts) -> Iterator[Finding]:
    for pid, program, seconds, state in facts.long_transactions:
        session = f"session {pid} ({program or 'no name'}, {state})"
        text = f"{session} has been in a transaction for {seconds} s"
        todo = "end it; until then dead rows accumulate and claims become slow"
        yield Finding(
            "transaction", True, text, todo, {"pid": pid, "seconds": seconds, "state": state}
        )


def _wakeups(facts: StoreFacts) -> Iterator[Finding]:
    if not facts.echo:
        todo = (
            "connect to the server directly, or add ?pooler=transaction to the URL; "
            "then nodes poll once a second"
        )
        yield Finding("listener", True, "NOTIFY does not arrive through this connection", todo)
    for node in facts.nodes:
        if node.id in facts.deaf:
            text = f"node {node.name} does not receive wake-ups"
            todo = "it polls once a second; if this continues, read its log and restart it"
            yield Finding("listener", True, text, todo, {"node": node.name})


def _nodes(facts: StoreFacts) -> Iterator[Finding]:
    waiting = sum(count for _, count, _ in facts.queues)
    if not facts.nodes:
        todo = "start one: genba node start module:app" if waiting else None
        yield Finding(
            "nodes",
            waiting > 0,
            f"no node is alive, and {waiting} jobs wait",
            todo,
            {"waiting": waiting},
        )
        return
    names = [node.name for node in facts.nodes]
    yield Finding(
        "nodes",
        False,
        f"{len(names)} nodes are alive: {', '.join(names[:8])}",
        None,
        {"nodes": names},
    )
    for node in facts.nodes:
        silent = node.seen_at - node.beat_at
        if 2 * silent > node.lease:
            text = f"node {node.name} has been silent for {_words(silent)}"
            todo = (
                f"its jobs are taken over after {_words(node.lease)}; "
                f"read its log and check the load of {node.host}"
            )
            yield Finding("beat", True, text, todo, {"node": node.name, "seconds": silent / SECOND})
    versions = {node.version: node.name for node in facts.nodes}
    if len(versions) > 1:
        text = f"nodes have different versions of genba: {', '.join(sorted(versions))}"
        yield Finding("versions", False, text, None, {"versions": sorted(versions)})


def _tasks(facts: StoreFacts) -> Iterator[Finding]:
    known = {task for node in facts.nodes for task in node.knows}
    unknown: dict[str, int] = {}
    for why, _, count in facts.parked:
        task = why.removeprefix("unknown task ")
        if task != why and task not in known:
            unknown[task] = unknown.get(task, 0) + count
    for task, count in sorted(unknown.items()):
        text = f"no live node knows task {task}, and {count} jobs wait for it"
        todo = (
            "start a node of the app that has it, or cancel them: genba job cancel --task " + task
        )
        yield Finding("task", True, text, todo, {"task": task, "jobs": count})


def _queues(facts: StoreFacts) -> Iterator[Finding]:
    served = {queue for node in facts.nodes for queue in node.serves}
    for queue, count, first in facts.queues if facts.nodes else ():
        data = {"queue": queue, "waiting": count}
        age = facts.now - first
        if queue not in served:
            todo = f"start one with -q {queue}"
            yield Finding(
                "queue",
                True,
                f"no live node serves queue {queue}, and {count} jobs wait in it",
                todo,
                data,
            )
        elif age > MAX_WAIT:
            todo = (
                "give it more slots (genba node set) or more nodes; "
                "genba job explain says why a job waits"
            )
            yield Finding(
                "queue",
                False,
                f"queue {queue}: {count} jobs wait, the first for {_words(age)}",
                todo,
                data,
            )
    parked: dict[str, int] = {}
    for why, _, count in facts.parked:
        if not why.startswith("unknown task "):
            parked[why] = parked.get(why, 0) + count
    for why, count in sorted(parked.items()):
        yield Finding(
            "parked", False, f"{count} jobs are parked: {why}", None, {"why": why, "jobs": count}
        )


def _maintenance(facts: StoreFacts) -> Iterator[Finding]:
    late, first = facts.overdue
    todo = "nodes do this; check that they are alive and not overloaded"
    if late and first is not None:
        text = f"{late} scheduled jobs are overdue, the first for {_words(facts.now - first)}"
        yield Finding("overdue", True, text, todo, {"jobs": late})
    for name, moment in facts.late_schedules:
        text = f"schedule {name} should have run {_words(facts.now - moment)} ago"
        yield Finding("schedule", True, text, todo, {"schedule": name})
    for job, node in facts.abandoned:
        text = f"job {job} is running on node {node}, which has ended"
        yield Finding("abandoned", True, text, todo, {"job": job, "node": node})


def _held(facts: StoreFacts) -> Iterator[Finding]:
    for reason, count in facts.held:
        text = f"{count} jobs are held: {reason}"
        yield Finding(
            "held",
            False,
            text,
            "genba job resume, or genba job cancel",
            {"reason": reason, "jobs": count},
        )
    for name, why in facts.stopped_schedules:
        text = f"schedule {name} is paused" + (f": {why}" if why else "")
        yield Finding("paused", False, text, f"genba schedule resume {name}", {"schedule": name})


def _words(time: Micros) -> str:
    """Format a time rounded to seconds, at least one."""
    return format_duration(max(1, round(time / SECOND)) * SECOND)


CHECKS: tuple[DoctorCheck, ...] = (
    _engine,
    _disk,
    _clock,
    _unused_space,
    _writer,
    _transactions,
    _wakeups,
    _nodes,
    _tasks,
    _queues,
    _maintenance,
    _held,
)
