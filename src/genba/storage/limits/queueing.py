"""The lines of jobs in front of buckets: which jobs wait there, and which of them are let go.

The order of the locks: first the rows of the caller's own jobs, then the buckets, in the order of
their names.  From then on nothing here waits for a lock.  Rows of jobs and buckets that another
transaction holds are skipped, and their lines are rechecked later, by that transaction or by the
sweep.
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
    SlotAssignment,
    SlotNeed,
    SlotNeeds,
    assign_slots,
    bucket_to_wait_for,
    read_needs,
    write_needs,
)
from genba.storage.engines.database import Transaction
from genba.storage.records import JobId, Micros

# Reason for which jobs in the line of a bucket are parked, before the bucket's name.
PARKED_ON_LIMIT = "limit "
JOBS_PER_GRANT = 1000  # the most that one look at a line lets go
# Looks at the same lines in one transaction.  What is left is rechecked in another one.
ROUNDS = 8
RATE_RETRY_US = 50_000  # until the line of a rate is looked at again that could not be emptied


class LimitedJob(NamedTuple):
    """A job that has stopped running, or left its line (in the order of the queries)."""

    id: JobId
    buckets: str
    granted_at: Micros | None
    state: str


class _Waiting(NamedTuple):
    """Jobs at the front of some lines, and how many of each line there was room for."""

    jobs: Sequence[BucketWaiter]
    room: Mapping[str, int]


class BucketQueues:
    """The lines of jobs in front of buckets.

    `granted` is a hint: since it was last cleared, jobs have been let go.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.granted = False

    # jobs join lines

    def join(
        self,
        tx: Transaction,
        buckets: Mapping[str, Bucket],
        jobs: Sequence[tuple[LimitedJob, SlotNeeds]],
    ) -> None:
        """Park jobs that may start, and jobs that must keep their place in an ordered bucket."""
        places = []
        ready = []
        for row, needs in jobs:
            ordered = next((need.name for need in needs if need.kind == ORDERED), None)
            owned = ordered is not None and buckets[ordered].owner == row.id
            line = bucket_to_wait_for(needs, owned)
            if row.state == "waiting" and line is None:
                # Its turn is all it needs, and it has that.
                ready.append(row.id)
                places.append((row.id, PARKED_ON_LIMIT + str(ordered), 1))
            elif line is not None and (
                row.state == "waiting" or (line.kind == ORDERED and row.state != "blocked")
            ):
                places.append((row.id, PARKED_ON_LIMIT + line.name, int(ordered is not None)))
        tx.batch("park_on_limit", places)
        self.grant(tx, ready)

    # free slots are given to jobs in line

    def serve(self, tx: Transaction, buckets: dict[str, Bucket], names: Iterable[str]) -> None:
        """Give the free slots of these locked buckets to the jobs in line, and write them."""
        now = self._now(tx, buckets)
        lines, recheck = set(names), set[str]()
        for _ in range(ROUNDS):
            room = {
                name: count
                for name in sorted(lines)
                if (count := self._room(tx, buckets[name], now))
            }
            if not room:
                lines = set()
                break
            waiting = _Waiting(self._first_in_lines(tx, room), room)
            now = self._lock_unseen(tx, buckets, waiting.jobs, now)
            lines, later = self._give_slots(tx, buckets, waiting, now)
            recheck |= later
        for bucket in buckets.values():  # a job may have moved to any of them
            if bucket.per is not None:
                self._plan_next_look(tx, bucket, now or tx.now())
        self.write(tx, buckets.values())
        recheck |= lines
        if recheck:
            rows = [
                (name, buckets[name].template, None, None, None, None) for name in sorted(recheck)
            ]
            tx.batch("insert_rechecks", rows, namespace=self._namespace)

    def lock_and_serve(self, tx: Transaction, rows: Sequence[tuple[str, str]]) -> None:
        """Do the same for (bucket, template), which are not locked yet."""
        needs = {name: SlotNeed(name, template, LIMIT) for name, template in sorted(rows)}
        if needs:
            self.serve(tx, self.lock(tx, needs), needs)

    def serve_missing(self, tx: Transaction, names: Sequence[str]) -> None:
        """Make those of these buckets that have no row, and serve their lines."""
        rows = tx.batch("existing_buckets", [(name,) for name in names], namespace=self._namespace)
        missing = set(names) - {row[0] for row in rows}
        first = self._first_in_lines(tx, dict.fromkeys(sorted(missing), 1))
        needs = {need.name: need for job in first for need in job.needs if need.name == job.line}
        if needs:
            self.make(tx, needs, {})
            self.serve(tx, self.lock(tx, needs), needs)

    def _first_in_lines(self, tx: Transaction, room: Mapping[str, int]) -> list[BucketWaiter]:
        """Read the first jobs of these lines, as many as there is room for."""
        rows = []
        for count in sorted(set(room.values())):
            lines = tx.names([PARKED_ON_LIMIT + name for name in room if room[name] == count])
            rows += tx.all_json("first_parked", lines=lines, room=count, namespace=self._namespace)
        return [
            BucketWaiter(
                rank, id, line.removeprefix(PARKED_ON_LIMIT), read_needs(needs), state == "waiting"
            )
            for line, id, rank, needs, state in rows
        ]

    def _lock_unseen(
        self,
        tx: Transaction,
        buckets: dict[str, Bucket],
        jobs: Sequence[BucketWaiter],
        now: Micros,
    ) -> Micros:
        """Lock the other buckets that these jobs need, as far as they are free; gives the moment.

        This skips rows that another transaction holds: waiting here would break the order of the
        locks.
        """
        needs = {need.name: need for job in jobs for need in job.needs if need.name not in buckets}
        if not needs:
            return now
        rows = tx.batch(
            "try_lock_buckets", [(name,) for name in sorted(needs)], namespace=self._namespace
        )
        buckets.update((row[0], Bucket(*row).seen()) for row in rows)
        if len(rows) < len(needs):
            self._recheck_missing(tx, [need for name, need in needs.items() if name not in buckets])
        return now or self._now(tx, buckets)

    def _recheck_missing(self, tx: Transaction, needs: Sequence[SlotNeed]) -> None:
        """Have those of these buckets made again that have no row, by a recheck.

        An insert here could wait for another transaction that makes the same bucket, while we hold
        others.
        """
        names = [(need.name,) for need in needs]
        existing = {
            row[0] for row in tx.batch("existing_buckets", names, namespace=self._namespace)
        }
        rows = [
            (need.name, need.template, None, None, None, None)
            for need in sorted(needs)
            if need.name not in existing
        ]
        tx.batch("insert_rechecks", rows, namespace=self._namespace)

    def _give_slots(
        self, tx: Transaction, buckets: dict[str, Bucket], waiting: _Waiting, now: Micros
    ) -> tuple[set[str], set[str]]:
        """Assign slots, and let the jobs go that got all of theirs.

        Gives the lines that may have more jobs to let go, and those that must be rechecked later:
        because a bucket or the row of a job was held by another transaction.
        """
        assignment = assign_slots(buckets, waiting.jobs, now)
        recheck = {
            job.line
            for job in waiting.jobs
            if assignment.unseen & {need.name for need in job.needs}
        }
        recheck |= self._write_grants(tx, buckets, assignment)
        recheck |= self._write_turns_and_moves(tx, buckets, assignment)
        left = {job.line for job in assignment.grants} | {job.line for job, _ in assignment.moves}
        counts = Counter(job.line for job in waiting.jobs)
        more = {
            name
            for name, room in waiting.room.items()
            if counts[name] == room
            and name in left
            and name not in recheck
            and buckets[name].room(now)
        }
        return more, recheck

    def _write_grants(
        self, tx: Transaction, buckets: Mapping[str, Bucket], assignment: SlotAssignment
    ) -> set[str]:
        """Let jobs go.

        If another transaction holds a job's row, take its slots back; gives the lines of those.
        """
        granted = self.grant(tx, [job.id for job in assignment.grants])
        missed = [job for job in assignment.grants if job.id not in granted]
        for job in missed:
            for need in job.needs:
                buckets[need.name].give(job.id)
        return {job.line for job in missed}

    def _write_turns_and_moves(
        self, tx: Transaction, buckets: Mapping[str, Bucket], assignment: SlotAssignment
    ) -> set[str]:
        """Write who has the turn of an ordered bucket, and who moved to another line.

        As above, gives the lines of jobs whose rows were held.
        """
        turns = tx.batch("unpark_jobs", [(job.id,) for job in assignment.turns])
        moves = tx.batch(
            "park_on_next_limit",
            [(job.id, PARKED_ON_LIMIT + bucket) for job, bucket in assignment.moves],
        )
        written = {row[0] for row in (*turns, *moves)}
        jobs = (*assignment.turns, *(job for job, _ in assignment.moves))
        missed = [job for job in jobs if job.id not in written]
        for job in missed:
            if buckets[job.line].ordered:
                buckets[job.line].give(job.id)
        return {job.line for job in missed}

    def grant(self, tx: Transaction, ids: Sequence[JobId]) -> set[JobId]:
        """Let these jobs go; those whose rows another transaction holds stay parked."""
        if not ids:
            return set()
        if tx.run("grant_slots", ids=tx.numbers(ids)) < len(ids):
            ids = [row[0] for row in tx.batch("granted_jobs", [(id,) for id in ids])]
        self.granted = self.granted or bool(ids)
        return set(ids)

    def _now(self, tx: Transaction, buckets: Mapping[str, Bucket]) -> Micros:
        """Read the clock if any of these buckets is a rate; the others do not need it."""
        return tx.now() if any(bucket.per is not None for bucket in buckets.values()) else 0

    def _room(self, tx: Transaction, bucket: Bucket, now: Micros) -> int:
        room = min(JOBS_PER_GRANT, bucket.room(now))
        if room and bucket.per is not None:
            # Jobs that were let go and have not started yet must not start all at once.
            most = bucket.burst or bucket.n
            mark = needs_pattern(bucket.name)
            ((unclaimed,),) = tx.all(
                "count_unclaimed", namespace=self._namespace, mark=mark, most=most
            )
            room = min(room, max(0, most - unclaimed))
        return room

    def _plan_next_look(self, tx: Transaction, bucket: Bucket, now: Micros) -> None:
        """Set when a node must look at the line of a rate again; never, if no job waits there."""
        waits = self._first_in_lines(tx, {bucket.name: 1})
        ripe = bucket.ripe_at(now)
        bucket.next_at = None if not waits else ripe if ripe > now else now + RATE_RETRY_US

    # rows of buckets

    def make(
        self, tx: Transaction, needs: Mapping[str, SlotNeed], rules: Mapping[str, LimitRule]
    ) -> None:
        """Insert rows for buckets that have none.

        `rules` are used for templates that are not stored yet.
        """
        names = sorted(needs)
        existing = {
            row[0]
            for row in tx.batch(
                "existing_buckets", [(name,) for name in names], namespace=self._namespace
            )
        }
        missing = [needs[name] for name in names if name not in existing]
        if missing:
            templates = sorted({need.template for need in missing})
            limits = [limit_row(rules[name]) for name in templates if name in rules]
            tx.batch("insert_limits", limits, namespace=self._namespace)
            tx.batch(
                "make_buckets",
                [(need.name, need.template) for need in missing],
                namespace=self._namespace,
            )

    def lock(self, tx: Transaction, needs: Mapping[str, SlotNeed]) -> dict[str, Bucket]:
        """Lock and read the rows of these buckets, in the order of their names."""
        buckets = self._lock_existing(tx, needs)
        if len(buckets) < len(needs):  # pruned since they were read
            self.make(tx, needs, {})
            buckets = self._lock_existing(tx, needs)
        if len(buckets) < len(needs):  # of a row changed by hand, whose template is not stored
            lost = {name: need for name, need in needs.items() if name not in buckets}
            rules = {need.template: LimitRule(need.template, 0) for need in lost.values()}
            self.make(tx, lost, rules)
            buckets |= self._lock_existing(tx, lost)
        return buckets

    def _lock_existing(self, tx: Transaction, needs: Mapping[str, SlotNeed]) -> dict[str, Bucket]:
        rows = tx.all_json("lock_buckets", names=tx.names(sorted(needs)), namespace=self._namespace)
        return {row[0]: Bucket(*row).seen() for row in rows}

    def write(self, tx: Transaction, buckets: Iterable[Bucket]) -> None:
        """Write the buckets that have changed since they were read."""
        changed = [
            (*bucket.values(), bucket.template, bucket.n) for bucket in buckets if bucket.changed
        ]
        tx.batch("save_buckets", changed, namespace=self._namespace)


def needs_pattern(name: str) -> str:
    """Make a LIKE pattern for the jobs that need this bucket; it may match a few more."""
    return "%" + write_needs((SlotNeed(name, "", 0),))[2:].split(",", 1)[0].replace("\\", "_") + "%"


def limit_row(rule: LimitRule) -> tuple[Any, ...]:
    """Give the values of a rule in the order of the queries."""
    return rule.template, rule.n, int(rule.ordered), rule.per, rule.burst
