"""Bad input gets a clear error, and nothing is lost: neither a job, nor the queue, nor the node."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.support import eventually, load_jobs, run_genba

from genba import (
    BadArguments,
    BadOption,
    BadTask,
    Genba,
    GenbaError,
    JobNotFound,
    PayloadTooLarge,
    SchemaTooNew,
    StoreError,
    StoreUnreachable,
)


@pytest.fixture
def client(shop):
    """The tasks, in a queue to which the test must not add a job."""
    before = shop.app.count(state="any")
    yield shop.jobs
    assert shop.app.count(state="any") == before


# arguments


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "x"),
        ((1, 2, 3), {}, "argument"),
        ((1,), {"z": 3}, "z"),
        ((1,), {"x": 2}, "x"),
        (("one",), {}, "x"),
        ((True,), {}, "x"),
        ((1.5,), {}, "x"),
        ((None,), {}, "x"),
        ((2**70,), {}, "x"),
        pytest.param(
            (object(),), {}, "x", id="object"
        ),  # its address is no name: workers must agree on it
    ],
    ids=repr,
)
def test_arguments_that_do_not_fit_the_signature_are_refused_at_the_enqueue(
    client, args, kwargs, message
):
    with pytest.raises(BadArguments, match=message) as caught:
        client.add.enqueue(*args, **kwargs)

    assert "jobs.add" in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"items": [{"name": "a"}, {"name": {1, 2}}]}, r"items\[1\]\.name"),
        ({"at": time.struct_time(range(9))}, "at"),
        ({"raw": b"bytes"}, "raw"),
        ({"numbers": [0, float("nan")]}, r"numbers\[1\]"),
        ({"numbers": [float("inf")]}, r"numbers\[0\]"),
        ({"text": "a\0b"}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"pair": (1, 2)}, "pair"),
        ({1: "int key"}, "key"),
    ],
    ids=["set", "object", "bytes", "nan", "inf", "NUL", "surrogate", "tuple", "int key"],
)
def test_values_that_cannot_be_kept_are_refused_with_the_path_to_them(client, value, path):
    with pytest.raises(BadArguments, match=path):
        client.app.enqueue("somebody.elses", order=value)


def test_text_that_no_database_takes_is_refused_in_typed_arguments_too(client):
    for text in ("a\0b", "\udcff"):
        with pytest.raises(BadArguments, match="word"):
            client.write.enqueue("path", text)


def test_arguments_that_are_too_large_are_refused_with_both_sizes(jobs):
    with pytest.raises(PayloadTooLarge, match=r"1[,_ ]?048[,_ ]?576|1 MiB|1\.0 MiB"):
        jobs.write.enqueue("path", "x" * 1_100_000)
    assert jobs.write.enqueue("path", "x" * 1_000_000).args["word"] == "x" * 1_000_000


def test_one_bad_call_of_many_and_nothing_is_enqueued(client):
    with pytest.raises(BadArguments):
        client.app.enqueue_many([client.add.call(1), client.add.call("two")])
    with pytest.raises(JobNotFound, match="999999"):
        client.app.enqueue_many([client.add.call(1), client.add.using(after=[999_999]).call(2)])


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioritty": 1}, "did you mean priority"),
        ({"priority": 1, "nice": 1}, "priority and nice exclude each other"),
        ({"at": "now", "delay": 1}, "at and delay"),
        ({"key": "k", "once": True}, "key and once"),
        ({"priority": True}, "priority must be"),
        ({"priority": "high"}, "priority must be"),
        ({"nice": 30}, "nice must be"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "soon"),
        ({"timeout": float("nan")}, "timeout"),
        ({"at": "someday"}, "someday"),
        ({"retry": True}, "retry"),
        ({"retry": -2}, "retry"),
        ({"queue": "a b"}, "queue must be"),
        ({"key": ""}, "key must be"),
        ({"key": "a\0"}, "key must be"),
        ({"tags": "x" * 200}, "tags"),
        ({"once": "always"}, "once must be"),
        ({"on_conflict": "ignore"}, "on_conflict must be"),
        ({"after": ["42"]}, "dependency"),
        ({"max_crashes": 3}, "is a policy of the task"),
        ({"limits": ["gpu"]}, "limits"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_options_that_are_unknown_ill_typed_or_contradictory_are_refused(client, options, message):
    with pytest.raises(BadOption, match=message):
        client.add.using(**options).enqueue(1)


# what is neither an argument nor an option: the same on both databases


@pytest.mark.parametrize(
    "reason", ["a\0b", "\ud800", 5, b"why"], ids=["NUL", "surrogate", "int", "bytes"]
)
def test_a_reason_that_no_database_takes_is_refused(jobs, reason):
    app, job = jobs.app, jobs.add.using(delay="1h").enqueue(1)
    schedule = app.recur("s", jobs.add.call(1), cron="0 3 * * *")
    group = app.enqueue_many([jobs.add.using(delay="1h").call(1)])
    for ask in (
        job.hold,
        job.cancel,
        job.kill,
        group.cancel,
        schedule.pause,
        app.tasks["jobs.add"].disable,
        lambda why: app.queues["default"].pause(reason=why),
        lambda why: app.cancel_many(reason=why),
        lambda why: app.hold_many(reason=why),
    ):
        with pytest.raises(
            BadOption, match="reason must be a text without NUL and lone surrogates, got"
        ):
            ask(reason)
    assert (job.refresh().state, group[0].refresh().state, schedule.refresh().paused) == (
        "scheduled",
    ) * 2 + (False,)


def test_a_hold_needs_a_reason(jobs):
    with pytest.raises(BadOption, match="reason must be a text"):
        jobs.add.enqueue(1).hold(None)
    with pytest.raises(BadOption, match="reason must be a text"):
        jobs.app.hold_many(reason=None)


@pytest.mark.parametrize("name", ["task", "queue", "tag", "key", "schedule", "node", "error"])
@pytest.mark.parametrize("text", ["a\0b", "\udcff", 5], ids=["NUL", "surrogate", "int"])
def test_jobs_cannot_be_chosen_by_a_text_that_no_database_takes(jobs, name, text):
    for ask in (jobs.app.jobs, jobs.app.count, jobs.app.cancel_many):
        with pytest.raises(BadOption, match=f"{name} must be a text"):
            ask(**{name: text})
    if name == "key":
        with pytest.raises(BadOption, match="key must be a text"):
            jobs.app.job(key=text)


@pytest.mark.parametrize("id", [2**63, 2**70, -(2**70), 0, -1])
def test_an_id_that_no_job_can_have_is_not_found(jobs, id):
    app = jobs.app
    for ask in (
        lambda: app.job(id),
        lambda: app.jobs(parent=id),
        lambda: list(app.events(job=id)),
        lambda: jobs.add.using(after=[id]).enqueue(1),
        lambda: jobs.add.using(parent=id).enqueue(1),
    ):
        with pytest.raises(JobNotFound, match=f"there is no job {id};"):
            ask()
    assert app.count(state="any") == 0


@pytest.mark.parametrize("id", ["x", "1", True, 1.0, b"1", [1]], ids=repr)
def test_what_is_no_id_is_refused(jobs, id):
    app = jobs.app
    for ask in (
        lambda: app.job(id),
        lambda: app.jobs(parent=id),
        lambda: app.jobs(before=id),
        lambda: list(app.events(job=id)),
        lambda: jobs.add.using(parent=id).enqueue(1),
    ):
        with pytest.raises(BadOption, match="must be a job or its id"):
            ask()


def test_a_call_must_come_together_with_those_it_waits_for(client):
    first = client.add.call(1)
    second = client.add.using(after=[first]).call(2)

    with pytest.raises(BadOption, match="after"):
        client.app.enqueue_many([second])


# tasks


def test_a_task_cannot_be_registered_twice_or_under_no_name(jobs):
    app = jobs.app

    def add(x: int) -> int:
        return x

    with pytest.raises(BadTask, match=r"jobs\.add.*registered already"):
        app.task(name="jobs.add")(add)
    for name in ("", "1st", "a b", "ä" * 300, "a\0"):
        with pytest.raises(GenbaError, match="name"):
            app.task(name=name)(add)
    with pytest.raises(BadTask):
        app.task(42)
    with pytest.raises(BadTask, match="run"):
        app.task(type("NoRun", (), {}))
    with pytest.raises(BadOption, match="did you mean timeout"):
        app.task(timeuot=3)
    with pytest.raises(BadTask, match="no name"):
        app.enqueue("no name")


def test_arguments_that_no_longer_fit_are_held_for_a_person(shop):
    with closing(Genba(shop.url)) as older:  # it does not know the signature, so nothing is checked
        job = older.enqueue("jobs.add", x="not a number")
        eventually(lambda: job.refresh().state == "held", within=10)

    assert "no longer fit" in (job.reason or "")
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2


# databases


def test_an_unreachable_server_is_an_error_at_once_and_without_the_password(tmp_path):
    url = "postgresql://me:secret@127.0.0.1:1/nothing"
    with closing(Genba(url)) as app, pytest.raises(StoreUnreachable) as caught:
        app.enqueue("a.b")
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)

    ran = run_genba(url, "job", "ls", cwd=tmp_path)
    assert ran.returncode == 3
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "secret" not in ran.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: see the next test")
def test_a_read_only_folder_is_an_error(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with (
        closing(Genba(f"sqlite:///{folder}/genba.db")) as app,
        pytest.raises(StoreError, match="locked"),
    ):
        app.enqueue("a.b")


@pytest.mark.parametrize("place", ["/proc/genba.db", "/no/such/folder/genba.db"])
def test_a_folder_in_which_nothing_can_be_made_is_an_error(tmp_path, place):
    with closing(Genba(f"sqlite:///{place}")) as app, pytest.raises(StoreError, match=place):
        app.enqueue("a.b")
    ran = run_genba(f"sqlite:///{place}", "job", "ls", cwd=tmp_path)
    assert (ran.returncode, len(ran.stderr.strip().splitlines())) == (3, 1)
    assert place in ran.stderr


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader, " * 1000)
    with (
        closing(Genba(f"sqlite:///{file}")) as app,
        pytest.raises(StoreError, match=r"letter\.txt"),
    ):
        app.enqueue("a.b")
    assert file.read_text() == "Dear reader, " * 1000


@pytest.mark.parametrize(
    "url", ["mysql://x/y", "genba.db", "sqlite://genba.db", "sqlite:///a.db?driver=odbc"]
)
def test_a_bad_url_is_an_error(url):
    with closing(Genba(url)) as app, pytest.raises(BadOption, match="sqlite"):
        app.enqueue("a.b")


def test_a_newer_schema_is_refused_and_left_alone(jobs, url, engine, start_node):
    job = jobs.add.enqueue(1)
    jobs.app.close()
    statement = "INSERT INTO {0} (version, name, applied_at) SELECT 9999, 'future', max(applied_at) FROM {0}"
    if engine == "sqlite":
        import apsw

        with closing(apsw.Connection(url.removeprefix("sqlite:///"))) as conn:
            conn.execute(statement.format("genba_migration"))
    else:
        import psycopg

        with psycopg.connect(url) as server:
            server.execute(statement.format("genba.migration").encode())
    with pytest.raises(SchemaTooNew, match="9999"):
        jobs.app.enqueue("a.b")

    node = start_node("jobs:app", url)
    assert node.wait() != 0
    assert "9999" in node.log
    assert "Traceback" not in node.log
    with pytest.raises(SchemaTooNew):
        job.refresh()


# nodes


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("import no_such_module_at_all", "broken:app", "no_such_module_at_all"),
        ("raise RuntimeError('not today')", "broken:app", "not today"),
        ("app = 3", "broken:app", "not a Genba app"),
        ("", "broken:app", "app"),
        ("def f(:", "broken:app", "SyntaxError"),
        (None, "nowhere:app", "nowhere"),
        ("", "broken.py", "broken:app"),
    ],
    ids=["import", "raise", "no app", "no attribute", "syntax", "no module", "a path"],
)
def test_a_node_whose_module_does_not_import_says_so_and_ends(tmp_path, source, target, message):
    if source is not None:
        (tmp_path / "broken.py").write_text(source + "\n")

    ran = run_genba(f"sqlite:///{tmp_path}/genba.db", "node", "start", target, cwd=tmp_path)

    assert ran.returncode not in (0, None)
    assert message in ran.stderr
    assert ran.stderr.count("genba:") == 1  # one message
    assert "loop.py" not in ran.stderr  # of the user's module, not of ours


def test_a_second_node_of_the_same_name_ends_and_the_first_goes_on(shop, tmp_path):
    load_jobs(shop.url, tmp_path)
    ran = run_genba(shop.url, "node", "start", "jobs:app", "--name", "shop", cwd=tmp_path)

    assert ran.returncode != 0
    assert "'shop'" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2
    assert [node.name for node in shop.app.nodes()] == ["shop"]
    if shop.url.startswith("sqlite"):
        folder = Path(shop.url.removeprefix("sqlite:///") + "-nodes")
        assert len(list(folder.glob("*.lock"))) == 1


def test_the_name_of_a_dead_node_is_free_at_once(jobs, url, start_node, path):
    first = start_node("jobs:app", url, "--name", "phoenix")
    job = jobs.wait_for.enqueue(str(path))
    eventually(lambda: Path(f"{path}.started").exists(), within=15)
    first.kill9()

    began = time.monotonic()
    second = start_node("jobs:app", url, "--name", "phoenix")
    eventually(lambda: [node.pid for node in jobs.app.nodes()] == [second.pid], within=15)
    assert time.monotonic() - began < 15, "as long as the lease"
    path.touch()
    assert job.result(timeout=10) == "opened"
    assert second.stop() == 0
