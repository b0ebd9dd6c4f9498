"""The examples of the reference of the command line are run, and what `--json` prints is what its schema says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner
from tests.support import ROOT, sqlite_url

from genba import Genba
from genba.cli import main
from genba.domain.limits import LimitRule
from genba.storage.records import NewNode

REFERENCE = ROOT / "docs" / "reference"
ELSEWHERE = {  # these run for long, or need PostgreSQL
    "genba db grant": "below",
    "genba demo": "test_demo.py",
    "genba bench": "test_bench.py",
    "genba node start": "test_node.py and most others",
    "genba event tail --follow": "test_events.py",
}
CODE = """
from genba import Genba

app = Genba()

@app.task
def add(x: int, y: int = 1) -> int:
    return x + y

@app.task(queue="render")
def render(scene: str = "duck") -> str:
    return scene

@app.task
def greet(name: str) -> str:
    return name
"""


def examples() -> Iterator[str]:
    """Each line of a shell block that calls genba, as it stands there."""
    for block in re.findall(r"```sh\n(.*?)```", (REFERENCE / "cli.md").read_text(), re.DOTALL):
        for line in block.splitlines():
            call = re.search(r"genba .*", line)
            assert call, line
            yield call[0].rstrip(")") if "$(" in line else call[0].partition(" > ")[0]


EXAMPLES = [line for line in examples() if not line.startswith(tuple(ELSEWHERE))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an app and a database, in which all that the examples name is there."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tasks.py").write_text(CODE)
    app = Genba(sqlite_url(folder))
    app.install()
    store = app.store
    for id, name in ((1, "web1-1"), (2, "web1-2")):
        store.nodes.join(
            NewNode(
                id=id,
                name=name,
                host="web1",
                boot_id="b",
                pid=os.getpid(),
                slots=2,
                lease=3600_000_000,
                version="0.1.0",
                queues=("default", "render"),
                tasks=tuple(
                    {"name": name, "title": None}
                    for name in ("tasks.add", "tasks.render", "tasks.greet")
                ),
            )
        )
    with store._db.transaction() as tx:  # as a node does whose tasks have it
        store.limits.declare(tx, [LimitRule("tenant:{tenant}", 1)])
    app.enqueue_many([app.call("tasks.add", (i,)) for i in range(41)])
    app.submit(
        [
            app.call(
                "tasks.render", ("duck",), options={"queue": "render", "key": "r:7", "tags": ["x"]}
            )
        ]
    )
    app.enqueue_many([app.call("tasks.add", (i,)) for i in range(3)])
    app.job(3).cancel("no")
    app.recur("nightly", app.call("tasks.add", (1,)), cron="0 3 * * *", tz="Europe/Zurich")
    assert app.job(42).key == "r:7"
    app.close()
    return folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, as the current folder."""
    folder = tmp_path / "shop"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GENBA_URL", sqlite_url(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("tasks", None)


def before(line: str, url: str) -> None:
    """What must have happened so that the example makes sense, and does not wait for ever."""
    app = Genba(url)
    words = line.split()
    try:
        if words[1:3] in (["job", "wait"], ["job", "requeue"], ["job", "tail"]):
            for id in (42, 43):
                app.job(id).cancel("no")
        elif words[1:3] == ["job", "resume"]:
            app.job(42).hold("why")
        elif words[1:3] == ["queue", "resume"]:
            app.queues["render"].pause()
        elif words[1:3] == ["schedule", "resume"]:
            app.schedule("nightly").pause()
        elif words[1:3] == ["task", "enable"]:
            app.tasks["tasks.render"].disable()
        elif words[1:3] == ["task", "set"] and "--reset" in words:
            app.tasks["tasks.render"].set(timeout="5m")
        elif words[1:3] == ["lock", "break"]:
            app.mutex("stock/7", wait=0).acquire()
            app.close()
    finally:
        app.close()


def ran(line: str, *more: str) -> Any:
    words = [
        word.replace("postgresql://localhost/shop", os.environ["GENBA_URL"])
        for word in shlex.split(line)[1:]
    ]
    at = words.index("--") if "--" in words else len(words)
    return CliRunner().invoke(main, [*words[:at], *more, *words[at:]], input="y\n")


def code_of(line: str) -> set[int]:
    """A wait for what was cancelled is no success; a file has two silent nodes, so something is wrong."""
    return {1} if line.startswith(("genba job wait", "genba doctor", "genba lock break")) else {0}


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_of_the_reference_runs(line, place):
    before(line, os.environ["GENBA_URL"])
    result = ran(line)

    assert result.exit_code in code_of(line), (line, result.output)


@pytest.fixture
def owned(databases: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database of PostgreSQL, and a role that has no rights in it yet."""
    with databases.fresh(template) as name:
        url = databases.url(name)
        monkeypatch.setenv("GENBA_URL", url)
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("CREATE ROLE shop_web")
            try:
                yield url
            finally:
                conn.execute("DROP OWNED BY shop_web")
                conn.execute("DROP ROLE shop_web")


def test_the_examples_of_grant_run_on_postgres(owned):
    lines = [line for line in examples() if line.startswith("genba db grant")]
    assert lines
    for line in lines:
        with psycopg.connect(owned, autocommit=True) as conn:
            may = "SELECT has_column_privilege('shop_web', 'genba.job', 'args', 'INSERT')"
            assert conn.execute(may).fetchone() == (False,)
            result = ran(line)
            assert result.exit_code == 0, (line, result.output)
            assert conn.execute(may).fetchone() == (True,)
        result = ran(line, "--json")
        fits(json.loads(result.stdout), SCHEMAS["properties"]["db grant"], line)


def commands(group: click.Group = main, path: str = "genba") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_every_command_has_an_example():
    shown = list(examples())
    for command in commands():
        assert any(line == command or line.startswith(f"{command} ") for line in shown), command


# --json

LINES = (
    "genba job tail",
    "genba event tail",
    "genba node drain",
    "genba node stop",
)  # one object a line

SCHEMAS = json.loads((REFERENCE / "json-schemas.json").read_text())
_KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def fits(value: Any, schema: dict[str, Any], where: str) -> None:
    """As far as our schemas go: $ref, anyOf by type, type, properties, required, items, additionalProperties."""
    if "anyOf" in schema:
        one, many = schema["anyOf"]
        schema = many if isinstance(value, list) else one
    if "$ref" in schema:
        schema = SCHEMAS["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    kinds = schema.get("type")
    if kinds is not None:
        listed = [kinds] if isinstance(kinds, str) else kinds
        good = any(
            isinstance(value, _KINDS[kind])
            and not (isinstance(value, bool) and kind in ("integer", "number"))
            for kind in listed
        )
        assert good, f"{where} is {value!r}, not {kinds}"
    if isinstance(value, dict) and "properties" in schema:
        missing = set(schema["required"]) - value.keys()
        assert not missing, f"{where} lacks {missing}"
        strange = value.keys() - schema["properties"].keys()
        assert not strange, f"{where} has {strange}, which its schema does not know"
        for name, part in schema["properties"].items():
            if name in value:
                fits(value[name], part, f"{where}.{name}")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for name, part in value.items():
            fits(part, schema["additionalProperties"], f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for i, part in enumerate(value):
            fits(part, schema["items"], f"{where}[{i}]")


@pytest.mark.parametrize("line", EXAMPLES)
def test_what_json_prints_is_what_its_schema_says(line, place):
    before(line, os.environ["GENBA_URL"])
    (command,) = [one for one in commands() if line == one or line.startswith(f"{one} ")]
    result = ran(line, "--json")

    assert result.exit_code in code_of(line), (line, result.output)
    printed = result.stdout.splitlines()
    for line_shown in printed if command in LINES else ["".join(printed)]:
        fits(json.loads(line_shown), SCHEMAS["properties"][command.removeprefix("genba ")], command)


def test_every_command_has_a_schema():
    assert {f"genba {name}" for name in SCHEMAS["properties"]} == set(commands())


def test_errors_have_a_schema_too(place):
    result = ran("genba job show 999", "--json")

    assert result.exit_code == 4
    fits(json.loads(result.stderr), SCHEMAS["$defs"]["error"], "error")
