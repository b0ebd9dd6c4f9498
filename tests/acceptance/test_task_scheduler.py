"""The README of php-task-scheduler, name by name: what its users do, done with genba."""

from __future__ import annotations

import json
import socketserver
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.support import NodeProcess, eventually, load_module, sqlite_url

from genba import JobCancelled, JobFailed

LONG = 30
MODULE = """
import email, os, smtplib, time
from genba import Genba, current_job

app = Genba()

@app.task(name="MailJob")
class MailJob:
    def run(self, mail: str, port: int, then: str = "") -> bool:
        message = email.message_from_string(mail)
        with smtplib.SMTP("127.0.0.1", port, timeout=10) as transport:
            transport.send_message(message, message["From"], [message["To"]])
        if then:
            raise Exception(then)
        return True

@app.task(name="CopyFileJob", progress_every=0)
def copy_file(source: str, destination: str) -> int:
    job, size, read = current_job(), os.path.getsize(source), 0
    with open(source, "rb") as f, open(destination, "wb") as t:
        while chunk := f.read(4096):
            read += t.write(chunk)
            job.progress(read, size)
            time.sleep(0.05)
    return read

@app.task(name="MyTask")
def my_task(word: str) -> str:
    if word == "throw":
        raise RuntimeError("i am an exception")
    return word[::-1]

@app.task(name="OtherTask")
def other_task(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)

@app.task(name="CleanTemp")
def clean_temp(max_age: int) -> int:
    return max_age
"""
MAIL = "From: root@localhost\nTo: ann@localhost\nSubject: Hello...\n\nWorld"


class Scheduler:
    def __init__(self, module: Any, node: NodeProcess) -> None:
        self.module, self.node, self.app = module, node, module.app


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def scheduler(request, tmp_path_factory) -> Iterator[Scheduler]:
    folder: Path = tmp_path_factory.mktemp("scheduler")
    (folder / "balloon.py").write_text(MODULE)
    database = None
    url = sqlite_url(folder)
    if request.param == "postgres":
        databases = request.getfixturevalue("databases")
        database = databases.fresh(request.getfixturevalue("template"))
        url = databases.url(database.__enter__())
    module = load_module("balloon", folder, url)
    node = NodeProcess.start("balloon:app", url, "--max", "3", cwd=folder)
    try:
        eventually(module.app.nodes, within=15)
        yield Scheduler(module, node)
    finally:
        node.end()
        print(node.log)
        module.app.close()
        if database is not None:
            database.__exit__(None, None, None)


class Sink(socketserver.ThreadingTCPServer):
    """Takes mail, and keeps it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Session)
        self.mails: list[str] = []
        threading.Thread(target=self.serve_forever, name="smtp", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Session(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"220 sink\r\n")
        while line := self.rfile.readline().strip().upper():
            if line == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                body = iter(lambda: self.rfile.readline().rstrip(b"\r\n"), b".")
                self.server.mails.append(b"\n".join(body).decode())  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if line == b"QUIT" else b"250 fine\r\n")
            if line == b"QUIT":
                return


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as server:
        yield server
        server.shutdown()


def test_mail_job_sends_its_mail(scheduler, sink):
    assert scheduler.module.MailJob.enqueue(MAIL, sink.port).result(LONG) is True

    (mail,) = sink.mails
    assert "Subject: Hello..." in mail
    assert mail.endswith("World")


def test_mail_job_that_throws_is_tried_five_times_more(scheduler, sink):
    from genba import Retry

    retry = Retry(times=5, delay="0.02s", backoff=1)
    job = scheduler.module.MailJob.using(retry=retry).enqueue(
        MAIL, sink.port, then="i am an exception"
    )

    with pytest.raises(JobFailed, match="i am an exception"):
        job.result(LONG)
    assert len(job.attempts) == len(sink.mails) == 6
    kinds = [event.kind for event in scheduler.app.events(job=job)]
    assert (kinds.count("retrying"), kinds[-1]) == (5, "failed")


def test_mail_job_in_one_hour_with_retries_is_postponed(scheduler, sink):
    job = scheduler.module.MailJob.using(at="+1 hour", retry=3).enqueue(MAIL, sink.port)

    assert job.refresh().state == "scheduled"
    assert abs(job.due - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert job in scheduler.app.jobs(state="postponed", task="MailJob")
    assert [event.kind for event in scheduler.app.events(job=job, kinds="postponed")] == [
        "scheduled"
    ]
    job.cancel()
    assert sink.mails == []


def test_copy_file_job_tells_its_progress(scheduler, tmp_path):
    source, destination = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"x" * 4096 * 12)
    job = scheduler.module.copy_file.enqueue(str(source), str(destination))

    assert job.result(LONG) == 4096 * 12
    assert destination.read_bytes() == source.read_bytes()
    assert job.refresh().progress == 100
    steps = [event.data["done"] for event in scheduler.app.events(job=job, kinds="progress")]
    assert steps == sorted(steps)
    assert steps
    assert all(0 < step <= 4096 * 12 for step in steps)


def test_clean_temp_is_replaced_when_its_data_changes(scheduler):
    once = scheduler.module.clean_temp.using(once="task", on_conflict="replace", delay="24h")
    old = once.enqueue(max_age=3600)
    new = once.enqueue(max_age=1800)

    assert (old.refresh().state, new.refresh().state) == ("cancelled", "scheduled")
    assert [job.args for job in scheduler.app.jobs(task="CleanTemp")] == [{"max_age": 1800}]
    (cancelled,) = scheduler.app.events(job=old, kinds="cancel")
    assert f"replaced by job {new.id}" in cancelled.data["reason"]
    new.cancel()


def test_wait_for_three(scheduler):
    stack = [scheduler.module.my_task.enqueue(word) for word in ("foobar", "barfoo", "barefoot")]

    assert scheduler.app.wait(stack, timeout=LONG) == stack
    assert [job.result() for job in stack] == ["raboof", "oofrab", "tooferab"]


def test_wait_with_throw(scheduler):
    stack = [scheduler.module.my_task.enqueue(word) for word in ("foobar", "throw", "barefoot")]

    with pytest.raises(JobFailed, match="i am an exception") as raised:
        scheduler.app.wait(stack, timeout=LONG, throw=True)
    assert raised.value.job_id == stack[1].id
    assert 'raise RuntimeError("i am an exception")' in (raised.value.traceback or "")


def test_listen_until_true(scheduler):
    seen: list[str] = []
    job = scheduler.module.my_task.enqueue("foobar")

    def on_event(event: Any) -> bool:
        seen.append(event.kind)
        return event.job.refresh().state == "succeeded"

    scheduler.app.listen(on_event, job=job)
    assert seen[0] == "waiting"
    assert set(seen) <= {"waiting", "running", "succeeded"}


def test_on_and_all(scheduler):
    heard: dict[str, list[tuple[int, str]]] = {"waiting": [], "done": [], "*": []}

    def note(name: str) -> Any:
        return lambda event: heard[name].append((event.job_id, event.kind))

    app = scheduler.app
    assert (
        app.on("waiting", note("waiting"))
        .on("taskscheduler.onDone", note("done"))
        .on("*", note("*"))
        is app
    )
    stack = [scheduler.module.my_task.enqueue(word) for word in ("foobar", "barfoo")]
    app.wait(stack, timeout=LONG)

    eventually(lambda: {(job.id, "succeeded") for job in stack} <= set(heard["*"]))
    for job in stack:
        assert (
            heard["waiting"].count((job.id, "waiting"))
            == heard["done"].count((job.id, "succeeded"))
            == 1
        )
        assert [kind for id, kind in heard["*"] if id == job.id] == [
            "waiting",
            "running",
            "succeeded",
        ]


def test_cancel_of_a_running_job(scheduler, path):
    job = scheduler.module.other_task.using(retry=5).enqueue(str(path))
    eventually(lambda: job.refresh().state == "running")

    assert scheduler.app.job(job.id).cancel("no longer wanted")
    with pytest.raises(JobCancelled, match="no longer wanted"):
        job.result(LONG)
    assert [job.id for job in scheduler.app.jobs(state="any", task="OtherTask")] == [
        job.id
    ]  # and does not come back


class Api(BaseHTTPRequestHandler):
    """A job is asked for, and looked for, by two requests."""

    module: Any

    def do_POST(self) -> None:
        words = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(202, [self.module.my_task.enqueue(word).id for word in words])

    def do_GET(self) -> None:
        ids = [int(id) for id in parse_qs(urlsplit(self.path).query)["id"]]
        jobs = [self.module.app.job(id) for id in ids]
        self.module.app.wait(jobs, timeout=LONG)
        self._answer(200, {job.id: str(job.refresh().state) for job in jobs})

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *words: Any) -> None: ...


def test_http_202_with_a_second_request(scheduler):
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Here", (Api,), {"module": scheduler.module})
    ) as server:
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}/jobs"
        with urllib.request.urlopen(base, json.dumps(["foobar", "throw"]).encode()) as response:
            assert response.status == 202
            ids = json.load(response)
        with urllib.request.urlopen(f"{base}?id={ids[0]}&id={ids[1]}") as response:
            assert json.load(response) == {str(ids[0]): "succeeded", str(ids[1]): "failed"}
        server.shutdown()
