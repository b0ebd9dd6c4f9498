"""Whatever stands in the tables: a node lives, good jobs run, and what people look at can be looked at.

Rows are made from the schema itself: for each column that holds a text or bytes one row, or several, that is right in
all others and has something hostile in this one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import apsw
import pytest
from tests.storage.builders import connection, rows
from tests.support import eventually

from genba.cli import main
from genba.domain.schedule import ScheduleRule
from genba.storage.engines.database import TABLES
from genba.storage.records import NewJob
from genba.storage.schedules.rows import NewSchedule

TEXTS = [
    "not json",
    "{}",
    "[]",
    "7",
    "null",
    '"x"',
    '[1, {"a": null}]',
    '[["a", "b"], ["c"]]',
    '{"jobs": 7, "each": [], "limits": 7, "rule": {}, "job": [], "type": [], "message": {}, "started": "x"}',
    '{"jobs": [1, "x"], "each": {"attempt": []}, "limits": [[]], "keep": "for ever", "max_running": "x"}',
    "[" * 5_000,
    "9" * 400,
    "1e999",
    "\x1b[31m\r\n\u202e",
    "",
    "x" * 300,
]
HUGE = [2**63 - 1, -(2**63), 2**53, -1]
BASE = 8_000_000_000
NOT_OURS = {
    "migration",
    "sequence",
    "namespace",
}  # a number there is the state of the whole database, not a row
IDS = {"id", "job_id", "seq", "child_id", "parent_id", "schedule_id"}


@dataclass(frozen=True)
class Column:
    name: str
    kind: str  # text, bytes, int or bool
    needed: bool


def columns(url: str, table: str) -> list[Column]:
    kinds = {"TEXT": "text", "BLOB": "bytes", "INTEGER": "int", "bytea": "bytes", "boolean": "bool"}
    if url.startswith("sqlite"):
        asked = 'name, type, "notnull" AND dflt_value IS NULL'
        found = rows(url, f"SELECT {asked} FROM pragma_table_info('genba_{table}')")
        return [Column(name, kinds[kind], bool(needed)) for name, kind, needed in found]
    asked = "column_name::text, data_type::text, is_nullable = 'NO' AND column_default IS NULL"
    source = f"information_schema.columns WHERE table_schema = 'genba' AND table_name = '{table}'"
    found = rows(url, f"SELECT {asked} FROM {source} ORDER BY ordinal_position")
    return [
        Column(
            name,
            kinds.get(kind, "int" if kind in ("bigint", "integer", "smallint") else kind),
            needed,
        )
        for name, kind, needed in found
    ]


def a_schedule(**rule: Any) -> str:
    job = NewJob(task="jobs.add", args=b"")
    return NewSchedule(name="s", rule=ScheduleRule(**rule), job=job).definition()


# What a row of a table says that is right; what is not named here is made by the kind of the column.
RIGHT: dict[str, list[dict[str, Any]]] = {
    "job": [
        {"task": "jobs.add", "args": b'{"x":1}', **more}
        for more in (
            {"state": "waiting"},
            {"state": "waiting", "parked_on": "question k"},
            {"state": "waiting", "parked_on": "limit b", "buckets": '[["b","b",0]]'},
            {"state": "waiting", "expires_at": 1},
            {"state": "scheduled"},
            {"state": "blocked", "open_deps": 1},
            {"state": "running", "node": 5, "claim_id": 5, "attempt": 1},
            {"state": "held", "reason": "r"},
            {"state": "failed", "finished_at": 1, "error": '{"type":"E"}'},
            {"state": "succeeded", "finished_at": 1, "result": b"2"},
        )
    ],
    "task": [
        {"definition": "{}", "enabled": True},
        {"definition": '{"limits":[]}', "enabled": False},
    ],
    "queue": [{}, {"paused": True, "paused_until": 1}],
    "node": [
        {
            "state": "live",
            "queues": '["default"]',
            "tasks": '["jobs.add"]',
            "lease": 60_000_000,
            "lease_until": 2**61,
        },
        {"state": "draining", "queues": "[]", "tasks": "[]", "lease": 1, "lease_until": 0},
        {"state": "dead", "queues": "[]", "tasks": "[]", "lease": 1, "lease_until": 0},
    ],
    "schedule": [
        {
            "definition": a_schedule(cron="* * * * *"),
            "args": b'{"x":1}',
            "task": "jobs.add",
            "next_at": 1,
        },
        {
            "definition": a_schedule(every=60_000_000),
            "args": b'{"x":1}',
            "task": "jobs.add",
            "next_at": 1,
        },
        {"definition": "{}", "args": b"{}", "next_at": 1},
        {"definition": "{}", "args": b"{}", "owner": "code"},
        {"definition": "{}", "args": b"{}", "paused": True},
    ],
    "question": [{"conditions": '["jobs.c"]', "look_at": 0}],
    "event": [
        {"kind": "succeeded", "data": b"{}"},
        {"kind": "failed", "data": b"{}", "job_id": None},
    ],
    "dependency": [{"wants": "success", "state": "open"}],
    "message": [
        {"job_id": None, "topic": "t", "data": b'{"message":1}'},
        {"topic": None, "data": b'{"message":1}'},
    ],
    "control": [{"verb": "set", "data": "{}"}],
    "bucket": [{"n": 1}, {"n": 1, "per": 1, "burst": 1, "next_at": 1}],
    "attempt": [{"cause": "exception"}],
}


class Planter:
    """Writes rows straight into the tables."""

    def __init__(self, url: str, node: Callable[[], int]) -> None:
        self._url = url
        self._node = node  # the living one, for what is addressed to it
        self._numbers = itertools.count(BASE)
        self.planted: dict[str, list[Any]] = {}

    def plant(self, tables: set[str]) -> None:
        with connection(self._url) as self._conn:
            self._conn.execute("BEGIN")
            for table in sorted(tables):
                known = columns(self._url, table)
                for right, column in itertools.product(RIGHT.get(table, [{}]), known):
                    for value in self._hostile(table, column):
                        self._write(table, known, right, column, value)
            self._conn.execute("COMMIT")

    def _hostile(self, table: str, column: Column) -> Iterator[Any]:
        if column.kind == "text":
            yield from TEXTS
        elif column.kind == "bytes":
            yield from (text.encode() for text in TEXTS)
            yield b"\xff\xfe\x00"
        elif column.kind == "int" and table not in NOT_OURS and column.name not in IDS:
            yield from HUGE

    def _write(
        self, table: str, known: list[Column], right: dict[str, Any], column: Column, value: Any
    ) -> None:
        number = next(self._numbers)
        required = [each for each in known if each.needed or each.name in ("id", "seq", "job_id")]
        row = {each.name: self._usual(each, number) for each in required}
        row |= {**right, column.name: value}
        if table == "control":
            row["node"] = self._node()
        with (
            suppress(Exception),
            self._saved(),
        ):  # too long, too large, or there already: then it cannot be there
            names, marks = ", ".join(row), ", ".join(["%s" if self._postgres else "?"] * len(row))
            how = "OVERRIDING SYSTEM VALUE " if self._postgres else ""
            text = f"INSERT INTO genba{self._dot}{table} ({names}) {how}VALUES ({marks})"
            self._conn.execute(text, tuple(row.values()))
            self.planted.setdefault(table, []).append(row)

    def _usual(self, column: Column, number: int) -> Any:
        if column.name in ("namespace", "queue"):
            return "default"
        if column.kind == "text":
            return f"{column.name}-{number}"
        if column.kind == "bytes":
            return b"{}"
        return number if column.name in IDS else False if column.kind == "bool" else 0

    def _saved(self) -> Any:
        return self._conn.transaction() if self._postgres else self._conn

    @property
    def _postgres(self) -> bool:
        return self._url.startswith("postgres")

    @property
    def _dot(self) -> str:
        return "." if self._postgres else "_"


LISTS = [
    *(
        "job ls --state any --limit 500",
        "node ls",
        "task ls",
        "queue ls",
        "schedule ls",
        "lock ls",
        "event tail",
    ),
    *("top --once", "doctor", "db verify"),
]


def command(words: list[str], url: str) -> int:
    """Its code; an exception is one that a person would see as a traceback."""
    with pytest.raises(SystemExit) as left:
        main([*words, "--url", url])
    return int(left.value.code or 0)


@pytest.mark.parametrize("table", sorted(TABLES - {"migration"}))
def test_a_hostile_row_runs_nothing_breaks_nothing_and_hides_nothing(
    jobs, url, start_node, table, capfd
):
    if not columns(url, table):
        pytest.skip("PostgreSQL needs no such table")
    node = start_node("jobs:app", url, "--max", "2", "--name", "good")
    (mine,) = eventually(jobs.app.nodes, within=60)
    planter = Planter(url, lambda: mine.id)
    planter.plant({table})
    assert planter.planted[table]
    late = start_node("jobs:app", url, "--max", "2", "--name", "late")  # joins what is there

    for x in range(3):
        assert jobs.add.enqueue(x).result(timeout=60) == x + 1
    eventually(lambda: any(one.name == "late" for one in jobs.app.nodes()), within=60)
    for words in LISTS:
        for form in ([], ["--json"]):
            assert command([*words.split(), *form], url) in (0, 1), words
    for row in planter.planted[table][:: max(1, len(planter.planted[table]) // 100)]:
        for looked in looks(table, row):
            assert command(looked, url) in (0, 1, 2, 3, 4), looked
    capfd.readouterr()
    eventually(lambda: jobs.add.enqueue(7).result(timeout=60) == 8, within=60)
    for one in (node, late):
        assert not one.ended, one.log
        assert "Traceback" not in one.log
        assert len(one.log.splitlines()) < 3 * len(planter.planted[table]) + 50


def looks(table: str, row: dict[str, Any]) -> Iterator[list[str]]:
    """What a person asks about this row."""
    id = str(row.get("job_id", row.get("child_id", row.get("id"))))
    if table in ("job", "attempt", "dependency", "argument"):
        yield from (["job", "show", id], ["job", "show", id, "--json"], ["job", "explain", id])
    if table == "job":
        yield from (["job", "cancel", id], ["job", "hold", id], ["job", "requeue", id])
    if table == "schedule" and row["name"] and clean_name(row["name"]):
        yield from (
            [
                ["schedule", verb, row["name"]]
                for verb in ("next", "ticks", "pause", "resume", "delete")
            ]
        )
    if table == "task" and clean_name(row["name"]):
        yield from ([["task", verb, row["name"]] for verb in ("disable", "enable")])
        yield ["job", "enqueue", row["name"]]


def clean_name(name: str) -> bool:
    return name.replace("-", "").isalnum()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_value_of_another_type_is_refused_by_the_table(jobs, url, engine):
    job = jobs.add.enqueue(1)
    for column, value in [
        ("options", "X'7B7D'"),
        ("attempt", "'many'"),
        ("args", "'{}'"),
        ("attempt", str(2**63 - 1)),
    ]:
        with pytest.raises(apsw.ConstraintError):
            rows(url, f"UPDATE genba.job SET {column} = {value} WHERE id = {job.id}")


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_text_that_is_no_utf8_keeps_no_other_job_waiting(jobs, url, engine, start_node):
    """SQLite takes any bytes as a text; PostgreSQL refuses them."""
    bad = jobs.add.enqueue(1)
    rows(url, f"UPDATE genba.job SET options = CAST(X'FFFE' AS TEXT) WHERE id = {bad.id}")
    node = start_node("jobs:app", url, "--max", "2")

    assert jobs.add.enqueue(2).result(timeout=60) == 3
    eventually(lambda: jobs.app.count(state=["waiting", "running"]) == 0, within=30)
    assert jobs.add.enqueue(3).result(timeout=60) == 4
    assert not node.ended
    assert command(["job", "ls", "--state", "any"], url) == 3  # one sentence, no traceback
