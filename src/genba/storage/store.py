"""The store: what genba does with its database; one method is one use case and one transaction.

This module opens a database and wires the parts.  The parts are in `jobs/`, `limits/`,
`schedules/`, `nodes/` and `clients/`; each docstring there says which locks its transactions take,
and in which order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from urllib.parse import parse_qs, unquote

from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import Micros
from genba.domain.liveness import DEFAULT_LEASE_US
from genba.domain.rank import AGE_STEP
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
from genba.storage.jobs.attempts import Attempts
from genba.storage.jobs.bulk import BulkChanges
from genba.storage.jobs.claim import Claims
from genba.storage.jobs.conditions import Conditions
from genba.storage.jobs.counts import JobCounts
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.due import DueJobs
from genba.storage.jobs.enqueue import Enqueuer
from genba.storage.jobs.fairness import Fairness
from genba.storage.jobs.own_writes import OwnWrites
from genba.storage.jobs.parked import ParkedJobs
from genba.storage.jobs.prune import Pruner
from genba.storage.jobs.search import Search
from genba.storage.jobs.settle import Settler
from genba.storage.jobs.steer import Steering
from genba.storage.jobs.stop import Stopping
from genba.storage.namespace import Namespace
from genba.storage.nodes.nodes import Nodes
from genba.storage.operators import Operators
from genba.storage.records import (
    BOOST,
    HISTORY,
    JOB_COLUMNS,
    AttemptRecord,
    JobId,
    JobRecord,
    NewJob,
)
from genba.storage.schedules.rows import RunEnd
from genba.storage.schedules.schedules import Schedules
from genba.storage.schedules.ticks import Ticks
from genba.storage.verify import VerifyReport, verify
from genba.storage.wakeups import ClientWakeups, NodeWakeups

DEFAULT_URL = "sqlite:///genba.db"
# Pieces that several queries share.
_SHARED_SQL = {
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
    lease: Micros = DEFAULT_LEASE_US,
    age_step: Micros = AGE_STEP,
) -> Store:
    """Make the store behind `url`; nothing is opened before the first call.

    `clock` is for tests.
    """
    scheme = split_url(url).scheme
    database: Database
    node_wakeups: NodeWakeups
    client_wakeups: ClientWakeups
    if scheme == "sqlite":
        location = _sqlite_location(url)
        database = SqliteDatabase(location, queries("sqlite"), clock or SystemClock())
        node_wakeups = SqliteNodeWakeups(location.path)
        client_wakeups = SqliteClientWakeups(location.path)
    elif scheme in ("postgresql", "postgres"):
        database = server = PostgresDatabase(url, queries("postgres"), clock)
        node_wakeups = PostgresNodeWakeups(server)
        client_wakeups = PostgresClientWakeups(server)
    else:
        raise BadOption(
            f"{mask_password(url)!r} is not a database URL: use sqlite:///file.db, "
            "sqlite:////folder/file.db or postgresql://…"
        )
    return Store(database, node_wakeups, client_wakeups, namespace, lease, clock, age_step)


def queries(dialect: str) -> dict[str, Query]:
    """Load all statements of an engine, and fill in the pieces that several of them share."""
    return {
        name: Query(
            name,
            reduce(lambda text, piece: text.replace(*piece), _SHARED_SQL.items(), query.text),
            query.columns,
            query.literals,
        )
        for name, query in load_queries(dialect).items()
    }


def _sqlite_location(url: str) -> SqliteLocation:
    parts = split_url(url)
    options = parse_qs(parts.query)
    unknown = set(options) - {"driver", "network"}
    driver = options.get("driver", ["apsw"])[0]
    network_ok = options.get("network", ["allow"]) == ["allow"]
    if unknown or driver not in ("apsw", "sqlite3") or not network_ok:
        raise BadOption(
            f"{mask_password(url)!r}: a sqlite URL takes ?driver=apsw, ?driver=sqlite3 "
            "and ?network=allow"
        )
    if parts.netloc:
        raise BadOption(
            f"{mask_password(url)!r}: three slashes before a relative path, "
            "four before an absolute one"
        )
    name = unquote(parts.path)[1:]
    path = Path(os.path.abspath(name)) if name and name != ":memory:" else None
    return SqliteLocation(path, driver, "network" in options)


class Store:
    """One namespace of a database. The parts come first, then the methods that most callers use."""

    def __init__(
        self,
        database: Database,
        node_wakeups: NodeWakeups,
        client_wakeups: ClientWakeups,
        namespace: str,
        lease: Micros,
        clock: Clock | None = None,
        age_step: Micros = AGE_STEP,
    ) -> None:
        clock = clock or SystemClock()
        shared = Namespace(database, namespace, node_wakeups, age_step)
        self._db = database
        self._shared = shared
        self._installed = False
        self.namespace = namespace
        self.age_step = age_step
        self.node_wakeups = node_wakeups
        self.events = shared.events
        self.limits = shared.limits

        self.locks = Locks(database, client_wakeups, namespace)
        self.messages = Messages(database, client_wakeups, namespace)
        self.sessions = Sessions(
            database, client_wakeups, namespace, lease, self.locks.free_session, clock.boot
        )
        self.listener = ClientListener(client_wakeups, self.sessions)

        self.dependencies = Dependencies(shared)
        self.attempts = Attempts(
            shared, self.dependencies, self.locks, self._insert, self._runs_ended
        )
        stopping = Stopping(shared, self.attempts)
        self.settler = Settler(shared, self.dependencies, stopping)
        self.steering = Steering(shared, self.attempts, self.dependencies, stopping, self.settler)
        self.conditions = Conditions(shared, self.attempts, stopping)
        self.operators = Operators(
            database, namespace, self.install, self._wake_all_nodes, self.limits
        )
        self.fairness = Fairness(shared, self.operators)
        self.enqueuer = Enqueuer(
            shared,
            self.install,
            stopping,
            self.settler,
            self.dependencies,
            self.conditions,
            self.fairness,
        )
        self.schedules = Schedules(
            database, namespace, self.enqueuer.insert, stopping.cancel_or_hold_with_slots
        )
        self.ticks = Ticks(
            database, namespace, self.enqueuer.insert, stopping.cancel_or_hold_with_slots
        )
        self.claims = Claims(shared, self.operators, self.fairness, self.attempts)
        self.own_writes = OwnWrites(database, self.events, self.attempts.end, self._after_own_end)
        self.due = DueJobs(shared, self.attempts)
        self.parked = ParkedJobs(shared)
        self.search = Search(database, namespace)
        self.bulk = BulkChanges(shared, self.search, self.attempts, self.dependencies, self.settler)
        self.pruner = Pruner(database, namespace)
        self.counts = JobCounts(database, namespace)

        self.nodes = Nodes(
            database,
            node_wakeups,
            namespace,
            self.attempts.end,
            self.events,
            self.limits,
            clock.boot,
        )
        self.doctor_facts = DoctorFacts(database, node_wakeups, namespace, clock)
        self.clock_set_back = ClockSetBack(database, namespace)

        self._expose_verbs()

    def _expose_verbs(self) -> None:
        """Offer the methods of the parts that most callers need under the store's own name."""
        self.enqueue = self.enqueuer.enqueue
        self.claim = self.claims.claim
        self.finish = self.attempts.finish
        self.end = self.attempts.end_attempts
        self.mark_started = self.attempts.mark_started
        self.record_progress = self.attempts.record_progress
        self.promote = self.due.promote
        self.expire = self.due.expire
        self.settle = self.settler.settle
        self.cancel = self.steering.cancel
        self.cancel_all = self.steering.cancel_all
        self.hold = self.steering.hold
        self.resume = self.steering.resume
        self.requeue = self.steering.requeue
        self.requeue_failed = self.steering.requeue_failed
        self.prune = self.pruner.prune_before
        self.wake_for_granted = self._shared.wake_for_granted

    # for the parts that are made before the parts they call

    def _insert(self, tx: Transaction, jobs: Sequence[NewJob]) -> None:
        self.enqueuer.insert_with_conditions(tx, jobs)

    def _runs_ended(self, tx: Transaction, runs: Sequence[RunEnd]) -> bool:
        return self.ticks.runs_ended(tx, runs)

    def _after_own_end(self) -> None:
        """Do for a job that has ended itself what its node does for other jobs."""
        with suppress(StoreError):  # nodes do it later
            self.locks.wake_called()
            if self.dependencies.unsettled:
                self.dependencies.unsettled = False
                self.settle()
            self.node_wakeups.wake_nodes(self.namespace, None)

    def _wake_all_nodes(self) -> None:
        """Let every node look at once, busy or not."""
        with suppress(StoreError):  # they look every second anyway
            for node in self.nodes.live():
                self.node_wakeups.wake_node(node.id)

    # the database

    @property
    def changed_by(self) -> Callable[[], str]:
        """Give the operator's name for the history of changes made by hand."""
        return self._shared.changed_by

    @changed_by.setter
    def changed_by(self, name: Callable[[], str]) -> None:
        self._shared.changed_by = name

    @property
    def parallel_writers(self) -> int:
        return self._db.parallel_writers

    @property
    def pooler_found(self) -> bool:
        """Tell whether a transaction pooler was found that the URL does not mention.

        Known after the first call.
        """
        return self._db.pooler_found

    def writer(self) -> WritingProcess | None:
        """Give the process that writes at the moment, where only one can; never waits."""
        return self._db.writing_process()

    def install(self) -> None:
        """Make the schema current; safe when many processes do it at once, and cheap when it is."""
        if not self._installed:
            migrate.upgrade(self._db)
            with self._db.statement() as tx:
                known = tx.one("namespace_known", namespace=self.namespace)
            # Read first: a caller with an open transaction of its own may be the only writer.
            if not known:
                with self._db.transaction() as tx:
                    tx.run("declare_namespace", namespace=self.namespace)
            self._installed = True

    def upgrade(self, progress: Callable[[int, int], None] = lambda done, of: None) -> list[str]:
        """Make the schema current; gives the names of the migrations that were applied."""
        applied = migrate.upgrade(self._db, progress)
        self.install()
        return applied

    def objects(self) -> list[str]:
        """List the tables and sequences of genba that exist: what `uninstall` removes."""
        return migrate.objects(self._db)

    def uninstall(self) -> list[str]:
        """Remove the objects of genba, with all jobs, and nothing else; gives their names."""
        self._installed = False
        return sorted(migrate.uninstall(self._db))

    def verify(self) -> VerifyReport:
        """Check this installation against its own history."""
        self.install()
        return verify(self._db, self.namespace)

    def now(self) -> Micros:
        with self._db.statement() as tx:
            return tx.now()

    def write_marker(self) -> object:
        """Give a value that changes whenever something was written."""
        return self._db.write_marker()

    def close(self) -> None:
        self.listener.close()
        self.node_wakeups.close()
        self._db.close()

    # read jobs

    def job(self, id: JobId | None = None, *, key: str | None = None) -> JobRecord | None:
        self.install()
        with self._db.statement() as tx:
            if key is not None:
                row = tx.one("job_by_key", namespace=self.namespace, key=key)
            else:
                row = tx.one("job", namespace=self.namespace, id=id)
            return JobRecord(*row) if row else None

    def attempts_of(self, id: JobId) -> list[AttemptRecord]:
        """Read the attempts of a job that have ended."""
        with self._db.statement() as tx:
            return [AttemptRecord(*row) for row in tx.all("attempts", id=id)]

    def states(self, ids: Sequence[JobId]) -> dict[JobId, str]:
        """Read the states of those of these jobs that exist."""
        with self._db.statement() as tx:
            rows = tx.batch("states", [(id,) for id in ids], namespace=self.namespace)
            return {row[0]: row[1] for row in rows}

    def ahead(self, job: JobRecord) -> int:
        """Count the waiting jobs of its queue that start before it."""
        with self._db.statement() as tx:
            row = tx.one(
                "count_ahead", namespace=self.namespace, queue=job.queue, rank=job.rank, id=job.id
            )
            return int(row[0]) if row else 0
