"""Store: what genba does with its database; one method is one use case is one transaction."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from genba.domain.clock import Clock, SystemClock
from genba.domain.limit import STRIPE, line_of, write_needs
from genba.domain.rank import AGE_STEP
from genba.domain.states import Cause
from genba.errors import BadOption, KeyTaken, StoreError, StoreUnreachable
from genba.storage import migrate
from genba.storage.bells import Bells, FileBells, ServerBells
from genba.storage.bulk import GONE_TOO, Bulk
from genba.storage.database import AnswerLost, Database, Query, Tx, load_queries
from genba.storage.dependencies import Dependencies
from genba.storage.ear import Ear
from genba.storage.events import Events, operator
from genba.storage.fairness import Fairness
from genba.storage.finals import hooks_of
from genba.storage.inside import Inside
from genba.storage.limits import LINE, Limited, Limits
from genba.storage.locks import Locks
from genba.storage.membership import Membership
from genba.storage.messages import Messages
from genba.storage.place import Place
from genba.storage.policy import Policies, Rules, RulesChanged
from genba.storage.postgres import PostgresDatabase
from genba.storage.presence import FilePresence, Presence, ServerPresence
from genba.storage.questions import Questions, Steering
from genba.storage.records import (
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
)
from genba.storage.schedules import RunEnd, Schedules
from genba.storage.search import Search
from genba.storage.sessions import Sessions
from genba.storage.sqlite import SqliteDatabase

ATTEMPTS, SHORTEN = 100, 20  # of a job that is tried for ever the last hundred are kept, looked at now and then
REMEMBERED = 10_000
FINAL = ("succeeded", "failed", "timed_out", "cancelled")
_WRITTEN = Success._fields.index("quiet")  # the rest is not written
_OVER = (*FINAL, "held")  # for the schedule of a job: a held one does not stop the series
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # claims come in few sizes, each a prepared statement
QUIET = '"history":"final"'
DEFAULT_URL = "sqlite:///genba.db"
LEASE: Micros = 15_000_000
_PATIENCE = (0.0, 0.02, 0.05, 0.1, 0.1)  # seconds before each try to get a row that somebody holds

_COLUMNS = (  # noqa: SIM905  eighteen quoted names would hide their order
    "id created_at due_at rank state expires_at unique_until parent_id priority open_deps once_waiting "
    "namespace queue task key key_hash tags options args"
).split()
_STATE, _OPTIONS = _COLUMNS.index("state"), _COLUMNS.index("options")
_LIMITED = ("buckets", "parked_on", "capped")  # only of jobs that have a limit
_json = msgspec.json.Encoder()


def open_store(
    url: str, *, namespace: str = "default", clock: Clock | None = None, lease: Micros = LEASE
) -> Store:
    """The store behind `url`; nothing is opened before the first call.  A clock of its own is for tests."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        place = _place(url)
        database = SqliteDatabase(place, _queries("sqlite"), clock or SystemClock())
        return Store(database, FilePresence(place.path), FileBells(place.path), namespace, lease)
    if parts.scheme in ("postgresql", "postgres"):
        server = PostgresDatabase(url, _queries("postgres"), clock)
        return Store(server, ServerPresence(server), ServerBells(server), namespace, lease)
    raise BadOption(f"{url!r} is no database URL: use sqlite:///file.db, sqlite:////folder/file.db or postgresql://…")


def _queries(dialect: str) -> dict[str, Query]:
    found = load_queries(dialect)
    return {
        name: Query(name, query.text.replace("{columns}", JOB_COLUMNS), query.columns, query.literals)
        for name, query in found.items()
    }


def _place(url: str) -> Place:
    parts = urlsplit(url)
    asked = parse_qs(parts.query)
    unknown = set(asked) - {"driver", "network"}
    driver = asked.get("driver", ["apsw"])[0]
    if unknown or driver not in ("apsw", "sqlite3") or asked.get("network", ["allow"]) != ["allow"]:
        raise BadOption(f"{url!r}: a sqlite URL takes ?driver=apsw, ?driver=sqlite3 and ?network=allow")
    if parts.netloc:
        raise BadOption(f"{url!r}: three slashes before a relative path, four before an absolute one")
    name = unquote(parts.path)[1:]
    path = Path(os.path.abspath(name)) if name and name != ":memory:" else None
    return Place(path, driver, "network" in asked)


class Store:
    def __init__(self, database: Database, presence: Presence, bells: Bells, namespace: str, lease: Micros) -> None:
        self._db = database
        self.presence = presence
        self.namespace = namespace
        self.events = Events(database, namespace)
        self.by: Callable[[], str] = operator  # who changes something by hand, for the history
        self.limits = Limits(database, namespace)
        self.nodes = Membership(database, presence, namespace, self._end, self.events, self.limits)
        self.policy = Policies(database, namespace, self.install, self._wake_all, self.limits)
        self.search = Search(database, namespace)
        self.bulk = Bulk(self, database)
        self.fairness = Fairness(database, namespace, self.policy)
        self.inside = Inside(database, self.events, self._end, self._ended_inside)
        self.dependencies = Dependencies(database, namespace, self)
        self.locks = Locks(database, bells, namespace)
        self.messages = Messages(database, bells, namespace)
        self.sessions = Sessions(database, bells, namespace, lease, self.locks.free_session)
        self.ear = Ear(bells, self.sessions)
        self.schedules = Schedules(database, namespace, self._insert, self._put_down_now)
        steering = Steering(self._end, self._put_down_now, self.events, self.limits)
        self.questions = Questions(database, namespace, steering)
        self.children_wait = False  # a hint: since it was last cleared, a parent has ended
        self._installed = False
        self._told: dict[JobId, int] = {}  # attempts whose start is told already

    @property
    def lanes(self) -> int:
        return self._db.lanes

    def install(self) -> None:
        """Make the schema current; safe when many processes do it at once, and cheap when it is."""
        if not self._installed:
            migrate.upgrade(self._db)
            with self._db.statement() as tx:
                known = tx.one("namespace_known", namespace=self.namespace)
            if not known:  # looked first: a caller with an open transaction of its own may be the only writer
                with self._db.transaction() as tx:
                    tx.run("declare_namespace", namespace=self.namespace)
            self._installed = True

    def upgrade(self) -> list[str]:
        """Make the schema current; gives the names of the migrations that were applied."""
        applied = migrate.upgrade(self._db)
        self.install()
        return applied

    def objects(self) -> list[str]:
        """Our tables and sequences that are there: what `uninstall` removes."""
        return migrate.objects(self._db)

    def uninstall(self) -> list[str]:
        """Remove our objects, with all jobs, and nothing else; gives their names."""
        self._installed = False
        return sorted(migrate.uninstall(self._db))

    def _wake_all(self) -> None:
        """Every node looks at once, busy or not."""
        with suppress(StoreError):  # they look every second anyway
            for node in self.nodes.live():
                self.presence.knock(node.id)

    def now(self) -> Micros:
        with self._db.statement() as tx:
            return tx.now()

    def mark_of_writes(self) -> object:
        return self._db.mark()

    def close(self) -> None:
        self.ear.close()
        self.presence.close()
        self._db.close()

    # jobs come in

    def enqueue(self, jobs: Sequence[NewJob], conn: Any = None, epoch: int | None = None) -> list[Enqueued]:
        """Durable when it returns (with `conn`: when the caller commits); all or nothing.

        RulesChanged, and nothing written, if `epoch` is given and an operator has changed the rules since.
        """
        self.install()
        if conn is not None:
            with self._db.adopt(conn) as tx:
                return self._insert(tx, jobs, epoch=epoch, ours=False)
        ids: list[JobId] = []
        try:
            done = self._commit(jobs, ids, epoch)
        except AnswerLost:
            done = self._commit_again(jobs, ids, epoch)
        with suppress(StoreError):  # the jobs are in: what fails from here on must not say otherwise
            if any(job.after for job in jobs):
                self.settle()
            for queue, count in Counter(job.queue for job in jobs).items():
                self.presence.ring(self.namespace, queue, count)
        return done

    def _commit(self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None) -> list[Enqueued]:
        """`ids` tells afterwards under which ids it was tried."""
        if len(jobs) == 1 and jobs[0].plain:
            with self._db.single() as tx:
                ids[:] = ids or tx.ids(1)
                made = self._insert_one(tx, jobs[0], ids[0], epoch=epoch)
                if not made.created:  # it has no identity that could be taken
                    raise RulesChanged("the rules have changed")
                return [made]
        with self._db.transaction() as tx:
            ids[:] = ids or tx.ids(len(jobs))
            done = self._insert(tx, jobs, ids, epoch)
            self.questions.ask_for(tx, jobs, done)
            return done

    def _commit_again(self, jobs: Sequence[NewJob], ids: list[JobId], epoch: int | None) -> list[Enqueued]:
        """The answer to the commit was lost; the same ids tell whether it had happened."""
        try:
            there = self.states(ids)
            return self._as_found(jobs, ids) if there else self._commit(jobs, ids, epoch)
        except StoreUnreachable:
            raise
        except StoreError:  # the server was still at it: our ids were taken, by ourselves
            if not self.states(ids):
                raise
            return self._as_found(jobs, ids)

    def _as_found(self, jobs: Sequence[NewJob], ids: Sequence[JobId]) -> list[Enqueued]:
        there = self.states(ids)
        done = []
        with self._db.statement() as tx:
            for job, id in zip(jobs, ids, strict=True):
                if id in there:
                    done.append(Enqueued(id, True))
                elif found := tx.one("with_identity", namespace=self.namespace, key_hash=job.identity):
                    done.append(Enqueued(found[0], False))
        return done

    def _insert(
        self,
        tx: Tx,
        jobs: Sequence[NewJob],
        given: Sequence[JobId] = (),
        epoch: int | None = None,
        *,
        ours: bool = True,
    ) -> list[Enqueued]:
        limited = any(job.limited for job in jobs)
        if limited:
            self._check_waiting(tx, jobs)
        ids = given or tx.ids(len(jobs))
        done: list[Enqueued] = [Enqueued(0, False)] * len(jobs)
        rows: list[tuple[Any, ...]] = []
        edges: list[tuple[int, int, str]] = []
        moment, known = tx.one("now_and_epoch", namespace=self.namespace) or (0, None)
        if epoch is not None and known != epoch:
            raise RulesChanged("the rules have changed")
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
        self.fairness.place(tx, jobs, done)
        if limited:
            self._limit(tx, [job for job, made in zip(jobs, done, strict=True) if made.created], ours)
        self.limits.moved(tx, replaced)
        return done

    def _limit(self, tx: Tx, made: Sequence[NewJob], ours: bool) -> None:
        rules = {rule.template: rule for job in made for rule in job.rules}
        now = tx.now()
        soon = [job for job in made if not job.after and not job.delay and (job.due_at or 0) <= now]
        self.limits.admit_new(tx, [job.needs for job in soon], rules.values(), ours=ours)

    def _check_waiting(self, tx: Tx, jobs: Sequence[NewJob]) -> None:
        more: Counter[str] = Counter()
        most: dict[str, int] = {}
        for job in jobs:
            if job.max_waiting is not None:
                most[job.task] = job.max_waiting
                there = job.identity and tx.one("with_identity", namespace=self.namespace, key_hash=job.identity)
                more[job.task] += not (there and job.on_conflict == "return")
        self.limits.check_waiting(tx, {task: (most[task], more[task]) for task in most if more[task]})

    def _connect(
        self, tx: Tx, jobs: Sequence[NewJob], done: Sequence[Enqueued], edges: Sequence[tuple[int, int, str]]
    ) -> None:
        tags = [(tag, made.id) for job, made in zip(jobs, done, strict=True) if made.created for tag in job.tags]
        tx.batch("add_tags", tags, namespace=self.namespace)
        self.dependencies.add(tx, edges)

    def _row(self, job: NewJob, id: JobId, deps: int, now: Micros, limited: bool) -> tuple[Any, ...]:
        due = max(now, job.due_at if job.due_at is not None else now + job.delay)
        state = "blocked" if deps else "scheduled" if due > now else "waiting"
        more: tuple[Any, ...] = ()
        rank = due - job.priority * AGE_STEP
        if limited:
            line = line_of(job.needs)
            rank = now if line is not None and line.kind == STRIPE else rank
            parked_on = LINE + line.name if line is not None and state == "waiting" else None
            more = (write_needs(job.needs) if job.needs else None, parked_on, 1 if job.capped else None)
        return (
            id,
            now,
            due,
            rank,
            state,
            job.expires_at if job.expires_in is None else now + job.expires_in,
            None if job.unique_for is None else now + job.unique_for,
            job.parent_id,
            job.priority,
            deps,
            job.once_waiting,
            self.namespace,
            job.queue,
            job.task,
            job.key,
            job.identity,
            _json.encode(job.tags).decode() if job.tags else None,
            job.options,
            job.args,
            *more,
        )

    def _insert_one(self, tx: Tx, job: NewJob, id: JobId, deps: int = 0, epoch: int | None = None) -> Enqueued:
        quiet = _quiet(job.options)
        row = tx.one(
            "enqueue_one",
            node=self.events.node,
            quiet=quiet,
            id=id,
            epoch=epoch,
            due_at=job.due_at,
            delay=job.delay,
            boost=job.priority * AGE_STEP,
            expires_at=job.expires_at,
            expires_in=job.expires_in,
            unique_for=job.unique_for,
            parent_id=job.parent_id,
            priority=job.priority,
            open_deps=deps,
            once_waiting=job.once_waiting,
            namespace=self.namespace,
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
        told = {"kind": row[1], "node": self.events.node, "quiet": quiet}
        tx.run("enqueue_one_event", namespace=self.namespace, job_id=id, **told)
        if job.limited:
            line = line_of(job.needs)
            tx.one(
                "limit_job",
                id=id,
                buckets=write_needs(job.needs) if job.needs else None,
                capped=1 if job.capped else None,
                line=None if line is None else LINE + line.name,
                ordered=int(line is not None and line.kind == STRIPE),
            )
        return Enqueued(id, True)

    def _insert_unique(
        self, tx: Tx, job: NewJob, id: JobId, after: dict[int, str], replaced: list[JobId]
    ) -> tuple[Enqueued, dict[int, str]]:
        """One open job per identity; the unique index decides, also against those we cannot see yet."""
        for _ in range(10):
            made = self._insert_one(tx, job, id, len(after))
            if made.created:
                return made, after
            found = tx.one("with_identity", namespace=self.namespace, key_hash=job.identity)
            if found is None:
                continue  # the one in our way has just ended
            other, state, unique_until = found
            if state in FINAL and (unique_until or 0) <= tx.now():
                tx.run("forget_identity", id=other)
            elif job.on_conflict == "return":
                return Enqueued(other, False), {}
            elif job.on_conflict == "raise":
                name = f"key {job.key!r}" if job.key else "the same identity"
                raise KeyTaken(f"job {other} ({state}) has {name} already", job_id=other)
            else:
                tx.run("forget_identity", id=other)  # from here its row is locked: it cannot start behind our back
                reason = f"replaced by job {id}"
                if self.put_down(tx, "cancel", other, reason, by=self.by()):
                    replaced.append(other)
                    continue
                if self.ask_to_stop(tx, other, "cancel", reason) is not None:
                    after = {**after, other: "finished"}
        raise KeyTaken(f"the identity of this {job.task!r} job changes hands too fast to take it")

    def _tell_of_new(self, tx: Tx, rows: Sequence[tuple[Any, ...]]) -> None:
        by_state: dict[str, list[JobId]] = {}
        for row in rows:
            if not _quiet(row[_OPTIONS]):
                by_state.setdefault(row[_STATE], []).append(row[0])
        for state, ids in by_state.items():
            self.events.tell(tx, state, ids)

    # jobs are run

    def exchange(
        self, node: int, claim: int, ended: Sequence[Success], wants: Mapping[str, int], tasks: Sequence[str]
    ) -> tuple[set[JobId], list[Claimed]]:
        """Finish one batch and claim the next, in one commit."""
        with self._db.transaction() as tx:
            matched = self._succeed(tx, node, ended)
            return matched, self._claim(tx, node, claim, wants, tasks)

    def claim(self, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]) -> list[Claimed]:
        """Lease the best due jobs of each queue to `node`; nobody else gets them while it lives."""
        frame = self._db.single if len(wants) == 1 else self._db.transaction
        with frame() as tx:
            return self._claim(tx, node, claim, wants, tasks)

    def _claim(
        self, tx: Tx, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]
    ) -> list[Claimed]:
        got = self._claim_by(tx, self.policy.rules_in(tx), node, claim, wants, tasks)
        if not got and self.policy.stale(tx):
            got = self._claim_by(tx, self.policy.read(tx), node, claim, wants, tasks)
        return got

    def _claim_by(
        self, tx: Tx, rules: Rules, node: int, claim: int, wants: Mapping[str, int], tasks: Sequence[str]
    ) -> list[Claimed]:
        got: list[Claimed] = []
        known = tx.names([task for task in tasks if task not in rules.disabled] if rules.disabled else tasks)
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
            jobs = [Claimed(*row) for row in sorted(rows)]
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
                for id, task in tx.all("dedicated_ahead", namespace=self.namespace, queue=queue, mark=mark)
                if task in known
            ]
        if not found:
            return []
        with self._db.transaction() as tx:
            given = {"node": node, "claim": claim, "namespace": self.namespace, "epoch": rules.epoch}
            rows = [tx.one("claim_one", id=id, **given) for id in found[:limit]]
        return [Claimed(*row) for row in rows if row is not None]

    def claim_this(self, node: int, claim: int, id: JobId) -> Claimed | None:
        """Lease one job to `node`, due or not; None if it is in no state to start."""
        with self._db.single() as tx:
            row = tx.one("claim_this", namespace=self.namespace, node=node, claim=claim, id=id)
        return Claimed(*row) if row else None

    def finish(self, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Record attempts that returned; gives the ids that were still ours, and not asked to stop."""
        with self._db.transaction() as tx:
            return self._succeed(tx, node, ended)

    def _succeed(self, tx: Tx, node: int, ended: Sequence[Success]) -> set[JobId]:
        if not ended:
            return set()
        loud = [one[:_WRITTEN] for one in ended if not one.quiet]
        matched = tx.batch("succeed", loud, node=node)
        if len(loud) < len(ended):
            matched += tx.batch("succeed_quietly", [one[:_WRITTEN] for one in ended if one.quiet], node=node)
        runs: set[JobId] = set()
        if len(matched) < len(ended):
            ours = set(matched)
            runs = self._succeed_runs(tx, node, [one for one in ended if one[:2] not in ours])
            ended = list({one[:2]: one for one in ended if one[:2] in ours}.values())
            loud = [one[:_WRITTEN] for one in ended if not one.quiet]
            if not ended:
                return runs
        tx.batch("succeed_history", loud, node=node)
        ids = [one.id for one in ended]
        self._look_at_children(tx, "succeeded", ids)
        started = [None if one.quiet or self._told.pop(one.id, 0) else one.started for one in ended]
        each: dict[str, Sequence[Any]] = {"started": started} if any(started) else {}
        if any(one.attempt != 1 for one in ended):
            each["attempt"] = [one.attempt for one in ended]
        self.events.tell(tx, "succeeded", ids, node=node, each=each)
        limited = [one.id for one in ended if one.limited]
        if limited:
            self.limits.moved(tx, limited)
        return {*ids, *runs}

    def _succeed_runs(self, tx: Tx, node: int, ended: Sequence[Success]) -> set[JobId]:
        """Those of them that a schedule has made: more follows from their end than from that of a plain job."""
        found = tx.batch("series_among", [(one.id, one.attempt, one.claim) for one in ended])
        counted = {id: dict(zip(("retries", "crashes", "losses"), counts, strict=True)) for id, *counts in found}
        endings = [replace(one.as_ending(), **counted[one.id]) for one in ended if one.id in counted]
        return self._end(tx, node, endings) if endings else set()

    def after_end(self, tx: Tx, kind: str, ids: Sequence[JobId], **more: Any) -> None:
        """Of jobs that were not running."""
        if ids:
            self._look_at_children(tx, kind, ids)
            self.events.tell(tx, kind, ids, **more)
            self._call_hooks(tx, ids)

    def _look_at_children(self, tx: Tx, kind: str, ids: Sequence[JobId]) -> None:
        """After the jobs' rows are written, never before: an edge we do not see yet will see our lock."""
        if self.dependencies.awaited(tx, kind, ids):
            self.children_wait = True

    def _runs_ended(self, tx: Tx, ended: Sequence[tuple[JobId, str, int | None]]) -> None:
        runs = [RunEnd(schedule, id, state) for id, state, schedule in ended if schedule and state in _OVER]
        if runs and self.schedules.ended(tx, runs):
            self.children_wait = True  # the next one may be due before anybody would look

    def end(self, node: int, ended: Sequence[Ending]) -> set[JobId]:
        """Record attempts that ended otherwise; gives the ids that were still ours to end."""
        with self._db.transaction() as tx:
            mine = self._end(tx, node, ended)
        self.locks.ring()
        return mine

    def _end(self, tx: Tx, node: int | None, ended: Sequence[Ending]) -> set[JobId]:
        rows = [
            (
                e.id,
                e.attempt,
                e.claim,
                e.state,
                e.attempt if e.happened else e.attempt - 1,
                e.due_at,
                e.rank,
                e.retries,
                e.crashes,
                e.losses,
                e.reason,
                e.error,
                e.result,
                e.progress,
            )
            for e in ended
        ]
        found = tx.batch("end", rows)
        matched = {row[:2]: row[2:] for row in found}
        if not matched:
            return set()
        self._runs_ended(tx, [(row[0], row[3], row[4]) for row in found])
        now = tx.now()
        mine = [e for e in ended if (e.id, e.attempt) in matched]
        tx.batch(
            "history",
            [
                (
                    e.id,
                    e.attempt,
                    matched[e.id, e.attempt][0],
                    e.started,
                    e.ended or now,
                    e.cause,
                    node,
                    e.pid,
                    e.cpu,
                    e.peak,
                    e.error,
                    e.log,
                )
                for e in mine
                if e.happened and (not e.quiet or e.state in FINAL[1:])  # of a success the job's row says it all
            ],
        )
        held = [(e.id, e.attempt) for e in mine if e.locks]
        if held:
            self.locks.free_attempts(tx, held)
        for e in mine:
            if e.attempt % SHORTEN == 0:
                tx.run("shorten_history", job_id=e.id, before=e.attempt - ATTEMPTS)
        self._enqueue_clones(tx, [e for e in mine if e.clones and matched[e.id, e.attempt][1] == "succeeded"])
        self._tell_of_ends(tx, node, [(e, matched[e.id, e.attempt][1]) for e in mine])
        self._call_hooks(tx, [e.id for e in mine if e.hooked and matched[e.id, e.attempt][1] in FINAL])
        aside = {e.id for e in mine if e.cause == Cause.NOT_READY}  # free their slots, and do not stand in line again
        limited = [
            Limited(row[0], row[5], row[6], "held" if row[0] in aside and row[3] == "waiting" else row[3])
            for row in found
            if row[5] is not None
        ]
        if limited:
            self.limits.ended(tx, limited)
        return {e.id for e in mine}

    def _call_hooks(self, tx: Tx, ids: Sequence[JobId]) -> None:
        hooks = hooks_of(tx, self.namespace, ids) if ids else []
        if hooks:
            self._insert(tx, hooks)
            self.children_wait = True

    def _enqueue_clones(self, tx: Tx, ended: Sequence[Ending]) -> None:
        """After the rows of those that they are copies of: a key is free only then."""
        clones = [msgspec.msgpack.decode(clone, type=NewJob) for e in ended for clone in e.clones]
        if clones:
            self.questions.ask_for(tx, clones, self._insert(tx, clones))

    def _tell_of_ends(self, tx: Tx, node: int | None, ended: Sequence[tuple[Ending, str]]) -> None:
        told: dict[str, list[tuple[Ending, bool]]] = {}
        for e, state in ended:
            known = bool(self._told.pop(e.id, 0)) or e.told
            if not e.quiet or state in FINAL:
                told.setdefault(_kind(e, state), []).append((e, known))
        for kind, some in told.items():
            ids = [e.id for e, _ in some]
            if kind in FINAL:
                self._look_at_children(tx, kind, ids)
            each: dict[str, list[Any]] = {
                "attempt": [e.attempt for e, _ in some],
                "cause": [e.cause for e, _ in some],
                "reason": [e.reason for e, _ in some],
                "due": [e.due_at for e, _ in some],
                "started": [e.started if e.happened and not known and not e.quiet else None for e, known in some],
            }
            each = {name: values for name, values in each.items() if any(value is not None for value in values)}
            self.events.tell(tx, kind, ids, node=node, each=each)

    def mark(self, started: Sequence[tuple[JobId, int, int, Micros]], *, late: bool = False) -> set[JobId]:
        """Note that these attempts (id, attempt, claim, moment) have started; `late`: if nobody holds their rows."""
        attempts = {one[0]: one[1] for one in started}
        with self._db.transaction() as tx:
            rows = tx.batch("mark_late" if late else "mark", started)
            ids = [id for id, options in rows if not _quiet(options)]
            if ids:
                self.events.tell(tx, "running", ids, each={"attempt": [attempts[id] for id in ids]})
        self._told.update(dict.fromkeys(ids, 1))
        while len(self._told) > REMEMBERED:  # they have ended themselves, and nobody told us
            self._told.pop(next(iter(self._told)))
        return {id for id, _ in rows}

    def progress(self, notes: Sequence[tuple[JobId, int, int, str]]) -> set[JobId]:
        told = {note[0]: note[3] for note in notes}
        with self._db.transaction() as tx:
            rows = tx.batch("note_progress", notes)
            ids = [id for id, options in rows if not _quiet(options)]
            if ids:
                done = [msgspec.json.decode(told[id]) for id in ids]
                each = {"done": [one[0] for one in done], "total": [one[1] for one in done]}
                each["note"] = [one[2] or None for one in done]
                self.events.tell(tx, "progress", ids, each=each)
        return {id for id, _ in rows}

    def _ended_inside(self) -> None:
        """A job has ended itself: what follows is what its node does for the others."""
        with suppress(StoreError):  # others do it later
            self.locks.ring()
            if self.children_wait:
                self.children_wait = False
                self.settle()
            self.presence.ring(self.namespace, None)

    def ring_handed(self) -> bool:
        """Wake nodes for jobs that were let go by a limit, if there are any."""
        handed, self.limits.handed = self.limits.handed, False
        if handed:
            self.presence.ring(self.namespace, None, 8)
        return handed

    # jobs are kept in motion

    def promote(self) -> int:
        """Scheduled jobs whose moment has come; how many."""
        with self._db.transaction() as tx:
            rows = tx.all("promote", namespace=self.namespace, age_step=AGE_STEP)
            self.tell_of_moves(tx, [row[:3] for row in rows])
            self.limits.moved(tx, [row[0] for row in rows if row[3] is not None])
            return len(rows)

    def tell_of_moves(self, tx: Tx, rows: Sequence[tuple[Any, ...]]) -> None:
        """(id, state, options) of jobs that have just come into that state."""
        by_state: dict[str, list[JobId]] = {}
        for id, state, options in rows:
            if not _quiet(options):
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
            self.presence.knock(node)
        return done

    def _put_down_now(self, tx: Tx, verb: str, id: JobId, reason: str) -> bool:
        done = self.put_down(tx, verb, id, reason)
        self.limits.moved(tx, [id])
        return done

    def put_down(self, tx: Tx, verb: str, id: JobId, reason: str, by: str | None = None) -> bool:
        """Cancel or hold what has not started; False if it has, or is final.

        The caller tells `limits.moved` of it, after all else that may wait for a row.
        """
        row = tx.one(verb, id=id, namespace=self.namespace, reason=reason)
        if row is None:
            return False
        told: dict[str, Any] = {"reason": reason} if by is None else {"reason": reason, "by": by}
        if verb == "cancel":
            self._runs_ended(tx, [(id, "cancelled", row[1])])
            self.after_end(tx, "cancelled", [id], **told)
        else:
            self.events.tell(tx, "held", [id], **told)
        return True

    def expire(self) -> int:
        with self._db.transaction() as tx:
            rows = tx.all("expire", namespace=self.namespace)
            ids = [row[0] for row in rows]
            self._runs_ended(tx, [(id, "cancelled", schedule) for id, schedule in rows])
            self.after_end(tx, "cancelled", ids, reason="expired")
            self.limits.moved(tx, ids)
            return len(ids)

    def park_unknown(self, queue: str, known: Iterable[str]) -> int:
        """Put aside the jobs in front that no live node can run; how many."""
        with self._db.transaction() as tx:
            return tx.run("park_unknown", namespace=self.namespace, queue=queue, tasks=tx.names(sorted(known)))

    def unpark(self, reasons: Iterable[str]) -> int:
        with self._db.transaction() as tx:
            rows = [row for reason in reasons for row in tx.all("unpark", namespace=self.namespace, parked_on=reason)]
            self.limits.moved(tx, [id for id, buckets in rows if buckets is not None])
            return len(rows)

    def parked_on(self) -> set[str]:
        with self._db.statement() as tx:
            return {row[0] for row in tx.all("parked_anything", namespace=self.namespace)}

    def prune(self, before: Micros, task: str | None = None, state: str | None = None) -> int:
        """Delete up to 500 jobs that ended before `before` (in `state`), with their history; how many."""
        with self._db.transaction() as tx:
            gone = tx.all("prune", namespace=self.namespace, before=before, task=task, state=state)
            for name in GONE_TOO:
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
            return {row[0]: row[1] for row in tx.batch("states", [(id,) for id in ids], namespace=self.namespace)}

    def definitions(self, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What nodes have told of these tasks; those that no node ever had are left out."""
        self.install()
        with self._db.statement() as tx:
            rows = [tx.one("definition", namespace=self.namespace, name=task) for task in sorted(tasks)]
        return {row[0]: msgspec.json.decode(row[1], type=dict[str, Any]) for row in rows if row}

    def ahead(self, job: JobRecord) -> int:
        """How many waiting jobs of its queue start before it."""
        with self._db.statement() as tx:
            row = tx.one("ahead", namespace=self.namespace, queue=job.queue, rank=job.rank, id=job.id)
            return int(row[0]) if row else 0

    def cancel(self, id: JobId, reason: str | None, how: str = "cancel") -> bool:
        """What has not started is cancelled, what runs is asked to stop; False if it was final already."""
        with self._db.transaction() as tx:
            asked = None
            down = self.put_down(tx, "cancel", id, reason or "cancelled", by=self.by())
            if not down and (asked := self.ask_to_stop(tx, id, how, reason)) is None:
                # It may have been given back meanwhile.
                down = self.put_down(tx, "cancel", id, reason or "cancelled", by=self.by())
            if not down and asked is None:
                return False
            if down:
                self.limits.moved(tx, [id])
        with suppress(StoreError):  # it is asked for: what is left is done by others, later
            if asked is None:
                self.settle()
                self.ring_handed()
            else:
                self.presence.knock(asked)
        return True

    def cancel_all(self, ids: Sequence[JobId], reason: str | None) -> int:
        """Those of these jobs that are not final; how many."""
        count, asked = 0, set()
        for start in range(0, len(ids), 500):
            with self._db.transaction() as tx:
                gone = []
                for id in sorted(ids[start : start + 500]):
                    if self.put_down(tx, "cancel", id, reason or "cancelled"):
                        count += 1
                        gone.append(id)
                    elif (node := self.ask_to_stop(tx, id, "cancel", reason)) is not None:
                        asked.add(node)
                        count += 1
                self.limits.moved(tx, gone)
        with suppress(StoreError):  # as in cancel
            self.settle()
            self.ring_handed()
            for node in asked:
                self.presence.knock(node)
        return count

    def ask_to_stop(self, tx: Tx, id: JobId, how: str, reason: str | None) -> int | None:
        """Which node was asked; None if none runs it.

        A job holds its own row while its `transaction()` is open.  Its node is told then, and the row is not: if the
        job commits before it has heard of it, it has ended by itself.
        """
        row = None
        for pause in _PATIENCE:
            time.sleep(pause)
            row = tx.one("ask_to_stop", id=id, namespace=self.namespace, how=how, reason=reason)
            known = row or tx.one("who_runs", id=id, namespace=self.namespace)
            if row or known is None:
                break
            row = known
        if row is None:
            return None
        node, attempt = row
        tx.run("command", node=node, job_id=id, attempt=attempt, verb=how, data=reason)
        self.events.tell(tx, "stop_requested", [id], how=how, reason=reason, by=self.by(), attempt=attempt)
        return int(node)

    def hold(self, id: JobId, reason: str) -> bool:
        return self._steer("hold", "held", id, reason=reason)

    def resume(self, id: JobId) -> bool:
        return self._steer("resume", "resumed", id, age_step=AGE_STEP)

    def requeue(self, id: JobId) -> bool:
        """A final job runs again; those that were cancelled or held because of it wait for it again."""
        with self._db.transaction() as tx:
            if not tx.one("requeue", id=id, namespace=self.namespace, age_step=AGE_STEP):
                return False
            self.events.tell(tx, "requeued", [id], by=self.by())
            self.dependencies.reopen(tx, id)
            self.limits.moved(tx, [id])
        self.presence.ring(self.namespace, None)
        return True

    def requeue_failed(self, ids: Sequence[JobId]) -> int:
        """Those of these jobs that did not succeed; not those that never ran because of others.  How many."""
        with self._db.statement() as tx:
            failed = [row[0] for row in tx.batch("given_up", [(id,) for id in ids], namespace=self.namespace)]
        return sum(map(self.requeue, sorted(failed)))

    def _steer(self, verb: str, kind: str, id: JobId, **values: Any) -> bool:
        with self._db.transaction() as tx:
            done = tx.one(verb, id=id, namespace=self.namespace, **values)
            if done:
                why = {"reason": values["reason"]} if "reason" in values else {"state": done[0]}
                self.events.tell(tx, kind, [id], by=self.by(), **why)
                self.limits.moved(tx, [id])
        if done:
            self.presence.ring(self.namespace, None)
        return done is not None


def _kind(ending: Ending, state: str) -> str:
    """The event that tells of this end; `state` is what the job came to."""
    if state in (*FINAL, "held"):
        return state
    if not ending.happened or ending.cause in ("drain", "collateral"):
        return "released"
    return "retrying" if ending.cause in ("exception", "timeout", "stall", "returned") else "crashed"


def _quiet(options: str | None) -> bool:
    """Its task wants final states only in the history."""
    return options is not None and QUIET in options


def _size(count: int) -> int:
    """The largest of the few sizes that does not exceed `count`."""
    return max((size for size in SIZES if size <= count), default=1)

