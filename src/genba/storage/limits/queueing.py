"""The lines of buckets: who stands in them, and who is let go.

Whoever works here holds the rows of the buckets, locked in the order of their names and after the rows of its own jobs;
from then on it waits for nobody: rows of jobs that others hold are left to them, or to the sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    bucket_to_wait_for,
    read_needs,
    write_needs,
)
from genba.storage.engines.database import Transaction
from genba.storage.records import JobId, Micros

PARKED_ON_LIMIT = "limit "  # what jobs in the line of a bucket are parked on, before its name
MOST = 1000  # jobs that are let go in one go
ROUNDS = 8  # looks at the same lines in one transaction; what is left is looked at in another one


class LimitedJob(NamedTuple):
    """A job that has stopped running, or left its line (the order is that of the queries)."""

    id: JobId
    buckets: str
    granted_at: Micros | None
    state: str


class BucketQueues:
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.handed = False  # a hint: since it was last cleared, jobs have been let go

    def stand(
        self,
        tx: Transaction,
        buckets: Mapping[str, Bucket],
        jobs: Sequence[tuple[LimitedJob, SlotNeeds]],
    ) -> None:
        """In line, those that may start, and those that must keep their place in an ordered one."""
        places = []
        ready = []
        for row, needs in jobs:
            stripe = next((need.name for need in needs if need.kind == ORDERED), None)
            owned = stripe is not None and buckets[stripe].owner == row.id
            line = bucket_to_wait_for(needs, owned)
            if row.state == "waiting" and line is None:
                ready.append(row.id)  # its turn is all it needs, and it has that
                places.append((row.id, PARKED_ON_LIMIT + str(stripe), 1))
            elif line is not None and (
                row.state == "waiting" or (line.kind == ORDERED and row.state != "blocked")
            ):
                places.append((row.id, PARKED_ON_LIMIT + line.name, int(stripe is not None)))
        tx.batch("park_on_limit", places)
        self.grant(tx, ready)

    def serve(self, tx: Transaction, buckets: dict[str, Bucket], names: Iterable[str]) -> None:
        """Hand the free slots of these buckets, which we hold, to those who wait for them; and write them."""
        now = self._now(tx, buckets)
        lines, put_off = set(names), set[str]()
        for _ in range(ROUNDS):
            asked = {
                name: room for name in sorted(lines) if (room := self._room(tx, buckets[name], now))
            }
            if not asked:
                lines = set()
                break
            rows = self._heads(tx, asked)
            lines, again = self._hand(tx, buckets, rows, asked, now)
            put_off |= again
        for bucket in buckets.values():  # also one that somebody has just moved to
            if bucket.per is not None:
                self._wake(tx, bucket, now or tx.now())
        self.write(tx, buckets.values())
        if put_off | lines:
            asked_for = [
                (name, buckets[name].template, None, None, None, None)
                for name in sorted(put_off | lines)
            ]
            tx.batch("insert_rechecks", asked_for, namespace=self._namespace)

    def look(self, tx: Transaction, rows: Sequence[tuple[str, str]]) -> None:
        wanted = {name: SlotNeed(name, template, LIMIT) for name, template in sorted(rows)}
        if wanted:
            self.serve(tx, self.lock(tx, wanted), wanted)

    def _heads(self, tx: Transaction, asked: Mapping[str, int]) -> list[tuple[Any, ...]]:
        """The first ones of these lines, as many as there is room."""
        found = []
        for room in sorted(set(asked.values())):
            lines = tx.names(
                [PARKED_ON_LIMIT + name for name, count in asked.items() if count == room]
            )
            found += tx.all_json("first_parked", lines=lines, room=room, namespace=self._namespace)
        return found

    def grant(self, tx: Transaction, ids: Sequence[JobId]) -> set[JobId]:
        """Let these go; those whose rows somebody else holds stay where they are."""
        if not ids:
            return set()
        if tx.run("grant_slots", ids=tx.numbers(ids)) < len(ids):
            ids = [row[0] for row in tx.batch("granted_jobs", [(id,) for id in ids])]
        self.handed = self.handed or bool(ids)
        return set(ids)

    def _now(self, tx: Transaction, buckets: Mapping[str, Bucket]) -> Micros:
        """The moment, if any of them is a rate: the others do not ask what time it is."""
        return tx.now() if any(bucket.per is not None for bucket in buckets.values()) else 0

    def _room(self, tx: Transaction, bucket: Bucket, now: Micros) -> int:
        room = min(MOST, bucket.room(now))
        if (
            room and bucket.per is not None
        ):  # what was let go and has not started yet must not start all at once
            most = bucket.burst or bucket.n
            mark = needs_pattern(bucket.name)
            ((unclaimed,),) = tx.all(
                "count_unclaimed", namespace=self._namespace, mark=mark, most=most
            )
            room = min(room, max(0, most - unclaimed))
        return room

    def _hand(
        self,
        tx: Transaction,
        buckets: dict[str, Bucket],
        rows: Sequence[tuple[Any, ...]],
        asked: Mapping[str, int],
        now: Micros,
    ) -> tuple[set[str], set[str]]:
        """Gives the lines where there may be more to hand out, and those that somebody must look at again."""
        waiters = [
            BucketWaiter(
                rank, id, line.removeprefix(PARKED_ON_LIMIT), read_needs(needs), state == "waiting"
            )
            for line, id, rank, needs, state in rows
        ]
        unseen = {need.name for waiter in waiters for need in waiter.needs} - buckets.keys()
        if unseen:
            tried = tx.batch(
                "try_lock_buckets", [(name,) for name in sorted(unseen)], namespace=self._namespace
            )
            buckets.update((row[0], Bucket(*row).seen()) for row in tried)
            now = now or self._now(tx, buckets)
        done = assign_slots(buckets, waiters, now)
        again = {
            waiter.line for waiter in waiters if done.unseen & {need.name for need in waiter.needs}
        }
        granted = self.grant(tx, [waiter.id for waiter in done.grants])
        turned = {
            row[0] for row in tx.batch("unpark_jobs", [(waiter.id,) for waiter in done.turns])
        }
        moved = {
            row[0]
            for row in tx.batch(
                "park_on_next_limit",
                [(waiter.id, PARKED_ON_LIMIT + to) for waiter, to in done.moves],
            )
        }
        for waiter in done.grants:
            if waiter.id not in granted:  # somebody holds its row, and looks at the line afterwards
                again.add(waiter.line)
                for need in waiter.needs:
                    buckets[need.name].give(waiter.id)
        for waiter in (*done.turns, *(waiter for waiter, _ in done.moves)):
            if waiter.id not in turned and waiter.id not in moved:
                again.add(waiter.line)
                buckets[waiter.line].give(waiter.id) if buckets[waiter.line].ordered else None
        found = Counter(waiter.line for waiter in waiters)
        full = [name for name, room in asked.items() if found[name] == room]
        went = {waiter.line for waiter, _ in done.moves} | {waiter.line for waiter in done.grants}
        return {
            name for name in full if name in went and name not in again and buckets[name].room(now)
        }, again

    def _wake(self, tx: Transaction, bucket: Bucket, now: Micros) -> None:
        """Somebody must look at the line of a rate when the next one may start, if anybody is there."""
        waits = self._heads(tx, {bucket.name: 1})
        ripe = bucket.ripe_at(now)
        bucket.next_at = None if not waits else ripe if ripe > now else now + 50_000

    def make(
        self, tx: Transaction, wanted: Mapping[str, SlotNeed], rules: Mapping[str, LimitRule]
    ) -> None:
        """Rows for buckets that have none; `rules` for templates that nobody has told of."""
        names = sorted(wanted)
        there = {
            row[0]
            for row in tx.batch(
                "existing_buckets", [(name,) for name in names], namespace=self._namespace
            )
        }
        missing = [wanted[name] for name in names if name not in there]
        if missing:
            known = [rules[t] for t in sorted({need.template for need in missing}) if t in rules]
            told = [(r.template, r.n, int(r.ordered), r.per, r.burst) for r in known]
            tx.batch("insert_limits", told, namespace=self._namespace)
            tx.batch(
                "make_buckets",
                [(need.name, need.template) for need in missing],
                namespace=self._namespace,
            )

    def lock(self, tx: Transaction, wanted: Mapping[str, SlotNeed]) -> dict[str, Bucket]:
        """The rows of these buckets, ours until the end of the transaction."""
        names = sorted(wanted)
        rows = tx.all_json("lock_buckets", names=tx.names(names), namespace=self._namespace)
        if len(rows) < len(names):  # pruned since we looked
            self.make(tx, wanted, {})
            rows = tx.all_json("lock_buckets", names=tx.names(names), namespace=self._namespace)
        found = {row[0]: Bucket(*row).seen() for row in rows}
        if len(found) < len(names):
            lost = {
                name: need for name, need in wanted.items() if name not in found
            }  # of a row written by hand
            self.make(
                tx, lost, {need.template: LimitRule(need.template, 0) for need in lost.values()}
            )
            rows = tx.all_json(
                "lock_buckets", names=tx.names(sorted(lost)), namespace=self._namespace
            )
            found |= {row[0]: Bucket(*row).seen() for row in rows}
        return found

    def write(self, tx: Transaction, buckets: Iterable[Bucket]) -> None:
        changed = [
            (*bucket.values(), bucket.template, bucket.n) for bucket in buckets if bucket.changed
        ]
        tx.batch("save_buckets", changed, namespace=self._namespace)


def needs_pattern(name: str) -> str:
    """A pattern for the buckets of jobs that need this one; it may find a few more."""
    return "%" + write_needs((SlotNeed(name, "", 0),))[2:].split(",", 1)[0].replace("\\", "_") + "%"
