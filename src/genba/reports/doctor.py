"""What is wrong with an installation, and what to do about it.

Each thing that goes wrong in practice has one small asker below; what they judge was seen at one moment
(`storage/doctor_facts.py`), so that they are pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from genba.domain.duration import format_duration
from genba.storage.doctor_facts import StoreFacts
from genba.storage.engines.sqlite.database import has_wal_reset_bug
from genba.storage.engines.sqlite.file_checks import NETWORK_FILE_SYSTEMS
from genba.storage.store import Store

SKEW = 1_000_000  # micros between two clocks
LONG = 300  # seconds of a transaction
WASTE = 100 * 2**20  # bytes that hold nothing, and half of all
SPACE = 500 * 2**20  # bytes that a disk should have left
WAITING = 600_000_000  # micros that a job may wait though a node serves its queue


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: `wrong`, or only worth knowing; `todo` is what to do about it."""

    kind: str
    wrong: bool
    text: str
    todo: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text if self.todo is None else f"{self.text}: {self.todo}"


def examine(store: Store) -> list[Finding]:
    """What is wrong comes first; what is fine is told too, so that one knows what was looked at."""
    store.install()
    found = findings(store.doctor_facts.collect(store.nodes.live(), store.policy.parked(), LONG))
    return sorted(found, key=lambda one: not one.wrong)


def findings(vitals: StoreFacts) -> list[Finding]:
    return [finding for ask in ASKERS for finding in ask(vitals)]


Asker = Callable[[StoreFacts], Iterable[Finding]]


def _engine(seen: StoreFacts) -> Iterator[Finding]:
    data = {"engine": seen.engine, "version": seen.version}
    said = f"{seen.engine} {seen.version}"
    numbers = tuple(map(int, re.findall(r"\d+", seen.version)[:3]))
    if seen.engine == "SQLite" and has_wal_reset_bug(numbers):
        todo = "use the default driver, apsw, which brings a sound one"
        yield Finding(
            "engine", True, f"{said} may corrupt a file that two processes write", todo, data
        )
    elif seen.engine == "PostgreSQL" and numbers < (14,):
        yield Finding(
            "engine", True, f"{said} is older than genba can use", "upgrade it to 14 or later", data
        )
    else:
        yield Finding("engine", False, said, None, data)


def _home(seen: StoreFacts) -> Iterator[Finding]:
    kind, free = seen.home.file_system, seen.home.free
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
    if free is not None and free < SPACE:
        yield Finding(
            "disk", True, f"only {free >> 20} MB are free on its disk", "make room", {"free": free}
        )


def _clock(seen: StoreFacts) -> Iterator[Finding]:
    ahead = seen.skew / 1_000_000
    wrong = abs(seen.skew) > SKEW
    text = f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the database's"
    todo = (
        "let both follow the same time server; naive moments are read by this clock"
        if wrong
        else None
    )
    yield Finding("clock", wrong, text, todo, {"seconds": ahead})


def _waste(seen: StoreFacts) -> Iterator[Finding]:
    for what, size, empty in seen.waste:
        if empty > WASTE and 2 * empty > size:
            text = f"{what}: {empty >> 20} of {size >> 20} MB hold nothing"
            todo = "VACUUM it, and see what keeps it from being vacuumed (long transactions)"
            yield Finding("bloat", True, text, todo, {"what": what, "size": size, "empty": empty})


def _writer(seen: StoreFacts) -> Iterator[Finding]:
    if seen.writer and seen.writer.stopped:
        pid = seen.writer.pid
        text = f"process {pid} is stopped in the middle of a write, and nobody else can write"
        todo = f"let it go on (kill -CONT {pid}), or end it (kill -KILL {pid}): what it has not committed is undone"
        yield Finding("writer", True, text, todo, {"pid": pid, "state": "stopped"})


def _transactions(seen: StoreFacts) -> Iterator[Finding]:
    for pid, program, seconds, state in seen.long_transactions:
        text = (
            f"session {pid} ({program or 'no name'}, {state}) is in a transaction since {seconds} s"
        )
        todo = "end it: dead rows pile up meanwhile, and claims become slow"
        yield Finding(
            "transaction", True, text, todo, {"pid": pid, "seconds": seconds, "state": state}
        )


def _hearing(seen: StoreFacts) -> Iterator[Finding]:
    if not seen.echo:
        todo = "connect to the server, or say ?pooler=transaction in its URL; nodes look once a second then"
        yield Finding("listener", True, "NOTIFY does not arrive through this connection", todo)
    for node in seen.nodes:
        if node.id in seen.deaf:
            text = f"node {node.name} hears no knock"
            todo = "it looks once a second; if this stays, see its log and restart it"
            yield Finding("listener", True, text, todo, {"node": node.name})


def _nodes(seen: StoreFacts) -> Iterator[Finding]:
    waiting = sum(count for _, count, _ in seen.queues)
    if not seen.nodes:
        todo = "start one: genba node start module:app" if waiting else None
        yield Finding(
            "nodes",
            waiting > 0,
            f"no node is alive, {waiting} jobs wait",
            todo,
            {"waiting": waiting},
        )
        return
    names = [node.name for node in seen.nodes]
    yield Finding(
        "nodes",
        False,
        f"{len(names)} nodes are alive: {', '.join(names[:8])}",
        None,
        {"nodes": names},
    )
    for node in seen.nodes:
        silent = node.seen_at - node.beat_at
        if 2 * silent > node.lease:
            text = f"node {node.name} has been silent for {_words(silent)}"
            todo = f"its jobs are taken over after {_words(node.lease)}; see its log, and the load of {node.host}"
            yield Finding(
                "beat", True, text, todo, {"node": node.name, "seconds": silent / 1_000_000}
            )
    versions = {node.version: node.name for node in seen.nodes}
    if len(versions) > 1:
        text = f"nodes have different versions of genba: {', '.join(sorted(versions))}"
        yield Finding("versions", False, text, None, {"versions": sorted(versions)})


def _tasks(seen: StoreFacts) -> Iterator[Finding]:
    known = {task for node in seen.nodes for task in node.knows}
    unknown: dict[str, int] = {}
    for why, _, count in seen.parked:
        task = why.removeprefix("unknown task ")
        if task != why and task not in known:
            unknown[task] = unknown.get(task, 0) + count
    for task, count in sorted(unknown.items()):
        text = f"no living node knows task {task}, {count} jobs wait for one"
        todo = (
            "start a node of the app that has it, or cancel them: genba job cancel --task " + task
        )
        yield Finding("task", True, text, todo, {"task": task, "jobs": count})


def _queues(seen: StoreFacts) -> Iterator[Finding]:
    served = {queue for node in seen.nodes for queue in node.serves}
    for queue, count, first in seen.queues if seen.nodes else ():
        data = {"queue": queue, "waiting": count}
        age = seen.now - first
        if queue not in served:
            todo = f"start one with -q {queue}"
            yield Finding(
                "queue",
                True,
                f"no living node serves queue {queue}, {count} jobs wait in it",
                todo,
                data,
            )
        elif age > WAITING:
            todo = "more slots (genba node set), or more nodes; genba job explain says why one of them waits"
            yield Finding(
                "queue",
                False,
                f"queue {queue}: {count} jobs wait, the first for {_words(age)}",
                todo,
                data,
            )
    parked: dict[str, int] = {}
    for why, _, count in seen.parked:
        if not why.startswith("unknown task "):
            parked[why] = parked.get(why, 0) + count
    for why, count in sorted(parked.items()):
        yield Finding(
            "parked", False, f"{count} jobs are parked: {why}", None, {"why": why, "jobs": count}
        )


def _maintenance(seen: StoreFacts) -> Iterator[Finding]:
    late, first = seen.overdue
    todo = "nodes do this: are they alive, and not at their limit?"
    if late and first is not None:
        text = f"{late} scheduled jobs should wait since {_words(seen.now - first)}, and nobody has moved them"
        yield Finding("overdue", True, text, todo, {"jobs": late})
    for name, moment in seen.late_schedules:
        text = f"schedule {name} should have run {_words(seen.now - moment)} ago"
        yield Finding("schedule", True, text, todo, {"schedule": name})
    for job, node in seen.abandoned:
        text = f"job {job} is running on node {node}, which has ended"
        yield Finding("abandoned", True, text, todo, {"job": job, "node": node})


def _people(seen: StoreFacts) -> Iterator[Finding]:
    for reason, count in seen.held:
        text = f"{count} jobs are held: {reason}"
        yield Finding(
            "held",
            False,
            text,
            "genba job resume, or genba job cancel",
            {"reason": reason, "jobs": count},
        )
    for name, why in seen.stopped_schedules:
        text = f"schedule {name} is paused" + (f": {why}" if why else "")
        yield Finding("paused", False, text, f"genba schedule resume {name}", {"schedule": name})


def _words(time: int) -> str:
    return format_duration(max(1, round(time / 1_000_000)) * 1_000_000)


ASKERS: tuple[Asker, ...] = (
    *(
        _engine,
        _home,
        _clock,
        _waste,
        _writer,
        _transactions,
        _hearing,
        _nodes,
        _tasks,
        _queues,
        _maintenance,
        _people,
    ),
)
