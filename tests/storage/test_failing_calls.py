"""For every method of the store that writes: each of its calls to the database fails, and it is called again.

Afterwards all is as if it had been called once; what may differ is said with the scene (`tests/storage/scenes.py`).
"""

from __future__ import annotations

import ast
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import psycopg
import pytest
from tests.storage.builders import install
from tests.storage.failing import LOST, WAYS, Failing, said
from tests.storage.scenes import SCENES, Play, Scene

from genba.domain.clock import ManualClock
from genba.domain.liveness import DEFAULT_LEASE_US
from genba.errors import StoreError, StoreUnreachable
from genba.storage.engines.database import TABLES
from genba.storage.store import Store, open_store

START = 1_767_225_600_000_000
SILENT = {"_db", "node_wakeups", "_wakeups"}  # parts that write no rows of ours
# What only reads, or changes nothing but what is in memory.
READS = {
    "Store": "objects verify now write_marker close job attempts_of states ahead writer",
    "Namespace": "wake_nodes",
    "Claims": "jobs_of_claim",
    "DueJobs": "next_due",
    "ParkedJobs": "reasons_among",
    "Events": "page end tasks_of",
    "LimitSlots": "rules line",
    "Nodes": "due_work live ended_on_host silence suspects left_behind names known_tasks",
    "Operators": "rules refresh definitions tasks task queues waiting parked",
    "Search": "jobs ids count usual_duration busy_nodes",
    "JobCounts": "read",
    "DoctorFacts": "collect",
    "BulkChanges": "each",
    "Attempts": "forget_starts",
    "OwnWrites": "ended",
    "Dependencies": "open_parents results_of_parents",
    "Locks": "look held assert_held wake_called holders waiters nodes_in_the_way",
    "Pruner": "begin",
    "Sessions": "all remove_stale",
    "ClientListener": "listening enter leave mark wait await_ lost forget later close",
    "Schedules": "all named open_runs ticks abandoned",
    "Conditions": "check",
}
ELSEWHERE = {"Store.uninstall"}  # below


def parts() -> dict[str, type]:
    store = open_store("sqlite:///:memory:")
    found: list[type] = [
        Store,
        *(type(part) for name, part in vars(store).items() if name not in SILENT),
    ]
    return {kind.__name__: kind for kind in found if kind.__module__.startswith("genba.storage")}


def use_cases() -> dict[str, Any]:
    """Public methods that are not part of another's transaction."""
    return {
        f"{part}.{name}": method
        for part, kind in parts().items()
        for name, method in vars(kind).items()
        if not name.startswith("_")
        and isinstance(inspect.unwrap(method), types.FunctionType)
        and "tx" not in inspect.signature(method).parameters
    }


def test_every_method_that_writes_has_a_scene():
    reads = {f"{part}.{name}" for part, names in READS.items() for name in names.split()}
    played = {name for scene in SCENES for name in scene.of} | ELSEWHERE

    assert use_cases().keys() - reads - played == set(), (
        "write a scene for these, or say that they only read"
    )
    assert (reads | played) - use_cases().keys() == set(), "there are none of these"
    assert reads & played == set()


def test_what_is_said_to_read_only_opens_no_frame_for_writing():
    reads = {f"{part}.{name}" for part, names in READS.items() for name in names.split()}
    cases = use_cases()
    writers = sorted(
        name for name in reads if _writes(parts()[name.partition(".")[0]], cases[name])
    )

    assert writers == []


def _writes(part: type, method: Any) -> bool:
    """By itself, or by a method of its own part."""
    pending, seen = [method], set()
    while pending:
        tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(pending.pop()))))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                if node.attr in ("transaction", "single_write", "pipeline", "job_transaction"):
                    return True
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                called = vars(part).get(node.attr) if own and node.attr not in seen else None
                if isinstance(called, types.FunctionType) and node.attr not in (
                    "install",
                    "_install",
                ):
                    seen.add(node.attr)
                    pending.append(called)
    return False


class Stage:
    """One database for all scenes, emptied before each: to make one takes longer than most of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._first = open_store(url, clock=ManualClock(START))
        self._server = psycopg.connect(url, autocommit=True) if url.startswith("postgres") else None
        self.database: Any = self._first._db

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._first.close()

    def play(self) -> Play:
        clock = ManualClock(START)
        self.database.clock = clock
        tables = sorted(
            TABLES - {"migration", "sequence"} - ({"argument"} if self._server else set())
        )
        if self._server is not None:
            self._server.execute("; ".join(f"DELETE FROM genba.{table}" for table in tables))
        else:
            with self.database.transaction() as tx:
                for table in tables:
                    tx.select(f"DELETE FROM genba.{table}")

        def store(namespace: str) -> Store:
            like = self._first
            made = Store(
                self.database,
                like.node_wakeups,
                like.listener._wakeups,
                namespace,
                DEFAULT_LEASE_US,
                clock,
            )
            made.changed_by = lambda: "me"
            return made

        first = store("default")
        first.install()
        return Play(first, clock, store)


@pytest.fixture(scope="module")
def stage(home: tuple[str, Path]) -> Iterator[Stage]:
    install(home[0])
    stage = Stage(home[0])
    yield stage
    stage.close()


def run(
    stage: Stage, scene: Scene, number: int, way: str
) -> tuple[Failing, dict[str, Counter[Any]]]:
    play = stage.play()
    act = scene.prepare(play)
    failing = Failing(stage.database)
    failing.number, failing.way = number, way
    with failing.armed():
        try:
            act()
        except StoreError:
            failing.number = 0  # one of them, and no more
            _again(scene, act, way)
    _keep(play.store)
    for check in play.checks:
        check()
    there = said(play.store)
    assert play.store.verify().faults == []
    return failing, there


def _keep(store: Store) -> None:
    """What the maintenance of other nodes does for a dead one."""
    while store.settle():
        pass
    store.operators.refresh()
    store.operators.keep_parked()


def _again(scene: Scene, act: Callable[[], Any], way: str) -> None:
    try:
        act()
    except scene.over:
        assert way == LOST, "it was over, and had never happened"


def differences(
    once: dict[str, Counter[Any]], now: dict[str, Counter[Any]], twice: frozenset[str]
) -> list[str]:
    found = []
    for table in once:
        for row in once[table] | now[table]:
            more = now[table][row] - once[table][row]
            allowed = table in twice or (table == "event" and row[0] in twice)
            if more and not (allowed and (more == 1 or table in ("job", "tick", "schedule"))):
                found.append(f"{more:+} {table}: {row}")
    return found


NAMES = [f"{scene.of[0]} {number}" for number, scene in enumerate(SCENES)]


@pytest.mark.parametrize("scene", SCENES, ids=NAMES)
def test_whichever_call_fails_it_is_done_once_when_it_is_called_again(
    stage: Stage, scene: Scene
) -> None:
    clean, once = run(stage, scene, 0, "")
    assert clean.frames or stage.database.parallel_writers == 1  # what one engine alone has to do

    for number, ways in enumerate(clean.frames, 1):
        for way in WAYS:
            if way in ways:
                _, now = run(stage, scene, number, way)
                doubled = scene.twice | (
                    scene.unsynced if stage.database.dialect == "sqlite" else frozenset()
                )
                differing = differences(once, now, doubled if way == LOST else frozenset())
                assert differing == [], f"call {number} of {len(clean.frames)} was {way}"


@pytest.mark.parametrize("way", ["refused", "lost"])
def test_an_uninstall_that_fails_is_done_again(empty_url: str, way: str) -> None:
    store = open_store(empty_url)
    store.install()
    failing = Failing(store._db)
    failing.number, failing.way = 1, way
    with failing.armed(), pytest.raises(StoreUnreachable):
        store.uninstall()

    store.uninstall()

    assert store.objects() == []
    store.install()
    assert store.verify().faults == []
    store.close()
