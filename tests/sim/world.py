"""A world in one thread: the real Store on SQLite in memory, real brains, writers and maintenance; all else is played.

Played are the clock, the network between nodes and database, the bells, the processes below a node, and whatever
goes wrong with them, all of it out of one seed: the same seed gives the same history, up to the names of claims.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from genba.domain.clock import ManualClock
from genba.errors import StoreUnreachable
from genba.storage.engines.database import TABLES, AnswerLost
from genba.storage.engines.queries import Query
from genba.storage.engines.sqlite.database import SqliteDatabase
from genba.storage.engines.sqlite.file_checks import SqliteLocation
from genba.storage.engines.sqlite.transaction import SqliteTransaction
from genba.storage.engines.sqlite.wakeups import SqliteClientWakeups, SqliteNodeWakeups
from genba.storage.records import NodeRecord
from genba.storage.store import Store
from genba.storage.store import queries as all_queries

MS = 1_000
SECOND = 1_000_000
START = 1_767_225_600 * SECOND
LEASE = 5 * SECOND
BOOT = "sim"


@dataclass
class Run:
    """A worker was in a job, from `began` on, whatever the database came to know of it."""

    job: int
    attempt: int
    claim: int
    began: int
    ended: int | None = None
    completed: bool = False
    disturbed: bool = False  # its node was hit by something while it ran
    hold: Any = None  # of the lock

    def end(self, now: int) -> None:
        self.ended = now
        if self.hold is not None and self.hold.ended is None:
            self.hold.ended = now


class Time(ManualClock):
    def go_on(self, micros: int) -> None:
        """`advance`, for calls that happen hundreds of times in a world."""
        self._now += micros
        self._boot += micros


@dataclass
class Mood:
    """How bad this world is: chances, of each call or of each second."""

    before: float = 0.0  # a call that may write fails, and nothing has happened
    after: float = 0.0  # a call that may write fails, and it has happened
    pause: float = 0.0  # a node is paused where it stands, at a call
    lost_bell: float = 0.2
    reads: float = 0.0  # a call that only reads fails


@dataclass
class World:
    rng: random.Random
    clock: Time
    database: SqliteDatabase
    mood: Mood = field(default_factory=Mood)
    runs: list[Run] = field(default_factory=list)
    hits: set[str] = field(default_factory=set)  # what has gone wrong so far
    nodes: dict[int, Any] = field(default_factory=dict)  # by id, those that live
    visitors: list[Any] = field(default_factory=list)  # processes outside of jobs
    holds: list[Any] = field(default_factory=list)  # of the lock
    harm: list[str] = field(default_factory=list)
    false_alarms: int = 0  # nodes that were buried though nothing but the database had failed them
    more: random.Random = field(
        default_factory=lambda: random.Random(0)
    )  # for what came later than the first seeds
    calls: int = 0  # transactions so far
    reads: int = 0  # ... and statements that only read
    fails: tuple[int, str] = (
        0,
        "",
    )  # the number of one that fails: "before" or "after" it happens, or a "read"
    down: bool = False  # the database, for everybody
    quiet: bool = False  # nothing goes wrong any more

    def __post_init__(self) -> None:
        self._agenda: list[tuple[int, int, Callable[[], None], Any]] = []
        self._count = 0
        self._depth = 0

    # time

    @property
    def now(self) -> int:
        return self.clock.boot()

    def at(self, delay: float, act: Callable[[], None], owner: Any = None) -> None:
        """In so many micros; not while its owner is paused, and never if that is dead by then."""
        self._count += 1
        heapq.heappush(self._agenda, (self.now + int(delay), self._count, act, owner))

    def run(self, until: int, done: Callable[[], bool] = lambda: False) -> bool:
        """Until that moment, or until it is done; whether it is."""
        look = 0
        while self._agenda and self._agenda[0][0] <= until:
            moment, _, act, owner = heapq.heappop(self._agenda)
            self.clock.go_on(max(0, moment - self.now))
            if owner is not None and not owner.alive:
                continue
            if owner is not None and owner.paused:
                owner.late.append(act)
                continue
            act()
            if self.clock.boot() >= look:  # to ask after each act would cost more than the acts
                look = self.clock.boot() + 100 * MS
                if done():
                    return True
        self.clock.go_on(max(0, until - self.now))
        return done()

    # what goes wrong at a call

    def happens(self, chance: float, rng: random.Random | None = None) -> bool:
        return not self.quiet and chance > 0 and (rng or self.rng).random() < chance

    def pause_here(self, node: Any) -> None:
        """The world goes on without this node, which stands in the middle of something."""
        if self._depth < 2 and node is not None and node.alive and not node.paused:
            self._depth += 1
            self.hits.add("paused at a call")
            node.pause()
            self.run(self.now + int(LEASE * self.rng.choice((0.1, 0.5, 1.2, 2.5))))
            node.resume()
            self._depth -= 1

    def ring(self) -> None:
        for node in list(self.nodes.values()):
            if not self.happens(self.mood.lost_bell):
                self.at(self.rng.uniform(0, 3 * MS), node.rung, node)


class Process:
    """One that can be paused where it stands, or killed; or cut off from the database."""

    cut = False

    def __init__(self, world: World) -> None:
        self.alive, self.paused = True, False
        self.late: deque[Callable[[], None]] = deque()
        self._world = world

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        while self.late and self.alive and not self.paused:
            self._world.at(0, self.late.popleft(), self)


class Unsteady(SqliteDatabase):
    """The way to the one database, of a node or a client: calls fail before or after they happen, or take a while."""

    def __init__(self, world: World, node: Any = None) -> None:
        vars(self).update(vars(world.database))  # the same connection
        self._world = world
        self._node = node

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        world = self._world
        self._check()
        world.calls += 1
        fails = world.fails[1] if world.calls == world.fails[0] else ""
        if world.happens(world.mood.pause):
            world.pause_here(self._node)
            self._check()
        if fails == "before" or world.happens(world.mood.before):
            world.hits.add("failed before it happened")
            raise StoreUnreachable("sim: refused")
        conn = self._idle[0]
        with (
            self.store_errors()
        ):  # as the real one does it, without its locks: there is one thread, and one connection
            conn.execute("BEGIN IMMEDIATE")
            try:
                yield SqliteTransaction(conn, self, begun=True)
                conn.execute("COMMIT")
            except BaseException:
                conn.execute("ROLLBACK")
                raise
        world.clock.go_on(200)
        if world.happens(world.mood.pause):
            world.pause_here(self._node)
            if self._node is not None and not self._node.alive:
                raise Gone
        if fails == "after" or world.happens(world.mood.after):
            world.hits.add("failed after it happened")
            raise AnswerLost("sim: the answer was lost")

    @contextmanager
    def statement(self) -> Iterator[SqliteTransaction]:
        """It writes nothing, so that failing before or after is the same."""
        world = self._world
        self._check()
        world.reads += 1
        if world.fails == (world.reads, "read") or world.happens(world.mood.reads, world.more):
            world.hits.add("a read failed")
            raise StoreUnreachable("sim: refused")
        with self.store_errors():
            yield SqliteTransaction(self._idle[0], self)

    def _check(self) -> None:
        if self._node is not None and not self._node.alive:
            raise Gone
        if self._world.down or (self._node is not None and self._node.cut):
            raise StoreUnreachable("sim: no answer")


class Gone(BaseException):
    """The process that made this call has been killed meanwhile."""


class Whispers(SqliteNodeWakeups):
    """Locks that death frees at once, bells that may be lost or late."""

    def __init__(self, world: World) -> None:
        super().__init__(None)
        self._world = world

    def lock_is_free(self, node: NodeRecord) -> bool:
        return node.id not in self._world.nodes

    def wake_nodes(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        self._world.ring()

    def wake_node(self, node: int) -> None:
        if node in self._world.nodes and not self._world.happens(self._world.mood.lost_bell):
            known = self._world.nodes[node]
            self._world.at(self._world.rng.uniform(0, 3 * MS), known.rung, known)


def a_store(world: World, node: Any = None) -> Store:
    store = Store(
        Unsteady(world, node),
        Whispers(world),
        SqliteClientWakeups(None),
        "default",
        LEASE,
        world.clock,
    )
    store.changed_by = lambda: "sim"
    store._installed = (
        True  # by the stage; to read all migrations again for each node takes longer than its life
    )
    return store


class Stage:
    """One database in memory for many worlds: to empty it is quicker than to make it.

    `broken` maps queries to words of theirs, and what stands there instead.
    """

    def __init__(
        self, broken: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType({})
    ) -> None:
        queries = all_queries("sqlite")
        for name, changes in broken.items():
            for words, instead in changes:
                query = queries[name]
                assert words in query.text
                queries[name] = Query(
                    name, query.text.replace(words, instead), query.columns, query.literals
                )
        self._database = SqliteDatabase(
            SqliteLocation(None, "apsw", False), queries, ManualClock(START)
        )
        Store(
            self._database, SqliteNodeWakeups(None), SqliteClientWakeups(None), "default", LEASE
        ).install()

    def world(self, seed: int) -> World:
        with self._database.transaction() as tx:
            for table in sorted(TABLES - {"migration", "sequence", "namespace"}):
                tx.select(f"DELETE FROM genba.{table}")
        random.seed(seed)  # maintenance takes theirs from here
        clock = Time(START)
        self._database.clock = clock
        return World(
            random.Random(seed), clock, self._database, more=random.Random(f"more of {seed}")
        )
