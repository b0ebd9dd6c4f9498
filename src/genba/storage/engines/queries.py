"""Named SQL queries: shared by both engines, with overrides per engine.

A query is written once, with `:name` parameters and the tables as `genba.job`:

    -- name: finish(id, attempt)      the names in parentheses order the columns of a batch
    -- literal: limit                 a parameter that is written into the text, for the planner

`/* now */` is the store's wall clock, `/* boot */` its clock for leases, `/* lock */` locks the
rows that no other transaction has locked, `/* args */` are the arguments of a job, wherever they
are stored. A folder named like the engine may override a query, with a reason beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")

_HEAD = re.compile(r"^-- name: (\w+)(?:\(([^)]*)\))?\s*$", re.MULTILINE)
_LITERAL = re.compile(r"^-- literal: (\w+)\s*$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Query:
    """One named statement.

    `columns` order the values of a batch; `literals` are parameters that are written into the text.
    """

    name: str
    text: str
    columns: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()


def load_queries(dialect: str) -> dict[str, Query]:
    """Load every query of the package; those of `dialect` replace the shared ones."""
    root = files("genba.storage") / "queries"
    queries: dict[str, Query] = {}
    for folder in (root / "shared", root / dialect):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".sql"):
                queries.update((query.name, query) for query in parse_queries(file.read_text()))
    return queries


def parse_queries(text: str) -> Iterable[Query]:
    heads = list(_HEAD.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : following.start() if following else len(text)]
        columns = tuple(c.strip() for c in (head[2] or "").split(",") if c.strip())
        yield Query(
            head[1],
            _COMMENT.sub("", body).strip().rstrip(";"),
            columns,
            tuple(_LITERAL.findall(body)),
        )
