"""The table of nodes: join, renew, receive commands, leave, be declared dead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import msgspec

from genba.domain.limits import LimitRule
from genba.domain.untrusted_json import read_json
from genba.errors import BadTask, GenbaError, StoreError
from genba.storage.engines.database import Database, Transaction
from genba.storage.events import Events
from genba.storage.limits.slots import LimitSlots
from genba.storage.nodes.dead_nodes import HeartbeatWatch
from genba.storage.records import Command, Ending, JobId, Micros, NewNode, NodeRecord
from genba.storage.wakeups import NodeWakeups

ORPHANS_PER_CALL = 500  # the limit in the query


class Orphan(NamedTuple):
    """A running job whose node is dead, in the order of the query."""

    id: JobId
    attempt: int
    claim: int
    started_mark: Micros | None
    claimed_at: Micros
    priority: int
    retries: int
    crashes: int
    losses: int
    options: str | None
    cancel_requested: str | None
    task: str


class LeaseRenewal(NamedTuple):
    """The result of a renewal; `alive` is False if the node was declared dead."""

    alive: bool
    now: Micros
    draining: bool


class DueWork(NamedTuple):
    """What maintenance has to do next, in the order of the query."""

    now: Micros
    next_due: Micros | None
    next_expiry: Micros | None
    unsettled: bool
    commands: bool
    epoch: int
    pause_ends: Micros | None
    next_tick: Micros | None
    recheck: bool
    next_ripe: Micros | None
    next_look: Micros | None  # at a condition
    lines: bool  # jobs are parked, or have a slot and wait
    running: bool  # jobs of any node
    sessions: bool  # or locks, or waiters for them
    work: bool


class EndJobs(Protocol):
    def __call__(
        self, tx: Transaction, node: int | None, ended: Sequence[Ending]
    ) -> set[JobId]: ...


Judge = Callable[[Orphan, Micros], Ending]
# By task, by option: the value that was declared before, and the new one.
TaskChanges = dict[str, dict[str, tuple[Any, Any]]]

_json = msgspec.json.Encoder(order="deterministic")


def _diff(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(before.keys() | now.keys())
    return {
        name: (before.get(name), now.get(name))
        for name in names
        if before.get(name) != now.get(name)
    }


class NameTaken(GenbaError):
    """A living node has this name already."""


class _Limited(msgspec.Struct):
    """The limits in a stored definition."""

    limits: list[LimitRule] = []


class Nodes:
    def __init__(
        self,
        database: Database,
        wakeups: NodeWakeups,
        namespace: str,
        end: EndJobs,
        events: Events,
        limits: LimitSlots,
        steady: Callable[[], Micros],
    ) -> None:
        self._limits = limits
        self._steady = steady
        self._watch = HeartbeatWatch()
        self._read_commands: set[int] = set()  # they may still be in the table
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._end = end
        self._events = events

    def join(self, node: NewNode) -> TaskChanges:
        """Register a node and its tasks; NameTaken if a living node has the name.

        Returns the definitions that differ from those declared before.
        """
        with self._db.transaction() as tx:
            changed = self._declare(tx, node.tasks, node.id, node.name)
            self._declare_queues(tx, node.queues)
            joined = tx.one(
                "join_node",
                id=node.id,
                lease=node.lease,
                pid=node.pid,
                slots=node.slots,
                pool=msgspec.json.encode(node.pool).decode(),
                namespace=self._namespace,
                name=node.name,
                host=node.host,
                boot_id=node.boot_id,
                version=node.version,
                queues=msgspec.json.encode(node.queues).decode(),
                tasks=msgspec.json.encode(
                    [definition["name"] for definition in node.tasks]
                ).decode(),
            )
            if joined is None:
                other = tx.one("node_named", namespace=self._namespace, name=node.name)
                if other and other[0] == node.id:
                    return changed  # we joined before, and the answer was lost
                where = f" (host {other[1]}, pid {other[2]})" if other else ""
                raise NameTaken(
                    f"a live node is called {node.name!r} already{where}: choose another --name"
                )
            self._tell(tx, "node_joined", node.id, name=node.name, host=node.host, pid=node.pid)
            self._limit(tx, node.tasks)
            return changed

    def declare(
        self, node: int, tasks: Sequence[dict[str, Any]], queues: Sequence[str]
    ) -> TaskChanges:
        """Declare what `node` runs from now on; return the definitions that differ from before."""
        with self._db.transaction() as tx:
            names = msgspec.json.encode([definition["name"] for definition in tasks]).decode()
            served = msgspec.json.encode(queues).decode()
            row = tx.one("set_node_tasks", id=node, tasks=names, queues=served)
            changed = self._declare(tx, tasks, node, row[0]) if row else {}
            if row:
                self._declare_queues(tx, queues)
                self._limit(tx, tasks)
            return changed

    def _declare_queues(self, tx: Transaction, queues: Sequence[str]) -> None:
        for queue in sorted(queues):
            tx.run("declare_queue", namespace=self._namespace, name=queue)

    def _declare(
        self, tx: Transaction, tasks: Sequence[dict[str, Any]], node: int, name: str
    ) -> TaskChanges:
        by, changed = f"node {name}", {}
        declared = {row[0]: (row[1], row[2]) for row in tx.all("tasks", namespace=self._namespace)}
        # In one order, so that two nodes that join do not wait for each other.
        for definition in sorted(tasks, key=itemgetter("name")):
            task, title = definition["name"], definition.get("title")
            before, now = declared.get(task), (title, _json.encode(definition).decode())
            if before != now and tx.run(
                "declare_task",
                namespace=self._namespace,
                name=task,
                title=title,
                definition=now[1],
                by=by,
            ):  # or another was faster, and said the same
                diff = (
                    {}
                    if before is None
                    else _diff(read_json(before[1], dict[str, Any], {}), definition)
                )
                if diff:
                    changed[task] = diff
                    self._tell(tx, "task_changed", node, task=task, by=by, diff=diff)
            fair_by, queue = definition.get("fair_by"), definition.get("queue", "default")
            if fair_by and tx.one(
                "make_fair", namespace=self._namespace, name=queue, fair_by=fair_by
            ):
                tx.run("next_epoch", namespace=self._namespace)
        return changed

    def _limit(self, tx: Transaction, tasks: Sequence[dict[str, Any]]) -> None:
        """Declare the limits of these tasks.

        BadTask if a task of a living node declares another limit for the same template.
        """
        declared = {
            rule[0]: (LimitRule(*rule), task["name"])
            for task in tasks
            for rule in task.get("limits", ())
        }
        if not declared:
            return
        ours = {task["name"] for task in tasks}
        nodes = tx.all("live_nodes", namespace=self._namespace)
        live = {name for row in nodes for name in NodeRecord(*row).knows}
        for name, _, definition, *_ in tx.all("tasks", namespace=self._namespace):
            if name in live and name not in ours:
                for rule in read_json(definition, _Limited, _Limited()).limits:
                    if rule[0] in declared and declared[rule[0]][0] != rule:
                        own_rule, task = declared[rule[0]]
                        raise BadTask(
                            f"bucket {rule[0]!r}: task {task!r} says {own_rule.n}, and task "
                            f"{name!r}, of a node that runs, says {rule[1]}; n is the template's"
                        )
        self._limits.declare(tx, [rule for rule, _ in declared.values()])

    def renew(self, node: int) -> LeaseRenewal:
        """Renew the lease.

        One statement, so that a node that is stopped in the middle of it keeps no row locked.
        """
        with self._db.single_write() as tx:
            row = tx.one("renew_node", id=node)
            return (
                LeaseRenewal(False, tx.now(), False)
                if row is None
                else LeaseRenewal(True, row[0], row[1] == "draining")
            )

    def due_work(self, node: int, queues: Sequence[str], tasks: Sequence[str]) -> DueWork:
        """Read everything that may have to be done; writes nothing."""
        with self._db.statement() as tx:
            row = tx.one("due_work", namespace=self._namespace, node=node)
            assert row is not None
            work = tx.one(
                "any_work",
                namespace=self._namespace,
                queues=tx.names(queues),
                tasks=tx.names(tasks),
            )
            return DueWork._make((*row, work is not None))

    def commands(self, node: int) -> list[Command]:
        """Return the new commands.

        They are read before they are deleted, so that none is lost with the answer.
        """
        with self._db.statement() as tx:
            commands = sorted(Command(*row) for row in tx.all("commands", node=node))
        new = [command for command in commands if command.seq not in self._read_commands]
        self._read_commands = {command.seq for command in commands}
        # If this fails, the next call deletes them, and does not return them again.
        with suppress(StoreError), self._db.single_write() as tx:
            tx.batch("delete_commands", [(command.seq,) for command in commands])
        return new

    def hungry(self, node: int, hungry: bool) -> None:
        """Note whether the node wants jobs: producers wake only hungry nodes."""
        if self._db.parallel_writers > 1:
            with self._db.single_write() as tx:
                tx.all("set_hungry", id=node, hungry=hungry)

    def drain(self, node: int) -> None:
        with self._db.transaction() as tx:
            tx.one("set_node_state", id=node, state="draining", hungry=False)

    def command(self, node: int, verb: str, data: str | None = None) -> None:
        """Send a command to a living node, and wake it."""
        with self._db.transaction() as tx:
            tx.run("insert_command", node=node, job_id=None, attempt=None, verb=verb, data=data)
        with suppress(StoreError):  # the node finds it at its next look
            self._wakeups.wake_node(node)

    def resize(self, node: int, slots: int, pool: Mapping[str, Any]) -> None:
        with self._db.transaction() as tx:
            tx.run("set_pool", id=node, slots=slots, pool=msgspec.json.encode(pool).decode())

    def tell(self, node: int, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Record events of a node: (kind, more) each."""
        with self._db.transaction() as tx:
            for kind, more in events:
                self._tell(tx, kind, node, **more)

    def leave(self, node: int) -> None:
        with self._db.transaction() as tx:
            if tx.one("set_node_state", id=node, state="ended", hungry=False):
                self._tell(tx, "node_left", node)

    def live(self) -> list[NodeRecord]:
        with self._db.statement() as tx:
            return [NodeRecord(*row) for row in tx.all("live_nodes", namespace=self._namespace)]

    def ended_on_host(self, host: str, boot_id: str) -> list[int]:
        """Return known nodes of any namespace that ended or died here since the machine's start."""
        with self._db.statement() as tx:
            return [row[0] for row in tx.all("ended_nodes_on_host", host=host, boot_id=boot_id)]

    def silence(self, nodes: Sequence[NodeRecord]) -> dict[int, Micros]:
        """Return how long each living node has been silent, even if the store's clock was set."""
        return self._watch.silence(nodes, self._steady())

    def suspects(self, nodes: Sequence[NodeRecord], me: int) -> list[NodeRecord]:
        """Return the nodes whose lock is free."""
        return [node for node in nodes if node.id != me and self._wakeups.lock_is_free(node)]

    def declare_dead(self, node: int, judge: Judge) -> list[JobId]:
        """Declare `node` dead and take over its jobs, up to ORPHANS_PER_CALL."""
        with self._db.transaction() as tx:
            if tx.one("set_node_state", id=node, state="dead", hungry=False):
                self._tell(tx, "node_lost", node)
            return self._take_over(tx, node, judge)

    def take_over_jobs(self, node: int, judge: Judge) -> list[JobId]:
        """Take over jobs that a node still held when it was declared dead."""
        with self._db.transaction() as tx:
            return self._take_over(tx, node, judge)

    def left_behind(self) -> list[int]:
        """Return nodes that are dead, or deleted from the table, and still hold jobs."""
        with self._db.statement() as tx:
            rows = [
                *tx.all("dead_nodes_with_jobs", namespace=self._namespace),
                *tx.all("missing_nodes_with_jobs", namespace=self._namespace),
            ]
            return sorted({row[0] for row in rows})

    def _take_over(self, tx: Transaction, node: int, judge: Judge) -> list[JobId]:
        rows = tx.all("orphans", node=node)
        if not rows:
            return []
        now = tx.now()
        return sorted(self._end(tx, node, [judge(Orphan(*row), now) for row in rows]))

    def names(self) -> dict[int, str]:
        with self._db.statement() as tx:
            return {row[0]: row[1] for row in tx.all("node_names", namespace=self._namespace)}

    def forget(self, before: Micros) -> int:
        with self._db.transaction() as tx:
            return tx.run("forget_nodes", namespace=self._namespace, before=before)

    def known_tasks(self) -> set[str]:
        """Return the tasks that some living node can run."""
        return {name for node in self.live() for name in node.knows}

    def _tell(self, tx: Transaction, kind: str, node: int, **more: Any) -> None:
        self._events.add(tx, kind, node=node, **more)
