"""Find jobs: typed filters become one statement, its pieces are all written here.

Millions of succeeded jobs must not be walked for the few that are open or have failed.  So a question is split by
state into branches, each of which has an index that holds little else, and their newest ones are put together.
Those that succeeded are many, and branch again by their kinds (queue and task), if some of these are asked for.

A time of enqueueing is turned into ids, which are handed out in its order but for SKEW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.domain.states import State
from genba.storage.database import Database
from genba.storage.records import JobId, JobRecord, Micros

# The predicates of the partial indexes, word by word: SQLite takes an index only if it finds them so.
_RARE = "(state < 'running' OR state = 'timed_out')"  # by the alphabet: blocked, cancelled, failed, held
_DONE = "state = 'succeeded'"
_RUNNING = "state = 'running' AND node >= 0"  # the index of those that run is by node
_BRANCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("failed", "timed_out", "cancelled", "held", "blocked"), _RARE),
    (("waiting",), "state = 'waiting' AND parked_on IS NULL"),
    (("waiting",), "state = 'waiting' AND parked_on IS NOT NULL"),
    (("scheduled",), "state = 'scheduled'"),
    (("running",), _RUNNING),
    (("succeeded",), _DONE),
)
KINDS = 100  # so many pairs of queue and task are looked up; if there are more, all that succeeded are walked
FEW = 20_000  # so many jobs of a tag are sorted
SKEW = 600_000_000  # micros; an id is used up to a minute after it was taken (AGE_OF_IDS), and clocks are set


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
        """An index of its own leads to what is wanted, whatever the state; tags may lead to many, and do not count."""
        given = (self.keys, self.schedules, self.nodes, self.parents, self.ids)
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
            ("schedule", "schedule_id", "SELECT id FROM genba.schedule WHERE namespace = :namespace AND name"),
            ("node", "node", "SELECT id FROM genba.node WHERE namespace = :namespace AND name"),
        ):
            chosen = {"schedule": self.schedules, "node": self.nodes}[name]
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
        return found, values

    def tagged(self, few: bool, values: dict[str, Any]) -> str:
        """Few: by the index of tags, whatever the state.  Many: those of a state are asked for theirs, one by one."""
        named = f"t.namespace = :namespace AND t.name IN ({_places('tag', self.tags or (), values) or 'NULL'})"
        tagged = f"SELECT t.job_id FROM genba.tag AS t WHERE {named}"  # noqa: S608
        return f"id IN ({tagged})" if few else f"EXISTS ({tagged} AND t.job_id = genba.job.id)"


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
        ids = self.ids(filter, limit)
        # A statement of its own: joined with the search, a planner may walk all jobs along with the few ids.
        with self._db.statement() as tx:
            found = {row[0]: JobRecord(*row) for row in tx.all("jobs_of_ids", ids=tx.numbers(ids))} if ids else {}
        return [found[id] for id in ids if id in found]

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

    def busy_nodes(self) -> dict[int, int]:
        """How many jobs each node holds."""
        with self._db.statement() as tx:
            return {row[0]: row[1] for row in tx.all("busy_nodes")}

    def _ids(self, filter: Filter, limit: int) -> tuple[str, dict[str, Any]]:
        branches, values = self._branches(filter)
        order = f"ORDER BY id {'ASC' if filter.oldest_first else 'DESC'} LIMIT {int(limit)}"
        # Of few: as a sum the key cannot be walked, and the planner takes the index of them, always.
        few = order.replace("BY id", "BY id + 0")
        parts = [
            f"SELECT id FROM (SELECT id FROM genba.job WHERE {where} {few if _few(where) else order}) AS part{i}"  # noqa: S608
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
        few_tagged = filter.tags is not None and self._few_tagged(filter.tags)
        if filter.tags is not None:
            clauses.append(filter.tagged(few_tagged, values))
        if filter.narrow or few_tagged:
            branches = [[_one_of(states)]] if states else []
        else:
            branches = [
                [predicate] if states >= set(of) else [predicate, _one_of(states & set(of))]
                for of, predicate in _BRANCHES
                if states & set(of) and not (filter.error is not None and predicate == _DONE)
            ]
            branches = [kind for branch in branches for kind in self._by_kind(branch, filter, values)]
        clauses += self._id_range(filter, values)
        return [" AND ".join(["namespace = :namespace", *branch, *clauses]) for branch in branches], values

    def _few_tagged(self, tags: Sequence[str]) -> bool:
        with self._db.statement() as tx:
            counts = (tx.one("count_tagged", namespace=self._namespace, name=tag, limit=FEW) for tag in tags)
            return sum(int(row[0]) for row in counts if row) < FEW

    def _by_kind(self, branch: list[str], filter: Filter, values: dict[str, Any]) -> list[list[str]]:
        """The branch of those that succeeded, once for each pair of queue and task that fits."""
        if branch != [_DONE] or (filter.tasks is None and filter.queues is None):
            return [branch]
        kinds = self._kinds()
        if kinds is None:
            return [branch]
        found = []
        for i, (queue, task) in enumerate(kinds):
            if (filter.tasks is None or task in filter.tasks) and (filter.queues is None or queue in filter.queues):
                values |= {f"kind_queue_{i}": queue, f"kind_task_{i}": task}
                found.append([_DONE, f"queue = :kind_queue_{i}", f"task = :kind_task_{i}"])
        return found

    def _kinds(self) -> list[tuple[str, str]] | None:
        """All pairs of queue and task that have succeeded, each found behind the last one in the index; None: many."""
        found: list[tuple[str, str]] = []
        queue, task = "", ""
        with self._db.statement() as tx:
            while (row := tx.one("next_kind", namespace=self._namespace, queue=queue, task=task)) is not None:
                if len(found) == KINDS:
                    return None
                queue, task = row
                found.append((queue, task))
        return found

    def _id_range(self, filter: Filter, values: dict[str, Any]) -> list[str]:
        """At most one bound on each side: of two, SQLite takes any for its walk."""
        lowest, highest = [], []
        if filter.since is not None:
            lowest.append(self._first_id(filter.since - SKEW))
        if filter.until is not None:
            highest.append(self._first_id(filter.until + SKEW))
        if filter.last_id is not None:
            (lowest if filter.oldest_first else highest).append(filter.last_id + (1 if filter.oldest_first else -1))
        found = []
        if lowest:
            found.append("id >= :lowest_id")
            values["lowest_id"] = max(lowest)
        if highest:
            found.append("id <= :highest_id")
            values["highest_id"] = min(highest)
        return found

    def _first_id(self, moment: Micros) -> JobId:
        """About the first id of those enqueued at this moment or later: cut in half until it is found."""
        with self._db.statement() as tx:
            row = tx.one("ends_of_ids")
            low, high = (0, 0) if row is None or row[0] is None else (row[0], row[1] + 1)
            while low < high:
                middle = (low + high) // 2
                there = tx.one("enqueued_behind", id=middle)
                if there is not None and there[1] < moment:
                    low = max(middle, there[0]) + 1
                else:
                    high = middle
        return int(low)


def _few(where: str) -> bool:
    """Those that run, have one of these keys or ids, or a tag that few have."""
    return any(mark in where for mark in (_RUNNING, "key IN (", " id IN ("))


def _one_of(states: frozenset[str]) -> str:
    """As literals, so that the planner sees which partial index holds them."""
    return f"state IN ({', '.join(repr(str(state)) for state in sorted(states))})"
