"""What roles of a PostgreSQL server may do with our tables: producer, worker, reader, admin.

A producer enqueues jobs and sees their states, but not their arguments and results. It cannot claim
or end a job, nor change its identity, its work or its state; but an enqueue also moves other jobs
that wait for the same slot, turn or key, and so a producer may write seven columns of every job: it
can make others wait. A worker is a node, with its jobs. A reader reads everything and changes
nothing. An admin also changes tasks, queues, limits and locks. None of them may change the tables
themselves; that needs their owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType

from genba.domain.url import mask_password, scrub_password, split_url
from genba.errors import BadOption, StoreError
from genba.storage.engines.database import TABLES
from genba.storage.engines.postgres.database import PostgresDatabase
from genba.storage.engines.postgres.schema import SEQUENCES
from genba.storage.jobs.job_row import INSERT_COLUMNS

_ALL = "SELECT, INSERT, UPDATE, DELETE"
_SECRET = frozenset({"args", "result", "saved", "error", "progress"})  # not for producers
# What an enqueue changes in existing rows. PostgreSQL can restrict that to columns, not to rows: a
# slot goes to the first parked job (parked_on, granted_at, rank), a key is taken from a job that is
# final (key_hash), and a job that is unique or of a fair queue gets the rest after its insert
# (buckets, capped, fair_key, rank).
_MOVED_BY_ENQUEUE = ("parked_on", "granted_at", "rank", "buckets", "capped", "fair_key", "key_hash")
# Tables of operators, with the columns that a node writes too.
_WRITTEN_BY_NODES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "task": ("title", "definition", "changed_at", "changed_by"),
        "queue": ("vtime", "fair_by", "paused", "paused_until", "changed_at", "changed_by"),
        "bucket_limit": ("n", "most", "ordered", "per", "burst"),
    }
)
_COLUMNS = (
    "SELECT table_name, array_agg(column_name::text ORDER BY ordinal_position) "
    "FROM information_schema.columns WHERE table_schema = 'genba' GROUP BY table_name"
)
ROLE_KINDS = ("producer", "worker", "reader", "admin")


def grant(url: str, role: str, kind: str) -> None:
    """Give `role`, which must exist, the rights of `kind` and no others on our tables."""
    if kind not in ROLE_KINDS:
        raise BadOption(f"a role is one of {', '.join(ROLE_KINDS)}, not {kind!r}")
    if split_url(url).scheme not in ("postgresql", "postgres"):
        raise BadOption("only PostgreSQL has roles; a SQLite file belongs to its owner (mode 0600)")
    database = PostgresDatabase(url, {}, None)
    with closing(database.connect()) as conn:
        try:
            with conn.transaction():
                for statement in _statements(
                    _quoted(role), kind, dict(conn.execute(_COLUMNS).fetchall())
                ):
                    conn.execute(statement)
        except database.errors as error:
            text = scrub_password(str(error).strip(), url)
            raise StoreError(
                f"{mask_password(url)}: cannot make {role!r} a {kind}: {text}"
            ) from error


def _statements(role: str, kind: str, columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if "job" not in columns:
        raise StoreError("there are no tables yet: genba db install")
    yield f"REVOKE ALL ON ALL TABLES IN SCHEMA genba FROM {role}"
    yield f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA genba FROM {role}"
    yield f"GRANT USAGE ON SCHEMA genba TO {role}"
    for table in sorted(TABLES & columns.keys()):
        for rights in _rights(kind, table, columns[table]):
            yield f"GRANT {rights} ON genba.{table} TO {role}"
    if kind != "reader":
        for sequence in SEQUENCES:
            yield f"GRANT USAGE ON SEQUENCE genba.{sequence} TO {role}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _rights(kind: str, table: str, columns: Sequence[str]) -> list[str]:
    if kind == "reader" or table == "migration":
        return ["SELECT"]
    if kind == "admin":
        return [_ALL]
    if kind == "worker":
        columns_of_nodes = _WRITTEN_BY_NODES.get(table)
        if columns_of_nodes is None:
            return [_ALL]
        return ["SELECT, INSERT", _on_columns("UPDATE", columns_of_nodes)]
    return _producer_rights(table, columns)


def _producer_rights(table: str, columns: Sequence[str]) -> list[str]:
    match table:
        case "job":
            shown = [column for column in columns if column not in _SECRET]
            return [
                _on_columns("SELECT", shown),
                _on_columns("INSERT", INSERT_COLUMNS),
                _on_columns("UPDATE", _MOVED_BY_ENQUEUE),
            ]
        case "event":
            return ["INSERT"]
        case "tag" | "dependency" | "unsettled" | "recheck":
            return ["SELECT, INSERT"]
        case "bucket":
            return [
                "SELECT, INSERT",
                _on_columns("UPDATE", ["taken", "owner", "full_at", "next_at"]),
            ]
        case "question":
            return ["SELECT, INSERT", _on_columns("UPDATE", ["look_at"])]
        case "fair":
            return ["SELECT, INSERT", _on_columns("UPDATE", ["last"])]
        case "bucket_limit":
            return ["SELECT, INSERT"]
        case "node":
            return ["SELECT", _on_columns("UPDATE", ["hungry"])]
        case "namespace" | "task" | "queue":
            return ["SELECT"]
    return []


def _on_columns(right: str, columns: Sequence[str]) -> str:
    return f"{right} ({', '.join(columns)})"
