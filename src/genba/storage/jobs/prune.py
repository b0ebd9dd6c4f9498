"""Old jobs go: found in the order in which they ended, so that what is kept costs a sweep nothing.

Of each length of time that some task is kept, only those are looked at that have grown so old since the sweep before.
All are looked at when a node begins, when the rules have changed, and once a day.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from genba.domain.duration import DAY, MINUTE, Micros
from genba.options.parse import KeepTimes
from genba.storage.engines.database import Database
from genba.storage.jobs.bulk import DELETED_WITH_JOB
from genba.storage.records import JobId

SLICE = 500  # in one transaction: no longer than 200 ms, on a busy machine too
MOST_LATER = 10_000
OVERLAP = MINUTE  # an end that is written now may be seen a little later


@dataclass(slots=True)
class _Pass:
    """Those that have ended from (`since`, `id`) on, up to `before`."""

    since: Micros
    id: JobId
    before: Micros


class Pruner:
    """One sweep after the other: `begin`, then `step` until there is nothing more to look at."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace
        self._keeps: Mapping[str, KeepTimes] = {}
        self._now: Micros = 0
        self._whole_at: Micros | None = None
        self._passed: dict[
            Micros, Micros
        ] = {}  # by the length of time: all that ended before that were looked at
        self._passes: deque[_Pass] = deque()
        self._later: list[JobId] = []  # old, but somebody who is open needs them
        self._again: deque[JobId] = deque()

    def begin(self, keeps: Mapping[str, KeepTimes], now: Micros, whole: bool = False) -> None:
        """What is to go by now, as these tasks are kept; goes on with the sweep before if that is not at its end."""
        if self._passes or self._again:
            return
        times = {each for keep in keeps.values() for each in _lengths(keep) if each is not None}
        last = self._whole_at
        if whole or last is None or keeps != self._keeps or not last <= now < last + DAY:
            self._whole_at, self._later = now, []
            self._passes.extend(_Pass(0, 0, now - shortest + 1) for shortest in sorted(times)[:1])
        else:
            self._passes.extend(
                _Pass(self._passed[time], 0, now - time + 1) for time in sorted(times)
            )
        self._passed = {time: now - time - OVERLAP for time in times}
        self._keeps, self._now = dict(keeps), now
        self._again, self._later = deque(self._later), []

    def step(self) -> int | None:
        """How many of the next few went; None: that was all."""
        if self._again:
            some = list(islice(self._again, SLICE))
            gone = self._delete(some)
            self._again = deque(islice(self._again, len(some), None))  # not before: it may fail
            return gone
        if not self._passes:
            return None
        now = self._passes[0]
        with self._db.statement() as tx:
            rows = tx.all(
                "ended_since",
                namespace=self._namespace,
                since=now.since,
                id=now.id,
                before=now.before,
                limit=SLICE,
            )
        gone = self._delete(
            [id for id, task, state, ended in rows if self._is_old(task, state, ended)]
        )
        if len(rows) < SLICE:
            self._passes.popleft()
        else:
            now.id, _, _, now.since = rows[-1]
        return gone

    def _is_old(self, task: str, state: str, ended: Micros) -> bool:
        if task not in self._keeps:
            return False  # whoever knows the task knows how long
        keep = self._keeps[task]
        time = keep.get(state) if isinstance(keep, dict) else keep
        return time is not None and ended <= self._now - time

    def _delete(self, ids: Sequence[JobId]) -> int:
        if not ids:
            return 0
        with self._db.transaction() as tx:
            gone = tx.all("prune_jobs", ids=tx.numbers(ids))
            for name in DELETED_WITH_JOB:
                tx.batch(name, gone)
            left = sorted(set(ids) - {row[0] for row in gone})
            there = (
                tx.batch("states", [(id,) for id in left], namespace=self._namespace)
                if left
                else []
            )
        self._later += [row[0] for row in there][: MOST_LATER - len(self._later)]
        return len(gone)


def _lengths(keep: KeepTimes) -> list[Micros | None]:
    return list(keep.values()) if isinstance(keep, dict) else [keep]
