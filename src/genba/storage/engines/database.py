"""What the Store needs from a database, and the named queries that both engines share.

A query is written once, with `:name` parameters and the tables as `genba.job`:

    -- name: finish(id, attempt)      the names in parentheses order the columns of a batch
    -- literal: limit                 this parameter is written into the text (the planner must see it)

`/* now */` is the store's wall clock, `/* boot */` its clock for leases, `/* lock */` takes the rows that
nobody else holds, `/* args */` are the arguments of a job, wherever they are kept.  A folder named like the engine
may override a name, with a reason beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

from genba.errors import StoreUnreachable

Row = tuple[Any, ...]
QueryCall = tuple[str, Mapping[str, Any]]  # the name of a query, and its values


class AnswerLost(StoreUnreachable):
    """The connection broke in the middle: it may have happened, or not."""


_HEAD = re.compile(r"^-- name: (\w+)(?:\(([^)]*)\))?\s*$", re.MULTILINE)
_LITERAL = re.compile(r"^-- literal: (\w+)\s*$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n?", re.MULTILINE)
TABLES = frozenset(
    {
        *(
            "migration",
            "namespace",
            "sequence",
            "job",
            "tag",
            "attempt",
            "event",
            "dependency",
            "unsettled",
            "bucket",
        ),
        *("question", "argument"),
        *(
            "bucket_limit",
            "recheck",
            "lock",
            "waiter",
            "schedule",
            "tick",
            "task",
            "queue",
            "node",
            "control",
        ),
        *("message", "session", "listener", "fair"),
    }
)  # ours, of both engines: what an uninstall may drop
LONG_ARGUMENTS_BYTES = (
    500  # longer ones are kept apart from the row of their job, which is written again
)
PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Query:
    """One named statement; `columns` order the values of a batch, `literals` are written into the text."""

    name: str
    text: str
    columns: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """Where the database is, as far as this machine can see: "" and None if it is elsewhere."""

    file_system: str = ""
    free: int | None = None  # bytes on that disk


def load_queries(dialect: str) -> dict[str, Query]:
    """Every named query of the package, those of `dialect` over the shared ones."""
    root = files("genba.storage") / "queries"
    found: dict[str, Query] = {}
    for folder in (root / "shared", root / dialect):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".sql"):
                found.update((query.name, query) for query in parse_queries(file.read_text()))
    return found


def parse_queries(text: str) -> Iterable[Query]:
    heads = list(_HEAD.finditer(text))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : after.start() if after else len(text)]
        columns = tuple(c.strip() for c in (head[2] or "").split(",") if c.strip())
        yield Query(
            head[1],
            _COMMENT.sub("", body).strip().rstrip(";"),
            columns,
            tuple(_LITERAL.findall(body)),
        )


class Transaction(Protocol):
    """One open transaction (or one statement of its own)."""

    def all(self, name: str, /, **values: Any) -> list[Row]: ...

    def one(self, name: str, /, **values: Any) -> Row | None: ...

    def all_json(self, name: str, /, **values: Any) -> list[Row]:
        """As `all`, for many rows; where each row costs, the query gives them as one JSON array."""
        ...

    def run(self, name: str, /, **values: Any) -> int:
        """How many rows it changed."""
        ...

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        """The statement for each row, in as few calls as the engine can; gives all rows returned."""
        ...

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        """As `batch`, of a statement that returns something for each row that it finds; None: it has found all."""
        ...

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        """The best jobs that may start, leased; in any order."""
        ...

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Many plain new rows of `genba.job`, the fastest way the engine has."""
        ...

    def insert_alike(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        """The same of rows that differ in their first and last column only, the id and the arguments."""
        ...

    def select(self, text: str, /, **values: Any) -> list[Row]:
        """A statement that was composed; same parameters and table names as in the files."""
        ...

    def names(self, values: Sequence[str]) -> Any:
        """A list of names, as the engine wants it for a parameter."""
        ...

    def numbers(self, values: Sequence[int]) -> Any:
        """The same for whole numbers."""
        ...

    def ids(self, count: int) -> list[int]:
        """That many new job ids, growing."""
        ...

    def now(self) -> int:
        """The store's wall clock."""
        ...


class WritingProcess(NamedTuple):
    """The process that keeps all others from writing; `born` tells it from a later one with its pid."""

    pid: int
    born: int
    stopped: bool  # by a signal, or a debugger: it will not come to an end by itself


class Database(Protocol):
    """One engine, connected on first use; safe to use from several threads and after a fork."""

    @property
    def dialect(self) -> str: ...

    @property
    def parallel_writers(self) -> int:
        """How many writers gain from writing at once: with one, a finish and the next claim share a commit."""
        ...

    @property
    def pooler_found(self) -> bool:
        """Nobody has said that there is a pooler, and there is one."""
        ...

    def transaction(self) -> AbstractContextManager[Transaction]:
        """All or nothing, durable when the block is left."""
        ...

    def single_write(self) -> AbstractContextManager[Transaction]:
        """For one writing statement: durable when the block is left, without the cost of a frame around it."""
        ...

    def pipeline(self, *steps: QueryCall) -> list[list[Row]]:
        """These as one transaction, sent all at once: none may need the answer to another.  Gives their rows."""
        ...

    def statement(self) -> AbstractContextManager[Transaction]:
        """For reading; each statement sees what is committed."""
        ...

    def snapshot(self) -> AbstractContextManager[DatabaseSnapshot]:
        """For reading all there is, as of one moment, however long it takes."""
        ...

    def adopt(self, conn: Any) -> AbstractContextManager[Transaction]:
        """The caller's own open transaction."""
        ...

    def job_transaction(self, within: float) -> JobTransaction:
        """A transaction that user code writes in too, of so many seconds at most where it blocks all others."""
        ...

    def schema(self) -> AbstractContextManager[Schema]:
        """What is there, without waiting for whoever writes or changes it."""
        ...

    def migrations(self) -> AbstractContextManager[SchemaMigration]:
        """The right to change the schema; one process at a time."""
        ...

    def home(self) -> DiskInfo: ...

    def writer(self, *, whoever: bool = False) -> WritingProcess | None:
        """Who writes just now, where that is one at a time; asks the kernel, and never waits for the database.

        Only who is in our way; `whoever` it is takes longer."""
        ...

    def mark(self) -> object:
        """For those who poll: if two marks are equal, surely nothing was written between them."""
        ...

    def close(self) -> None: ...


class DatabaseSnapshot(Protocol):
    """The database as it was when this was opened; others go on writing."""

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        """One after the other, so that any number of them needs no memory; several of these may be under way."""
        ...


class JobTransaction(Protocol):
    """An open transaction, ours and the user's: `connection` is the driver's own, and for this alone."""

    def ours(self) -> AbstractContextManager[Transaction]:
        """For our own statements in it."""
        ...

    @property
    def connection(self) -> Any: ...

    @property
    def expired(self) -> str:
        """Words for the user if its time was over; then it is rolled back, and its connection closed."""
        ...

    def take_back(self) -> None:
        """From here on it is ours alone; StoreError if it is not open any more."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Schema(Protocol):
    def applied(self) -> Mapping[int, str]: ...

    def serves(self) -> Mapping[int, int]:
        """Of each that is applied: the oldest schema whose code works with it."""
        ...


class SchemaMigration(Schema, Protocol):
    """Under the lock: what is applied, and how to apply more."""

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        """The script and its record, in one transaction; `serves` None: nobody but those who know it."""
        ...

    def drop_all(self) -> list[str]:
        """Remove our objects and nothing else; gives their names."""
        ...
