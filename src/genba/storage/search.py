"""Find jobs: typed filters become one statement, its pieces are all written here.

Millions of succeeded jobs must not be walked for the few that are open or have failed.  So a question is split by
state into branches, each of which has an index that holds little else, and their newest ones are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.domain.states import State
from genba.storage.database import Database
from genba.storage.records import JOB_COLUMNS, JobId, JobRecord, Micros

# The predicates of the partial indexes, word by word: SQLite takes an index only if it finds them so.
_RARE = "state IN ('failed', 'timed_out', 'cancelled', 'held', 'blocked')"
_RUNNING = "state = 'running' AND node >= 0"  # the index of those that run is by node
_BRANCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("failed", "timed_out", "cancelled", "held", "blocked"), _RARE),
    (("waiting",), "state = 'waiting' AND parked_on IS NULL"),
    (("waiting",), "state = 'waiting' AND parked_on IS NOT NULL"),
    (("scheduled",), "state = 'scheduled'"),
    (("running",), _RUNNING),
    (("succeeded",), "state = 'succeeded'"),
)
FEW = 20_000  # so many are sorted rather than that all others are walked


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs; None is no condition, several values of one field are alternatives."""

    states: frozenset[str] | None = None
    tasks: Sequence[str] | None = None
    queues: Sequence[str] | None = None
    tags: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    schedules: Sequence[str] | None = None
    nodes: Sequence[str] | None = None
    parents: Sequence[int] | None = None
    since: Micros | None = None
    until: Micros | None = None
    error: str | None = None
    last_id: int | None = None  # where the last page ended
    oldest_first: bool = False
    ids: Sequence[int] | None = field(default=None)

    @property
    def narrow(self) -> bool:
        """An index of its own leads to what is wanted, whatever the state."""
        given = (self.tags, self.keys, self.schedules, self.nodes, self.parents, self.ids)
        return any(one is not None for one in given)

    def wanted_states(self) -> frozenset[str]:
        return frozenset(State) if self.states is None else self.states

    def clauses(self) -> tuple[list[str], dict[str, Any]]:
        found: list[str] = []
        values: dict[str, Any] = {}
        for column, choices in (
            ("task", self.tasks),
            ("queue", self.queues),
            ("key", self.keys),
            ("parent_id", self.parents),
            ("id", self.ids),
        ):
            if choices is not None:
                found.append(f"{column} IN ({_places(column, choices, values)})" if choices else "1 = 0")
        for name, column, inner in (
            ("tag", "id", "SELECT job_id FROM genba.tag WHERE namespace = :namespace AND name"),
            ("schedule", "schedule_id", "SELECT id FROM genba.schedule WHERE namespace = :namespace AND name"),
            ("node", "node", "SELECT id FROM genba.node WHERE namespace = :namespace AND name"),
        ):
            chosen = {"tag": self.tags, "schedule": self.schedules, "node": self.nodes}[name]
            if chosen is not None:
                found.append(f"{column} IN ({inner} IN ({_places(name, chosen, values) or 'NULL'}))")
        if self.since is not None:
            found.append("created_at >= :since")
            values["since"] = self.since
        if self.until is not None:
            found.append("created_at < :until")
            values["until"] = self.until
        if self.error is not None:
            found.append("error LIKE :error ESCAPE '!'")
            values["error"] = "%" + "".join(f"!{letter}" if letter in "!%_" else letter for letter in self.error) + "%"
        if self.last_id is not None:
            found.append(f"id {'>' if self.oldest_first else '<'} :last_id")
            values["last_id"] = self.last_id
        return found, values


def _places(column: str, choices: Iterable[Any], values: dict[str, Any]) -> str:
    names = []
    for i, choice in enumerate(choices):
        values[f"{column}_{i}"] = choice
        names.append(f":{column}_{i}")
    return ", ".join(names)


class Search:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def jobs(self, filter: Filter, limit: int) -> list[JobRecord]:
        """Newest first, by when they were enqueued; or the oldest."""
        ids, values = self._ids(filter, limit)
        order = "ASC" if filter.oldest_first else "DESC"
        text = f"SELECT {JOB_COLUMNS} FROM genba.job WHERE id IN ({ids}) ORDER BY id {order}"  # noqa: S608
        with self._db.statement() as tx:
            return [JobRecord(*row) for row in tx.select(text, **values)]

    def ids(self, filter: Filter, limit: int) -> list[JobId]:
        text, values = self._ids(filter, limit)
        with self._db.statement() as tx:
            return sorted((row[0] for row in tx.select(text, **values)), reverse=not filter.oldest_first)

    def count(self, filter: Filter) -> int:
        branches, values = self._branches(filter)
        if not branches:
            return 0
        counts = " + ".join(f"(SELECT count(*) FROM genba.job WHERE {where})" for where in branches)  # noqa: S608
        with self._db.statement() as tx:
            return int(tx.select(f"SELECT {counts}", **values)[0][0])

    def usual_run(self, task: str | None, queue: str | None) -> Micros | None:
        """How long jobs of this task or queue took, of the last few hundred that have ended; None if none did."""
        with self._db.statement() as tx:
            row = tx.one("recent_runs", namespace=self._namespace, task=task, queue=queue)
            return int(row[0]) if row and row[0] is not None else None

    def _ids(self, filter: Filter, limit: int) -> tuple[str, dict[str, Any]]:
        branches, values = self._branches(filter)
        order = f"ORDER BY id {'ASC' if filter.oldest_first else 'DESC'} LIMIT {int(limit)}"
        # Those that run are few: as a sum the key cannot be walked, and the planner takes the index of them, always.
        few = order.replace("BY id", "BY id + 0")
        parts = [
            f"SELECT id FROM (SELECT id FROM genba.job WHERE {where} {few if _RUNNING in where else order}) AS part{i}"  # noqa: S608
            for i, where in enumerate(branches)
        ]
        if not parts:
            return "SELECT id FROM genba.job WHERE 1 = 0", {}
        return f"SELECT id FROM ({' UNION ALL '.join(parts)}) AS found {order}", values  # noqa: S608

    def _branches(self, filter: Filter) -> tuple[list[str], dict[str, Any]]:
        """Conditions of which each job fulfils at most one."""
        clauses, values = filter.clauses()
        values["namespace"] = self._namespace
        states = filter.wanted_states()
        if filter.narrow:
            branches = [[_one_of(states)]] if states else []
        else:
            branches = [
                [predicate] if states >= set(of) else [predicate, _one_of(states & set(of))]
                for of, predicate in _BRANCHES
                if states & set(of) and not (filter.error is not None and of == ("succeeded",))
            ]
            if filter.since is not None and "succeeded" in states and filter.error is None and self._few_since(filter):
                branches[-1].append("finished_at >= :since")
        return [" AND ".join(["namespace = :namespace", *branch, *clauses]) for branch in branches], values

    def _few_since(self, filter: Filter) -> bool:
        """Few have ended since then: nobody ends before it is enqueued, so the index of ends has all that matter."""
        ended = f"SELECT 1 FROM genba.job WHERE namespace = :namespace AND finished_at >= :since LIMIT {FEW}"  # noqa: S608
        some = f"SELECT count(*) FROM ({ended}) AS part"  # noqa: S608
        with self._db.statement() as tx:
            return int(tx.select(some, namespace=self._namespace, since=filter.since)[0][0]) < FEW


def _one_of(states: frozenset[str]) -> str:
    """As literals, so that the planner sees which partial index holds them."""
    return f"state IN ({', '.join(repr(str(state)) for state in sorted(states))})"
