"""Store: what genba does with its database; one method is one use case is one transaction."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from genba.domain.clock import Clock, SystemClock
from genba.domain.rank import AGE_STEP
from genba.errors import BadOption, JobNotFound, KeyTaken, StoreError, StoreUnreachable
from genba.storage import migrate
from genba.storage.database import AnswerLost, Database, Query, Tx, load_queries
from genba.storage.inside import Inside
from genba.storage.membership import Membership
from genba.storage.postgres import PostgresDatabase
from genba.storage.presence import FilePresence, Presence, ServerPresence
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
from genba.storage.search import Search
from genba.storage.sqlite import Place, SqliteDatabase

FINAL = ("succeeded", "failed", "timed_out", "cancelled")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # claims come in few sizes, each a prepared statement
DEFAULT_URL = "sqlite:///genba.db"

_COLUMNS = (  # noqa: SIM905  eighteen quoted names would hide their order
    "id created_at due_at rank state expires_at unique_until parent_id priority open_deps once_waiting "
    "namespace queue task key key_hash tags options args"
).split()
_json = msgspec.json.Encoder()


def open_store(url: str, *, namespace: str = "default", clock: Clock | None = None) -> Store:
    """The store behind `url`; nothing is opened before the first call.  A clock of its own is for tests."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        place = _place(url)
        database = SqliteDatabase(place, _queries("sqlite"), clock or SystemClock())
        return Store(database, FilePresence(place.path), namespace)
    if parts.scheme in ("postgresql", "postgres"):
        server = PostgresDatabase(url, _queries("postgres"), clock)
        return Store(server, ServerPresence(server), namespace)
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
    def __init__(self, database: Database, presence: Presence, namespace: str) -> None:
        self._db = database
        self.presence = presence
        self.namespace = namespace
        self.nodes = Membership(database, presence, namespace, self._end)
        self.search = Search(database, namespace)
        self.inside = Inside(database, namespace, self._end, self._ended_inside)
        self.children_wait = False  # a hint: since it was last cleared, a parent has ended
        self._installed = False

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

    def now(self) -> Micros:
        with self._db.statement() as tx:
            return tx.now()

    def mark_of_writes(self) -> object:
        return self._db.mark()

    def close(self) -> None:
        self.presence.close()
        self._db.close()

    # jobs come in

    def enqueue(self, jobs: Sequence[NewJob], conn: Any = None) -> list[Enqueued]:
        """Durable when it returns (with `conn`: when the caller commits); all or nothing."""
        self.install()
        if conn is not None:
            with self._db.adopt(conn) as tx:
                return self._insert(tx, jobs)
        ids: list[JobId] = []
        try:
            done = self._commit(jobs, ids)
        except AnswerLost:
            done = self._commit_again(jobs, ids)
        with suppress(StoreError):  # the jobs are in: what fails from here on must not say otherwise
            if any(job.after for job in jobs):
                self.settle()
            for queue, count in Counter(job.queue for job in jobs).items():
                self.presence.ring(self.namespace, queue, count)
        return done

    def _commit(self, jobs: Sequence[NewJob], ids: list[JobId]) -> list[Enqueued]:
        """`ids` tells afterwards under which ids it was tried."""
        if len(jobs) == 1 and jobs[0].plain:
            with self._db.single() as tx:
                ids[:] = ids or tx.ids(1)
                return [self._insert_one(tx, jobs[0], ids[0])]
        with self._db.transaction() as tx:
            ids[:] = ids or tx.ids(len(jobs))
            return self._insert(tx, jobs, ids)

    def _commit_again(self, jobs: Sequence[NewJob], ids: list[JobId]) -> list[Enqueued]:
        """The answer to the commit was lost; the same ids tell whether it had happened."""
        try:
            there = self.states(ids)
            return self._as_found(jobs, ids) if there else self._commit(jobs, ids)
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

    def _insert(self, tx: Tx, jobs: Sequence[NewJob], given: Sequence[JobId] = ()) -> list[Enqueued]:
        ids = given or tx.ids(len(jobs))
        done: list[Enqueued] = [Enqueued(0, False)] * len(jobs)
        rows: list[tuple[Any, ...]] = []
        edges: list[tuple[int, int, str]] = []
        now = tx.now() if len(jobs) > 1 else 0
        for i, job in enumerate(jobs):
            if now and not job.after and job.identity is None:
                rows.append(self._row(job, ids[i], 0, now))
                done[i] = Enqueued(ids[i], True)
                continue
            wanted = {done[e.job].id if e.inside else e.job: e.wants for e in job.after}
            if job.identity is None and now:
                rows.append(self._row(job, ids[i], len(wanted), now))
                done[i] = Enqueued(ids[i], True)
            elif job.identity is None:
                done[i] = self._insert_one(tx, job, ids[i], len(wanted))
            else:
                done[i], wanted = self._insert_unique(tx, job, ids[i], wanted)
            if done[i].created:
                edges += [(done[i].id, parent, wants) for parent, wants in wanted.items()]
        if rows:
            tx.insert_jobs(_COLUMNS, rows)
            self._tell(tx, "enqueued", [row[0] for row in rows])
        self._connect(tx, jobs, done, edges)
        return done

    def _connect(
        self, tx: Tx, jobs: Sequence[NewJob], done: Sequence[Enqueued], edges: Sequence[tuple[int, int, str]]
    ) -> None:
        tags = [(tag, made.id) for job, made in zip(jobs, done, strict=True) if made.created for tag in job.tags]
        tx.batch("add_tags", tags, namespace=self.namespace)
        if edges:
            parents = sorted({parent for _, parent, _ in edges})
            known = {row[0] for row in tx.batch("states", [(parent,) for parent in parents], namespace=self.namespace)}
            unknown = [parent for parent in parents if parent not in known]
            if unknown:
                raise JobNotFound(f"after: there is no job {', '.join(map(str, unknown))}")
            tx.batch("add_edges", edges)
            tx.batch("look_at", [(parent,) for parent in parents], namespace=self.namespace)

    def _row(self, job: NewJob, id: JobId, deps: int, now: Micros) -> tuple[Any, ...]:
        due = max(now, job.due_at if job.due_at is not None else now + job.delay)
        state = "blocked" if deps else "scheduled" if due > now else "waiting"
        return (
            id,
            now,
            due,
            due - job.priority * AGE_STEP,
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
        )

    def _insert_one(self, tx: Tx, job: NewJob, id: JobId, deps: int = 0) -> Enqueued:
        row = tx.one(
            "enqueue_one",
            id=id,
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
        tx.run("enqueue_one_event", namespace=self.namespace, job_id=id)
        return Enqueued(id, True)

    def _insert_unique(
        self, tx: Tx, job: NewJob, id: JobId, after: dict[int, str]
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
                if tx.one("cancel", id=other, namespace=self.namespace, reason=reason):
                    self._after_end(tx, "cancelled", [other])
                elif self._ask_to_stop(tx, other, "cancel", reason) is not None:
                    after = {**after, other: "finished"}
        raise KeyTaken(f"the identity of this {job.task!r} job changes hands too fast to take it")

    def _tell(self, tx: Tx, kind: str, ids: Sequence[JobId], **more: Any) -> None:
        """One event row, whatever the number of jobs it tells of."""
        if len(ids) == 1:
            tx.run(
                "enqueued",
                namespace=self.namespace,
                kind=kind,
                job_id=ids[0],
                data=_json.encode(more) if more else None,
            )
        elif ids:
            tx.run(
                "enqueued", namespace=self.namespace, kind=kind, job_id=None, data=_json.encode({"jobs": ids, **more})
            )

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
        got: list[Claimed] = []
        known = tx.names(tasks)
        for queue, count in wants.items():
            if count < 1:
                continue
            rows = tx.all(
                "claim",
                namespace=self.namespace,
                queue=queue,
                node=node,
                claim=claim,
                tasks=known,
                limit=_size(count),
            )
            got += [Claimed(*row) for row in sorted(rows)]
        return got

    def claim_dedicated(
        self, node: int, claim: int, queues: Sequence[str], tasks: Sequence[str], limit: int
    ) -> list[Claimed]:
        """Lease dedicated jobs only, of those that are nearly due to be claimed: for a node without a free slot."""
        known, mark = set(tasks), '%"dedicated":true%'
        with self._db.statement() as tx:
            found = [
                id
                for queue in queues
                for id, task in tx.all("dedicated_ahead", namespace=self.namespace, queue=queue, mark=mark)
                if task in known
            ]
        if not found:
            return []
        with self._db.transaction() as tx:
            rows = [tx.one("claim_one", node=node, claim=claim, id=id) for id in found[:limit]]
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
        matched = set(tx.batch("succeed", ended, node=node))
        if len(matched) < len(ended):
            ended = list({one[:2]: one for one in ended if one[:2] in matched}.values())
        tx.batch("succeed_history", ended, node=node)
        ids = [one.id for one in ended]
        self._after_end(tx, "succeeded", ids)
        return set(ids)

    def _after_end(self, tx: Tx, kind: str, ids: Sequence[JobId]) -> None:
        """After the jobs' rows are written, never before: an edge we do not see yet will see our lock."""
        parents = tx.all("with_children", ids=tx.numbers(ids))
        if parents:
            tx.batch("look_at", parents, namespace=self.namespace)
            self.children_wait = True
        self._tell(tx, kind, ids)

    def end(self, node: int, ended: Sequence[Ending]) -> set[JobId]:
        """Record attempts that ended otherwise; gives the ids that were still ours to end."""
        with self._db.transaction() as tx:
            return self._end(tx, node, ended)

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
        matched = {(id, attempt): (claimed, state) for id, attempt, claimed, state in tx.batch("end", rows)}
        if not matched:
            return set()
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
                if e.happened
            ],
        )
        told: dict[str, list[JobId]] = {}
        for e in mine:
            told.setdefault(_kind(e, matched[e.id, e.attempt][1]), []).append(e.id)
        for kind, ids in told.items():
            if kind in FINAL:
                self._after_end(tx, kind, ids)
            else:
                self._tell(tx, kind, ids)
        return {e.id for e in mine}

    def mark(self, started: Sequence[tuple[JobId, int, int, Micros]], *, late: bool = False) -> set[JobId]:
        """Note that these attempts (id, attempt, claim, moment) have started; `late`: if nobody holds their rows."""
        with self._db.transaction() as tx:
            ids = [row[0] for row in tx.batch("mark_late" if late else "mark", started)]
            self._tell(tx, "running", ids)
            return set(ids)

    def progress(self, notes: Sequence[tuple[JobId, int, int, str]]) -> set[JobId]:
        with self._db.transaction() as tx:
            return {row[0] for row in tx.batch("note_progress", notes)}

    def _ended_inside(self) -> None:
        """A job has ended itself: what follows is what its node does for the others."""
        with suppress(StoreError):  # others do it later
            if self.children_wait:
                self.children_wait = False
                self.settle()
            self.presence.ring(self.namespace, None)

    # jobs are kept in motion

    def promote(self) -> int:
        """Scheduled jobs whose moment has come; how many."""
        with self._db.transaction() as tx:
            return tx.run("promote", namespace=self.namespace, age_step=AGE_STEP)

    def next_due(self) -> Micros | None:
        with self._db.statement() as tx:
            row = tx.one("next_due", namespace=self.namespace)
            return row[0] if row else None

    def settle(self) -> int:
        """Look at the children of parents that have ended; how many parents."""
        with self._db.transaction() as tx:
            tx.run("one_settler", namespace=self.namespace)
            settled = 0
            pending = tx.all("unsettled", namespace=self.namespace)
            states = {parent: tx.one("parent_state", id=parent) for _, parent, _ in pending}
            for seq, parent, seen in pending:
                state = states[parent]
                if state is None and seen is not None:
                    continue  # somebody holds the row: another pass will see how that ended
                if state is None or state[0] in FINAL:
                    self._resolve(tx, parent, state[0] if state else "deleted")
                settled += tx.run("forget_unsettled", seq=seq)
            return settled

    def _resolve(self, tx: Tx, parent: JobId, state: str) -> None:
        for child, wants in tx.all("children", parent_id=parent):
            fine = wants == "finished" or (wants == "success") == (state == "succeeded")
            policy = "run" if fine else self._on_dependency_failure(tx, child)
            if not tx.all("edge_done", child_id=child, parent_id=parent, state="met" if fine else "broken"):
                continue
            moved = tx.one("one_dep_less", id=child, age_step=AGE_STEP)
            if moved and policy != "run":
                word = "failed" if wants == "success" else "succeeded"
                reason = f"dependency {word}: job {parent} ended {state}"
                verb = "cancel" if policy == "cancel" else "hold"
                if tx.one(verb, id=child, namespace=self.namespace, reason=reason):
                    self._after_end(tx, "cancelled" if policy == "cancel" else "held", [child])

    def _on_dependency_failure(self, tx: Tx, child: JobId) -> str:
        row = tx.one("options_of", id=child)
        options = msgspec.json.decode(row[0]) if row and row[0] else {}
        return str(options.get("on_dependency_failure", "cancel"))

    def expire(self) -> int:
        with self._db.transaction() as tx:
            ids = [row[0] for row in tx.all("expire", namespace=self.namespace)]
            self._after_end(tx, "cancelled", ids)
            return len(ids)

    def park_unknown(self, queue: str, known: Iterable[str]) -> int:
        """Put aside the jobs in front that no live node can run; how many."""
        with self._db.transaction() as tx:
            return tx.run("park_unknown", namespace=self.namespace, queue=queue, tasks=tx.names(sorted(known)))

    def unpark(self, reasons: Iterable[str]) -> int:
        with self._db.transaction() as tx:
            return sum(tx.run("unpark", namespace=self.namespace, parked_on=reason) for reason in reasons)

    def parked_on(self) -> set[str]:
        with self._db.statement() as tx:
            return {row[0] for row in tx.all("parked_anything", namespace=self.namespace)}

    def prune(self, before: Micros, task: str | None = None) -> int:
        """Delete up to 500 jobs that ended before `before`, with their history; how many."""
        with self._db.transaction() as tx:
            gone = tx.all("prune", namespace=self.namespace, before=before, task=task)
            for name in ("prune_attempts", "prune_tags", "prune_edges"):
                tx.batch(name, gone)
            return len(gone)

    def prune_events(self, before: Micros) -> int:
        with self._db.transaction() as tx:
            return tx.run("prune_events", before=before)

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

    def open_parents(self, id: JobId) -> list[tuple[JobId, str | None]]:
        with self._db.statement() as tx:
            return [(row[0], row[1]) for row in tx.all("open_parents", id=id)]

    def results_of_parents(self, id: JobId) -> list[tuple[JobId, bytes | None]]:
        with self._db.statement() as tx:
            return [(row[0], row[1]) for row in tx.all("results_of_parents", id=id)]

    def ahead(self, job: JobRecord) -> int:
        """How many waiting jobs of its queue start before it."""
        with self._db.statement() as tx:
            row = tx.one("ahead", namespace=self.namespace, queue=job.queue, rank=job.rank, id=job.id)
            return int(row[0]) if row else 0

    def cancel(self, id: JobId, reason: str | None, how: str = "cancel") -> bool:
        """What has not started is cancelled, what runs is asked to stop; False if it was final already."""
        with self._db.transaction() as tx:
            if tx.one("cancel", id=id, namespace=self.namespace, reason=reason or "cancelled"):
                self._after_end(tx, "cancelled", [id])
                asked = None
            elif (asked := self._ask_to_stop(tx, id, how, reason)) is None:
                return False
        with suppress(StoreError):  # it is asked for: what is left is done by others, later
            if asked is None:
                self.settle()
            else:
                self.presence.knock(asked)
        return True

    def _ask_to_stop(self, tx: Tx, id: JobId, how: str, reason: str | None) -> int | None:
        row = tx.one("ask_to_stop", id=id, namespace=self.namespace, how=how, reason=reason)
        if row is None:
            return None
        node, attempt = row
        tx.run("command", node=node, job_id=id, attempt=attempt, verb=how, data=reason)
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
            self._tell(tx, "requeued", [id])
            for (child,) in tx.all("broken_children", parent_id=id):
                if tx.one("reblock", id=child):
                    again = tx.all("reopen_edges", child_id=child)  # all of them: another may still be broken
                    tx.batch("look_at", again, namespace=self.namespace)
        self.presence.ring(self.namespace, None)
        return True

    def _steer(self, verb: str, kind: str, id: JobId, **values: Any) -> bool:
        with self._db.transaction() as tx:
            done = tx.one(verb, id=id, namespace=self.namespace, **values)
            if done:
                self._tell(tx, kind, [id])
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


def _size(count: int) -> int:
    """The largest of the few sizes that does not exceed `count`."""
    return max((size for size in SIZES if size <= count), default=1)

