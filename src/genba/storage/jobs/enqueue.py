"""Insert jobs: one by one or in bulk, unique by key, with what they wait for; all or nothing.

The locks of one transaction are taken in this order: rows of jobs that are replaced; parents (a
note for the settler); keys of fair queues; and last the buckets of limits, by name.  A caller's own
transaction never locks a bucket.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import msgspec

from genba.domain.duration import Micros
from genba.domain.limits import ORDERED, bucket_to_wait_for, write_needs
from genba.domain.rank import boost
from genba.domain.states import FINAL
from genba.errors import KeyTaken, StoreError, StoreUnreachable
from genba.storage.engines.database import LONG_ARGUMENTS_BYTES, AnswerLost, Transaction
from genba.storage.jobs.conditions import Conditions
from genba.storage.jobs.dependencies import Dependencies
from genba.storage.jobs.fairness import Fairness
from genba.storage.jobs.job_row import COLUMNS, LIMIT_COLUMNS, OPTIONS, STATE, job_row
from genba.storage.jobs.settle import Settler
from genba.storage.jobs.stop import Stopping
from genba.storage.limits.queueing import PARKED_ON_LIMIT
from genba.storage.namespace import Namespace
from genba.storage.operators import RulesChanged
from genba.storage.records import Enqueued, JobId, NewJob, UniformJobs, is_quiet

_args = attrgetter("args")
# A job that comes later than this after the one before wakes a hungry node in the same statement.
WAKE_AGAIN_SECONDS = 0.005
_IDENTITY_TRIES = 10
_json = msgspec.json.Encoder()


class _NewRows:
    """What one call inserts, collected job by job before it is written."""

    __slots__ = ("edges", "enqueued", "replaced", "rows")

    def __init__(self, count: int) -> None:
        self.enqueued = [Enqueued(0, False)] * count
        self.rows: list[tuple[Any, ...]] = []
        self.edges: list[tuple[JobId, JobId, str]] = []
        self.replaced: list[JobId] = []


class Enqueuer:
    def __init__(
        self,
        namespace: Namespace,
        install: Callable[[], None],
        stopping: Stopping,
        settler: Settler,
        dependencies: Dependencies,
        conditions: Conditions,
        fairness: Fairness,
    ) -> None:
        self._db = namespace.database
        self._shared = namespace
        self._namespace = namespace.name
        self._age_step = namespace.age_step
        self._events = namespace.events
        self._limits = namespace.limits
        self._install = install
        self._stopping = stopping
        self._settler = settler
        self._dependencies = dependencies
        self._conditions = conditions
        self._fairness = fairness
        self._last_simple_at = 0.0

    def enqueue(
        self, jobs: Sequence[NewJob], conn: Any = None, epoch: int | None = None
    ) -> list[Enqueued]:
        """Insert jobs, durable when it returns (with `conn`: when the caller commits).

        All or nothing.

        RulesChanged, and nothing written, if `epoch` is given and an operator has changed the rules
        since.
        """
        self._install()
        if conn is not None:
            with self._db.adopt(conn) as tx:
                return self.insert(tx, jobs, epoch=epoch, own_transaction=False)
        ids: list[JobId] = []
        try:
            enqueued, wake = self._commit(jobs, ids, epoch)
        except AnswerLost:
            enqueued, wake = self._commit_again(jobs, ids, epoch), True
        # The jobs are in: a failure from here on must not say otherwise.
        with suppress(StoreError):
            if not isinstance(jobs, UniformJobs) and any(job.after for job in jobs):
                self._settler.settle()
            if wake:
                for queue, count in _queue_counts(jobs).items():
                    self._shared.node_wakeups.wake_nodes(self._namespace, queue, count)
        return enqueued

    def _commit(
        self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None
    ) -> tuple[list[Enqueued], bool]:
        """Insert in a transaction of our own; the bool says whether nodes must still be woken.

        Afterwards `ids` has the ids that were tried.
        """
        if len(jobs) == 1 and jobs[0].plain:
            return self._commit_one(jobs[0], ids, epoch)
        with self._db.transaction() as tx:
            ids[:] = ids or tx.ids(len(jobs))
            enqueued = self.insert(tx, jobs, ids, epoch)
            self._conditions.park_new(tx, jobs, enqueued)
            return enqueued, True

    def _commit_one(
        self, job: NewJob, ids: list[JobId], epoch: int | None
    ) -> tuple[list[Enqueued], bool]:
        one_trip = self._db.parallel_writers > 1
        simple = job.simple and (one_trip or len(job.args) <= LONG_ARGUMENTS_BYTES)
        with self._db.single_write() as tx:
            ids[:] = ids or tx.ids(1)
            wake: bool | None
            if simple:
                wake = self._insert_simple(tx, job, ids[0], epoch)
            else:
                created = self._insert_one(tx, job, ids[0], epoch=epoch, wake=True).created
                wake = not one_trip if created else None
            if wake is None:  # it has no identity that could be taken
                raise RulesChanged("the rules have changed")
        return [Enqueued(ids[0], True)], wake

    def _insert_simple(
        self, tx: Transaction, job: NewJob, id: JobId, epoch: int | None
    ) -> bool | None:
        """Insert a job like most others.

        Gives whether nodes must be woken, None if it was not inserted.
        """
        query, before, self._last_simple_at = (
            "enqueue_simple",
            self._last_simple_at,
            time.monotonic(),
        )
        if self._db.parallel_writers > 1 and self._last_simple_at - before < WAKE_AGAIN_SECONDS:
            query = "enqueue_simple_repeated"
        row = tx.one(
            query,
            id=id,
            epoch=epoch,
            boost=boost(job.priority, self._age_step),
            priority=job.priority,
            namespace=self._namespace,
            queue=job.queue,
            task=job.task,
            options=job.options,
            args=job.args,
            node=self._events.node,
        )
        if row is None:
            return None
        event = {"kind": "waiting", "node": self._events.node, "quiet": False}
        tx.run("enqueue_one_event", namespace=self._namespace, job_id=id, **event)
        return bool(row[1])

    def _commit_again(
        self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None
    ) -> list[Enqueued]:
        """Commit jobs whose commit got no answer, unless their ids show that it happened."""
        try:
            if self._known_among(ids):
                return self._read_back(jobs, ids)
            return self._commit(jobs, ids, epoch)[0]
        except StoreUnreachable:
            raise
        except StoreError:
            # The server was still busy with the first commit, which then took our ids.
            if not self._known_among(ids):
                raise
            return self._read_back(jobs, ids)

    def _known_among(self, ids: Sequence[JobId]) -> set[JobId]:
        with self._db.statement() as tx:
            rows = tx.batch("states", [(id,) for id in ids], namespace=self._namespace)
            return {row[0] for row in rows}

    def _read_back(self, jobs: Sequence[NewJob], ids: Sequence[JobId]) -> list[Enqueued]:
        known = self._known_among(ids)
        enqueued = []
        with self._db.statement() as tx:
            for job, id in zip(jobs, ids, strict=True):
                if id in known:
                    enqueued.append(Enqueued(id, True))
                elif row := self._with_identity(tx, job):
                    enqueued.append(Enqueued(row[0], False))
        return enqueued

    # inside a transaction

    def insert_with_conditions(self, tx: Transaction, jobs: Sequence[NewJob]) -> None:
        """Insert jobs and park those that have conditions."""
        self._conditions.park_new(tx, jobs, self.insert(tx, jobs))

    def insert(
        self,
        tx: Transaction,
        jobs: Sequence[NewJob],
        ids: Sequence[JobId] = (),
        epoch: int | None = None,
        *,
        own_transaction: bool = True,
    ) -> list[Enqueued]:
        """Insert jobs within a transaction.

        The steps are in the order of the locks (see the top of this module).
        """
        if isinstance(jobs, UniformJobs) and len(jobs) > 1 and jobs[0].plain:
            return self._insert_uniform(tx, jobs, ids or tx.ids(len(jobs)), epoch)
        limited = any(job.limited for job in jobs)
        if limited:
            self._check_waiting(tx, jobs)
        ids = ids or tx.ids(len(jobs))
        moment = self._moment(tx, epoch)
        # A single job without limits is inserted by a statement that reads the clock itself.
        now = moment if limited or len(jobs) > 1 else None
        new = self._insert_each(tx, jobs, ids, now, limited)
        if new.rows:
            tx.insert_jobs([*COLUMNS, *LIMIT_COLUMNS] if limited else COLUMNS, new.rows)
            self._add_events(tx, new.rows)
        self._connect(tx, jobs, new)
        self._fairness.rank_new(tx, jobs, new.enqueued)
        if limited:
            created = [job for job, row in zip(jobs, new.enqueued, strict=True) if row.created]
            self._queue_for_limits(tx, created, own_transaction)
        self._limits.after_move(tx, new.replaced)
        return new.enqueued

    def _insert_each(
        self,
        tx: Transaction,
        jobs: Sequence[NewJob],
        ids: Sequence[JobId],
        now: Micros | None,
        limited: bool,
    ) -> _NewRows:
        """Insert unique jobs one by one, and collect the rows of the others for one insert."""
        new = _NewRows(len(jobs))
        rows, enqueued = new.rows, new.enqueued
        namespace, age_step = self._namespace, self._age_step
        for i, job in enumerate(jobs):
            # First, because most jobs are like this: a bulk enqueue brings ten thousand of them.
            if now is not None and not job.after and job.identity is None:
                rows.append(job_row(job, ids[i], 0, now, limited, namespace, age_step))
                enqueued[i] = Enqueued(ids[i], True)
                continue
            parents = {enqueued[e.job].id if e.inside else e.job: e.wants for e in job.after}
            if job.identity is not None:
                enqueued[i], parents = self._insert_unique(tx, job, ids[i], parents, new.replaced)
            elif now is not None:
                rows.append(job_row(job, ids[i], len(parents), now, limited, namespace, age_step))
                enqueued[i] = Enqueued(ids[i], True)
            else:
                enqueued[i] = self._insert_one(tx, job, ids[i], len(parents))
            if enqueued[i].created:
                child = enqueued[i].id
                new.edges += [(child, parent, wants) for parent, wants in parents.items()]
        return new

    def _insert_uniform(
        self, tx: Transaction, jobs: UniformJobs, ids: Sequence[JobId], epoch: int | None
    ) -> list[Enqueued]:
        """Insert jobs that differ only in their arguments: the row is built once."""
        now = self._moment(tx, epoch)
        first = job_row(jobs[0], ids[0], 0, now, False, self._namespace, self._age_step)
        same = first[1:-1]  # between the id and the arguments
        tx.insert_uniform_jobs(COLUMNS, same, list(zip(ids, map(_args, jobs), strict=True)))
        if not is_quiet(jobs[0].options):
            self._events.add(tx, first[STATE], ids)
        return [Enqueued(id, True) for id in ids]

    def _moment(self, tx: Transaction, epoch: int | None) -> Micros:
        """Read the clock; RulesChanged if an operator has changed something since `epoch`."""
        now, current = tx.one("now_and_epoch", namespace=self._namespace) or (0, None)
        if epoch is not None and current != epoch:
            raise RulesChanged("the rules have changed")
        return int(now)

    def _queue_for_limits(
        self, tx: Transaction, created: Sequence[NewJob], own_transaction: bool
    ) -> None:
        rules = {rule.template: rule for job in created for rule in job.rules}
        now = tx.now()
        due = [
            job for job in created if not job.after and not job.delay and (job.due_at or 0) <= now
        ]
        needs = [job.needs for job in due]
        self._limits.queue_new(tx, needs, rules.values(), own_transaction=own_transaction)

    def _check_waiting(self, tx: Transaction, jobs: Sequence[NewJob]) -> None:
        """TaskFull if a task's `max_waiting` does not allow these jobs."""
        new: Counter[str] = Counter()
        max_waiting: dict[str, int] = {}
        for job in jobs:
            if job.max_waiting is not None:
                max_waiting[job.task] = job.max_waiting
                returned = job.on_conflict == "return" and self._with_identity(tx, job)
                new[job.task] += not returned
        self._limits.check_waiting(
            tx, {task: (max_waiting[task], new[task]) for task in max_waiting if new[task]}
        )

    def _connect(self, tx: Transaction, jobs: Sequence[NewJob], new: _NewRows) -> None:
        tags = [
            (tag, row.id)
            for job, row in zip(jobs, new.enqueued, strict=True)
            if row.created
            for tag in job.tags
        ]
        tx.batch("add_tags", tags, namespace=self._namespace)
        self._dependencies.add(tx, new.edges)

    def _insert_one(
        self,
        tx: Transaction,
        job: NewJob,
        id: JobId,
        parents: int = 0,
        epoch: int | None = None,
        *,
        wake: bool = False,
    ) -> Enqueued:
        """Insert one job that is not like most others.

        `wake` a hungry node in the same statement, where the engine can: only if nothing else is in
        this transaction.
        """
        quiet, long = is_quiet(job.options), len(job.args) > LONG_ARGUMENTS_BYTES
        row = tx.one(
            "enqueue_one",
            long=long,
            call=wake,
            node=self._events.node,
            quiet=quiet,
            id=id,
            epoch=epoch,
            due_at=job.due_at,
            delay=job.delay,
            boost=boost(job.priority, self._age_step),
            expires_at=job.expires_at,
            expires_in=job.expires_in,
            unique_for=job.unique_for,
            parent_id=job.parent_id,
            priority=job.priority,
            open_deps=parents,
            once_waiting=job.once_waiting,
            namespace=self._namespace,
            queue=job.queue,
            task=job.task,
            key=job.key,
            key_hash=job.identity,
            tags=_json.encode(job.tags).decode() if job.tags else None,
            options=job.options,
            args=job.args,
        )
        if row is None:
            return Enqueued(0, False)
        if long:
            tx.batch("insert_long_arguments", [(id, job.args)])
        event = {"kind": row[1], "node": self._events.node, "quiet": quiet}
        tx.run("enqueue_one_event", namespace=self._namespace, job_id=id, **event)
        if job.limited:
            bucket = bucket_to_wait_for(job.needs)
            tx.one(
                "limit_job",
                id=id,
                buckets=write_needs(job.needs) if job.needs else None,
                capped=1 if job.capped else None,
                line=None if bucket is None else PARKED_ON_LIMIT + bucket.name,
                ordered=int(bucket is not None and bucket.kind == ORDERED),
            )
        return Enqueued(id, True)

    def _insert_unique(
        self,
        tx: Transaction,
        job: NewJob,
        id: JobId,
        parents: dict[JobId, str],
        replaced: list[JobId],
    ) -> tuple[Enqueued, dict[JobId, str]]:
        """Insert a job of which only one may be open; gives it, and the jobs that it waits for.

        The unique index decides, also against rows of other transactions that are not visible yet.
        """
        for _ in range(_IDENTITY_TRIES):
            enqueued = self._insert_one(tx, job, id, len(parents))
            if enqueued.created:
                return enqueued, parents
            row = self._with_identity(tx, job)
            if row is None:
                continue  # the job in our way has just ended
            other, state, unique_until = row
            ended = state in FINAL and (unique_until or 0) <= tx.now()
            if ended or (job.once_waiting and state == "running"):
                tx.run("clear_key_hash", id=other)
            elif job.on_conflict == "return":
                return Enqueued(other, False), {}
            elif job.on_conflict == "raise":
                name = f"key {job.key!r}" if job.key else "the same identity"
                raise KeyTaken(f"job {other} ({state}) has {name} already", job_id=other)
            else:
                parents = self._replace(tx, other, id, parents, replaced)
        raise KeyTaken(
            f"the identity of this {job.task!r} job changed hands {_IDENTITY_TRIES} times "
            "while it was enqueued: enqueue it again"
        )

    def _replace(
        self,
        tx: Transaction,
        other: JobId,
        id: JobId,
        parents: dict[JobId, str],
        replaced: list[JobId],
    ) -> dict[JobId, str]:
        """Cancel the job in our way, or ask it to stop and wait for its end."""
        # From here on its row is locked, so it cannot start in the meantime.
        tx.run("clear_key_hash", id=other)
        reason = f"replaced by job {id}"
        by = self._shared.changed_by()
        if self._stopping.cancel_or_hold(tx, "cancel", other, reason, by=by):
            replaced.append(other)
        elif self._stopping.ask_to_stop(tx, other, "cancel", reason) is not None:
            return {**parents, other: "finished"}
        return parents

    def _with_identity(self, tx: Transaction, job: NewJob) -> tuple[Any, ...] | None:
        """Read the id, state and `unique_until` of the job with the same identity."""
        if job.identity is None:
            return None
        return tx.one("job_with_key_hash", namespace=self._namespace, key_hash=job.identity)

    def _add_events(self, tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
        by_state: dict[str, list[JobId]] = {}
        for row in rows:
            if not is_quiet(row[OPTIONS]):
                by_state.setdefault(row[STATE], []).append(row[0])
        for state, ids in by_state.items():
            self._events.add(tx, state, ids)


def _queue_counts(jobs: Sequence[NewJob]) -> Mapping[str, int]:
    if isinstance(jobs, UniformJobs):
        return {jobs[0].queue: len(jobs)}
    return Counter(job.queue for job in jobs)
