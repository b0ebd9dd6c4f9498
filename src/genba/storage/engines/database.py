"""The protocols that a database engine implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from genba.errors import StoreUnreachable

Row = tuple[Any, ...]
QueryCall = tuple[str, Mapping[str, Any]]  # the name of a query, and its values

LONG_ARGUMENTS_BYTES = 500  # longer arguments are not stored in the job's row, which is rewritten

# Our tables, on both engines: the only ones that an uninstall may drop.
TABLES = frozenset(
    (
        *("migration", "namespace", "sequence"),
        *("job", "tag", "argument", "attempt", "event", "dependency", "unsettled"),
        *("bucket", "bucket_limit", "recheck", "fair", "question"),
        *("lock", "waiter", "message", "session", "listener"),
        *("schedule", "tick", "task", "queue", "node", "control"),
    )
)


class AnswerLost(StoreUnreachable):
    """The connection broke during a call: the change may or may not have been committed."""


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """The disk of the database, if it is on this machine; otherwise "" and None."""

    file_system: str = ""
    free: int | None = None  # bytes


class Transaction(Protocol):
    """One open transaction, or a connection that runs single statements."""

    def all(self, name: str, /, **values: Any) -> list[Row]: ...

    def one(self, name: str, /, **values: Any) -> Row | None: ...

    def all_json(self, name: str, /, **values: Any) -> list[Row]:
        """Like `all`, for many rows; on SQLite the query returns them as one JSON array."""
        ...

    def run(self, name: str, /, **values: Any) -> int:
        """Run the query; return the number of changed rows."""
        ...

    def batch(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row]:
        """Run the query for each row, in as few calls as possible; return all rows it returns."""
        ...

    def matched(self, name: str, rows: Sequence[Row], /, **values: Any) -> list[Row] | None:
        """Run a batch that returns one row per match; return None if every row matched."""
        ...

    def claim(self, **values: Any) -> Sequence[Sequence[Any]]:
        """Lease the best jobs that may start; return them in any order."""
        ...

    def insert_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert many plain rows into `genba.job`, the fastest way that the engine has."""
        ...

    def insert_uniform_jobs(
        self, columns: Sequence[str], same: Row, rows: Sequence[tuple[int, bytes]]
    ) -> None:
        """Insert rows that differ only in their first and last column, id and arguments."""
        ...

    def select(self, text: str, /, **values: Any) -> list[Row]:
        """Run a composed statement; parameters and table names as in the files."""
        ...

    def names(self, values: Sequence[str]) -> Any:
        """Convert a list of names to the form that the engine wants for a parameter."""
        ...

    def numbers(self, values: Sequence[int]) -> Any:
        """Convert a list of whole numbers in the same way."""
        ...

    def ids(self, count: int) -> list[int]:
        """Allocate that many new job ids, in growing order."""
        ...

    def now(self) -> int:
        """Read the store's wall clock."""
        ...


class WritingProcess(NamedTuple):
    """The process that holds the write lock; `born` and pid together identify it."""

    pid: int
    born: int  # ticks since the machine's start
    stopped: bool  # by a signal or a debugger: it will not finish by itself


class Database(Protocol):
    """One database, connected on first use; safe to use from several threads and after a fork."""

    @property
    def dialect(self) -> str: ...

    @property
    def parallel_writers(self) -> int:
        """How many writers gain from writing at the same time.

        With one, a finish and the next claim share a commit.
        """
        ...

    @property
    def pooler_found(self) -> bool:
        """Whether there is a pooler that the URL does not mention."""
        ...

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Open a transaction; it is durable when the block is left."""
        ...

    def single_write(self) -> AbstractContextManager[Transaction]:
        """Run one writing statement, durable when the block is left.

        Saves the cost of a transaction around it.
        """
        ...

    def pipeline(self, *calls: QueryCall) -> list[list[Row]]:
        """Run queries as one transaction, sent all at once; return the rows of each.

        None of them may need the answer to another.
        """
        ...

    def statement(self) -> AbstractContextManager[Transaction]:
        """Open a connection for reading; each statement sees all that is committed."""
        ...

    def snapshot(self) -> AbstractContextManager[DatabaseSnapshot]:
        """Open a snapshot for reading everything, however long it takes."""
        ...

    def adopt(self, conn: Any) -> AbstractContextManager[Transaction]:
        """Use the caller's own open transaction."""
        ...

    def job_transaction(self, within: float) -> JobTransaction:
        """Open a transaction that user code writes in too.

        On SQLite it blocks all other writers and ends after `within` seconds.
        """
        ...

    def schema(self) -> AbstractContextManager[Schema]:
        """Open the schema for reading, without waiting for a writer or a migration."""
        ...

    def migrations(self) -> AbstractContextManager[SchemaMigration]:
        """Lock the schema for changes; one process at a time."""
        ...

    def disk(self) -> DiskInfo: ...

    def writing_process(self, *, any_holder: bool = False) -> WritingProcess | None:
        """Find the process that writes, if only one can write at a time.

        Asks the kernel, and never waits for the database. Only a process that is in our way; with
        `any_holder` also another one, which takes longer.
        """
        ...

    def write_marker(self) -> object:
        """Return a marker for polling: if two are equal, no write happened in between."""
        ...

    def close(self) -> None: ...


class DatabaseSnapshot(Protocol):
    """The database as of the moment when this was opened; other processes go on writing."""

    def rows(self, name: str, /, **values: Any) -> Iterator[Row]:
        """Yield rows one by one, in constant memory; several such reads may be open at once."""
        ...


class JobTransaction(Protocol):
    """An open transaction that a job's user code and genba share.

    `connection` is the driver's own, and is used for nothing else.
    """

    def own_statements(self) -> AbstractContextManager[Transaction]:
        """Run genba's own statements in the transaction."""
        ...

    @property
    def connection(self) -> Any: ...

    @property
    def expired(self) -> str:
        """Explain to the user that the time limit has passed; "" if it has not.

        After the time limit the transaction is rolled back and its connection is closed.
        """
        ...

    def reclaim(self) -> None:
        """End the user's part; StoreError if the transaction is not open any more."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class Schema(Protocol):
    def applied(self) -> Mapping[int, str]: ...

    def serves(self) -> Mapping[int, int]:
        """Map each applied version to the oldest schema whose code works with it."""
        ...


class SchemaMigration(Schema, Protocol):
    """The schema, locked for changes."""

    def apply(self, version: int, name: str, script: str, serves: int | None = None) -> None:
        """Run the script and record it, in one transaction.

        `serves` None: only code that knows this version works with it.
        """
        ...

    def drop_all(self) -> list[str]:
        """Remove our objects and no others; return their names."""
        ...
