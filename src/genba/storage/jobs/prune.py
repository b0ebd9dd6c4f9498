"""Delete old jobs.

They are found in the order in which they ended, so that jobs that are kept cost a sweep nothing.

For each length of time that some task is kept, a sweep looks only at the jobs that have grown so
old since the sweep before.  It looks at all jobs when a node starts, when the rules have changed,
and once a day.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from genba.domain.duration import DAY, MINUTE, Micros
from genba.options.parse import KeepTimes
from genba.storage.engines.database import Database
from genba.storage.records import JobId

JOBS_PER_STEP = 500  # in one transaction: no longer than 200 ms, on a busy machine too
MOST_NEEDED = 10_000  # jobs that are remembered because open jobs need them
OVERLAP_US = MINUTE  # an end that is written now may become visible a little later
# Queries that delete what belongs to a deleted job.
DELETED_WITH_JOB = (
    "prune_attempts",
    "prune_tags",
    "prune_edges",
    "prune_messages",
    "prune_arguments",
)


@dataclass(slots=True)
class _Pass:
    """Jobs that ended from (`since`, `id`) on and up to `before`."""

    since: Micros
    id: JobId
    before: Micros


class Pruner:
    """Sweep through old jobs: `begin`, then `step` until it returns None."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace
        self._keeps: Mapping[str, KeepTimes] = {}
        self._now: Micros = 0
        self._whole_at: Micros | None = None
        # By length of time kept: every job that ended before this moment was looked at.
        self._swept: dict[Micros, Micros] = {}
        self._passes: deque[_Pass] = deque()
        self._needed: list[JobId] = []  # old, but an open job needs them
        self._again: deque[JobId] = deque()

    def begin(self, keeps: Mapping[str, KeepTimes], now: Micros, whole: bool = False) -> None:
        """Begin a sweep with these tasks' `keep`.

        Goes on with the sweep before if that is not done.
        """
        if self._passes or self._again:
            return
        times = {time for keep in keeps.values() for time in _lengths(keep) if time is not None}
        last = self._whole_at
        if whole or last is None or keeps != self._keeps or not last <= now < last + DAY:
            self._whole_at, self._needed = now, []
            self._passes.extend(_Pass(0, 0, now - shortest + 1) for shortest in sorted(times)[:1])
        else:
            self._passes.extend(
                _Pass(self._swept[time], 0, now - time + 1) for time in sorted(times)
            )
        self._swept = {time: now - time - OVERLAP_US for time in times}
        self._keeps, self._now = dict(keeps), now
        self._again, self._needed = deque(self._needed), []

    def step(self) -> int | None:
        """Delete the next few jobs; how many, None if the sweep is done."""
        if self._again:
            ids = list(islice(self._again, JOBS_PER_STEP))
            deleted = self._delete(ids)
            # Not before: the delete may fail.
            self._again = deque(islice(self._again, len(ids), None))
            return deleted
        if not self._passes:
            return None
        current = self._passes[0]
        with self._db.statement() as tx:
            rows = tx.all(
                "ended_since",
                namespace=self._namespace,
                since=current.since,
                id=current.id,
                before=current.before,
                limit=JOBS_PER_STEP,
            )
        deleted = self._delete(
            [id for id, task, state, ended in rows if self._is_old(task, state, ended)]
        )
        if len(rows) < JOBS_PER_STEP:
            self._passes.popleft()
        else:
            current.id, _, _, current.since = rows[-1]
        return deleted

    def _is_old(self, task: str, state: str, ended: Micros) -> bool:
        if task not in self._keeps:
            return False  # only a node that knows the task knows how long its jobs are kept
        keep = self._keeps[task]
        time = keep.get(state) if isinstance(keep, dict) else keep
        return time is not None and ended <= self._now - time

    def _delete(self, ids: Sequence[JobId]) -> int:
        if not ids:
            return 0
        with self._db.transaction() as tx:
            deleted = tx.all("prune_jobs", ids=tx.numbers(ids))
            for name in DELETED_WITH_JOB:
                tx.batch(name, deleted)
            left = sorted(set(ids) - {row[0] for row in deleted})
            needed = (
                tx.batch("states", [(id,) for id in left], namespace=self._namespace)
                if left
                else []
            )
        self._needed += [row[0] for row in needed][: MOST_NEEDED - len(self._needed)]
        return len(deleted)

    def prune_before(self, before: Micros) -> int:
        """Delete up to 500 jobs that ended before `before`, with their history; how many."""
        with self._db.transaction() as tx:
            deleted = tx.all("prune", namespace=self._namespace, before=before)
            for name in DELETED_WITH_JOB:
                tx.batch(name, deleted)
            return len(deleted)


def _lengths(keep: KeepTimes) -> list[Micros | None]:
    return list(keep.values()) if isinstance(keep, dict) else [keep]
