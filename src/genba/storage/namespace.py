"""One namespace of a database, with what every change of its jobs needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from genba.domain.duration import Micros
from genba.errors import StoreError
from genba.storage.engines.database import Database
from genba.storage.events import Events, current_operator
from genba.storage.limits.slots import LimitSlots
from genba.storage.wakeups import NodeWakeups


class Namespace:
    """What the parts of a store share.

    `age_step` is how much waiting time one point of priority is worth.  It is the same for every
    part that ranks jobs.
    """

    def __init__(
        self, database: Database, name: str, node_wakeups: NodeWakeups, age_step: Micros
    ) -> None:
        self.database = database
        self.name = name
        self.node_wakeups = node_wakeups
        self.age_step = age_step
        self.events = Events(database, name)
        self.limits = LimitSlots(database, name)
        # The operator's name in the history of changes made by hand.
        self.changed_by: Callable[[], str] = current_operator

    def wake_nodes(self) -> None:
        """Wake the hungry nodes after a change that is committed."""
        with suppress(StoreError):  # nodes look every second anyway
            self.node_wakeups.wake_nodes(self.name, None)

    def wake_for_granted(self) -> bool:
        """Wake nodes for jobs that a limit has let go, if there are any."""
        granted, self.limits.queues.granted = self.limits.queues.granted, False
        if granted:
            self.node_wakeups.wake_nodes(self.name, None, 8)
        return granted
