"""What the database and its nodes report about themselves, for `doctor` to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genba.domain.clock import Clock
from genba.storage.engines.database import Database, DiskInfo, WritingProcess
from genba.storage.records import Micros, NodeRecord
from genba.storage.wakeups import NodeWakeups

LATE_US = 60_000_000  # work that is overdue for longer is not being done


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """All facts, at one moment; those that an engine does not have are empty."""

    now: Micros  # by the store's clock
    skew: Micros  # how much this machine's clock is ahead of it
    engine: str
    version: str
    home: DiskInfo
    writer: WritingProcess | None  # if only one can write at a time
    waste: Sequence[tuple[str, int, int]]  # of what, bytes in all, unused bytes
    long_transactions: Sequence[tuple[int, str, int, str]]  # pid, program, seconds, state
    nodes: Sequence[NodeRecord]
    deaf: frozenset[int]  # nodes that wake-ups do not reach
    echo: bool  # whether wake-ups arrive through a connection like this
    queues: Sequence[tuple[str, int, Micros]]  # queue, jobs that may start now, since when
    parked: Sequence[tuple[str, str, int]]  # reason, queue, how many
    overdue: tuple[int, Micros | None]  # scheduled jobs that should have started; the first moment
    held: Sequence[tuple[str | None, int]]  # reason, how many
    late_schedules: Sequence[tuple[str, Micros]]
    stopped_schedules: Sequence[tuple[str, str | None]]
    abandoned: Sequence[tuple[int, str]]  # job, its node that has ended


class DoctorFacts:
    def __init__(
        self, database: Database, wakeups: NodeWakeups, namespace: str, clock: Clock
    ) -> None:
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._clock = clock

    def collect(
        self, nodes: Sequence[NodeRecord], parked: Sequence[tuple[str, str, int]], patience: int
    ) -> StoreFacts:
        """`patience`: seconds after which a transaction is long."""
        mine = {"namespace": self._namespace}
        with self._db.statement() as tx:
            before = self._clock.now()
            now = tx.now()
            skew = (before + self._clock.now()) // 2 - now
            engine = tx.one("engine")
            assert engine is not None
            overdue = tx.one("overdue_jobs", **mine, before=now - LATE_US)
            assert overdue is not None
            return StoreFacts(
                now=now,
                skew=skew,
                engine=engine[0],
                version=engine[1],
                home=self._db.disk(),
                writer=self._db.writing_process(any_holder=True),
                waste=[(row[0], row[1], row[2]) for row in tx.all("unused_space")],
                long_transactions=[
                    (row[0], row[1], row[2], row[3])
                    for row in tx.all("long_transactions", seconds=patience)
                ],
                nodes=nodes,
                deaf=frozenset(node.id for node in nodes if self._wakeups.is_unreachable(node)),
                echo=self._wakeups.are_delivered(),
                queues=[(row[0], row[1], row[2]) for row in tx.all("oldest_of_queues", **mine)],
                parked=parked,
                overdue=(overdue[0], overdue[1]),
                held=[(row[0], row[1]) for row in tx.all("held_reasons", **mine)],
                late_schedules=[
                    (row[0], row[1])
                    for row in tx.all("late_schedules", **mine, before=now - LATE_US)
                ],
                stopped_schedules=[(row[0], row[1]) for row in tx.all("stopped_schedules", **mine)],
                abandoned=[
                    (row[0], row[1])
                    for row in tx.all("jobs_of_ended_nodes", **mine, before=now - LATE_US)
                ],
            )
