"""Store: what genba does with its database; one method is one use case is one transaction."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from genba.domain.clock import Clock, SystemClock
from genba.domain.rank import AGE_STEP
from genba.domain.states import default_stop_reason
from genba.domain.untrusted_json import read_json
from genba.domain.url import mask_password, split_url
from genba.errors import BadOption, StoreError
from genba.storage.clients.listener import ClientListener
from genba.storage.clients.locks import Locks
from genba.storage.clients.messages import Messages
from genba.storage.clients.sessions import Sessions
from genba.storage.clock_set_back import ClockSetBack
from genba.storage.doctor_facts import DoctorFacts
from genba.storage.engines import migrate
from genba.storage.engines.database import Database, Transaction, WritingProcess
from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.engines.postgres.wakeups import PostgresClientWakeups, PostgresNodeWakeups
from genba.storage.engines.queries import Query, load_queries
from genba.storage.engines.sqlite.database import SqliteDatabase
from genba.storage.engines.sqlite.file_checks import SqliteLocation
from genba.storage.engines.sqlite.wakeups import SqliteClientWakeups, SqliteNodeWakeups
from genba.storage.events import Events, current_operator
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.bulk import DELETED_WITH_JOB, BulkChanges
from genba.storage.jobs.conditions import Conditions, Steering
from genba.storage.jobs.counts import JobCounts
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.enqueue import Enqueuer
from genba.storage.jobs.fairness import Fairness
from genba.storage.jobs.own_writes import OwnWrites
from genba.storage.jobs.prune import Pruner
from genba.storage.jobs.search import Search
from genba.storage.limits.slots import LimitSlots
from genba.storage.nodes.nodes import Nodes
from genba.storage.operators import OperatorRules, Operators
from genba.storage.records import (
    BOOST,
    HISTORY,
    JOB_COLUMNS,
    AttemptRecord,
    Claimed,
    Ending,
    Enqueued,
    JobId,
    JobRecord,
    Micros,
    NewJob,
    Success,
    is_quiet,
)
from genba.storage.schedules.schedules import Schedules
from genba.storage.verify import VerifyReport, verify
from genba.storage.wakeups import ClientWakeups, NodeWakeups

SIZES = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
)  # claims come in few sizes, each a prepared statement
FRONT = 2000  # jobs that are looked at for tasks that nobody knows: about a claim
DEFAULT_URL = "sqlite:///genba.db"
LEASE_US: Micros = 15_000_000
_claimed: Callable[[Any], Claimed] = partial(
    tuple.__new__, Claimed
)  # without a call of its Python constructor
_PATIENCE = (0.0, 0.02, 0.05, 0.1, 0.1)  # seconds before each try to get a row that somebody holds
_SHARED = {
    "{columns}": JOB_COLUMNS,
    "{history}": HISTORY,
    "{boost}": BOOST.replace("{priority}", "CAST(priority AS bigint)"),
    "{boost after crashes}": BOOST.replace("{priority}", "(CAST(priority AS bigint) - crashes)"),
}


def open_store(
    url: str,
    *,
    namespace: str = "default",
    clock: Clock | None = None,
    lease: Micros = LEASE_US,
    age_step: Micros = AGE_STEP,
) -> Store:
    """The store behind `url`; nothing is opened before the first call.  A clock of its own is for tests."""
    parts = split_url(url)
    if parts.scheme == "sqlite":
        place = _place(url)
        database = SqliteDatabase(place, queries("sqlite"), clock or SystemClock())
        return Store(
            database,
            SqliteNodeWakeups(place.path),
            SqliteClientWakeups(place.path),
            namespace,
            lease,
            clock,
            age_step,
        )
    if parts.scheme in ("postgresql", "postgres"):
        server = PostgresDatabase(url, queries("postgres"), clock)
        return Store(
            server,
            PostgresNodeWakeups(server),
            PostgresClientWakeups(server),
            namespace,
            lease,
            clock,
            age_step,
        )
    shown = mask_password(url)
    raise BadOption(
        f"{shown!r} is no database URL: use sqlite:///file.db, sqlite:////folder/file.db or postgresql://…"
    )


def queries(dialect: str) -> dict[str, Query]:
    """All statements, with what several of them share written into them."""
    found = load_queries(dialect)
    return {
        name: Query(
            name,
            reduce(lambda text, part: text.replace(*part), _SHARED.items(), query.text),
            query.columns,
            query.literals,
        )
        for name, query in found.items()
    }


def _place(url: str) -> SqliteLocation:
    parts = split_url(url)
    asked = parse_qs(parts.query)
    unknown = set(asked) - {"driver", "network"}
    driver = asked.get("driver", ["apsw"])[0]
    if unknown or driver not in ("apsw", "sqlite3") or asked.get("network", ["allow"]) != ["allow"]:
        raise BadOption(
            f"{mask_password(url)!r}: a sqlite URL takes ?driver=apsw, ?driver=sqlite3 and ?network=allow"
        )
    if parts.netloc:
        raise BadOption(
            f"{mask_password(url)!r}: three slashes before a relative path, four before an absolute one"
        )
    name = unquote(parts.path)[1:]
    path = Path(os.path.abspath(name)) if name and name != ":memory:" else None
    return SqliteLocation(path, driver, "network" in asked)


class Store:
    def __init__(
        self,
        database: Database,
        presence: NodeWakeups,
        bells: ClientWakeups,
        namespace: str,
        lease: Micros,
        clock: Clock | None = None,
        age_step: Micros = AGE_STEP,
    ) -> None:
        steady = (clock or SystemClock()).boot
        self._db = database
        self.node_wakeups = presence
        self.namespace = namespace
        self.age_step = (
            age_step  # how much waiting a priority is worth: the same for all who rank jobs
        )
        self.events = Events(database, namespace)
        self.by: Callable[[], str] = (
            current_operator  # who changes something by hand, for the history
        )
        self.limits = LimitSlots(database, namespace)
        self.enqueuer = Enqueuer(self, database)
        self.running = Attempts(self, database)
        self.nodes = Nodes(
            database, presence, namespace, self.running.end, self.events, self.limits, steady
        )
        self.policy = Operators(database, namespace, self.install, self._wake_all, self.limits)
        self.search = Search(database, namespace)
        self.counts = JobCounts(database, namespace)
        self.doctor_facts = DoctorFacts(database, presence, namespace, clock or SystemClock())
        self.bulk = BulkChanges(self, database)
        self.fairness = Fairness(self, database)
        self.inside = OwnWrites(database, self.events, self.running.end, self._ended_inside)
        self.dependencies = Dependencies(database, namespace, self)
        self.locks = Locks(database, bells, namespace)
        self.messages = Messages(database, bells, namespace)
        self.clock_set_back = ClockSetBack(database, namespace)
        self.pruner = Pruner(database, namespace)
        self.sessions = Sessions(database, bells, namespace, lease, self.locks.free_session, steady)
        self.listener = ClientListener(bells, self.sessions)
        self.schedules = Schedules(database, namespace, self.enqueuer.insert, self._put_down_now)
        steering = Steering(self.running.end, self._put_down_now, self.events, self.limits)
        self.conditions = Conditions(database, namespace, steering)
        self.children_wait = False  # a hint: since it was last cleared, a parent has ended
        self._installed = False

    @property
    def parallel_writers(self) -> int:
        return self._db.parallel_writers

    @property
    def pooler_found(self) -> bool:
        """There is one in transaction mode in between, of which the URL says nothing; known after the first call."""
        return self._db.pooler_found

    def writer(self) -> WritingProcess | None:
        """The process that writes just now, where that is one at a time; never waits."""
        return self._db.writing_process()

    def install(self) -> None:
        """Make the schema current; safe when many processes do it at once, and cheap when it is."""
        if not self._installed:
            migrate.upgrade(self._db)
            with self._db.statement() as tx:
                known = tx.one("namespace_known", namespace=self.namespace)
            if (
                not known
            ):  # looked first: a caller with an open transaction of its own may be the only writer
                with self._db.transaction() as tx:
                    tx.run("declare_namespace", namespace=self.namespace)
            self._installed = True

    def upgrade(self, tell: Callable[[int, int], None] = lambda done, of: None) -> list[str]:
        """Make the schema current; gives the names of the migrations that were applied."""
        applied = migrate.upgrade(self._db, tell)
        self.install()
        return applied

    def objects(self) -> list[str]:
        """Our tables and sequences that are there: what `uninstall` removes."""
        return migrate.objects(self._db)

    def uninstall(self) -> list[str]:
        """Remove our objects, with all jobs, and nothing else; gives their names."""
        self._installed = False
        return sorted(migrate.uninstall(self._db))

    def verify(self) -> VerifyReport:
        """What the history of this installation says of it."""
        self.install()
        return verify(self._db, self.namespace)

    def _wake_all(self) -> None:
        """Every node looks at once, busy or not."""
        with suppress(StoreError):  # they look every second anyway
            for node in self.nodes.live():
                self.node_wakeups.wake_node(node.id)

    def now(self) -> Micros:
        with self._db.statement() as tx:
            return tx.now()

    def write_marker(self) -> object:
        return self._db.write_marker()

    def close(self) -> None:
        self.listener.close()
        self.node_wakeups.close()
        self._db.close()

    # jobs come in

    def enqueue(
        self, jobs: Sequence[NewJob], conn: Any = None, epoch: int | None = None
    ) -> list[Enqueued]:
        """Durable when it returns (with `conn`: when the caller commits); all or nothing.

        RulesChanged, and nothing written, if `epoch` is given and an operator has changed the rules since.
        """
        return self.enqueuer.enqueue(jobs, conn, epoch)

    # jobs are run

    def warm_up(self, node: int) -> None:
        """For a thread that is about to claim and end jobs: a session of its own that knows the tables and the plans.

        The first statements of a session of PostgreSQL take ten times as long as the next ones.
        """
        if self.parallel_writers < 2:
            return
        nobody = Success(-1, 1, 0, b"", 0, 0, 0, 0, 0, 0)
        with self._db.single_write() as tx:
            for limit in (1, max(SIZES)):
                tx.claim(
                    namespace="",
                    queue="",
                    node=node,
                    claim=0,
                    tasks=tx.names(["x"]),
                    epoch=0,
                    limit=limit,
                )
            tx.matched("succeed", [nobody], node=node)

    def finish_and_claim(
        self,
        node: int,
        claim: int,
        ended: Sequence[Success],
        wants: Mapping[str, int],
        tasks: Sequence[str],
    ) -> tuple[set[JobId], list[Claimed]]:
        """Finish one batch and claim the next, in one commit."""
        with self._db.transaction() as tx:
            matched = self.running.succeed(tx, node, ended)
            jobs = self._claim(tx, node, claim, wants, tasks)
        self.running.forget(ended)
        return matched, jobs

    def claim(
        self, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]
    ) -> list[Claimed]:
        """Lease the best due jobs of each queue to `node`; nobody else gets them while it lives."""
        frame = self._db.single_write if len(wants) == 1 else self._db.transaction
        with frame() as tx:
            return self._claim(tx, node, claim, wants, tasks)

    def _claim(
        self, tx: Transaction, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]
    ) -> list[Claimed]:
        got = self._claim_by(tx, self.policy.rules_in(tx), node, claim, wants, tasks)
        if not got and self.policy.stale(tx):
            got = self._claim_by(tx, self.policy.read_rules(tx), node, claim, wants, tasks)
        return got

    def _claim_by(
        self,
        tx: Transaction,
        rules: OperatorRules,
        node: int,
        claim: int,
        wants: Mapping[str, int],
        tasks: Sequence[str],
    ) -> list[Claimed]:
        got: list[Claimed] = []
        known = tx.names(
            [task for task in tasks if task not in rules.disabled] if rules.disabled else tasks
        )
        for queue, count in wants.items():
            if count < 1 or queue in rules.paused:
                continue
            rows = tx.claim(
                namespace=self.namespace,
                queue=queue,
                node=node,
                claim=claim,
                tasks=known,
                epoch=rules.epoch,
                limit=_size(count),
            )
            jobs = sorted(map(_claimed, rows))
            if queue in rules.fair:
                self.fairness.move(tx, queue, jobs)
            got += jobs
        return got

    def claim_dedicated(
        self, node: int, claim: int, queues: Sequence[str], tasks: Sequence[str], limit: int
    ) -> list[Claimed]:
        """Lease dedicated jobs only, of those that are nearly due to be claimed: for a node without a free slot."""
        rules = self.policy.rules()
        known, mark = set(tasks) - rules.disabled, '%"dedicated":true%'
        with self._db.statement() as tx:
            found = [
                id
                for queue in queues
                if queue not in rules.paused
                for id, task in tx.all(
                    "dedicated_ahead", namespace=self.namespace, queue=queue, mark=mark
                )
                if task in known
            ]
        if not found:
            return []
        with self._db.transaction() as tx:
            given = {
                "node": node,
                "claim": claim,
                "namespace": self.namespace,
                "epoch": rules.epoch,
            }
            rows = [tx.one("claim_waiting_job", id=id, **given) for id in found[:limit]]
        return [Claimed(*row) for row in rows if row is not None]

    def claim_job(self, node: int, claim: int, id: JobId) -> Claimed | None:
        """Lease one job to `node`, due or not; None if it is in no state to start."""
        with self._db.single_write() as tx:
            row = tx.one("claim_job", namespace=self.namespace, node=node, claim=claim, id=id)
        return Claimed(*row) if row else None

    def jobs_of_claim(self, node: int, claim: int) -> list[Claimed]:
        """What a claim has taken whose answer was lost."""
        with self._db.statement() as tx:
            return [
                Claimed(*row) for row in sorted(tx.all("jobs_of_claim", node=node, claim=claim))
            ]

    def finish(self, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Record attempts that returned; gives the ids that were still ours, and not asked to stop."""
        with self._db.transaction() as tx:
            matched = self.running.succeed(tx, node, ended)
        self.running.forget(ended)
        return matched

    def end(self, node: int, ended: Sequence[Ending]) -> set[JobId]:
        """Record attempts that ended otherwise; gives the ids that were still ours to end."""
        with self._db.transaction() as tx:
            mine = self.running.end(tx, node, ended)
        self.running.forget(ended)
        self.locks.ring()
        return mine

    def mark(
        self, started: Sequence[tuple[JobId, int, int, Micros]], *, late: bool = False
    ) -> set[JobId]:
        """Note that these attempts (id, attempt, claim, moment) have started; `late`: if nobody holds their rows."""
        return self.running.mark(started, late=late)

    def progress(self, notes: Sequence[tuple[JobId, int, int, str]]) -> set[JobId]:
        return self.running.progress(notes)

    def _ended_inside(self) -> None:
        """A job has ended itself: what follows is what its node does for the others."""
        with suppress(StoreError):  # others do it later
            self.locks.ring()
            if self.children_wait:
                self.children_wait = False
                self.settle()
            self.node_wakeups.wake_nodes(self.namespace, None)

    def wake_for_granted(self) -> bool:
        """Wake nodes for jobs that were let go by a limit, if there are any."""
        handed, self.limits.lines.handed = self.limits.lines.handed, False
        if handed:
            self.node_wakeups.wake_nodes(self.namespace, None, 8)
        return handed

    # jobs are kept in motion

    def promote(self) -> int:
        """Scheduled jobs whose moment has come; how many."""
        with self._db.transaction() as tx:
            rows = tx.all("promote", namespace=self.namespace, age_step=self.age_step)
            self.record_states(tx, [row[:3] for row in rows])
            self.limits.moved(tx, [row[0] for row in rows if row[3] is not None])
            return len(rows)

    def record_states(self, tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
        """(id, state, options) of jobs that have just come into that state."""
        by_state: dict[str, list[JobId]] = {}
        for id, state, options in rows:
            if not is_quiet(options):
                by_state.setdefault(state, []).append(id)
        for state, ids in by_state.items():
            self.events.tell(tx, state, ids)

    def next_due(self) -> Micros | None:
        with self._db.statement() as tx:
            row = tx.one("next_due", namespace=self.namespace)
            return row[0] if row else None

    def settle(self) -> int:
        """Look at the children of parents that have ended; how many parents.  Once more, until there are none."""
        done = self.dependencies.settle()
        for node in self.dependencies.asked():
            self.node_wakeups.wake_node(node)
        return done

    def _put_down_now(self, tx: Transaction, verb: str, id: JobId, reason: str) -> bool:
        done = self.cancel_or_hold(tx, verb, id, reason)
        self.limits.moved(tx, [id])
        return done

    def cancel_or_hold(
        self, tx: Transaction, verb: str, id: JobId, reason: str, by: str | None = None
    ) -> bool:
        """Cancel or hold what has not started; False if it has, or is final.

        The caller tells `limits.moved` of it, after all else that may wait for a row.
        """
        row = tx.one(verb, id=id, namespace=self.namespace, reason=reason)
        if row is None:
            return False
        told: dict[str, Any] = {"reason": reason} if by is None else {"reason": reason, "by": by}
        if verb == "cancel":
            self.running.runs_ended(tx, [(id, "cancelled", row[1])])
            self.running.after_end(tx, "cancelled", [id], **told)
        else:
            self.events.tell(tx, "held", [id], **told)
        return True

    def expire(self) -> int:
        with self._db.transaction() as tx:
            rows = tx.all("expire", namespace=self.namespace)
            ids = [row[0] for row in rows]
            self.running.runs_ended(tx, [(id, "cancelled", schedule) for id, schedule in rows])
            self.running.after_end(tx, "cancelled", ids, reason="expired")
            self.limits.moved(tx, ids)
            return len(ids)

    def park_unknown(self, queue: str, known: Iterable[str]) -> int:
        """Put aside the jobs in front that no live node can run; how many.

        The look takes no lock, and reads no more than the front: what is further back is put aside when it comes there.
        """
        with self._db.statement() as tx:
            tasks = tx.names(sorted(known))
            rows = tx.all(
                "unknown_in_front", namespace=self.namespace, queue=queue, tasks=tasks, front=FRONT
            )
        if not rows:
            return 0
        with self._db.transaction() as tx:
            return tx.run("park_unknown", ids=tx.numbers([id for (id,) in rows]), tasks=tasks)

    def unpark(self, reasons: Iterable[str]) -> int:
        with self._db.transaction() as tx:
            rows = [
                row
                for reason in reasons
                for row in tx.all("unpark", namespace=self.namespace, parked_on=reason)
            ]
            self.limits.moved(tx, [id for id, buckets in rows if buckets is not None])
            return len(rows)

    def parked_on(self, reasons: Iterable[str]) -> set[str]:
        """Those of these that jobs are parked on."""
        with self._db.statement() as tx:
            return {
                row[0]
                for row in tx.batch(
                    "parked_on_reasons", [(one,) for one in reasons], namespace=self.namespace
                )
            }

    def prune(self, before: Micros) -> int:
        """Delete up to 500 jobs that ended before `before`, with their history; how many."""
        with self._db.transaction() as tx:
            gone = tx.all("prune", namespace=self.namespace, before=before)
            for name in DELETED_WITH_JOB:
                tx.batch(name, gone)
            return len(gone)

    # people look and steer

    def job(self, id: JobId | None = None, *, key: str | None = None) -> JobRecord | None:
        self.install()
        with self._db.statement() as tx:
            if key is not None:
                row = tx.one("job_by_key", namespace=self.namespace, key=key)
            else:
                row = tx.one("job", namespace=self.namespace, id=id)
            return JobRecord(*row) if row else None

    def attempts(self, id: JobId) -> list[AttemptRecord]:
        with self._db.statement() as tx:
            return [AttemptRecord(*row) for row in tx.all("attempts", id=id)]

    def states(self, ids: Sequence[JobId]) -> dict[JobId, str]:
        with self._db.statement() as tx:
            return {
                row[0]: row[1]
                for row in tx.batch("states", [(id,) for id in ids], namespace=self.namespace)
            }

    def definitions(self, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What nodes have told of these tasks; those that no node ever had are left out."""
        self.install()
        with self._db.statement() as tx:
            rows = [
                tx.one("task_definition", namespace=self.namespace, name=task)
                for task in sorted(tasks)
            ]
        told = {row[0]: read_json(row[1], dict[str, Any], {}) for row in rows if row}
        return {task: definition for task, definition in told.items() if definition}

    def ahead(self, job: JobRecord) -> int:
        """How many waiting jobs of its queue start before it."""
        with self._db.statement() as tx:
            row = tx.one(
                "count_ahead", namespace=self.namespace, queue=job.queue, rank=job.rank, id=job.id
            )
            return int(row[0]) if row else 0

    def cancel(self, id: JobId, reason: str | None, how: str = "cancel") -> bool:
        """What has not started is cancelled, what runs is asked to stop; False if it was final already."""
        with self._db.transaction() as tx:
            asked, told = None, reason or default_stop_reason(how)
            down = self.cancel_or_hold(tx, "cancel", id, told, by=self.by())
            if not down and (asked := self.ask_to_stop(tx, id, how, reason)) is None:
                # It may have been given back meanwhile.
                down = self.cancel_or_hold(tx, "cancel", id, told, by=self.by())
            if not down and asked is None:
                return False
            if down:
                self.limits.moved(tx, [id])
        with suppress(StoreError):  # it is asked for: what is left is done by others, later
            if asked is None:
                self.settle()
                self.wake_for_granted()
            else:
                self.node_wakeups.wake_node(asked)
        return True

    def cancel_all(self, ids: Sequence[JobId], reason: str | None) -> int:
        """Those of these jobs that are not final; how many."""
        count, asked = 0, set()
        for start in range(0, len(ids), 500):
            with self._db.transaction() as tx:
                gone = []
                for id in sorted(ids[start : start + 500]):
                    if self.cancel_or_hold(tx, "cancel", id, reason or "cancelled"):
                        count += 1
                        gone.append(id)
                    elif (node := self.ask_to_stop(tx, id, "cancel", reason)) is not None:
                        asked.add(node)
                        count += 1
                self.limits.moved(tx, gone)
        with suppress(StoreError):  # as in cancel
            self.settle()
            self.wake_for_granted()
            for node in asked:
                self.node_wakeups.wake_node(node)
        return count

    def ask_to_stop(self, tx: Transaction, id: JobId, how: str, reason: str | None) -> int | None:
        """Which node was asked; None if none runs it.

        A job holds its own row while its `transaction()` is open.  Its node is told then, and the row is not: if the
        job commits before it has heard of it, it has ended by itself.
        """
        row = None
        for pause in _PATIENCE:
            time.sleep(pause)
            row = tx.one("request_stop", id=id, namespace=self.namespace, how=how, reason=reason)
            known = row or tx.one("node_of_job", id=id, namespace=self.namespace)
            if row or known is None:
                break
            row = known
        if row is None:
            return None
        node, attempt = row
        tx.run("insert_command", node=node, job_id=id, attempt=attempt, verb=how, data=reason)
        self.events.tell(
            tx, "stop_requested", [id], how=how, reason=reason, by=self.by(), attempt=attempt
        )
        return int(node)

    def hold(self, id: JobId, reason: str) -> bool:
        return self._steer("hold", "held", id, reason=reason)

    def resume(self, id: JobId) -> bool:
        return self._steer("resume", "resumed", id, age_step=self.age_step)

    def requeue(self, id: JobId) -> bool:
        """A final job runs again; those that were cancelled or held because of it wait for it again."""
        with self._db.transaction() as tx:
            if not self.running.requeue(tx, id):
                return False
            self.events.tell(tx, "requeued", [id], by=self.by())
            self.dependencies.reopen(tx, id)
            self.limits.moved(tx, [id])
        self._ring_all()
        return True

    def requeue_failed(self, ids: Sequence[JobId]) -> int:
        """Those of these jobs that did not succeed; not those that never ran because of others.  How many."""
        with self._db.statement() as tx:
            failed = [
                row[0]
                for row in tx.batch(
                    "unsuccessful_jobs", [(id,) for id in ids], namespace=self.namespace
                )
            ]
        return sum(map(self.requeue, sorted(failed)))

    def _steer(self, verb: str, kind: str, id: JobId, **values: Any) -> bool:
        with self._db.transaction() as tx:
            done = tx.one(verb, id=id, namespace=self.namespace, **values)
            if done:
                why = {"reason": values["reason"]} if "reason" in values else {"state": done[0]}
                self.events.tell(tx, kind, [id], by=self.by(), **why)
                self.limits.moved(tx, [id])
        if done:
            self._ring_all()
        return done is not None

    def _ring_all(self) -> None:
        with suppress(StoreError):  # it is done: nodes look every second anyway
            self.node_wakeups.wake_nodes(self.namespace, None)


def _size(count: int) -> int:
    """The largest of the few sizes that does not exceed `count`."""
    return max((size for size in SIZES if size <= count), default=1)
