"""Find jobs: typed filters become one statement, its pieces are all written here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genba.storage.database import Database
from genba.storage.records import JOB_COLUMNS, JobRecord, Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs; None is no condition, several values of one field are alternatives."""

    states: frozenset[str] | None = None
    tasks: Sequence[str] | None = None
    queues: Sequence[str] | None = None
    tags: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    parents: Sequence[int] | None = None
    since: Micros | None = None
    before_id: int | None = None
    ids: Sequence[int] | None = field(default=None)

    def clauses(self) -> tuple[list[str], dict[str, Any]]:
        found: list[str] = []
        values: dict[str, Any] = {}
        for column, choices in (
            ("state", sorted(self.states) if self.states is not None else None),
            ("task", self.tasks),
            ("queue", self.queues),
            ("key", self.keys),
            ("parent_id", self.parents),
            ("id", self.ids),
        ):
            if choices is not None:
                found.append(f"{column} IN ({_places(column, choices, values)})" if choices else "1 = 0")
        if self.tags is not None:
            places = _places("tag", self.tags, values) or "NULL"
            tagged = f"SELECT job_id FROM genba.tag WHERE namespace = :namespace AND name IN ({places})"  # noqa: S608
            found.append(f"id IN ({tagged})")
        if self.since is not None:
            found.append("created_at >= :since")
            values["since"] = self.since
        if self.before_id is not None:
            found.append("id < :before_id")
            values["before_id"] = self.before_id
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
        """Newest first."""
        where, values = self._where(filter)
        text = f"SELECT {JOB_COLUMNS} FROM genba.job WHERE {where} ORDER BY id DESC LIMIT {int(limit)}"  # noqa: S608
        with self._db.statement() as tx:
            return [JobRecord(*row) for row in tx.select(text, **values)]

    def count(self, filter: Filter) -> int:
        where, values = self._where(filter)
        with self._db.statement() as tx:
            return int(tx.select(f"SELECT count(*) FROM genba.job WHERE {where}", **values)[0][0])  # noqa: S608

    def _where(self, filter: Filter) -> tuple[str, dict[str, Any]]:
        clauses, values = filter.clauses()
        return " AND ".join(["namespace = :namespace", *clauses]), {**values, "namespace": self._namespace}
