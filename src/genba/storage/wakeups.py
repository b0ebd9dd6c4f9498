"""Wake-ups: hints that make a node or a client look at once.

A wake-up may be lost; that costs the poll interval, never a job or a message. Its receiver also
holds a lock as long as its process lives. A free lock makes other nodes suspect early that the
process is dead; without it they wait for the lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from genba.storage.records import NodeRecord


class NodeWakeups(Protocol):
    """Wake-ups of nodes: sent by producers and operators, received by one node."""

    @property
    def times_connected(self) -> int:
        """How often the receiving end was opened."""
        ...

    def register(self, node: int) -> None:
        """Hold the node's lock, and open the receiving end."""
        ...

    def check(self, within: float) -> bool:
        """Repair the receiving end if it is broken; return False if it was."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable after a wake-up; -1 if there is none."""
        ...

    def clear(self) -> None:
        """Forget the wake-ups received so far."""
        ...

    def unregister(self) -> None: ...

    def lock_is_free(self, node: NodeRecord) -> bool:
        """Test the node's lock; if it is free, the node is probably dead."""
        ...

    def is_unreachable(self, node: NodeRecord) -> bool:
        """Test whether a wake-up for this living node is lost."""
        ...

    def are_delivered(self) -> bool:
        """Test whether a wake-up arrives at all, through a connection like ours."""
        ...

    def wake_nodes(self, namespace: str, queue: str | None, jobs: int = 1) -> None:
        """Wake up to `jobs` nodes, because there is work in `queue` (None: in some queue)."""
        ...

    def wake_node(self, node: int) -> None:
        """Wake one node, because there is a command for it."""
        ...

    def close(self) -> None: ...


class WakeupReceiver(Protocol):
    def fileno(self) -> int:
        """Return a descriptor, readable after a wake-up or if it is broken; -1 if there is none."""
        ...

    def clear(self) -> None:
        """Forget the wake-ups received so far, and repair the receiver if it is broken."""
        ...

    def close(self) -> None: ...


class ClientWakeups(Protocol):
    """Wake-ups of client processes: a lock is free, a message has arrived."""

    def open_receiver(self, id: int) -> WakeupReceiver:
        """Hold the lock of this id, and open its receiving end."""
        ...

    def wake_clients(self, ids: Iterable[int]) -> None: ...

    def lock_is_free(self, id: int) -> bool:
        """Test the lock of this id; if it is free, its process is probably dead."""
        ...

    def remove(self, id: int) -> None:
        """Remove what a dead process left."""
        ...

    def remove_stale(self) -> None:
        """Remove what all dead processes left."""
        ...


class NoReceiver:
    """For a database in memory, or behind a pooler: no wake-ups arrive."""

    def fileno(self) -> int:
        return -1

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass
