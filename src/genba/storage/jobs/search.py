"""Find jobs: typed filters become one statement, its pieces are all written here.

Millions of succeeded jobs must not be walked for the few that are open or have failed.  So a question is split by
state into branches, each of which has an index that holds little else, and their newest ones are put together.
Those that succeeded are many, and branch again by their kinds (queue and task), if some of these are asked for.  If
they are asked for by a tag that many have, the tags are walked instead, and each is asked for its job.

A time of enqueueing is turned into ids, which are handed out in its order but for SKEW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.domain.states import PANIC, State
from genba.storage.engines.database import Database
from genba.storage.records import JobId, JobRecord, Micros

# The predicates of the partial indexes, word by word: SQLite takes an index only if it finds them so.
_RARE = "(state < 'running' OR state = 'timed_out')"  # by the alphabet: blocked, cancelled, failed, held
_DONE = "state = 'succeeded'"
_DONE_BY_KEY = "state BETWEEN 'succeeded' AND 'succeeded'"  # no index holds it; SQLite would sort all of job_done
_RUNNING = "state = 'running' AND node >= 0"  # the index of those that run is by node
_BRANCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("failed", "timed_out", "cancelled", "held", "blocked"), _RARE),
    (("waiting",), "state = 'waiting' AND parked_on IS NULL"),
    (("waiting",), "state = 'waiting' AND parked_on IS NOT NULL"),
    (("scheduled",), "state = 'scheduled'"),
    (("running",), _RUNNING),
    (("succeeded",), _DONE),
)
_BOUNDS = {"lowest_id": "id >= :lowest_id", "highest_id": "id <= :highest_id"}
KINDS = 100  # so many pairs of queue and task are looked up; if there are more, all that succeeded are walked
FEW = 5_000  # so many jobs of a tag are sorted; so many of a kind are asked for their tags, one by one
SKEW = 600_000_000  # micros; an id is used up to a minute after it was taken (AGE_OF_IDS), and clocks are set


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs; None is no condition, several values of one field are alternatives."""

    states: frozenset[str] | None = None
    panics_only: bool = False  # of those that are held
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
                found.append(
                    f"{column} IN ({_places(column, choices, values)})" if choices else "1 = 0"
                )
        for name, column, inner in (
            (
                "schedule",
                "schedule_id",
                "SELECT id FROM genba.schedule WHERE namespace = :namespace AND name",
            ),
            ("node", "node", "SELECT id FROM genba.node WHERE namespace = :namespace AND name"),
        ):
            chosen = {"schedule": self.schedules, "node": self.nodes}[name]
            if chosen is not None:
                found.append(
                    f"{column} IN ({inner} IN ({_places(name, chosen, values) or 'NULL'}))"
                )
        if self.panics_only:
            found.append(f"(state <> 'held' OR substr(reason, 1, {len(PANIC)}) = '{PANIC}')")
        if self.since is not None:
            found.append("created_at >= :since")
            values["since"] = self.since
        if self.until is not None:
            found.append("created_at < :until")
            values["until"] = self.until
        if self.error is not None:
            found.append("error LIKE :error ESCAPE '!'")
            values["error"] = (
                "%"
                + "".join(f"!{letter}" if letter in "!%_" else letter for letter in self.error)
                + "%"
            )
        return found, values

    def tagged(self, few: bool, values: dict[str, Any]) -> str:
        """Few: by the index of tags, whatever the state.  Many: those of a branch are asked for theirs, one by one."""
        named = f"t.namespace = :namespace AND t.name IN ({_places('tag', self.tags or (), values) or 'NULL'})"
        tagged = f"SELECT t.job_id FROM genba.tag AS t WHERE {named}"
        return f"id IN ({tagged})" if few else f"EXISTS ({tagged} AND t.job_id = genba.job.id)"


def _places(column: str, choices: Iterable[Any], values: dict[str, Any]) -> str:
    names = []
    for i, choice in enumerate(choices):
        values[f"{column}_{i}"] = choice
        names.append(f":{column}_{i}")
    return ", ".join(names)


@dataclass(frozen=True, slots=True)
class Branch:
    """Some of the jobs that fit, and how to come by the newest of them."""

    where: str
    tagged: str | None = None  # the condition of a tag that many have
    along: str | None = (
        None  # "key": along all jobs; "tags": from them to the jobs; None: by an index of few others
    )

    @property
    def all(self) -> str:
        return self.where if self.tagged is None else f"{self.where} AND {self.tagged}"

    def ids(self, order: str, tags: Sequence[str], bounds: Sequence[str]) -> list[str]:
        """Statements that give together, in this order, the ids of a page and maybe some twice."""
        if self.along == "key":
            return [
                f"SELECT id FROM genba.job WHERE {self.all.replace(_DONE, _DONE_BY_KEY)} {order}"
            ]
        if self.along is None:
            # Of few: as a sum the key cannot be walked, and the planner takes the index of them, always.
            few = order.replace("BY id", "BY id + 0")
            return [
                f"SELECT id FROM genba.job WHERE {self.all} {few if _few(self.where) else order}"
            ]
        # A scalar subquery, which no planner turns into a join: it would start from the jobs if it thinks them few.
        job = f"(SELECT 1 FROM genba.job WHERE id = t.job_id AND {self.where}) = 1"
        mine = "".join(f" AND t.job_{bound}" for bound in bounds)
        return [
            f"SELECT t.job_id AS id FROM genba.tag AS t WHERE t.namespace = :namespace AND t.name = :tag_{i}{mine}"
            f" AND {job} {order.replace('BY id', 'BY t.job_id')}"
            for i, _ in enumerate(tags)
        ]


class Search:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def jobs(self, filter: Filter, limit: int) -> list[JobRecord]:
        """Newest first, by when they were enqueued; or the oldest."""
        ids = self.ids(filter, limit)
        # A statement of its own: joined with the search, a planner may walk all jobs along with the few ids.
        with self._db.statement() as tx:
            found = (
                {row[0]: JobRecord(*row) for row in tx.all("jobs_of_ids", ids=tx.numbers(ids))}
                if ids
                else {}
            )
        return [found[id] for id in ids if id in found]

    def ids(self, filter: Filter, limit: int) -> list[JobId]:
        text, values = self._ids(filter, limit)
        with self._db.statement() as tx:
            return sorted(
                (row[0] for row in tx.select(text, **values)), reverse=not filter.oldest_first
            )

    def count(self, filter: Filter) -> int:
        branches, values = self._branches(filter)
        if not branches:
            return 0
        counts = " + ".join(
            f"(SELECT count(*) FROM genba.job WHERE {branch.all})" for branch in branches
        )
        with self._db.statement() as tx:
            return int(tx.select(f"SELECT {counts}", **values)[0][0])

    def usual_duration(self, task: str | None, queue: str | None) -> Micros | None:
        """How long jobs of this task or queue took, of the last few hundred that have ended; None if none did."""
        with self._db.statement() as tx:
            row = tx.one("average_duration", namespace=self._namespace, task=task, queue=queue)
            return int(row[0]) if row and row[0] is not None else None

    def busy_nodes(self) -> dict[int, int]:
        """How many jobs each node holds."""
        with self._db.statement() as tx:
            return {row[0]: row[1] for row in tx.all("busy_nodes")}

    def _ids(self, filter: Filter, limit: int) -> tuple[str, dict[str, Any]]:
        branches, values = self._branches(filter)
        order = f"ORDER BY id {'ASC' if filter.oldest_first else 'DESC'} LIMIT {int(limit)}"
        bounds = [text for name, text in _BOUNDS.items() if name in values]
        selects = [
            select for branch in branches for select in branch.ids(order, filter.tags or (), bounds)
        ]
        if not selects:
            return "SELECT id FROM genba.job WHERE 1 = 0", {}
        parts = " UNION ALL ".join(
            f"SELECT id FROM ({select}) AS part{i}" for i, select in enumerate(selects)
        )
        once = "DISTINCT " if len(selects) > len(branches) else ""
        return f"SELECT {once}id FROM ({parts}) AS found {order}", values

    def _branches(self, filter: Filter) -> tuple[list[Branch], dict[str, Any]]:
        """Of which each job is in at most one."""
        clauses, values = filter.clauses()
        clauses.append("namespace = :namespace")
        values["namespace"] = self._namespace
        states = filter.wanted_states()
        few_tagged = filter.tags is not None and self._few_tagged(filter.tags)
        tagged = None if filter.tags is None else filter.tagged(few_tagged, values)
        if few_tagged and tagged is not None:
            clauses.append(tagged)
            tagged = None
        along = "key"
        if filter.narrow or few_tagged:
            branches = [[_one_of(states)]] if states else []
        else:
            branches = [
                [predicate] if states >= set(of) else [predicate, _one_of(states & set(of))]
                for of, predicate in _BRANCHES
                if states & set(of) and not (filter.error is not None and predicate == _DONE)
            ]
            kinds = self._wanted_kinds(filter) if [_DONE] in branches else None
            if tagged is not None and (kinds is None or not self._few_done(kinds)):
                along = "tags"
            elif kinds is not None:
                branches.remove([_DONE])
                branches += _by_kind(kinds, values)
        clauses += self._id_range(filter, values)
        found = [
            Branch(" AND ".join([*branch, *clauses]), tagged, along if branch == [_DONE] else None)
            for branch in branches
        ]
        return found, values

    def _few_tagged(self, tags: Sequence[str]) -> bool:
        with self._db.statement() as tx:
            counts = (
                tx.one("count_tagged", namespace=self._namespace, name=tag, limit=FEW)
                for tag in tags
            )
            return sum(int(row[0]) for row in counts if row) < FEW

    def _few_done(self, kinds: Iterable[tuple[str, str]]) -> bool:
        left = FEW
        with self._db.statement() as tx:
            for queue, task in kinds:
                row = tx.one(
                    "count_succeeded", namespace=self._namespace, queue=queue, task=task, limit=left
                )
                left -= int(row[0]) if row else 0
                if left <= 0:
                    return False
        return True

    def _wanted_kinds(self, filter: Filter) -> list[tuple[str, str]] | None:
        """The pairs of queue and task that fit and have succeeded; None if any will do, or if there are many."""
        if filter.tasks is None and filter.queues is None:
            return None
        kinds = self._kinds()
        return kinds and [
            (queue, task)
            for queue, task in kinds
            if (filter.tasks is None or task in filter.tasks)
            and (filter.queues is None or queue in filter.queues)
        ]

    def _kinds(self) -> list[tuple[str, str]] | None:
        """All pairs of queue and task that have succeeded; None: many."""
        with self._db.statement() as tx:
            found = tx.all("queues_and_tasks", namespace=self._namespace, limit=KINDS + 1)
        return [(queue, task) for queue, task in found] if len(found) <= KINDS else None

    def _id_range(self, filter: Filter, values: dict[str, Any]) -> list[str]:
        """At most one bound on each side: of two, SQLite takes any for its walk."""
        lowest, highest = [], []
        if filter.since is not None:
            lowest.append(self._first_id(filter.since - SKEW))
        if filter.until is not None:
            highest.append(self._first_id(filter.until + SKEW))
        if filter.last_id is not None:
            (lowest if filter.oldest_first else highest).append(
                filter.last_id + (1 if filter.oldest_first else -1)
            )
        if lowest:
            values["lowest_id"] = max(lowest)
        if highest:
            values["highest_id"] = min(highest)
        return [text for name, text in _BOUNDS.items() if name in values]

    def _first_id(self, moment: Micros) -> JobId:
        """About the first id of those enqueued at this moment or later."""
        with self._db.statement() as tx:
            row = tx.one("first_id_since", moment=moment)
            return int(row[0]) if row is not None else 0


def _by_kind(kinds: Iterable[tuple[str, str]], values: dict[str, Any]) -> list[list[str]]:
    """The branch of those that succeeded, once for each kind."""
    found = []
    for i, (queue, task) in enumerate(kinds):
        values |= {f"kind_queue_{i}": queue, f"kind_task_{i}": task}
        found.append([_DONE, f"queue = :kind_queue_{i}", f"task = :kind_task_{i}"])
    return found


def _few(where: str) -> bool:
    """Those that run, have one of these keys or ids, or a tag that few have."""
    return any(mark in where for mark in (_RUNNING, "key IN (", " id IN ("))


def _one_of(states: frozenset[str]) -> str:
    """As literals, so that the planner sees which partial index holds them."""
    return f"state IN ({', '.join(repr(str(state)) for state in sorted(states))})"
