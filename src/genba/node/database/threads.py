"""The threads of a node that talk to the database: desks, which write, and a keeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from genba.domain.clock import Clock
from genba.node.database.join import boot_id
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.node.database.writer import Writer
from genba.node.settings import NodeSettings
from genba.node.watch.counters import Counters
from genba.storage.schedules.rows import declared_schedules
from genba.storage.store import Store

FINISH = 10.0  # seconds for each to write what it has


class DatabaseThreads:
    """On PostgreSQL two desks end jobs, since one session would be what all others wait for, and a third claims."""

    def __init__(
        self,
        store: Store,
        node: int,
        settings: NodeSettings,
        contents: dict[str, Any],
        clock: Clock,
        post: Callable[[Any], None],
        meter: Counters | None,
    ) -> None:
        tasks = [task["name"] for task in contents["tasks"]]
        doubts = LostClaims(clock)
        names = ("writer", "second", "claimer") if store.parallel_writers > 1 else ("writer",)
        self._desks = [Writer(name, store, node, tasks, doubts, post, meter) for name in names]
        self._writers = self._desks[:-1] or self._desks
        self.writer, self.claimer = self._desks[0], self._desks[-1]
        self.keeper = Maintenance(
            store,
            node,
            lease=int(contents["lease"]),
            poll=settings.poll,
            queues=list(settings.queues),
            tasks=tasks,
            conditions=contents.get("conditions", ()),
            keep={task["name"]: task.get("keep") for task in contents["tasks"]},
            keep_events=contents["keep_events"],
            max_events=contents["max_events"],
            schedules=declared_schedules(contents),
            boot_id=boot_id() if store.parallel_writers == 1 else None,
            clock=clock,
            doubts=doubts,
            post=post,
        )

    @property
    def _threads(self) -> list[Writer | Maintenance]:
        return [*self._desks, self.keeper]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Write what is there, and end."""
        for thread in self._threads:
            thread.finish(FINISH)

    def dead(self) -> list[str]:
        """Names of threads that should be there and are not."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    @property
    def clear(self) -> bool:
        """Nothing about jobs is left to write."""
        return all(desk.clear for desk in self._desks)

    @property
    def finisher(self) -> Writer:
        """For jobs that simply succeeded: whoever has less to do."""
        return min(self._writers, key=Writer.load)

    def rung(self) -> None:
        """Whoever rang has cleared our flag."""
        for desk in self._desks:
            desk.rung()

    def serve(self, contents: dict[str, Any], queues: Sequence[str]) -> None:
        """The app was imported again, and may have other tasks."""
        self.keeper.serve(
            contents["tasks"], queues, declared_schedules(contents), contents.get("conditions", ())
        )
        for desk in self._desks:
            desk.serve([task["name"] for task in contents["tasks"]])
