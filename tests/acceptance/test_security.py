"""Nothing that comes out of a database is ever code: looked for in our own sources, and tried with hostile rows."""

from __future__ import annotations

import ast
import stat
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.storage.builders import connection
from tests.support import eventually

import genba
from genba.cli import main

SOURCES = Path(genba.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "yaml",
    "code",
    "runpy",
}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "import_module",
    "system",
    "popen",
    "load_module",
    "exec_module",
}
REVIEWED = {  # where it is, and what is imported there: never a name out of the database
    ("worker/zygote.py", "import_module"),  # a module of ours, before the first fork
    ("worker/load_app.py", "import_module"),  # the app that a command was given on its command line
    ("client/app.py", "import_module"),  # "genba.testing", written out
}


def _called(node: ast.Call) -> str:
    target = node.func
    if isinstance(target, ast.Attribute):
        regular = isinstance(target.value, ast.Name) and target.value.id == "re"
        return "" if regular else target.attr
    return target.id if isinstance(target, ast.Name) else ""


def _found() -> Iterator[tuple[str, str]]:
    for path in SOURCES.rglob("*.py"):
        where = str(path.relative_to(SOURCES))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (
                    (where, alias.name)
                    for alias in node.names
                    if alias.name.split(".")[0] in MODULES
                )
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
                yield where, str(node.module)
            elif isinstance(node, ast.Call):
                if _called(node) in CALLS:
                    yield where, _called(node)
                shell = [word for word in node.keywords if word.arg == "shell"]
                if shell and not (
                    isinstance(shell[0].value, ast.Constant) and shell[0].value.value is False
                ):
                    yield where, "shell"


def test_no_source_of_ours_makes_code_out_of_data():
    assert set(_found()) == REVIEWED


def test_the_file_of_a_new_database_is_for_its_owner_alone(tmp_path):
    app = genba.Genba(f"sqlite:///{tmp_path}/a.db")
    app.enqueue("x")
    kept = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.iterdir()
        if path.is_file()
    }
    app.close()

    assert kept["a.db"] == 0o600
    assert {mode & 0o077 for mode in kept.values()} == {0}


SECRET_URLS = [
    "postgresql://me:hunter2@localhost:1/shop",
    "postgresql://me@localhost:1/shop?password=hunter2",
    "postgresql://localhost:1/shop?user=me&password=hunter2&connect_timeout=1",
    "mysql://me:hunter2@localhost/shop",
    "postgresql+psycopg://me:hunter2@localhost:1/shop",
    "postgresql://me:100%hunter2@localhost:1/shop",
    "postgresql://me:a/hunter2@localhost:1/shop",
    "postgresql://me:a?hunter2@localhost:1/shop",
    "postgresql://me:a#hunter2@localhost:1/shop",
    "postgresql://me:a@hunter2@localhost:1/shop",
    "postgresql://me:a/b@hunter2@localhost:1/shop",
    "postgresql://me:[hunter2@localhost:1/shop",
    "postgresql://me:hunter2",
    "postgresql://me:%68unter2@localhost:1/shop",
    "me:hunter2@localhost/shop",
    "host=localhost port=1 password=hunter2",
    "sqlite://me:hunter2@/shop.db",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_password_is_in_no_message(url):
    app = genba.Genba(url)
    with pytest.raises(genba.GenbaError) as caught:
        app.enqueue("x")
    app.close()

    assert (
        "hunter2" not in f"{caught.value} {caught.value!r} {app!r} {app.settings!r} {app.shown_url}"
    )
    assert "hunter2" not in "".join(traceback.format_exception(caught.value, chain=True)).replace(
        f'"{url}"', ""
    )


@pytest.mark.parametrize(
    "words",
    [
        ("job", "ls"),
        ("job", "ls", "--json"),
        ("db", "install", "--create"),
        ("db", "grant", "reader", "somebody", "--json"),
        ("bench", "--quick"),
        ("unit", "systemd", "work:app"),
    ],
    ids=" ".join,
)
def test_a_password_is_in_nothing_that_a_command_prints(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENBA_TRACEBACK", "1")
    for url in SECRET_URLS:
        with suppress(SystemExit):  # whatever it says
            main([*words, "--url", url])
        caught = capfd.readouterr()
        assert "hunter2" not in caught.out + caught.err, url


@pytest.mark.parametrize("url", [url for i, url in enumerate(SECRET_URLS) if i in (0, 3, 5, 6, 9)])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_password_is_in_no_line_of_a_node(url, words, start_node, tmp_path):
    (tmp_path / "work.py").write_text("from genba import Genba\napp = Genba()\n")
    node = start_node("work:app", url, *words)

    assert node.wait(within=30) in (2, 3)
    assert "hunter2" not in node.log
    assert node.log.strip()


HOSTILE = [
    # task, args, options
    ("os.system", '{"command": "touch {}"}', None),
    ("jobs.__builtins__.exec", '["touch {}"]', None),
    ("builtins:eval", "{\"source\": \"open('{}', 'w')\"}", None),
    (
        "jobs.add",
        '{"__class__": "os.system", "x": {"__reduce__": ["os.system", ["touch {}"]]}}',
        None,
    ),
    ("jobs.add", "not json at all", None),
    ("jobs.add", "[1, 2", None),
    ("jobs.add", "[" * 5_000, None),
    ("jobs.add", '{"x": 1}', "no json"),
    ("jobs.add", '{"x": 1}', '{"timeout": "soon", "retry": 7, "ready": 3}'),
    ("jobs.add", '{"x": 1}', '{"ready": ["os.system"]}'),
    ("jobs.add", '{"x": 1}', '{"on_final": "os.system", "retry": {"on": ["os.system"]}}'),
    ("jobs.add", '{"x": 1}', '{"retry": {"times": -1e99}, "grace": -1, "max_crashes": -5}'),
    ("../../etc/passwd", "{}", None),
    ("x" * 300, "{}", None),
]


def test_rows_written_by_hand_run_nothing_and_crash_nothing(jobs, url, start_node, tmp_path):
    touched = tmp_path / "touched"
    jobs.app.install()
    dot = "." if url.startswith("postgres") else "_"
    with connection(url) as conn:
        for number, (task, args, options) in enumerate(HOSTILE):
            row = (9_000_000 + number, task, options, args.replace("{}", str(touched)).encode())
            mark = "%s" if url.startswith("postgres") else "?"
            conn.execute(
                f"INSERT INTO genba{dot}job (id, task, options, args, rank, due_at, created_at, priority, namespace, "
                f"queue, state) VALUES ({mark}, {mark}, {mark}, {mark}, 0, 0, 0, 0, 'default', 'default', 'waiting')",
                row,
            )
    node = start_node("jobs:app", url, "--max", "2")

    assert jobs.add.enqueue(1, 2).result(timeout=60) == 3
    unknown = {9_000_000 + n for n, (task, *_) in enumerate(HOSTILE) if task != "jobs.add"}
    known = {9_000_000 + n for n in range(len(HOSTILE))} - unknown
    eventually(lambda: all(_rests(jobs.app.job(id)) for id in known), within=60)
    assert jobs.add.enqueue(2, 2).result(timeout=60) == 4, "the node goes on"

    assert not touched.exists()
    assert {jobs.app.job(id).state for id in unknown} == {"waiting"}
    assert "Traceback" not in node.log
    assert node.tree()


def _rests(job: genba.Job) -> bool:
    """Say whether nothing will happen to it: it has ended, is held, or asks for something unknown."""
    return job.refresh().state in (
        "succeeded",
        "failed",
        "held",
        "scheduled",
    ) or "os.system" in str(job.explain())
