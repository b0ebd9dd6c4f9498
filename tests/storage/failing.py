"""Every call to the database fails in turn; and what a database says, so that two of them can be compared.

A *frame* is one call: a transaction, a single statement that writes, a transaction sent at once, one that a job shares
with us, a read.  It is *refused* (nothing has happened), *undone* (all was done, and is rolled back) or *lost* (it is
committed, and the answer is lost).  What is raised then is what the driver would: of PostgreSQL an AnswerLost, of
SQLite, where the log could not be synced, a StoreUnreachable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genba.domain.events import unfold
from genba.errors import StoreError, StoreUnreachable
from genba.storage.engines.database import TABLES, AnswerLost
from genba.storage.store import Store

REFUSED, UNDONE, LOST = WAYS = ("refused", "undone", "lost")
READ = (REFUSED,)  # a read that was lost is a read that was refused

_JOBS = {"job_id", "parent_id", "child_id", "scout"}
_SERIES = {"schedule_id"}
# numbers that come from sequences, which no rollback gives back, and what counts how often a row was written
_DROPPED = {"seq", "version", "passed", "epoch", "pruned", "token", "xid", "most"}
_LEFT_OUT = {"migration", "sequence", "event"}


_NAMED = re.compile(r"job (\d+)")


class _Undone(Exception):
    pass


class Failing:
    """The database behind a store, of which one frame fails; `frames` are the ways in which each could have."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self.number, self.way = 0, REFUSED
        self.frames: list[tuple[str, ...]] = []
        self._depth = 0
        self._kind: type[StoreUnreachable] = (
            AnswerLost if database.dialect == "postgres" else StoreUnreachable
        )

    def begins(self, ways: tuple[str, ...] = WAYS) -> str:
        """In which way this frame is going to fail, if it is."""
        self.frames.append(ways)
        if len(self.frames) != self.number or self.way not in ways:
            return ""
        if self.way == REFUSED:
            raise StoreUnreachable("refused")
        return self.way

    def error(self) -> StoreUnreachable:
        return self._kind("the answer was lost")

    @contextmanager
    def _frame(self, real: Callable[[], Any], ways: tuple[str, ...] = WAYS) -> Iterator[Any]:
        if self._depth:  # one engine makes a frame out of another
            with real() as tx:
                yield tx
            return
        way = self.begins(ways)
        self._depth += 1
        try:
            with real() as tx:
                yield tx
                if way == UNDONE:
                    raise _Undone
        except _Undone:
            raise self.error() from None
        finally:
            self._depth -= 1
        if way == LOST:
            raise self.error()

    def _in_turn(self, real: Callable[..., Any], *steps: Any) -> Any:
        if self._depth:
            return real(*steps)
        way = self.begins((REFUSED, LOST))
        self._depth += 1
        try:
            answer = real(*steps)
        finally:
            self._depth -= 1
        if way == LOST:
            raise self.error()
        return answer

    def _joint(self, real: Callable[[float], Any], within: float) -> Any:
        self.begins(READ)
        return FailingJoint(self, real(within))

    @contextmanager
    def armed(self) -> Iterator[Failing]:
        """While the block lasts."""
        database, real = self._database, {name: getattr(self._database, name) for name in _FRAMES}
        alone = (
            (REFUSED, LOST) if database.dialect == "postgres" else WAYS
        )  # there is nothing to be rolled back
        ways = {
            "transaction": WAYS,
            "single_write": alone,
            "statement": READ,
            "migrations": (REFUSED, LOST),
        }
        try:
            for name in ways:
                setattr(database, name, lambda name=name: self._frame(real[name], ways[name]))
            database.pipeline = lambda *steps: self._in_turn(real["pipeline"], *steps)
            database.job_transaction = lambda within: self._joint(real["job_transaction"], within)
            yield self
        finally:
            for name in _FRAMES:
                delattr(database, name)


_FRAMES = ("transaction", "single_write", "statement", "migrations", "pipeline", "job_transaction")


class FailingJoint:
    """A transaction of a job's own; its commit is a frame."""

    def __init__(self, failing: Failing, real: Any) -> None:
        self._failing, self._real = failing, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def commit(self) -> None:
        try:
            way = self._failing.begins()
        except StoreUnreachable:
            self._real.rollback()
            raise
        if way == UNDONE:
            self._real.rollback()
            raise self._failing.error()
        self._real.commit()
        if way == LOST:
            raise self._failing.error()


# what a database says


def said(store: Store) -> dict[str, Counter[Any]]:
    """All rows of each table, with the numbers of jobs and schedules in the order in which they came."""
    with store._db.statement() as tx:
        tables = {table: _rows(tx, store, table) for table in sorted(TABLES - _LEFT_OUT)}
        events = tx.select("SELECT kind, at, job_id, data FROM genba.event ORDER BY seq")
    events_seen = [one for kind, at, job, data in events for one in unfold(kind, at, job, data)]
    known = {row["id"] for row in tables["job"]} | {
        one.job_id for one in events_seen if one.job_id is not None
    }
    jobs = {id: f"job {place}" for place, id in enumerate(sorted(known))}
    series = {
        id: f"schedule {place}"
        for place, id in enumerate(sorted(row["id"] for row in tables["schedule"]))
    }
    found = {
        table: Counter(_line(table, row, jobs, series) for row in rows)
        for table, rows in tables.items()
    }
    found["event"] = Counter((one.kind, jobs.get(one.job_id or 0)) for one in events_seen)
    return found


def _rows(tx: Any, store: Store, table: str) -> list[dict[str, Any]]:
    if store._db.dialect == "sqlite":
        names = [
            row[0] for row in tx.select(f"SELECT name FROM pragma_table_info('genba_{table}')")
        ]
    else:
        columns = (
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(:name) AND attnum > 0"
        )
        names = [
            row[0] for row in tx.select(f"{columns} AND NOT attisdropped", name=f"genba.{table}")
        ]
    if not names:
        return []
    found = tx.select(f"SELECT {', '.join(names)} FROM genba.{table}")
    return [dict(zip(names, row, strict=True)) for row in found]


def _line(
    table: str, row: dict[str, Any], jobs: dict[int, str], series: dict[int, str]
) -> tuple[Any, ...]:
    cells = {}
    for name, value in row.items():
        if name in _DROPPED or (name == "id" and table in ("schedule", "listener")):
            continue
        if name in _JOBS or (table, name) in (("job", "id"), ("bucket", "owner")):
            cells[name] = jobs.get(value, value)
        else:
            cells[name] = series.get(value, value) if name in _SERIES else value
        if name in ("reason", "data") and isinstance(value, str):
            cells[name] = _NAMED.sub(lambda found: jobs.get(int(found[1]), found[0]), value)
    return tuple(sorted((name, _cell(value)) for name, value in cells.items()))


def _cell(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return int(value) if isinstance(value, bool) else value


def until_it_answers(act: Callable[[], Any]) -> Any:
    """What the second try gives, if the first has failed: only one frame fails."""
    try:
        return act()
    except StoreError:
        return act()
