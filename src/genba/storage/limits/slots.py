"""Slots of buckets: taken, waited for, and handed on.

A job that needs slots is *parked* in the line of a bucket until it has all of them; then it is in the claim index like
any other, and has them until its attempt ends.  How lines are worked off, and who locks what, is in `lines`.
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
from genba.storage.limits.queueing import PARKED_ON_LIMIT, BucketQueues, LimitedJob, needs_pattern
from genba.storage.records import JobId, Micros

LINES = 500  # that one sweep looks at
UNLIMITED = 2**31 - 1

_FINAL = frozenset(map(str, FINAL))
_OUT = _FINAL | {"held"}


class SlotHolder(NamedTuple):
    """Who has a slot: since when, and on which node if it runs."""

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
    ripe_at: Micros | None  # of a rate: when the next one may start
    owner: JobId | None  # of a stripe: whose turn it is
    holders: tuple[SlotHolder, ...]
    ahead: int  # others in line before it


class LimitSlots:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace
        self.lines = BucketQueues(namespace)
        self._looked_at = ""  # where the next sweep goes on

    # inside of others' transactions

    def moved(self, tx: Transaction, ids: Sequence[JobId]) -> None:
        """These jobs, whose rows we hold, have become waiting, held or final, other than by the end of an attempt.

        Every way into `waiting` comes through here (or through `ended`): those with limits take their slots, or stand
        in line; the others free what they had.  Jobs without limits are left alone.  Call it after all else that may
        wait for somebody's row.
        """
        rows = self.of(tx, ids)
        entering = [row for row in rows if row.state == "waiting" and row.granted_at is None]
        put_off = [row for row in rows if row.state == "scheduled" and row.granted_at is not None]
        if rows:
            self.ended(tx, [*entering, *put_off, *(row for row in rows if row.state in _OUT)])

    def of(self, tx: Transaction, ids: Sequence[JobId]) -> list[LimitedJob]:
        """Those of these jobs that have limits."""
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
        ours: bool = True,
    ) -> None:
        """Jobs with these needs were inserted, each parked in its first line.

        `ours` False: the transaction is the caller's, and may stay open for long, so that no bucket may be locked;
        nodes look at the lines when it is committed.
        """
        wanted = _names(needs)
        if not wanted:
            return
        known = {rule.template: rule for rule in rules}
        if ours:
            self.lines.make(tx, wanted, known)
            self.lines.serve(tx, self.lines.lock(tx, wanted), wanted)
            return
        asked = [(need, known[need.template]) for need in wanted.values()]
        rows = [(n.name, n.template, r.n, int(r.ordered), r.per, r.burst) for n, r in asked]
        tx.batch("insert_rechecks", rows, namespace=self._namespace)

    def ended(self, tx: Transaction, rows: Sequence[LimitedJob]) -> None:
        """Their attempts have ended, or they have left the queue: free what they had, and let the next ones go.

        The rows are ours, and tell what the jobs have come to.  One that waits again takes its place again; one that
        is not final keeps its turn in an ordered bucket.
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
            self.lines.make(tx, lock, {})
        buckets = self.lines.lock(tx, lock)
        for name, id in free:
            buckets[name].give(id)
        self.lines.stand(tx, buckets, again)
        self.lines.serve(tx, buckets, lock)

    def take(self, tx: Transaction, id: JobId, wanted: Mapping[str, int]) -> str | None:
        """For a job that runs, and whose row we hold: a slot of each of these buckets, or none of them.

        `wanted` is how many may have a slot of the bucket at a time.  None if it got them: they are freed with its
        other slots, if its end says that it is `limited` (a node knows that of jobs that had buckets when they were
        claimed).  Else the name of a bucket that is full; then put the job back, and call `wait_for`.
        """
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        more = {
            name: SlotNeed(name, name, LIMIT)
            for name in wanted
            if name not in {need.name for need in had}
        }
        buckets = self._dynamic(tx, more, wanted)
        full = next((name for name in sorted(more) if not buckets[name].room(0)), None)
        if full is None and more:
            for name in more:
                buckets[name].take(id, 0)
            self.lines.write(tx, buckets.values())
            written = write_needs(tuple(sorted({*had, *more.values()})))
            tx.run("set_buckets", id=id, buckets=written, granted=1)
        return full

    def give_back(self, tx: Transaction, id: JobId, names: Collection[str]) -> None:
        """For a job that runs, and whose row we hold: slots that it took with `take`, and does not need."""
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        back = {need.name: need for need in had if need.name in names}
        if not back:
            return
        rest = tuple(need for need in had if need.name not in back)
        tx.run("set_buckets", id=id, buckets=write_needs(rest) if rest else None, granted=0)
        buckets = self.lines.lock(tx, back)
        for name in back:
            buckets[name].give(id)
        self.lines.serve(tx, buckets, back)

    def wait_for(self, tx: Transaction, id: JobId, wanted: Mapping[str, int]) -> None:
        """For a job that has just become waiting, and whose row we hold: in line until it has these slots too."""
        (row,) = self._row(tx, id)
        had = read_needs(row[1]) if row[1] else ()
        more = {name: SlotNeed(name, name, LIMIT) for name in wanted}
        self._dynamic(tx, more, wanted)
        needs = tuple(sorted({need.name: need for need in (*had, *more.values())}.values()))
        tx.run("set_buckets", id=id, buckets=write_needs(needs), granted=0)
        self.moved(tx, [id])

    def _dynamic(
        self, tx: Transaction, more: Mapping[str, SlotNeed], wanted: Mapping[str, int]
    ) -> dict[str, Bucket]:
        rules = {name: LimitRule(name, max(0, wanted[name])) for name in more}
        self.lines.make(tx, more, rules)
        buckets = self.lines.lock(tx, more)
        for name, bucket in buckets.items():
            bucket.n = wanted[name]  # the last one who asks says how many
        changed = [(rule.template, rule.n, 0, None, None) for rule in rules.values()]
        if changed and tx.batch("declare_limits", changed, namespace=self._namespace):
            tx.batch(
                "refresh_buckets", [(name,) for name in sorted(more)], namespace=self._namespace
            )
        return buckets

    def _row(self, tx: Transaction, id: JobId) -> list[tuple[Any, ...]]:
        row = tx.one("buckets_of_job", id=id)
        return [row or (id, None, None, "")]

    def check_waiting(self, tx: Transaction, wanted: Mapping[str, tuple[int, int]]) -> None:
        """TaskFull if so many more jobs of a task may not wait: (most, more) each.  Holds until the commit."""
        for task, (most, more) in sorted(wanted.items()):
            tx.run("lock_waiting_count", namespace=self._namespace, task=task)
            ((there,),) = tx.all(
                "count_capped", namespace=self._namespace, task=task, most=most + 1
            )
            if there + more > most:
                raise TaskFull(
                    f"task {task!r}: {there} jobs wait already, and max_waiting is {most}"
                    + (f"; {more} more were asked for at once" if more > 1 else "")
                )

    # use cases of their own

    def recheck(self) -> int:
        """Look at the lines that somebody has asked us to look at; how many."""
        with self._db.transaction() as tx:
            rows = tx.all("rechecks", namespace=self._namespace)
            if not rows:
                return 0
            tx.batch("delete_rechecks", [(row[0],) for row in rows])
            wanted = {name: SlotNeed(name, template, LIMIT) for _, name, template, *_ in rows}
            told = [
                LimitRule(t, n, bool(ordered), per, burst)
                for _, _, t, n, ordered, per, burst in rows
                if n is not None
            ]
            self.lines.make(tx, wanted, {rule.template: rule for rule in told})
            self.lines.serve(tx, self.lines.lock(tx, wanted), wanted)
            return len(rows)

    def serve_due_rates(self) -> Micros | None:
        """Rates that let the next ones start; the moment when there is more to do."""
        with self._db.transaction() as tx:
            self.lines.look(tx, tx.all("due_rate_buckets", namespace=self._namespace))
            row = tx.one("next_due_rate", namespace=self._namespace)
            return row[0] if row else None

    def sweep(self) -> None:
        """The net under everything: lines that were forgotten, some at a time, and slots of jobs that nobody takes."""
        with self._db.statement() as tx:
            lines = tx.all(
                "parked_reasons_after", namespace=self._namespace, after=self._looked_at, most=LINES
            )
            stuck = self._stuck(tx, tx.all("stale_grants", namespace=self._namespace))
        self._looked_at = lines[-1][0] if len(lines) == LINES else ""
        neglected = [(name, template) for _, name, template in lines if name is not None]
        if neglected:
            with self._db.transaction() as tx:
                self.lines.look(tx, neglected)
        for id, buckets, other in stuck:
            with self._db.transaction() as tx:
                self._revoke(tx, id, read_needs(buckets), other)

    def set_limit(self, tx: Transaction, template: str, n: int | None) -> None:
        """An operator's n for all buckets of a template, None to go back to what the code says; stops nobody."""
        if n is not None and (type(n) is not int or not 0 <= n < 2**31):
            raise BadOption(f"the n of a limit must be a whole number of at least 0, not {n!r}")
        if not tx.all("set_limit", namespace=self._namespace, template=template, n=n):
            raise BadOption(f"there is no limit {template!r} whose n could be changed")
        self._refit(tx, [template])

    def override_limit(self, tx: Transaction, template: str, n: int | None) -> None:
        """As `set_limit`, also for a template that nobody has told of."""
        if n is not None:
            tx.batch("insert_limits", [(template, n, 0, None, None)], namespace=self._namespace)
        if tx.all("set_limit", namespace=self._namespace, template=template, n=n):
            self._refit(tx, [template])

    def declare(self, tx: Transaction, rules: Sequence[LimitRule]) -> None:
        """What the code says, by a node that joins; buckets that are there obey at once."""
        rows = [(r.template, r.n, int(r.ordered), r.per, r.burst) for r in sorted(set(rules))]
        changed = tx.batch("declare_limits", rows, namespace=self._namespace)
        self._refit(tx, [row[0] for row in changed])

    def rules(self) -> dict[str, tuple[int, int | None]]:
        """n and the operator's n of each template."""
        with self._db.statement() as tx:
            return {
                row[0]: (row[1], row[2]) for row in tx.all("limit_rules", namespace=self._namespace)
            }

    def prune(self) -> int:
        """Forget buckets that nobody uses or waits for; how many."""
        with self._db.statement() as tx:
            names = sorted(tx.all("empty_buckets", namespace=self._namespace))
        if not names:
            return 0
        with self._db.transaction() as tx:
            mine = tx.batch("try_lock_buckets", names, namespace=self._namespace)
            tx.batch("prune_buckets", [row[:1] for row in mine], namespace=self._namespace)
            return len(mine)

    def line(self, id: JobId, rank: int, parked_on: str | None) -> BucketWait | None:
        """What a parked job waits for, who has it, and how many are before it; None if it is in no line."""
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
        if bucket.per is not None:  # who has started does not keep others from it
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

    # what nobody uses

    def _stuck(
        self, tx: Transaction, stale: Sequence[tuple[JobId, str, str, str | None]]
    ) -> list[tuple[JobId, str, tuple[str, JobId]]]:
        """Those of these, whose slots nobody uses, for which another one waits who could start: (line, job)."""
        asked = {
            id: [
                (PARKED_ON_LIMIT + need.name, None if parked_on is not None else queue)
                for need in read_needs(buckets)
                if need.kind != ORDERED
            ]
            for id, queue, buckets, parked_on in stale
        }
        wanted = sorted({one for ones in asked.values() for one in ones}, key=str)
        others = tx.batch("other_parked_jobs", wanted, namespace=self._namespace)
        found = {
            (line, queue): (line.removeprefix(PARKED_ON_LIMIT), other)
            for line, queue, other in others
        }
        return [
            (id, buckets, other)
            for id, _, buckets, _ in stale
            if (other := next((found[one] for one in asked[id] if one in found), None)) is not None
        ]

    def _revoke(
        self, tx: Transaction, id: JobId, needs: SlotNeeds, other: tuple[str, JobId]
    ) -> None:
        """Take the slots of a job that nobody claims, and give them to another one."""
        line = next(need for need in needs if need.name == other[0])
        if not tx.one("revoke_grant", id=id, line=PARKED_ON_LIMIT + line.name):
            return
        theirs = next(
            (read_needs(row[1]) for row in tx.all_json("limited_jobs", ids=tx.numbers([other[1]]))),
            (),
        )
        wanted = _names([needs, theirs])
        buckets = self.lines.lock(tx, wanted)
        for need in needs:
            if need.kind != ORDERED and need.name in buckets:
                buckets[need.name].give(id)
        if wanted.keys() == buckets.keys() and theirs:
            done = assign_slots(buckets, [BucketWaiter(0, other[1], line.name, theirs)], tx.now())
            if done.grants and not self.lines.grant(tx, [other[1]]):
                for need in theirs:
                    buckets[need.name].give(other[1])
        self.lines.serve(tx, buckets, list(buckets))

    def _refit(self, tx: Transaction, templates: Sequence[str]) -> None:
        """Buckets of these templates obey what is said of them now."""
        rows = tx.batch(
            "buckets_of_template", [(one,) for one in templates], namespace=self._namespace
        )
        wanted = {row[0]: SlotNeed(row[0], "", LIMIT) for row in rows}
        if wanted:
            self.lines.lock(tx, wanted)
            tx.batch(
                "refresh_buckets", [(name,) for name in sorted(wanted)], namespace=self._namespace
            )
            self.lines.serve(tx, self.lines.lock(tx, wanted), wanted)


def _names(all_needs: Iterable[SlotNeeds]) -> dict[str, SlotNeed]:
    return {need.name: need for needs in all_needs for need in needs}
