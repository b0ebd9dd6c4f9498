"""The command line, on both engines: what it prints, what it does, and with which code it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import click
import psutil
import psycopg
import pytest
from tests.storage.builders import connection
from tests.support import ROOT, Databases, NodeProcess, eventually

from genba import Genba
from genba.cli import main

CODE = """
import time
from genba import Genba, current_job

app = Genba()

@app.task
def add(x: int, y: int = 1) -> int:
    return x + y

@app.task
def fail(text: str) -> None:
    raise ValueError(text)

@app.task(grace="2s")
def run_until_stopped(path: str) -> None:
    open(path, "w").close()
    while not current_job().should_stop:
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """`genba …` in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> Ran:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        ran = Ran(int(left.value.code or 0), out, err)
        assert ran.code == code, f"{words} ended with {ran.code}, not {code}\n{out}\n{err}"
        return ran

    def id(self, *words: object) -> int:
        return int(self("job", "enqueue", *words).out)


@pytest.fixture
def anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """No database is set: for what ends before one is needed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(CODE)
    return Command(capsys)


@pytest.fixture
def genba(anywhere: Command, url: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("GENBA_URL", url)
    return anywhere


@pytest.fixture
def imported_anew() -> Iterator[None]:
    before, path = dict(sys.modules), list(sys.path)
    yield
    sys.modules.pop("tasks", None)
    sys.path[:] = path
    assert "tasks" not in before


# enqueue


def test_enqueue_prints_the_id_and_show_tells_what_was_enqueued(genba: Command) -> None:
    id = genba.id("tasks.add", 1, "y=2")

    printed = genba("job", "show", id, "--json").json

    assert (printed["id"], printed["task"], printed["state"]) == (id, "tasks.add", "waiting")
    assert printed["args"] == {"*": [1], "y": 2}
    assert printed["attempts"] == []


def test_arguments_are_json_where_they_can_be_and_text_otherwise(genba: Command) -> None:
    id = genba.id(
        "t",
        "5",
        "1.5",
        "true",
        "null",
        "[1, 2]",
        '"5"',
        "duck",
        "NaN",
        "a b=c",
        "key=x=y",
        "n=7",
        "empty=",
    )

    args = genba("job", "show", id, "--json").json["args"]

    assert args.pop("*") == [5, 1.5, True, None, [1, 2], "5", "duck", "NaN", "a b=c"]
    assert args == {"key": "x=y", "n": 7, "empty": ""}


def test_after_two_dashes_an_argument_may_begin_with_a_dash(genba: Command) -> None:
    id = genba.id("t", "--priority", "3", "--", "-5", "--queue")

    printed = genba("job", "show", id, "--json").json

    assert printed["args"] == {"*": [-5, "--queue"]}
    assert (printed["priority"], printed["queue"]) == (3, "default")


def test_every_option_of_enqueue_reaches_the_job(genba: Command) -> None:
    first = genba.id("t")
    id = genba.id(
        *(
            "t",
            "--queue",
            "slow",
            "--priority",
            "7",
            "--key",
            "k",
            "--tag",
            "a",
            "--tag",
            "b",
            "--after",
            first,
        ),
        *("--timeout", "90s", "--retry", '{"times": 3, "delay": "1s"}', "--delay", "1h"),
    )

    with closing(Genba(os.environ["GENBA_URL"])) as app:
        job = app.job(id)

    assert (job.queue, job.priority, job.key, job.tags, job.state) == (
        "slow",
        7,
        "k",
        ["a", "b"],
        "blocked",
    )
    assert (job.due - job.enqueued).total_seconds() == pytest.approx(3600, abs=1)
    assert json.loads(job.record.options or "") == {
        "timeout": 90_000_000,
        "retry": {"times": 3, "delay": "1s", "backoff": 2.0, "cap": "1h"},
    }


def test_at_takes_a_moment(genba: Command) -> None:
    printed = genba("job", "show", genba.id("t", "--at", "2126-01-31T03:00+01:00"), "--json").json

    assert (printed["state"], printed["due"]) == ("scheduled", "2126-01-31T02:00:00+00:00")


def test_a_key_that_is_taken_gives_the_job_that_has_it(genba: Command) -> None:
    id = genba.id("t", "--key", "k")

    again = genba("job", "enqueue", "t", "--key", "k")

    assert int(again.out) == id
    assert "no new job was enqueued" in again.err
    assert genba("job", "enqueue", "t", "--key", "k", "--json").json == {"id": id, "created": False}
    assert genba("job", "show", "--key", "k", "--json").json["id"] == id


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["no name"], "no name"),
        (["t", "a=1", "a=2"], "twice"),
        (["t", "--timeout", "soon"], "soon"),
        (["t", "--retry", "often"], "retry"),
        (["t", "--at", "+1h", "--delay", "1h"], "exclude each other"),
        (["t", "--queue", "no queue"], "no queue"),
        (["t", "--priority", "high"], "high"),
        (["t", "--after", "0"], "--after"),
        (["t", "--prioritty", "3"], "--priority"),
        (["t", "x" * 1_200_000], "1"),
    ],
)
def test_what_cannot_be_enqueued_is_refused_with_code_2(
    anywhere: Command, words: list[str], part: str
) -> None:
    ran = anywhere("job", "enqueue", *words, code=2)

    assert part in ran.err
    assert "Traceback" not in ran.err


def test_after_a_job_that_is_not_there_is_refused_with_code_4(genba: Command) -> None:
    assert "there is no job 99" in genba("job", "enqueue", "t", "--after", "99", code=4).err
    assert genba("job", "ls", "--state", "any", "--json").json == []


@pytest.mark.usefixtures("imported_anew")
def test_with_the_app_arguments_are_checked(genba: Command) -> None:
    app = ("--app", "tasks:app")

    assert "argument `x`" in genba("job", "enqueue", "tasks.add", "one", *app, code=2).err
    assert "z" in genba("job", "enqueue", "tasks.add", "1", "z=3", *app, code=2).err
    unknown = genba("job", "enqueue", "tasks.addd", "1", *app, code=4)
    assert "tasks.add, tasks.fail" in unknown.err
    id = genba.id("tasks.add", "1", *app)
    assert genba("job", "show", id, "--json").json["args"] == {"x": 1, "y": 1}


@pytest.mark.usefixtures("imported_anew")
def test_an_app_that_cannot_be_imported_is_reported_once(anywhere: Command, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("import no_such_module")

    ran = anywhere("job", "enqueue", "t", "--app", "tasks:app", code=2)

    assert ran.err.count("genba: cannot import tasks:app: ") == 1
    assert ran.err.count("No module named 'no_such_module'") == 1


# look


def test_ls_shows_open_jobs_the_newest_first_and_filters(genba: Command) -> None:
    one, two, three = (
        genba.id("a", "--tag", "x"),
        genba.id("b", "--queue", "q"),
        genba.id("b", "--key", "k"),
    )
    genba("job", "cancel", one)

    def listed(*words: object) -> list[int]:
        return [job["id"] for job in genba("job", "ls", "--json", *words).json]

    assert listed() == [three, two]
    assert listed("--state", "any") == [three, two, one]
    assert listed("--state", "final") == [one]
    assert listed("--state", "cancelled", "--state", "waiting") == [three, two, one]
    assert listed("--task", "b", "--queue", "q") == [two]
    assert listed("--state", "any", "--tag", "x") == [one]
    assert listed("--key", "k") == [three]
    assert listed("--since", "1h") == [three, two]
    assert listed("--state", "any", "--limit", "1", "--before", three) == [two]


def test_ls_for_people_is_a_table_that_tells_how_to_go_on(genba: Command) -> None:
    assert genba("job", "ls").err == "no jobs\n"
    ids = [genba.id("tasks.add", i) for i in range(3)]

    ran = genba("job", "ls", "--limit", "2")

    assert ran.out.splitlines()[0].split()[:3] == ["ID", "STATE", "TASK"]
    assert ran.out.splitlines()[1].split()[:3] == [str(ids[2]), "waiting", "tasks.add"]
    assert f"--before {ids[1]}" in ran.err


def test_explain_says_why_a_job_waits(genba: Command) -> None:
    first = genba.id("tasks.add", "1")
    second = genba.id("tasks.add", "1", "--after", first)

    assert "no node is running" in genba("job", "explain", first).out
    assert f"waits for job {first}" in genba("job", "explain", second).out
    printed = genba("job", "explain", second, "--json").json
    assert (printed["job"], printed["state"], printed["reasons"][0]["kind"]) == (
        second,
        "blocked",
        "blocked",
    )


def test_no_text_of_a_job_can_steer_the_terminal(genba: Command) -> None:
    nasty = "\x1b[31mred\x07\x9b2J\u202eback\x7f\rline"
    id = genba.id("t", nasty, "--key", "k\x1b]0;title\x07")
    genba("job", "cancel", id, "--reason", f"{nasty}\nsecond line")
    for words in (["show", id], ["ls", "--state", "any"], ["explain", id], ["show", id, "--json"]):
        shown = genba("job", *words).out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown), shown
    assert "\\x1b[31mred" in genba("job", "ls", "--state", "any").out
    ended = genba("job", "wait", id, code=1)
    assert "\x1b" not in ended.out + ended.err
    assert genba("job", "show", id, "--json").json["reason"] == f"{nasty}\nsecond line"


# steer


def test_jobs_are_held_resumed_cancelled_and_requeued(genba: Command) -> None:
    one, two = genba.id("t"), genba.id("t")

    assert genba("job", "hold", one, two, "--reason", "ask Ann").out == f"{one} held\n{two} held\n"
    assert "ask Ann" in genba("job", "show", one).out
    assert "only a job that has not started" in genba("job", "hold", one, code=1).err
    assert genba("job", "resume", one).out == f"{one} waiting\n"
    assert "it is not held" in genba("job", "resume", one, two, code=1).err
    assert genba("job", "cancel", one, "--json").json == [
        {"id": one, "done": True, "state": "cancelled"}
    ]
    assert "nothing to cancel" in genba("job", "cancel", one, code=1).err
    assert genba("job", "kill", two).out == f"{two} cancelled\n"
    assert genba("job", "requeue", one).out == f"{one} waiting\n"
    assert "only a final job" in genba("job", "requeue", one, code=1).err


@pytest.mark.parametrize(
    "verb", ["show", "explain", "wait", "cancel", "kill", "hold", "resume", "requeue"]
)
def test_a_job_that_is_not_there_ends_with_code_4_and_one_that_is_not_named_with_2(
    genba: Command, verb: str
) -> None:
    id = genba.id("t")

    assert "there is no job 99" in genba("job", verb, id, 99, code=4).err
    assert "with key 'no'" in genba("job", verb, "--key", "no", code=4).err
    assert "no job is named" in genba("job", verb, code=2).err
    assert "0 is not in the range" in genba("job", verb, 0, code=2).err
    assert genba("job", "show", id, "--json").json["state"] == "waiting"


def test_wait_gives_up_with_code_1(genba: Command) -> None:
    ran = genba("job", "wait", genba.id("t"), "--timeout", "50ms", code=1)

    assert "1 of 1 jobs" in ran.err


# the same everywhere


def test_common_options_stand_before_and_after_the_command(genba: Command, url: str) -> None:
    id = genba.id("t", "--namespace", "shop")

    for words in (
        ["--namespace", "shop", "--json", "job", "ls"],
        ["job", "--namespace", "shop", "--json", "ls"],
        ["job", "ls", "--json", "--namespace", "shop"],
        ["--namespace", "other", "job", "ls", "--namespace", "shop", "--json", "--url", url],
    ):
        assert [job["id"] for job in genba(*words).json] == [id], words
    assert genba("job", "ls", "--json").json == []


def test_an_error_is_json_if_json_was_asked_for(genba: Command) -> None:
    for words, kind, code in (
        (["job", "show", "99", "--json"], "JobNotFound", 4),
        (["--json", "job", "enqueue", "t", "--timeout", "soon"], "BadOption", 2),
        (["job", "--json", "show"], "UsageError", 2),
        (["job", "shwo", "--json"], "NoSuchCommand", 2),
    ):
        ran = genba(*words, code=code)
        printed = json.loads(ran.err)["error"]
        assert printed["message"]
        assert printed["type"] in (kind, "UsageError")
        assert ran.out == ""


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////no/such/folder/genba.db",
        "postgresql://nobody:secret@127.0.0.1:1/genba?connect_timeout=2",
    ],
)
def test_a_database_that_cannot_be_reached_ends_with_code_3(anywhere: Command, url: str) -> None:
    for words in (
        ["job", "ls"],
        ["job", "enqueue", "t"],
        ["node", "ls"],
        ["db", "install"],
        ["db", "uninstall"],
    ):
        ran = anywhere(*words, "--url", url, code=3)
        assert ran.err.startswith("genba: cannot ")
        assert ran.err.count("\n") == 1
        assert "secret" not in ran.err


def test_a_traceback_is_shown_only_if_it_is_asked_for(
    anywhere: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["job", "ls", "--url", "mysql://x"]
    assert "Traceback" not in anywhere(*words, code=2).err

    monkeypatch.setenv("GENBA_TRACEBACK", "1")

    assert "Traceback" in anywhere(*words, code=2).err


def test_version_and_help(anywhere: Command) -> None:
    assert anywhere("--version").out.startswith("genba")
    for code in ("0", "1", "2", "3", "4", "130"):
        assert re.search(rf"^ +{code} +\w", anywhere("--help").out, re.MULTILINE)


def test_every_command_has_help_with_an_example_and_stands_in_the_reference(
    anywhere: Command,
) -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for path, command in _commands(main, ()):
        shown = anywhere(*path, "--help").out
        assert f"genba {' '.join(path)}" in shown.partition("Example")[2], path
        assert f"## `genba {' '.join(path)}" in reference, path
        for param in command.params:
            if isinstance(param, click.Option) and param.name not in (
                "help",
                "json",
                "url",
                "namespace",
            ):
                assert f"`{param.opts[0]}" in reference, (path, param.opts)


def _commands(
    group: click.Group, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


# the database


@pytest.fixture
def bare(anywhere: Command, empty_url: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("GENBA_URL", empty_url)
    return anywhere


def test_install_and_upgrade_do_nothing_the_second_time(bare: Command) -> None:
    assert "applied tables" in bare("db", "install").out
    assert "nothing to do" in bare("db", "install").out
    assert bare("db", "upgrade", "--json").json["applied"] == []


def test_verify_tells_what_is_wrong_and_ends_with_its_code(bare: Command, empty_url: str) -> None:
    job = bare.id("shop.pay")
    assert "1 jobs, 0 attempts, 1 events: nothing lost" in bare("db", "verify").out
    assert bare("db", "verify", "--json").json["sound"]

    with connection(empty_url) as conn:
        conn.execute(f"DELETE FROM genba{'.' if empty_url.startswith('postgres') else '_'}job")

    assert bare("db", "verify", code=1).out.startswith(
        f"job {job}: lost: it is gone, and it was waiting\n"
    )
    printed = bare("db", "verify", "--json", code=1).json
    assert (printed["sound"], printed["counts"]) == (False, {"lost": 1})
    assert printed["faults"] == [
        {"kind": "lost", "which": f"job {job}", "what": "it is gone, and it was waiting"}
    ]


def test_uninstall_removes_exactly_what_it_lists_and_nothing_of_others(
    bare: Command, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare("db", "install")
    _sql(empty_url, "CREATE TABLE genba_of_somebody_else (x int)")
    bare.id("t")
    _answer(monkeypatch, "n\n")
    listed = re.findall(r"^  (genba\S+)$", bare("db", "uninstall", code=1).err, re.MULTILINE)
    assert bare("job", "ls", "--json").json

    _answer(monkeypatch, "y\n")
    removed = bare("db", "uninstall", "--json").json["removed"]

    assert removed == listed
    assert {name[6:] for name in removed} > {"job", "attempt", "node", "migration"}
    assert _sql(empty_url, "SELECT count(*) FROM genba_of_somebody_else") == [(0,)]
    assert "there are no tables of genba" in bare("db", "uninstall", "--yes", code=1).out
    assert "applied tables" in bare("db", "install").out


def test_uninstall_without_a_terminal_to_ask_does_nothing(
    bare: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare("db", "install")
    _answer(monkeypatch, "")

    assert "--yes" in bare("db", "uninstall", code=2).err
    assert "nothing to do" in bare("db", "install").out
    assert "removed" in bare("db", "uninstall", "--yes").out


def test_create_makes_the_folder_of_an_sqlite_file(anywhere: Command, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/folder/genba.db"
    anywhere("db", "install", "--url", url, code=3)

    anywhere("db", "install", "--create", "--url", url)

    assert anywhere("job", "ls", "--json", "--url", url).json == []


def test_create_makes_a_postgresql_database(anywhere: Command, databases: Databases) -> None:
    name = f'genba_"test" {uuid.uuid4().hex[:8]}'
    url = databases.url(name.replace(" ", "%20").replace('"', "%22"))
    assert "does not exist" in anywhere("db", "install", "--url", url, code=3).err
    try:
        assert "applied tables" in anywhere("db", "install", "--create", "--url", url).out
        assert "nothing to do" in anywhere("db", "install", "--create", "--url", url).out
        assert anywhere("job", "ls", "--json", "--url", url).json == []
    finally:
        with psycopg.connect(databases.url("postgres"), autocommit=True) as conn:
            conn.execute(
                psycopg.sql.SQL("DROP DATABASE {} WITH (FORCE)").format(
                    psycopg.sql.Identifier(name)
                )
            )


def _sql(url: str, statement: Any) -> list[tuple[Any, ...]]:
    if url.startswith("sqlite"):
        import apsw

        conn = apsw.Connection(urlsplit(url).path[1:])
        try:
            return list(conn.execute(statement))
        finally:
            conn.close()
    with psycopg.connect(url, autocommit=True) as server:
        cursor = server.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# nodes, as real processes


def test_jobs_go_all_the_way_from_the_command_line(
    genba: Command, url: str, start_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    node = start_node(
        "tasks:app", url, "--name", "one", "-q", "default:2,slow", "--max", "2", "--grace", "2s"
    )
    fine, failing = genba.id("tasks.add", "1", "y=2"), genba.id("tasks.fail", "no \x1b[31mway")

    assert genba("job", "wait", fine, "--timeout", "20s").out == f"{fine} succeeded 3\n"
    ended = genba("job", "wait", fine, failing, "--timeout", "20s", code=1)
    assert f"{failing} failed ValueError: no \\x1b[31mway" in ended.out
    shown = genba("job", "show", failing).out
    assert "raise ValueError(text)" in shown
    assert "\x1b" not in shown
    [attempt] = genba("job", "show", failing, "--json").json["attempts"]
    assert (attempt["number"], attempt["cause"]) == (1, "exception")
    assert [job["id"] for job in genba("job", "ls", "--state", "failed", "--json").json] == [
        failing
    ]

    [printed] = genba("node", "ls", "--json").json
    assert (printed["name"], printed["pid"], printed["slots"]) == ("one", node.pid, 2)
    assert set(printed["queues"]) == {"default", "slow"}
    assert "one" in genba("node", "ls").out
    assert psutil.Process(node.pid).memory_info().rss < 60 * 2**20

    started = tmp_path / "started"
    running = genba.id("tasks.run_until_stopped", started)
    eventually(started.exists, within=20)
    asked = genba("job", "cancel", running).out
    assert asked in (
        f"{running} running, asked to stop\n",
        f"{running} cancelled\n",
    )  # it may have ended by now
    assert genba("job", "wait", running, "--timeout", "20s", code=1).out.startswith(
        f"{running} cancelled"
    )

    unserved = genba.id("tasks.add", "1", "--queue", "other")
    assert "no live node serves queue 'other'" in genba("job", "explain", unserved).out
    assert node.stop() == 0
    assert genba("node", "ls", "--json").json == []


def test_a_second_node_of_the_same_name_ends_at_once(
    genba: Command, url: str, start_node: Callable[..., NodeProcess]
) -> None:
    start_node("tasks:app", url, "--name", "one")
    eventually(lambda: genba("node", "ls", "--json").json, within=20)

    second = start_node("tasks:app", url, "--name", "one")

    assert second.wait() == 1
    assert "genba: a live node is called 'one' already" in second.log
    assert "Traceback" not in second.log


def test_a_node_uses_the_url_and_the_namespace_of_its_command_line(
    genba: Command, url: str, start_node: Callable[..., NodeProcess]
) -> None:
    start_node("tasks:app", "sqlite:////no/such/folder.db", "--url", url, "--namespace", "shop")
    id = genba.id("tasks.add", "1", "--namespace", "shop")

    assert (
        genba("job", "wait", id, "--namespace", "shop", "--timeout", "20s").out
        == f"{id} succeeded 2\n"
    )


def test_a_module_that_does_not_import_ends_the_node_with_one_clear_message(
    start_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text("import no_such_module")

    node = start_node("tasks:app", f"sqlite:///{tmp_path}/genba.db")

    assert node.wait() == 2
    assert node.log.count("cannot import tasks:app") == 1
    assert node.log.count("No module named 'no_such_module'") == 1
    assert node.tree() == []


def test_a_node_whose_database_cannot_be_reached_ends_with_code_3(
    start_node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(CODE)

    node = start_node("tasks:app", "sqlite:////no/such/folder/genba.db")

    assert node.wait() == 3
    assert "genba: cannot open" in node.log
    assert "Traceback" not in node.log
    assert node.tree() == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["tasks.py"], "tasks:app"),
        (["./my/tasks.py:app"], "my.tasks:app"),
        (["tasks:app:x"], "module:attribute"),
        (["tasks:app", "-q", "a:0"], "at least 1 slot"),
        (["tasks:app", "-q", "a,a"], "twice"),
        (["tasks:app", "-q", "no queue"], "no queue"),
        (["tasks:app", "-q", ","], "at least one queue"),
        (["tasks:app", "--pool", "big"], "ondemand"),
        (["tasks:app", "--min", "5", "--max", "2"], "greater than max"),
        (["tasks:app", "--max", "0"], "max at least 1"),
        (["tasks:app", "--grace", "long"], "long"),
        (["tasks:app", "--name", " "], "--name"),
        ([], "TARGET"),
    ],
)
def test_a_node_with_nonsense_for_options_does_not_start(
    anywhere: Command, words: list[str], part: str
) -> None:
    ran = anywhere("node", "start", *words, code=2)

    assert part in ran.err
    assert "Traceback" not in ran.err


def functions(frame: FrameType | None) -> set[str]:
    """Those that are under way."""
    found = set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_ctrl_c_ends_a_wait_with_code_130(genba: Command) -> None:
    id = genba.id("tasks.add", "1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def press() -> None:  # a wait is ended by a real signal only
        eventually(lambda: "wait_in_job" in functions(sys._current_frames()[main]), within=60)
        signal.pthread_kill(main, signal.SIGINT)

    ctrl_c = threading.Thread(target=press)
    ctrl_c.start()
    try:
        ran = genba("job", "wait", id, code=130)
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGINT, before)

    assert ran.err.strip() == "genba: interrupted"
