"""Find jobs: filters become one statement, whose pieces are all written here.

A search must not walk millions of succeeded jobs for the few that are open or have failed.  So it
is split by state into branches, each with an index that holds little else, and the newest jobs of
the branches are put together.

Succeeded jobs are many.  If the filter names queues or tasks, their branch is split again by kind
(queue and task).  If the filter has a tag that many jobs have, the tags are walked, and the job of
each is looked up.

A time of enqueueing is turned into ids, which are given out in its order except for SKEW_US.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.domain.states import PANIC, State
from genba.storage.engines.database import Database
from genba.storage.records import JobId, JobRecord, Micros

# The predicates of the partial indexes, word for word: SQLite uses an index only if it finds them.
# By alphabet: blocked, cancelled, failed, held.
_RARE = "(state < 'running' OR state = 'timed_out')"
_DONE = "state = 'succeeded'"
# Not a predicate of an index, or SQLite would sort all of `job_done`.
_DONE_BY_KEY = "state BETWEEN 'succeeded' AND 'succeeded'"
_RUNNING = "state = 'running' AND node >= 0"  # as the index of running jobs, which is by node
_BRANCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("failed", "timed_out", "cancelled", "held", "blocked"), _RARE),
    (("waiting",), "state = 'waiting' AND parked_on IS NULL"),
    (("waiting",), "state = 'waiting' AND parked_on IS NOT NULL"),
    (("scheduled",), "state = 'scheduled'"),
    (("running",), _RUNNING),
    (("succeeded",), _DONE),
)
_BOUNDS = {"lowest_id": "id >= :lowest_id", "highest_id": "id <= :highest_id"}
# So many pairs of queue and task are looked up.  With more of them, all succeeded jobs are walked.
MOST_KINDS = 100
# So many jobs of a tag are sorted.  So many jobs of a kind are checked for their tags, one by one.
FEW = 5_000
# An id is used up to a minute after it was taken, and clocks are set.
SKEW_US = 600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs to find; None is no condition, several values of one field are alternatives."""

    states: frozenset[str] | None = None
    panics_only: bool = False  # of the held jobs
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
        """Tell whether an index leads to few jobs, whatever their state; tags may lead to many."""
        values = (self.keys, self.schedules, self.nodes, self.parents, self.ids)
        return any(value is not None for value in values)

    def allowed_states(self) -> frozenset[str]:
        return frozenset(State) if self.states is None else self.states

    def clauses(self) -> tuple[list[str], dict[str, Any]]:
        """Give the conditions of all fields but states, tags and pages, with their values."""
        clauses: list[str] = []
        values: dict[str, Any] = {}
        for column, choices in (
            ("task", self.tasks),
            ("queue", self.queues),
            ("key", self.keys),
            ("parent_id", self.parents),
            ("id", self.ids),
        ):
            if choices is not None:
                clauses.append(
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
                clauses.append(
                    f"{column} IN ({inner} IN ({_places(name, chosen, values) or 'NULL'}))"
                )
        if self.panics_only:
            clauses.append(f"(state <> 'held' OR substr(reason, 1, {len(PANIC)}) = '{PANIC}')")
        if self.since is not None:
            clauses.append("created_at >= :since")
            values["since"] = self.since
        if self.until is not None:
            clauses.append("created_at < :until")
            values["until"] = self.until
        if self.error is not None:
            clauses.append("error LIKE :error ESCAPE '!'")
            values["error"] = (
                "%"
                + "".join(f"!{letter}" if letter in "!%_" else letter for letter in self.error)
                + "%"
            )
        return clauses, values

    def tagged(self, few: bool, values: dict[str, Any]) -> str:
        """Give the condition of the tags.

        If `few` jobs have them: by the index of tags, whatever the state.  Otherwise the jobs of a
        branch are checked one by one.
        """
        places = _places("tag", self.tags or (), values) or "NULL"
        names = f"t.namespace = :namespace AND t.name IN ({places})"
        tagged = f"SELECT t.job_id FROM genba.tag AS t WHERE {names}"
        return f"id IN ({tagged})" if few else f"EXISTS ({tagged} AND t.job_id = genba.job.id)"


def _places(column: str, choices: Iterable[Any], values: dict[str, Any]) -> str:
    names = []
    for i, choice in enumerate(choices):
        values[f"{column}_{i}"] = choice
        names.append(f":{column}_{i}")
    return ", ".join(names)


@dataclass(frozen=True, slots=True)
class Branch:
    """Some of the jobs that fit, and how to get the newest of them."""

    where: str
    tagged: str | None = None  # the condition of a tag that many jobs have
    # "key": walk all jobs; "tags": walk the tags and look up the jobs; None: use an index of few
    # jobs
    along: str | None = None

    @property
    def all(self) -> str:
        return self.where if self.tagged is None else f"{self.where} AND {self.tagged}"

    def ids(self, order: str, tags: Sequence[str], bounds: Sequence[str]) -> list[str]:
        """Give statements that together find the ids of a page, some of them maybe twice."""
        if self.along == "key":
            return [
                f"SELECT id FROM genba.job WHERE {self.all.replace(_DONE, _DONE_BY_KEY)} {order}"
            ]
        if self.along is None:
            # As a sum the key cannot be walked, so the planner always uses the index of few jobs.
            few = order.replace("BY id", "BY id + 0")
            return [
                f"SELECT id FROM genba.job WHERE {self.all} {few if _few(self.where) else order}"
            ]
        # A scalar subquery, which no planner turns into a join.  A join would start from the jobs
        # if the planner thinks that they are few.
        job = f"(SELECT 1 FROM genba.job WHERE id = t.job_id AND {self.where}) = 1"
        mine = "".join(f" AND t.job_{bound}" for bound in bounds)
        return [
            "SELECT t.job_id AS id FROM genba.tag AS t"
            f" WHERE t.namespace = :namespace AND t.name = :tag_{i}{mine}"
            f" AND {job} {order.replace('BY id', 'BY t.job_id')}"
            for i, _ in enumerate(tags)
        ]


class Search:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def jobs(self, filter: Filter, limit: int) -> list[JobRecord]:
        """Find jobs, the newest first, or the oldest if the filter says so."""
        ids = self.ids(filter, limit)
        # A statement of its own: joined with the search, a planner may walk all jobs for the few
        # ids.
        with self._db.statement() as tx:
            records = (
                {row[0]: JobRecord(*row) for row in tx.all("jobs_of_ids", ids=tx.numbers(ids))}
                if ids
                else {}
            )
        return [records[id] for id in ids if id in records]

    def ids(self, filter: Filter, limit: int) -> list[JobId]:
        """Find the ids of a page."""
        text, values = self._page_of_ids(filter, limit)
        with self._db.statement() as tx:
            return sorted(
                (row[0] for row in tx.select(text, **values)), reverse=not filter.oldest_first
            )

    def count(self, filter: Filter) -> int:
        """Count the jobs that fit."""
        branches, values = self._branches(filter)
        if not branches:
            return 0
        counts = " + ".join(
            f"(SELECT count(*) FROM genba.job WHERE {branch.all})" for branch in branches
        )
        with self._db.statement() as tx:
            return int(tx.select(f"SELECT {counts}", **values)[0][0])

    def usual_duration(self, task: str | None, queue: str | None) -> Micros | None:
        """Average the run times of the last few hundred jobs of this task or queue.

        None if none ended.
        """
        with self._db.statement() as tx:
            row = tx.one("average_duration", namespace=self._namespace, task=task, queue=queue)
            return int(row[0]) if row and row[0] is not None else None

    def busy_nodes(self) -> dict[int, int]:
        """Count the jobs that each node holds."""
        with self._db.statement() as tx:
            return {row[0]: row[1] for row in tx.all("busy_nodes")}

    def _page_of_ids(self, filter: Filter, limit: int) -> tuple[str, dict[str, Any]]:
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
        """Split a filter into branches; each job is in at most one of them."""
        clauses, values = filter.clauses()
        clauses.append("namespace = :namespace")
        values["namespace"] = self._namespace
        few_tagged = filter.tags is not None and self._few_tagged(filter.tags)
        tagged = None if filter.tags is None else filter.tagged(few_tagged, values)
        if few_tagged and tagged is not None:
            clauses.append(tagged)
            tagged = None
        along = "key"
        if filter.narrow or few_tagged:
            states = filter.allowed_states()
            branches = [[_one_of(states)]] if states else []
        else:
            branches = _by_state(filter)
            if [_DONE] in branches:
                branches, along = self._split_done(filter, branches, tagged, values)
        clauses += self._id_range(filter, values)
        return [
            Branch(" AND ".join([*branch, *clauses]), tagged, along if branch == [_DONE] else None)
            for branch in branches
        ], values

    def _split_done(
        self,
        filter: Filter,
        branches: list[list[str]],
        tagged: str | None,
        values: dict[str, Any],
    ) -> tuple[list[list[str]], str]:
        """Split the branch of succeeded jobs by kind if that helps.

        Also says how to walk it if not.
        """
        kinds = self._matching_kinds(filter)
        if tagged is not None and (kinds is None or not self._few_done(kinds)):
            return branches, "tags"
        if kinds is None:
            return branches, "key"
        others = [branch for branch in branches if branch != [_DONE]]
        return [*others, *_by_kind(kinds, values)], "key"

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

    def _matching_kinds(self, filter: Filter) -> list[tuple[str, str]] | None:
        """Find the kinds that fit and have succeeded jobs.

        None if all kinds fit, or there are many.
        """
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
        """Find all kinds that have succeeded jobs; None: many."""
        with self._db.statement() as tx:
            rows = tx.all("queues_and_tasks", namespace=self._namespace, limit=MOST_KINDS + 1)
        return [(queue, task) for queue, task in rows] if len(rows) <= MOST_KINDS else None

    def _id_range(self, filter: Filter, values: dict[str, Any]) -> list[str]:
        """Give at most one bound on each side: of two, SQLite uses any one for its walk."""
        lowest, highest = [], []
        if filter.since is not None:
            lowest.append(self._first_id(filter.since - SKEW_US))
        if filter.until is not None:
            highest.append(self._first_id(filter.until + SKEW_US))
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
        """Estimate the first id of the jobs enqueued at this moment or later."""
        with self._db.statement() as tx:
            row = tx.one("first_id_since", moment=moment)
            return int(row[0]) if row is not None else 0


def _by_state(filter: Filter) -> list[list[str]]:
    """Give the conditions of each branch that a filter needs."""
    states = filter.allowed_states()
    return [
        [predicate] if states >= set(of) else [predicate, _one_of(states & set(of))]
        for of, predicate in _BRANCHES
        # A succeeded job has no error.
        if states & set(of) and not (filter.error is not None and predicate == _DONE)
    ]


def _by_kind(kinds: Iterable[tuple[str, str]], values: dict[str, Any]) -> list[list[str]]:
    """Give the conditions of succeeded jobs, once for each kind."""
    branches = []
    for i, (queue, task) in enumerate(kinds):
        values |= {f"kind_queue_{i}": queue, f"kind_task_{i}": task}
        branches.append([_DONE, f"queue = :kind_queue_{i}", f"task = :kind_task_{i}"])
    return branches


def _few(where: str) -> bool:
    """Tell whether a condition is met by few jobs: running ones, or by key, id or a rare tag."""
    return any(mark in where for mark in (_RUNNING, "key IN (", " id IN ("))


def _one_of(states: frozenset[str]) -> str:
    """Give a condition with literals: the planner must see which partial index it fits."""
    return f"state IN ({', '.join(repr(str(state)) for state in sorted(states))})"
