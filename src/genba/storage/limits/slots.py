"""Slots of buckets: taken, waited for, freed and given to the next jobs.

A job that needs slots is *parked* in the line of a bucket until it has all of them.  Then it is in
the claim index like any other job, and has them until its attempt ends.  queueing.py has the lines,
and the order of the locks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from genba.domain.limits import (
    LIMIT,
    ORDERED,
    Bucket,
    BucketWaiter,
    LimitRule,
    SlotNeed,
    SlotNeeds,
    assign_slots,
    read_needs,
    write_needs,
)
from genba.domain.states import FINAL
from genba.errors import BadOption, TaskFull
from genba.storage.engines.database import Database, Transaction
from genba.storage.limits.queueing import (
    PARKED_ON_LIMIT,
    BucketQueues,
    LimitedJob,
    limit_row,
    needs_pattern,
)
from genba.storage.records import JobId, Micros

PARKED_JOBS_PER_PRUNE = 20_000
LINES_PER_SWEEP = 500
UNLIMITED = 2**31 - 1

_FINAL = frozenset(map(str, FINAL))
_OUT_OF_QUEUE = _FINAL | {"held"}


class SlotHolder(NamedTuple):
    """A job that has a slot: since when, and on which node if it runs."""

    job: JobId
    state: str
    granted_at: Micros
    claimed_at: Micros | None
    node: str | None


@dataclass(frozen=True, slots=True)
class BucketWait:
    """What a parked job waits for."""

    bucket: str
    n: int
    per: Micros | None
    ripe_at: Micros | None  # of a rate: when the next job may start
    owner: JobId | None  # of an ordered bucket: the job that has the turn
    holders: tuple[SlotHolder, ...]
    ahead: int  # jobs in line before it


class LimitSlots:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace
        self.queues = BucketQueues(namespace)
        self._swept_to = ""  # where the next sweep goes on

    # within a caller's transaction

    def after_move(self, tx: Transaction, ids: Sequence[JobId]) -> None:
        """Follow jobs that have become waiting, held or final, other than by the end of an attempt.

        Every way into `waiting` comes through here or through `free_slots`.  Waiting jobs take
        their slots or join a line; the others free what they had.  Jobs without limits are left
        alone.  The caller holds the jobs' rows, and calls this after everything else that may wait
        for a row.
        """
        rows = self.of(tx, ids)
        entering = [row for row in rows if row.state == "waiting" and row.granted_at is None]
        postponed = [row for row in rows if row.state == "scheduled" and row.granted_at is not None]
        if rows:
            self.free_slots(
                tx, [*entering, *postponed, *(row for row in rows if row.state in _OUT_OF_QUEUE)]
            )

    def of(self, tx: Transaction, ids: Sequence[JobId]) -> list[LimitedJob]:
        """Read those of these jobs that have limits."""
        return (
            [
                LimitedJob(*row)
                for row in tx.all_json("limited_jobs", ids=tx.numbers(sorted(set(ids))))
            ]
            if ids
            else []
        )

    def queue_new(
        self,
        tx: Transaction,
        needs: Iterable[SlotNeeds],
        rules: Iterable[LimitRule],
        *,
        own_transaction: bool = True,
    ) -> None:
        """Serve the lines that new jobs with these needs have joined.

        Each is parked in its first line.

        With `own_transaction=False` the transaction is the user's and may stay open for long, so no
        bucket is locked; nodes look at the lines when it is committed.
        """
        needed = _by_name(needs)
        if not needed:
            return
        known = {rule.template: rule for rule in rules}
        if own_transaction:
            self.queues.make(tx, needed, known)
            self.queues.serve(tx, self.queues.lock(tx, needed), needed)
            return
        rows = [(need.name, *limit_row(known[need.template])) for need in needed.values()]
        tx.batch("insert_rechecks", rows, namespace=self._namespace)

    def free_slots(self, tx: Transaction, rows: Sequence[LimitedJob]) -> None:
        """Free the slots of jobs that ended or left the queue, and let the next jobs go.

        The caller holds these rows, which have the new states.  A job that waits again joins its
        line again; a job that is not final keeps its turn in an ordered bucket.
        """
        free: list[tuple[str, JobId]] = []
        lock: dict[str, SlotNeed] = {}
        again: list[tuple[LimitedJob, SlotNeeds]] = []
        for row in rows:
            needs, final = read_needs(row.buckets), row.state in _FINAL
            for need in needs:
                if (need.kind == LIMIT and row.granted_at is not None) or (
                    need.kind == ORDERED and final
                ):
                    free.append((need.name, row.id))
                    lock[need.name] = need
            if not final:
                again.append((row, needs))
                lock.update((need.name, need) for need in needs)
        if not lock:
            return
        if again:
            tx.batch("clear_grants", [(row.id,) for row, _ in again])
            self.queues.make(tx, lock, {})
        buckets = self.queues.lock(tx, lock)
        for name, id in free:
            buckets[name].give(id)
        self.queues.join(tx, buckets, again)
        self.queues.serve(tx, buckets, lock)

    def take(self, tx: Transaction, id: JobId, sizes: Mapping[str, int]) -> str | None:
        """Take a slot of each of these buckets, or of none, for a running job.

        The caller holds the row of the job.  `sizes` says how many jobs may have a slot of the
        bucket at a time.  Gives None if the job got them: they are freed with its other slots, if
        its end says that it is `limited` (a node knows that of jobs that had buckets when they were
        claimed).  Otherwise gives a bucket that is full; then give the job back and call
        `wait_for`.
        """
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        more = {
            name: SlotNeed(name, name, LIMIT)
            for name in sizes
            if name not in {need.name for need in had}
        }
        buckets = self._lock_dynamic(tx, more, sizes)
        full = next((name for name in sorted(more) if not buckets[name].room(0)), None)
        if full is None and more:
            for name in more:
                buckets[name].take(id, 0)
            self.queues.write(tx, buckets.values())
            written = write_needs(tuple(sorted({*had, *more.values()})))
            tx.run("set_buckets", id=id, buckets=written, granted=1)
        return full

    def give_back(self, tx: Transaction, id: JobId, names: Collection[str]) -> None:
        """Give back slots that a running job took with `take` and does not need.

        The caller holds its row.
        """
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        back = {need.name: need for need in had if need.name in names}
        if not back:
            return
        rest = tuple(need for need in had if need.name not in back)
        tx.run("set_buckets", id=id, buckets=write_needs(rest) if rest else None, granted=0)
        buckets = self.queues.lock(tx, back)
        for name in back:
            buckets[name].give(id)
        self.queues.serve(tx, buckets, back)

    def wait_for(self, tx: Transaction, id: JobId, sizes: Mapping[str, int]) -> None:
        """Queue a job that has just become waiting for these slots too.

        The caller holds its row.
        """
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        more = {name: SlotNeed(name, name, LIMIT) for name in sizes}
        self._lock_dynamic(tx, more, sizes)
        needs = tuple(sorted({need.name: need for need in (*had, *more.values())}.values()))
        tx.run("set_buckets", id=id, buckets=write_needs(needs), granted=0)
        self.after_move(tx, [id])

    def _lock_dynamic(
        self, tx: Transaction, more: Mapping[str, SlotNeed], sizes: Mapping[str, int]
    ) -> dict[str, Bucket]:
        rules = {name: LimitRule(name, max(0, sizes[name])) for name in more}
        self.queues.make(tx, more, rules)
        buckets = self.queues.lock(tx, more)
        for name, bucket in buckets.items():
            bucket.n = sizes[name]  # the last request says how many
        changed = [limit_row(rule) for rule in rules.values()]
        if changed and tx.batch("declare_limits", changed, namespace=self._namespace):
            tx.batch(
                "refresh_buckets", [(name,) for name in sorted(more)], namespace=self._namespace
            )
        return buckets

    def _row(self, tx: Transaction, id: JobId) -> list[tuple[Any, ...]]:
        row = tx.one("buckets_of_job", id=id)
        return [row or (id, None, None, "")]

    def check_waiting(self, tx: Transaction, counts: Mapping[str, tuple[int, int]]) -> None:
        """TaskFull if so many more jobs of a task may not wait.

        `counts` has (most, more) of each task.

        The count is locked until the commit.
        """
        for task, (most, more) in sorted(counts.items()):
            tx.run("lock_waiting_count", namespace=self._namespace, task=task)
            ((there,),) = tx.all(
                "count_capped", namespace=self._namespace, task=task, most=most + 1
            )
            if there + more > most:
                raise TaskFull(
                    f"task {task!r}: {there} jobs wait already, and max_waiting is {most}"
                    + (f"; {more} more were asked for at once" if more > 1 else "")
                )

    # transactions of their own

    def recheck(self) -> int:
        """Serve the lines for which another transaction left a recheck; how many."""
        with self._db.transaction() as tx:
            rows = tx.all("rechecks", namespace=self._namespace)
            if not rows:
                return 0
            tx.batch("delete_rechecks", [(row[0],) for row in rows])
            needed = {name: SlotNeed(name, template, LIMIT) for _, name, template, *_ in rows}
            rules = [
                LimitRule(t, n, bool(ordered), per, burst)
                for _, _, t, n, ordered, per, burst in rows
                if n is not None
            ]
            self.queues.make(tx, needed, {rule.template: rule for rule in rules})
            self.queues.serve(tx, self.queues.lock(tx, needed), needed)
            return len(rows)

    def serve_due_rates(self) -> Micros | None:
        """Serve the lines of rates that let jobs start now; gives the moment of the next one."""
        with self._db.transaction() as tx:
            self.queues.lock_and_serve(tx, tx.all("due_rate_buckets", namespace=self._namespace))
            row = tx.one("next_due_rate", namespace=self._namespace)
            return row[0] if row else None

    def sweep(self) -> None:
        """Serve some lines that were missed, and free slots of jobs that no node claims.

        This is the safety net under everything else; each call goes on where the one before
        stopped.
        """
        with self._db.statement() as tx:
            lines = tx.all(
                "parked_reasons_after",
                namespace=self._namespace,
                after=self._swept_to,
                most=LINES_PER_SWEEP,
            )
            stuck = self._stuck(tx, tx.all("stale_grants", namespace=self._namespace))
        self._swept_to = lines[-1][0] if len(lines) == LINES_PER_SWEEP else ""
        missed = [(name, template) for _, name, template in lines if name is not None]
        others = [
            reason.removeprefix(PARKED_ON_LIMIT)
            for reason, name, _ in lines
            if name is None and reason.startswith(PARKED_ON_LIMIT)
        ]
        if missed or others:
            with self._db.transaction() as tx:
                self.queues.lock_and_serve(tx, missed)
                self.queues.serve_missing(tx, others)
        for id, buckets, other in stuck:
            with self._db.transaction() as tx:
                self._revoke(tx, id, read_needs(buckets), other)

    def set_limit(self, tx: Transaction, template: str, n: int | None) -> None:
        """Set an operator's n for all buckets of a template, None: as the code says.

        Stops no running job.
        """
        if n is not None and (type(n) is not int or not 0 <= n < 2**31):
            raise BadOption(f"the n of a limit must be a whole number of at least 0, not {n!r}")
        if not tx.all("set_limit", namespace=self._namespace, template=template, n=n):
            raise BadOption(f"there is no limit {template!r} whose n could be changed")
        self._refit(tx, [template])

    def override_limit(self, tx: Transaction, template: str, n: int | None) -> None:
        """Do the same, also for a template that is not stored yet."""
        if n is not None:
            tx.batch("insert_limits", [(template, n, 0, None, None)], namespace=self._namespace)
        if tx.all("set_limit", namespace=self._namespace, template=template, n=n):
            self._refit(tx, [template])

    def declare(self, tx: Transaction, rules: Sequence[LimitRule]) -> None:
        """Store the limits that a joining node's code declares; existing buckets follow at once."""
        rows = [limit_row(rule) for rule in sorted(set(rules))]
        changed = tx.batch("declare_limits", rows, namespace=self._namespace)
        self._refit(tx, [row[0] for row in changed])

    def rules(self) -> dict[str, tuple[int, int | None]]:
        """Read n and the operator's n of each template."""
        with self._db.statement() as tx:
            return {
                row[0]: (row[1], row[2]) for row in tx.all("limit_rules", namespace=self._namespace)
            }

    def prune(self) -> int:
        """Delete buckets that no job uses or waits for; how many.

        A job that waits for several buckets is parked in the line of one: it needs the others, too.
        """
        with self._db.statement() as tx:
            names = self._unneeded(tx, tx.all("empty_buckets", namespace=self._namespace))
        if not names:
            return 0
        with self._db.transaction() as tx:
            locked = tx.batch("try_lock_buckets", names, namespace=self._namespace)
            unneeded = self._unneeded(tx, [row[:1] for row in locked])
            tx.batch("prune_buckets", unneeded, namespace=self._namespace)
            return len(unneeded)

    def _unneeded(self, tx: Transaction, names: Sequence[Sequence[str]]) -> list[tuple[str]]:
        """Take away the buckets that parked jobs need.

        With too many parked jobs to read, take away all of them.
        """
        if not names:
            return []
        parked = tx.all(
            "parked_on_several_limits", namespace=self._namespace, most=PARKED_JOBS_PER_PRUNE
        )
        if len(parked) == PARKED_JOBS_PER_PRUNE:
            return []
        needed = {need.name for (buckets,) in parked for need in read_needs(buckets)}
        return sorted((name,) for (name,) in names if name not in needed)

    def line(self, id: JobId, rank: int, parked_on: str | None) -> BucketWait | None:
        """Describe what a parked job waits for, which jobs have it, and how many are before it.

        None if it is not in the line of a bucket.
        """
        if parked_on is None or not parked_on.startswith(PARKED_ON_LIMIT):
            return None
        name = parked_on.removeprefix(PARKED_ON_LIMIT)
        with self._db.statement() as tx:
            row = tx.one("bucket", namespace=self._namespace, name=name)
            found = tx.one(
                "count_parked_ahead", namespace=self._namespace, line=parked_on, rank=rank, id=id
            )
            holders = () if row is None else self._holders(tx, name)
            now = tx.now()
        ahead = int(found[0]) if found else 0
        if row is None:
            return BucketWait(name, 0, None, None, None, (), ahead)
        bucket = Bucket(*row)
        if bucket.per is not None:  # jobs that have started do not keep others from it
            holders = tuple(holder for holder in holders if holder.claimed_at is None)
        ripe = bucket.ripe_at(now) if bucket.per is not None else None
        return BucketWait(name, bucket.n, bucket.per, ripe, bucket.owner, holders, ahead)

    def _holders(self, tx: Transaction, name: str) -> tuple[SlotHolder, ...]:
        mark = needs_pattern(name)
        rows = [
            *tx.all("slot_holders", namespace=self._namespace, mark=mark),
            *tx.all("unclaimed_slot_holders", namespace=self._namespace, mark=mark),
        ]
        return tuple(
            SlotHolder(*row[:5])
            for row in rows
            if name in {need.name for need in read_needs(row[5])}
        )

    # slots that no job uses

    def _stuck(
        self, tx: Transaction, stale: Sequence[tuple[JobId, str, str, str | None]]
    ) -> list[tuple[JobId, str, tuple[str, JobId]]]:
        """Find the jobs with unused slots for which another job waits that could start.

        With its (line, job).
        """
        lines = {
            id: [
                (PARKED_ON_LIMIT + need.name, None if parked_on is not None else queue)
                for need in read_needs(buckets)
                if need.kind != ORDERED
            ]
            for id, queue, buckets, parked_on in stale
        }
        all_lines = sorted({line for of_job in lines.values() for line in of_job}, key=str)
        others = tx.batch("other_parked_jobs", all_lines, namespace=self._namespace)
        found = {
            (line, queue): (line.removeprefix(PARKED_ON_LIMIT), other)
            for line, queue, other in others
        }
        return [
            (id, buckets, other)
            for id, _, buckets, _ in stale
            if (other := next((found[line] for line in lines[id] if line in found), None))
            is not None
        ]

    def _revoke(
        self, tx: Transaction, id: JobId, needs: SlotNeeds, other: tuple[str, JobId]
    ) -> None:
        """Take the slots of a job that no node claims, and give them to another one."""
        line = next(need for need in needs if need.name == other[0])
        if not tx.one("revoke_grant", id=id, line=PARKED_ON_LIMIT + line.name):
            return
        other_needs = next(
            (read_needs(row[1]) for row in tx.all_json("limited_jobs", ids=tx.numbers([other[1]]))),
            (),
        )
        needed = _by_name([needs, other_needs])
        buckets = self.queues.lock(tx, needed)
        for need in needs:
            if need.kind != ORDERED and need.name in buckets:
                buckets[need.name].give(id)
        if needed.keys() == buckets.keys() and other_needs:
            assignment = assign_slots(
                buckets, [BucketWaiter(0, other[1], line.name, other_needs)], tx.now()
            )
            if assignment.grants and not self.queues.grant(tx, [other[1]]):
                for need in other_needs:
                    buckets[need.name].give(other[1])
        self.queues.serve(tx, buckets, list(buckets))

    def _refit(self, tx: Transaction, templates: Sequence[str]) -> None:
        """Make the buckets of these templates follow their changed rules."""
        rows = tx.batch(
            "buckets_of_template",
            [(template,) for template in templates],
            namespace=self._namespace,
        )
        needed = {row[0]: SlotNeed(row[0], "", LIMIT) for row in rows}
        if needed:
            self.queues.lock(tx, needed)
            tx.batch(
                "refresh_buckets", [(name,) for name in sorted(needed)], namespace=self._namespace
            )
            self.queues.serve(tx, self.queues.lock(tx, needed), needed)


def _by_name(all_needs: Iterable[SlotNeeds]) -> dict[str, SlotNeed]:
    return {need.name: need for needs in all_needs for need in needs}
