"""What a running node shows: metrics, probes, and log lines of its own and of its jobs."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import apsw
import psycopg
import pytest
from tests.support import NodeProcess, eventually, load_module, sqlite_url
from tests.support.postgres_server import own_server

APP = """
import logging, os, time
from genba import Genba, Limit, current_job

app = Genba()
log = logging.getLogger("shop.till")

@app.task(name="add")
def add(n: int) -> int:
    return n + 1

@app.task(name="until")
def until(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)

@app.task(name="locked")
def locked(path: str) -> None:
    with app.mutex("till"):
        until(path)

def deep(n):
    try:
        if n:
            deep(n - 1)
        {}["no such key"]
    except Exception as error:
        raise LookupError(f"level {n}") from error

@app.task(name="mixed")
def mixed(size: int) -> None:
    log.info("nested", extra={"cart": {"items": [{"price": 1.5}, None], "owner": {"name": "ann"}}})
    log.warning("a steering \\x1b[31m\\x9b1m text\\nwith a second line")
    try:
        len(5)
    except TypeError:
        log.exception("a type error")
    try:
        deep(11)
    except LookupError:
        log.exception("a deep one")
    log.error("x" * size)
    current_job().log("in its own words")

@app.task(name="raising")
def raising() -> None:
    deep(11)

@app.task(name="chatter")
def chatter(batch: str, count: int, size: int) -> None:
    for i in range(count):
        log.info("m" * size, extra={"batch": batch, "iteration": i})
"""


@dataclass(frozen=True)
class Watched:
    app: Any
    tasks: Any
    node: NodeProcess

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every line that the node has written is one: json.loads raises if it is not."""
        whole, _, _ = self.node.log.rpartition("\n")  # the last one may be on its way
        return [json.loads(line) for line in whole.split("\n") if line]

    def of(self, job: Any) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("job") == job.id]

    def get(self, path: str) -> tuple[int, str]:
        (shown,) = (
            record["message"]
            for record in self.records
            if record["message"].startswith("metrics are at")
        )
        return ask(shown.split()[-1].removesuffix("/metrics") + path)

    def sample(self, name: str) -> float | None:
        status, text = self.get("/metrics")
        assert status == 200
        found = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else None


def ask(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


OPTIONS = ("--metrics", "0", "--log-format", "json", "--log-jobs", "--max", "3")


@pytest.fixture(scope="module")
def watched(home):
    url, folder = home
    (folder / "till.py").write_text(APP)
    with ExitStack() as stack:
        module = load_module("till", folder, url)
        stack.callback(module.app.close)
        node = NodeProcess.start("till:app", url, "--name", "till", *OPTIONS, cwd=folder)
        stack.callback(lambda: print(node.log[-8000:]))
        stack.callback(node.end)
        eventually(module.app.nodes, within=40)
        yield Watched(module.app, module, node)


def test_metrics_tell_what_was_done_and_what_is_open(watched, path):
    done = [watched.tasks.add.enqueue(n) for n in range(3)]
    failed = watched.tasks.raising.enqueue()
    watched.app.wait([*done, failed], timeout=20)
    holders = [watched.tasks.locked.enqueue(str(path)) for _ in range(2)]
    later = watched.tasks.add.using(at="+1 hour").enqueue(1)
    watched.app.enqueue("no.such.task")

    ends = 'genba_attempts_total{queue="default",task="%s",state="%s"}'
    eventually(lambda: watched.sample(ends % ("add", "succeeded")) == 3, within=20)
    eventually(lambda: watched.sample(ends % ("raising", "failed")) == 1, within=20)
    assert watched.sample('genba_run_seconds_count{queue="default",task="add"}') == 3
    assert (watched.sample("genba_claim_seconds_count") or 0) >= 1
    jobs = 'genba_jobs{state="%s",queue="default",task="%s"}'
    eventually(lambda: watched.sample(jobs % ("running", "locked")) == 2, within=20)
    eventually(lambda: watched.sample("genba_lock_waiters") == 1, within=20)
    eventually(lambda: watched.sample(jobs % ("parked", "no.such.task")) == 1, within=30)
    assert watched.sample("genba_locks") == 1
    assert watched.sample(jobs % ("scheduled", "add")) == 1
    assert watched.sample("genba_gate_closed") == 0
    assert watched.sample("genba_database_up") == 1
    assert watched.get("/livez") == (200, "ok\n")
    eventually(lambda: watched.get("/readyz") == (200, "ok\n"), within=20)
    assert watched.get("/secret")[0] == 404
    later.cancel()
    path.touch()
    watched.app.wait(holders, timeout=20)


def test_usecase_46_mixed_records_are_lines_of_json_that_name_job_process_and_host(watched):
    job = watched.tasks.mixed.enqueue(20_000)
    job.wait(20)
    eventually(lambda: len(watched.of(job)) >= 6, within=20)
    records = watched.of(job)

    host = socket.gethostname()
    worker = job.refresh().attempts[-1].pid
    assert all(
        (r["host"], r["pid"], r["task"], r["attempt"]) == (host, worker, "mixed", 1)
        for r in records
    )
    nested, steering, wrong_type, deep, long, own = records
    assert nested["data"] == {"cart": {"items": [{"price": 1.5}, None], "owner": {"name": "ann"}}}
    assert steering["message"] == "a steering \x1b[31m\x9b1m text\nwith a second line"
    assert wrong_type["error"]["type"] == "TypeError"
    assert "len(5)" in wrong_type["error"]["traceback"]
    causes = deep["error"]["causes"]
    assert causes == [
        *(f"LookupError: level {n}" for n in range(10, -1, -1)),
        "KeyError: 'no such key'",
    ]
    assert re.fullmatch(r"x+… \[\d+ characters left out\]", long["message"])
    assert (own["logger"], own["message"]) == ("genba.job", "in its own words")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", watched.node.log)


def test_an_attempt_that_went_wrong_is_a_line_of_its_node_with_all_its_causes(watched):
    job = watched.tasks.raising.enqueue()
    job.wait(20)
    (record,) = eventually(lambda: watched.of(job), within=20)

    assert (record["level"], record["pid"], record["task"]) == (
        "warning",
        watched.node.pid,
        "raising",
    )
    assert "exception, now failed: LookupError: level 11" in record["message"]
    assert len(record["error"]["causes"]) == 12


@pytest.mark.parametrize(("count", "size"), [(1000, 20), (50, 52_000)])
def test_usecase_53_every_message_of_many_is_there_and_can_be_read(watched, count, size):
    batch = f"batch {count}"
    began = time.perf_counter()
    job = watched.tasks.chatter.enqueue(batch, count, size)
    job.wait(60)
    took = time.perf_counter() - began

    records = watched.of(job)
    assert [(r["data"]["batch"], r["data"]["iteration"]) for r in records] == [
        (batch, i) for i in range(count)
    ]
    print(
        f"{count} messages of {size} characters: {count / took:,.0f} a second, with all around it"
    )


def test_a_node_that_drains_lives_and_is_not_ready(tmp_path, path, start_node):
    url = sqlite_url(tmp_path)
    (tmp_path / "till.py").write_text(APP)
    module = load_module("till", tmp_path, url)
    node = start_node("till:app", url, *OPTIONS)
    watched = Watched(module.app, module, node)
    eventually(module.app.nodes, within=40)
    job = module.until.enqueue(str(path))
    eventually(lambda: job.refresh().state == "running", within=20)
    eventually(lambda: watched.get("/readyz") == (200, "ok\n"), within=20)

    node.signal(signal.SIGTERM)

    eventually(lambda: watched.get("/readyz") == (503, "the node drains\n"), within=20)
    assert watched.get("/livez") == (200, "ok\n")
    assert watched.sample("genba_draining") == 1
    path.touch()
    assert node.wait(30) == 0
    module.app.close()


@contextmanager
def away(url: str, databases: Callable[[], Any]) -> Iterator[None]:
    """Make the database give no answer: its server refuses all, or another process has the file."""
    if url.startswith("sqlite"):
        with closing(apsw.Connection(urlsplit(url).path[1:])) as conn:
            conn.set_busy_timeout(60_000)
            conn.execute("BEGIN EXCLUSIVE")
            yield
            conn.execute("ROLLBACK")
        return
    name = urlsplit(url).path[1:]
    with psycopg.connect(databases().url("postgres"), autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        yield
        conn.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def test_a_node_whose_database_is_away_lives_is_not_ready_and_goes_on_after(
    url, tmp_path, path, start_node, request
):
    (tmp_path / "till.py").write_text(APP)
    module = load_module("till", tmp_path, url)
    node = start_node(
        "till:app", url, *OPTIONS, env={"GENBA_LEASE": "10m"}
    )  # no node is taken for dead meanwhile
    watched = Watched(module.app, module, node)
    eventually(module.app.nodes, within=40)
    job = module.until.enqueue(str(path))
    eventually(lambda: job.refresh().state == "running", within=40)
    eventually(lambda: watched.get("/readyz") == (200, "ok\n"), within=40)
    # A file that another process has locked can be read: the node notices when it has to write.
    due = module.add.using(delay="1s").enqueue(1)

    with away(url, lambda: request.getfixturevalue("databases")):
        eventually(lambda: watched.get("/readyz")[0] == 503, within=120)
        assert watched.get("/readyz")[1].startswith("the database does not answer: ")
        assert watched.get("/livez") == (200, "ok\n")
        assert watched.sample("genba_database_up") == 0
        path.touch()

    eventually(lambda: watched.get("/readyz") == (200, "ok\n"), within=120)
    eventually(lambda: job.refresh().state == "succeeded", within=120)
    assert len(job.attempts) == 1
    assert due.wait(60).state == "succeeded"
    module.app.close()


def test_a_node_whose_server_has_ended_lives_and_is_not_ready(tmp_path, start_node):
    (tmp_path / "till.py").write_text(APP)
    with own_server(durable=False) as url:
        module = load_module("till", tmp_path, url)
        node = start_node("till:app", url, *OPTIONS, env={"GENBA_LEASE": "10m"})
        watched = Watched(module.app, module, node)
        eventually(module.app.nodes, within=40)
        eventually(lambda: watched.get("/readyz") == (200, "ok\n"), within=40)
        module.app.close()

    eventually(
        lambda: watched.get("/readyz")[1].startswith("the database does not answer: "), within=120
    )
    assert watched.get("/livez") == (200, "ok\n")
    assert watched.get("/metrics")[0] == 200


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path, start_node):
    (tmp_path / "till.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = start_node("till:app", sqlite_url(tmp_path), "--metrics", str(port))

        assert node.wait(30) == 1
    assert f"metrics: cannot listen on 127.0.0.1:{port}" in node.log
    assert "Traceback" not in node.log
