"""Jobs come in: one by one or in bulk, unique by key, with what they wait for; all or nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from genba.domain.limits import ORDERED, bucket_to_wait_for, write_needs
from genba.domain.rank import boost
from genba.domain.states import FINAL
from genba.errors import KeyTaken, StoreError, StoreUnreachable
from genba.storage.engines.database import LONG_ARGUMENTS_BYTES, AnswerLost, Database, Transaction
from genba.storage.limits.queueing import PARKED_ON_LIMIT
from genba.storage.operators import RulesChanged
from genba.storage.records import (
    EXACT_MOMENT,
    Enqueued,
    JobId,
    Micros,
    NewJob,
    UniformJobs,
    is_quiet,
)

if TYPE_CHECKING:
    from genba.storage.store import Store

_COLUMNS = (  # noqa: SIM905  twenty quoted names would hide their order
    "id created_at due_at due_from rank state expires_at unique_until parent_id priority open_deps once_waiting "
    "namespace queue task key key_hash tags options args"
).split()
_STATE, _OPTIONS = _COLUMNS.index("state"), _COLUMNS.index("options")
_LIMITED = ("buckets", "parked_on", "capped")  # only of jobs that have a limit
ENQUEUED = (*_COLUMNS, *_LIMITED)  # all that an insert may name
_args = attrgetter("args")
SOON = 0.005  # seconds after which a job calls a hungry node by itself again, and does not only look for one
_json = msgspec.json.Encoder()


class Enqueuer:
    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._db = database
        self._namespace = store.namespace
        self._last = 0.0  # when a simple job came

    def enqueue(
        self, jobs: Sequence[NewJob], conn: Any = None, epoch: int | None = None
    ) -> list[Enqueued]:
        """Durable when it returns (with `conn`: when the caller commits); all or nothing.

        RulesChanged, and nothing written, if `epoch` is given and an operator has changed the rules since.
        """
        self._store.install()
        if conn is not None:
            with self._db.adopt(conn) as tx:
                return self.insert(tx, jobs, epoch=epoch, ours=False)
        ids: list[JobId] = []
        try:
            done, call = self._commit(jobs, ids, epoch)
        except AnswerLost:
            done, call = self._commit_again(jobs, ids, epoch), True
        with suppress(
            StoreError
        ):  # the jobs are in: what fails from here on must not say otherwise
            if not isinstance(jobs, UniformJobs) and any(job.after for job in jobs):
                self._store.settle()
            if call:
                for queue, count in _queues(jobs).items():
                    self._store.node_wakeups.wake_nodes(self._namespace, queue, count)
        return done

    def _commit(
        self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None
    ) -> tuple[list[Enqueued], bool]:
        """Also whether nodes are still to be called; `ids` tells afterwards under which ids it was tried."""
        if len(jobs) == 1 and jobs[0].plain:
            return self._commit_one(jobs[0], ids, epoch)
        with self._db.transaction() as tx:
            ids[:] = ids or tx.ids(len(jobs))
            done = self.insert(tx, jobs, ids, epoch)
            self._store.conditions.ask_for(tx, jobs, done)
            return done, True

    def _commit_one(
        self, job: NewJob, ids: list[JobId], epoch: int | None
    ) -> tuple[list[Enqueued], bool]:
        one_trip = self._db.parallel_writers > 1
        simple = job.simple and (one_trip or len(job.args) <= LONG_ARGUMENTS_BYTES)
        with self._db.single_write() as tx:
            ids[:] = ids or tx.ids(1)
            if simple:
                call = self._insert_simple(tx, job, ids[0], epoch)
            else:
                made = self._insert_one(tx, job, ids[0], epoch=epoch, call=True)
                call = not one_trip if made.created else None
            if call is None:  # it has no identity that could be taken
                raise RulesChanged("the rules have changed")
        return [Enqueued(ids[0], True)], call

    def _insert_simple(
        self, tx: Transaction, job: NewJob, id: JobId, epoch: int | None
    ) -> bool | None:
        """Whether nodes are to be called; None if it was not inserted."""
        query, before, self._last = "enqueue_simple", self._last, time.monotonic()
        if self._db.parallel_writers > 1 and self._last - before < SOON:
            query = "enqueue_simple_repeated"
        row = tx.one(
            query,
            id=id,
            epoch=epoch,
            boost=boost(job.priority, self._store.age_step),
            priority=job.priority,
            namespace=self._namespace,
            queue=job.queue,
            task=job.task,
            options=job.options,
            args=job.args,
            node=self._store.events.node,
        )
        if row is None:
            return None
        told = {"kind": "waiting", "node": self._store.events.node, "quiet": False}
        tx.run("enqueue_one_event", namespace=self._namespace, job_id=id, **told)
        return bool(row[1])

    def _commit_again(
        self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None
    ) -> list[Enqueued]:
        """The answer to the commit was lost; the same ids tell whether it had happened."""
        try:
            there = self._store.states(ids)
            return self._as_found(jobs, ids) if there else self._commit(jobs, ids, epoch)[0]
        except StoreUnreachable:
            raise
        except StoreError:  # the server was still at it: our ids were taken, by ourselves
            if not self._store.states(ids):
                raise
            return self._as_found(jobs, ids)

    def _as_found(self, jobs: Sequence[NewJob], ids: Sequence[JobId]) -> list[Enqueued]:
        there = self._store.states(ids)
        done = []
        with self._db.statement() as tx:
            for job, id in zip(jobs, ids, strict=True):
                if id in there:
                    done.append(Enqueued(id, True))
                elif found := tx.one(
                    "job_with_key_hash", namespace=self._namespace, key_hash=job.identity
                ):
                    done.append(Enqueued(found[0], False))
        return done

    def insert(
        self,
        tx: Transaction,
        jobs: Sequence[NewJob],
        given: Sequence[JobId] = (),
        epoch: int | None = None,
        *,
        ours: bool = True,
    ) -> list[Enqueued]:
        if isinstance(jobs, UniformJobs) and len(jobs) > 1 and jobs[0].plain:
            return self._insert_alike(tx, jobs, given or tx.ids(len(jobs)), epoch)
        limited = any(job.limited for job in jobs)
        if limited:
            self._check_waiting(tx, jobs)
        ids = given or tx.ids(len(jobs))
        done: list[Enqueued] = [Enqueued(0, False)] * len(jobs)
        rows: list[tuple[Any, ...]] = []
        edges: list[tuple[int, int, str]] = []
        moment = self._moment(tx, epoch)
        now = moment if limited or len(jobs) > 1 else 0
        replaced: list[JobId] = []
        for i, job in enumerate(jobs):
            if now and not job.after and job.identity is None:
                rows.append(self._row(job, ids[i], 0, now, limited))
                done[i] = Enqueued(ids[i], True)
                continue
            wanted = {done[e.job].id if e.inside else e.job: e.wants for e in job.after}
            if job.identity is None and now:
                rows.append(self._row(job, ids[i], len(wanted), now, limited))
                done[i] = Enqueued(ids[i], True)
            elif job.identity is None:
                done[i] = self._insert_one(tx, job, ids[i], len(wanted))
            else:
                done[i], wanted = self._insert_unique(tx, job, ids[i], wanted, replaced)
            if done[i].created:
                edges += [(done[i].id, parent, wants) for parent, wants in wanted.items()]
        if rows:
            tx.insert_jobs([*_COLUMNS, *_LIMITED] if limited else _COLUMNS, rows)
            self._tell_of_new(tx, rows)
        self._connect(tx, jobs, done, edges)
        self._store.fairness.place(tx, jobs, done)
        if limited:
            self._limit(
                tx, [job for job, made in zip(jobs, done, strict=True) if made.created], ours
            )
        self._store.limits.moved(tx, replaced)
        return done

    def _insert_alike(
        self, tx: Transaction, jobs: UniformJobs, ids: Sequence[JobId], epoch: int | None
    ) -> list[Enqueued]:
        first = self._row(jobs[0], ids[0], 0, self._moment(tx, epoch), limited=False)
        same = first[1:-1]  # between the id and the arguments
        tx.insert_uniform_jobs(_COLUMNS, same, list(zip(ids, map(_args, jobs), strict=True)))
        if not is_quiet(jobs[0].options):
            self._store.events.tell(tx, first[_STATE], ids)
        return [Enqueued(id, True) for id in ids]

    def _moment(self, tx: Transaction, epoch: int | None) -> Micros:
        """Now; RulesChanged if an operator has changed something since `epoch`."""
        now, known = tx.one("now_and_epoch", namespace=self._namespace) or (0, None)
        if epoch is not None and known != epoch:
            raise RulesChanged("the rules have changed")
        return int(now)

    def _limit(self, tx: Transaction, made: Sequence[NewJob], ours: bool) -> None:
        rules = {rule.template: rule for job in made for rule in job.rules}
        now = tx.now()
        soon = [job for job in made if not job.after and not job.delay and (job.due_at or 0) <= now]
        self._store.limits.queue_new(tx, [job.needs for job in soon], rules.values(), ours=ours)

    def _check_waiting(self, tx: Transaction, jobs: Sequence[NewJob]) -> None:
        more: Counter[str] = Counter()
        most: dict[str, int] = {}
        for job in jobs:
            if job.max_waiting is not None:
                most[job.task] = job.max_waiting
                there = job.identity and tx.one(
                    "job_with_key_hash", namespace=self._namespace, key_hash=job.identity
                )
                more[job.task] += not (there and job.on_conflict == "return")
        self._store.limits.check_waiting(
            tx, {task: (most[task], more[task]) for task in most if more[task]}
        )

    def _connect(
        self,
        tx: Transaction,
        jobs: Sequence[NewJob],
        done: Sequence[Enqueued],
        edges: Sequence[tuple[int, int, str]],
    ) -> None:
        tags = [
            (tag, made.id)
            for job, made in zip(jobs, done, strict=True)
            if made.created
            for tag in job.tags
        ]
        tx.batch("add_tags", tags, namespace=self._namespace)
        self._store.dependencies.add(tx, edges)

    def _row(
        self, job: NewJob, id: JobId, deps: int, now: Micros, limited: bool
    ) -> tuple[Any, ...]:
        due, since = now + job.delay, None
        if job.due_at is not None and job.due_at > now:
            due, since = job.due_at, EXACT_MOMENT
        state = "blocked" if deps else "scheduled" if due > now else "waiting"
        more: tuple[Any, ...] = ()
        rank = due - boost(job.priority, self._store.age_step)
        if limited:
            line = bucket_to_wait_for(job.needs)
            rank = now if line is not None and line.kind == ORDERED else rank
            parked_on = (
                PARKED_ON_LIMIT + line.name if line is not None and state == "waiting" else None
            )
            more = (
                write_needs(job.needs) if job.needs else None,
                parked_on,
                1 if job.capped else None,
            )
        return (
            id,
            now,
            due,
            since,
            rank,
            state,
            job.expires_at if job.expires_in is None else now + job.expires_in,
            None if job.unique_for is None else now + job.unique_for,
            job.parent_id,
            job.priority,
            deps,
            job.once_waiting,
            self._namespace,
            job.queue,
            job.task,
            job.key,
            job.identity,
            _json.encode(job.tags).decode() if job.tags else None,
            job.options,
            job.args,
            *more,
        )

    def _insert_one(
        self,
        tx: Transaction,
        job: NewJob,
        id: JobId,
        deps: int = 0,
        epoch: int | None = None,
        *,
        call: bool = False,
    ) -> Enqueued:
        """`call` a hungry node with it, where that can be done in one: only if nothing else is in this transaction."""
        quiet, long = is_quiet(job.options), len(job.args) > LONG_ARGUMENTS_BYTES
        row = tx.one(
            "enqueue_one",
            long=long,
            call=call,
            node=self._store.events.node,
            quiet=quiet,
            id=id,
            epoch=epoch,
            due_at=job.due_at,
            delay=job.delay,
            boost=boost(job.priority, self._store.age_step),
            expires_at=job.expires_at,
            expires_in=job.expires_in,
            unique_for=job.unique_for,
            parent_id=job.parent_id,
            priority=job.priority,
            open_deps=deps,
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
        told = {"kind": row[1], "node": self._store.events.node, "quiet": quiet}
        tx.run("enqueue_one_event", namespace=self._namespace, job_id=id, **told)
        if job.limited:
            line = bucket_to_wait_for(job.needs)
            tx.one(
                "limit_job",
                id=id,
                buckets=write_needs(job.needs) if job.needs else None,
                capped=1 if job.capped else None,
                line=None if line is None else PARKED_ON_LIMIT + line.name,
                ordered=int(line is not None and line.kind == ORDERED),
            )
        return Enqueued(id, True)

    def _insert_unique(
        self, tx: Transaction, job: NewJob, id: JobId, after: dict[int, str], replaced: list[JobId]
    ) -> tuple[Enqueued, dict[int, str]]:
        """One open job per identity; the unique index decides, also against those we cannot see yet."""
        for _ in range(10):
            made = self._insert_one(tx, job, id, len(after))
            if made.created:
                return made, after
            found = tx.one("job_with_key_hash", namespace=self._namespace, key_hash=job.identity)
            if found is None:
                continue  # the one in our way has just ended
            other, state, unique_until = found
            if (state in FINAL and (unique_until or 0) <= tx.now()) or (
                job.once_waiting and state == "running"
            ):
                tx.run("clear_key_hash", id=other)
            elif job.on_conflict == "return":
                return Enqueued(other, False), {}
            elif job.on_conflict == "raise":
                name = f"key {job.key!r}" if job.key else "the same identity"
                raise KeyTaken(f"job {other} ({state}) has {name} already", job_id=other)
            else:
                tx.run(
                    "clear_key_hash", id=other
                )  # from here its row is locked: it cannot start behind our back
                reason = f"replaced by job {id}"
                if self._store.cancel_or_hold(tx, "cancel", other, reason, by=self._store.by()):
                    replaced.append(other)
                    continue
                if self._store.ask_to_stop(tx, other, "cancel", reason) is not None:
                    after = {**after, other: "finished"}
        raise KeyTaken(f"the identity of this {job.task!r} job changes hands too fast to take it")

    def _tell_of_new(self, tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
        by_state: dict[str, list[JobId]] = {}
        for row in rows:
            if not is_quiet(row[_OPTIONS]):
                by_state.setdefault(row[_STATE], []).append(row[0])
        for state, ids in by_state.items():
            self._store.events.tell(tx, state, ids)


def _queues(jobs: Sequence[NewJob]) -> Mapping[str, int]:
    return (
        {jobs[0].queue: len(jobs)}
        if isinstance(jobs, UniformJobs)
        else Counter(job.queue for job in jobs)
    )
