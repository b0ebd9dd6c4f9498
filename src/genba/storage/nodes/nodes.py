"""Nodes: they come, beat, are declared dead, and what they held is taken over."""

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

ORPHANS_PER_CALL = 500  # taken over in one transaction, as the query says


class Orphan(NamedTuple):
    """A job whose node is gone (the order is that of the query)."""

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
    """What a renewal tells: False means that others have declared us dead."""

    alive: bool
    now: Micros
    draining: bool


class DueWork(NamedTuple):
    """What there is to do (the order is that of the query)."""

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
    lines: bool  # jobs stand in a line, or have a slot and wait
    running: bool  # anybody's
    sessions: bool  # or locks, or who waits for one
    work: bool


class EndJobs(Protocol):
    def __call__(
        self, tx: Transaction, node: int | None, ended: Sequence[Ending]
    ) -> set[JobId]: ...


Judge = Callable[[Orphan, Micros], Ending]
TaskChanges = dict[
    str, dict[str, tuple[Any, Any]]
]  # by task, by option: what was told before, and what is said now

_json = msgspec.json.Encoder(order="deterministic")


def _diff(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(before.keys() | now.keys())
    return {
        name: (before.get(name), now.get(name))
        for name in names
        if before.get(name) != now.get(name)
    }


class NameTaken(GenbaError):
    """A live node has this name already."""


class _Limited(msgspec.Struct):
    """What a stored definition says of limits."""

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
        self._obeyed: set[int] = set()  # commands that may still be there
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        self._end = end
        self._events = events

    def join(self, node: NewNode) -> TaskChanges:
        """Become a member, and tell what it can run; NameTaken if a living one has the name.

        Gives what it says otherwise than was told of its tasks before.
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
                    return changed  # by ourselves: the answer was lost
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
        """Tell what `node` can run from now on; gives what is otherwise than before."""
        with self._db.transaction() as tx:
            names = msgspec.json.encode([definition["name"] for definition in tasks]).decode()
            served = msgspec.json.encode(queues).decode()
            known = tx.one("set_node_tasks", id=node, tasks=names, queues=served)
            changed = self._declare(tx, tasks, node, known[0]) if known else {}
            if known:
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
        told = {row[0]: (row[1], row[2]) for row in tx.all("tasks", namespace=self._namespace)}
        for definition in sorted(tasks, key=itemgetter("name")):  # two that join must not cross
            task, title = definition["name"], definition.get("title")
            before, now = told.get(task), (title, _json.encode(definition).decode())
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
        """What these tasks say of their templates; BadTask if others, that run, say something else."""
        said = {
            rule[0]: (LimitRule(*rule), one["name"])
            for one in tasks
            for rule in one.get("limits", ())
        }
        if not said:
            return
        ours = {one["name"] for one in tasks}
        nodes = tx.all("live_nodes", namespace=self._namespace)
        live = {name for row in nodes for name in NodeRecord(*row).knows}
        for name, _, definition, *_ in tx.all("tasks", namespace=self._namespace):
            if name in live and name not in ours:
                for rule in read_json(definition, _Limited, _Limited()).limits:
                    if rule[0] in said and said[rule[0]][0] != rule:
                        raise BadTask(
                            f"bucket {rule[0]!r}: task {said[rule[0]][1]!r} says {said[rule[0]][0].n}, and task "
                            f"{name!r}, of a node that runs, says {rule[1]}; n is the template's"
                        )
        self._limits.declare(tx, [rule for rule, _ in said.values()])

    def renew(self, node: int) -> LeaseRenewal:
        """Prolong the lease; one statement, so that a node that is stopped in the middle of it keeps no row locked."""
        with self._db.single_write() as tx:
            row = tx.one("renew_node", id=node)
            return (
                LeaseRenewal(False, tx.now(), False)
                if row is None
                else LeaseRenewal(True, row[0], row[1] == "draining")
            )

    def due_work(self, node: int, queues: Sequence[str], tasks: Sequence[str]) -> DueWork:
        """One look at everything; reads only."""
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
        """What is new.  Read first, and forgotten then: if no answer came to that, none of them would be lost."""
        with self._db.statement() as tx:
            found = sorted(Command(*row) for row in tx.all("commands", node=node))
        new = [command for command in found if command.seq not in self._obeyed]
        self._obeyed = {command.seq for command in found}
        with (
            suppress(StoreError),
            self._db.single_write() as tx,
        ):  # with the next look, then, and they are not new
            tx.batch("delete_commands", [(command.seq,) for command in found])
        return new

    def hungry(self, node: int, hungry: bool) -> None:
        """Producers look for this before they ring."""
        if self._db.parallel_writers > 1:
            with self._db.single_write() as tx:
                tx.all("set_hungry", id=node, hungry=hungry)

    def drain(self, node: int) -> None:
        with self._db.transaction() as tx:
            tx.one("set_node_state", id=node, state="draining", hungry=False)

    def command(self, node: int, verb: str, data: str | None = None) -> None:
        """Let a living node do something; a hint makes it look at once."""
        with self._db.transaction() as tx:
            tx.run("insert_command", node=node, job_id=None, attempt=None, verb=verb, data=data)
        with suppress(StoreError):  # it finds it with its next look
            self._wakeups.wake_node(node)

    def resize(self, node: int, slots: int, pool: Mapping[str, Any]) -> None:
        with self._db.transaction() as tx:
            tx.run("set_pool", id=node, slots=slots, pool=msgspec.json.encode(pool).decode())

    def tell(self, node: int, events: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Write what has happened on a node: (kind, more) each."""
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
        """Those that have ended or died on this machine since its start, of any namespace, as far as they are known."""
        with self._db.statement() as tx:
            return [row[0] for row in tx.all("ended_nodes_on_host", host=host, boot_id=boot_id)]

    def silence(self, nodes: Sequence[NodeRecord]) -> dict[int, Micros]:
        """How long each of those that live has not been heard, whatever becomes of the store's clock."""
        return self._watch.silence(nodes, self._steady())

    def suspects(self, nodes: Sequence[NodeRecord], me: int) -> list[NodeRecord]:
        """Those whose lock is free."""
        return [node for node in nodes if node.id != me and self._wakeups.lock_is_free(node)]

    def declare_dead(self, node: int, judge: Judge) -> list[JobId]:
        """Declare `node` dead and take over what it held, up to ORPHANS jobs a call."""
        with self._db.transaction() as tx:
            if tx.one("set_node_state", id=node, state="dead", hungry=False):
                self._tell(tx, "node_lost", node)
            return self._take_over(tx, node, judge)

    def take_over_jobs(self, node: int, judge: Judge) -> list[JobId]:
        """Take over what a node left behind when it was declared dead."""
        with self._db.transaction() as tx:
            return self._take_over(tx, node, judge)

    def left_behind(self) -> list[int]:
        """Nodes that are dead, or gone from the table, and still hold jobs."""
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
        """Names that some live node can run."""
        return {name for node in self.live() for name in node.knows}

    def _tell(self, tx: Transaction, kind: str, node: int, **more: Any) -> None:
        self._events.add(tx, kind, node=node, **more)
