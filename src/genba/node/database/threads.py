"""The threads of a node that use the database: writers, and maintenance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from genba.domain.clock import Clock
from genba.node.database.join import boot_id
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.node.database.writer import Writer
from genba.node.settings import NodeSettings
from genba.node.timing import FINISH_SECONDS
from genba.node.watch.counters import Counters
from genba.storage.schedules.rows import declared_schedules
from genba.storage.store import Store


class DatabaseThreads:
    """One writer on SQLite.  On PostgreSQL three: two write ends of jobs, and one claims."""

    def __init__(
        self,
        store: Store,
        node: int,
        settings: NodeSettings,
        contents: dict[str, Any],
        clock: Clock,
        post: Callable[[Any], None],
        counters: Counters | None,
    ) -> None:
        tasks = [task["name"] for task in contents["tasks"]]
        lost_claims = LostClaims(clock)
        names = ("writer", "second", "claimer") if store.parallel_writers > 1 else ("writer",)
        self._all_writers = [
            Writer(name, store, node, tasks, lost_claims, post, counters) for name in names
        ]
        self._success_writers = self._all_writers[:-1] or self._all_writers
        self.writer, self.claimer = self._all_writers[0], self._all_writers[-1]
        self.maintenance = Maintenance(
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
            lost_claims=lost_claims,
            post=post,
        )

    @property
    def _threads(self) -> list[Writer | Maintenance]:
        return [*self._all_writers, self.maintenance]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Write what is there, and end."""
        for thread in self._threads:
            thread.finish(FINISH_SECONDS)

    def dead_threads(self) -> list[str]:
        """Give the names of threads that have died."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    @property
    def all_written(self) -> bool:
        """Whether nothing about jobs is left to write."""
        return all(writer.all_written for writer in self._all_writers)

    @property
    def success_writer(self) -> Writer:
        """The writer for successes that has less to do."""
        return min(self._success_writers, key=Writer.load)

    def on_wakeup(self) -> None:
        """Note that the process that woke this node has cleared the node's flag."""
        for writer in self._all_writers:
            writer.on_wakeup()

    def set_app(self, contents: dict[str, Any], queues: Sequence[str]) -> None:
        """Use the tasks, schedules and conditions of an app that was imported again."""
        conditions = contents.get("conditions", ())
        schedules = declared_schedules(contents)
        self.maintenance.set_app(contents["tasks"], queues, schedules, conditions)
        for writer in self._all_writers:
            writer.set_tasks([task["name"] for task in contents["tasks"]])
