"""Something blocks the way: a full disk, a producer that is paused in the middle of its transaction."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from tests.chaos.fire import Disk, Producer, load
from tests.storage.builders import one
from tests.support import (
    PATIENCE,
    eventually,
    lines,
    load_module,
    run_genba,
    sqlite_url,
    without_settings,
)
from tests.support.postgres_server import a_server

from genba.errors import StoreError, StoreUnreachable
from genba.reports.doctor import examine
from genba.storage.engines.sqlite import database, write_queue


def test_a_full_disk_loses_nothing_says_so_and_all_goes_on_when_it_is_freed(start_node, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    disk = Disk(tmp_path / "disk")
    try:
        url, effects = sqlite_url(disk.folder), tmp_path / "effects"
        app = load(url, tmp_path)
        node = start_node("fire:app", url, "--max", "2")
        app.work.enqueue(str(effects), "first").result(timeout=60)

        disk.occupy()
        promised = sum(until_refused(app, effects, load) for load in (500_000, 20_000, 100))
        with pytest.raises(StoreUnreachable, match="full"):
            app.work.enqueue(str(effects), "refused", "x" * 500_000)
        eventually(lambda: "full" in node.log, within=60)
        disk.free()
        began = time.monotonic()
        app.work.enqueue(str(effects), "last").result(timeout=60)
        print(f"after the disk was freed it took {time.monotonic() - began:.2f} s")

        eventually(lambda: app.app.count(state="succeeded") == promised + 2, within=60)
        assert len(lines(effects)) >= promised + 2
        assert app.app.verify().faults == []
        assert node.log.count("full") <= 10  # it says so, and does not repeat it at every try
        app.app.close()
    finally:
        disk.close()


@pytest.fixture
def small_database() -> Iterator[tuple[str, Disk]]:
    """On a PostgreSQL of its own, whose tables are on a small disk, and its log elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    with a_server() as server, tempfile.TemporaryDirectory(prefix="genba-", dir="/tmp") as place:
        os.chmod(place, 0o711)  # the server has to pass
        disk = Disk(Path(place, "disk"))
        try:
            owner, tables = (server.home / "data").stat(), disk.folder / "tables"
            tables.mkdir()
            for path in (disk.folder, tables):
                os.chown(path, owner.st_uid, owner.st_gid)
            with psycopg.connect(server.url, autocommit=True) as conn:
                conn.execute(f"CREATE TABLESPACE small LOCATION '{tables}'".encode())
                conn.execute("CREATE DATABASE small TABLESPACE small")
            yield server.url.replace("/postgres?", "/small?"), disk
        finally:
            disk.close()


def test_a_full_disk_below_postgresql_loses_nothing_and_all_goes_on_when_it_is_freed(
    small_database, start_node, tmp_path
):
    (url, disk), effects = small_database, tmp_path / "effects"
    app = load(url, tmp_path)
    node = start_node("fire:app", url, "--max", "2")
    app.work.enqueue(str(effects), "first").result(timeout=60)

    many = 2_000  # whose ends need room
    app.app.enqueue_many([app.work.call(str(effects), "before") for _ in range(many)])
    disk.occupy()
    promised = many + sum(until_refused(app, effects, load) for load in (500_000, 20_000, 100))
    with pytest.raises(StoreUnreachable, match="No space left"):
        app.work.enqueue(str(effects), "refused", os.urandom(200_000).hex())
    eventually(lambda: "No space left" in node.log, within=60)
    full = time.monotonic()
    eventually(lambda: time.monotonic() - full > 5, within=10)  # what it says meanwhile is counted
    said = node.log.count("No space left")
    disk.free()
    began = time.monotonic()
    app.work.enqueue(str(effects), "last").result(timeout=10)
    print(
        f"freed, it took {time.monotonic() - began:.2f} s; full, the node said so {said} times in 5 s"
    )

    eventually(lambda: app.app.count(state="succeeded") == promised + 2, within=60)
    assert len(lines(effects)) >= promised + 2
    assert app.app.verify().faults == []
    assert said <= 4  # one for each of its threads: three writers and maintenance
    app.app.close()


def until_refused(app: Any, effects: Path, load: int) -> int:
    """How many were promised: what is free inside of SQLite's files is used up first."""
    promised = 0
    while True:
        try:
            app.work.enqueue(str(effects), "while full", "x" * load)
        except StoreUnreachable:
            return promised
        promised += 1


@pytest.fixture
def app(url, tmp_path):
    module = load(url, tmp_path)
    yield module
    module.app.close()


@pytest.fixture
def paused(app, url, tmp_path):
    producer = Producer(url, tmp_path, tmp_path / "effects", "of the paused")
    assert producer.inside
    producer.pause()
    yield producer
    producer.kill()


@pytest.mark.parametrize("engine", ["sqlite"])
def test_while_a_producer_is_paused_in_a_sqlite_write_others_wait_or_get_its_pid(
    app, paused, tmp_path, monkeypatch
):
    eventually(lambda: any(finding.kind == "writer" for finding in examine(app.app.store)))
    for module in (database, write_queue):
        monkeypatch.setattr(module, "BUSY_SECONDS", 0.5)
    with pytest.raises(StoreUnreachable, match="another process has kept it locked"):
        app.work.enqueue(str(tmp_path / "effects"), "refused")
    for module in (database, write_queue):
        monkeypatch.setattr(module, "BUSY_SECONDS", 60.0)
    app.app.close()  # its connections have the patience of before

    patient = load(app.app.url, tmp_path)
    thread = threading.Thread(
        target=lambda: patient.work.enqueue(str(tmp_path / "effects"), "waited"), name="waits"
    )
    thread.start()
    assert paused.end() == "done"
    thread.join(60)

    assert patient.app.count(state="any") == 2
    assert patient.app.verify().faults == []
    patient.app.close()


STOPPED = """
import gc, os, signal, sys
import apsw, fire

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    return False

fire.work.enqueue(sys.argv[1], "before")
for conn in [one for one in gc.get_objects() if isinstance(one, apsw.Connection)]:
    conn.set_commit_hook(stop)
fire.work.enqueue(sys.argv[1], "stopped")
"""


@pytest.fixture
def stop_a_producer(app, url, tmp_path):
    """Between the BEGIN and the COMMIT of an enqueue."""
    processes = []

    def stopped() -> subprocess.Popen[bytes]:
        env = {**without_settings(os.environ), "GENBA_URL": url}
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(tmp_path / "effects")], cwd=tmp_path, env=env
        )
        processes.append(process)
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, within=30)
        return process

    yield stopped
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_node_names_a_stopped_producer_once_and_leaves_it_alone(
    app, stop_a_producer, url, start_node, tmp_path
):
    node = start_node("fire:app", url, "--max", "2")
    eventually(app.app.nodes, within=60)
    stopped = stop_a_producer()
    output = f"process {stopped.pid} is stopped in the middle of a write"
    eventually(lambda: output in node.log, within=60)
    seen = time.monotonic()
    eventually(
        lambda: time.monotonic() - seen > 4, within=10
    )  # it would be named again meanwhile, or killed

    assert node.log.count(output) == 1
    assert psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(30) == 0
    app.work.enqueue(str(tmp_path / "effects"), "last").result(timeout=60)
    assert app.app.verify().faults == []


HELD = """
import gc, os, signal, subprocess, sys
import apsw
from genba import Genba, current_job

app = Genba()

@app.task
def add(x: int) -> int:
    return x

def stop(path):
    add.enqueue(1)
    def hook():
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return False
    for conn in [one for one in gc.get_objects() if isinstance(one, apsw.Connection)]:
        conn.set_commit_hook(hook)
    add.enqueue(2)

@app.task
def itself(path: str) -> int:
    if current_job().attempt == 1:
        stop(path)
    return current_job().attempt

@app.task
def child(path: str) -> int:
    if current_job().attempt == 1:
        call = f"import held; held.stop({path!r})"
        subprocess.run([sys.executable, "-c", call], start_new_session=True)
    return current_job().attempt

@app.task
def block(path: str) -> int:
    if current_job().attempt == 1:
        with current_job().transaction():
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    return current_job().attempt
"""


@pytest.mark.parametrize("engine", ["sqlite"])
@pytest.mark.parametrize("stuck", ["itself", "child", "block"])
def test_a_job_that_is_stopped_in_a_sqlite_write_is_ended_and_all_others_go_on(
    stuck, url, start_node, tmp_path
):
    (tmp_path / "held.py").write_text(HELD)
    held = load_module("held", tmp_path, url)
    node = start_node("held:app", url, "--max", "2")
    eventually(held.app.nodes, within=60)
    path = tmp_path / "pid"
    job = getattr(held, stuck).enqueue(str(path))
    pid = int(eventually(lambda: path.exists() and path.read_text(), within=30))
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    began = time.monotonic()
    written: list[float] = []

    def write() -> None:
        held.add.enqueue(3)
        written.append(time.monotonic())

    thread = threading.Thread(target=write, name="writes")
    thread.start()

    eventually(lambda: not psutil.pid_exists(pid), within=5)
    gone = time.monotonic() - began
    thread.join(30)
    assert written  # it was not refused; how soon the disk takes it is not asked here
    print(
        f"{stuck}: ended after {gone:.1f} s, and others could write again after {written[0] - began:.1f} s"
    )

    assert job.result(timeout=30) == 2
    assert [attempt.cause for attempt in job.attempts] == ["pause in a write", "returned"]
    assert (job.crashes, job.retries) == (1, 0)
    assert f"ended process {pid}: it was stopped in the middle of a write" in node.log
    assert held.app.verify().faults == []
    held.app.close()


@pytest.mark.parametrize("engine", ["sqlite"])
def test_beside_a_producer_stopped_in_a_sqlite_write_new_processes_read_at_once_and_get_its_pid(
    app, stop_a_producer, url, tmp_path
):
    stopped = stop_a_producer()

    def run(*words: str) -> tuple[float, int, str]:
        began = time.monotonic()
        done = run_genba(url, *words, cwd=tmp_path)
        return time.monotonic() - began, done.returncode, done.stdout + done.stderr

    listing, code, output = run("job", "ls")
    assert code == 0
    assert "fire.work" in output
    looking, code, output = run("doctor")
    assert code == 1
    assert f"process {stopped.pid} is stopped in the middle of a write" in output
    refusal, code, output = run("job", "enqueue", "fire.work", str(tmp_path / "effects"), "refused")
    assert code != 0
    assert re.search(rf"process {stopped.pid} \(stopped\) has been writing for 10 s", output)
    print(f"job ls took {listing:.1f} s, doctor {looking:.1f} s, a refused enqueue {refusal:.1f} s")
    assert max(listing, looking) < refusal  # which waits for the writer first

    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(30) == 0
    assert app.app.count(state="any") == 2
    assert app.app.verify().faults == []


@pytest.mark.parametrize("engine", ["postgres"])
def test_a_producer_paused_with_row_locks_holds_up_only_writers_of_the_same_row(
    app, paused, tmp_path
):
    effects = str(tmp_path / "effects")
    app.work.enqueue(effects, "another")
    made = []
    thread = threading.Thread(
        target=lambda: made.append(app.work.using(key="paused").enqueue(effects, "x"))
    )
    thread.name = "waits"
    thread.start()
    assert app.app.count(state="any") == 1
    assert paused.end() == "done"
    thread.join(60)

    assert [job.created for job in made] == [False]
    assert app.app.count(state="any") == 2
    assert app.app.verify().faults == []


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["postgres"])
def test_rows_locked_by_a_suspended_process_are_free_in_ten_seconds(store, url):
    one(store)
    with psycopg.connect(url) as other, suppress(StoreError), store._db.transaction() as tx:
        tx.select("SELECT id FROM genba.job FOR UPDATE")
        began = time.monotonic()
        assert other.execute("SELECT id FROM genba.job FOR UPDATE").fetchall()
        took = time.monotonic() - began

    assert took < PATIENCE * 12
    print(f"the rows were free after {took:.1f} s")
