"""UseCase52 of Kōjō's fitness cases, with locks and transactions: no two units of a model at once, each done once.

Its other two forms, message groups and the throttled delegator, belong to limits.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support import NodeProcess, eventually, lines, load_module, sqlite_url

_TASKS = """
import os, time
from contextlib import contextmanager
from genba import Genba, current_job

app = Genba()
here = os.path.dirname(os.path.abspath(__file__))
WORKERS = 4

def tell(*words):
    fd = os.open(os.path.join(here, "told"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@contextmanager
def transaction():
    if app.url.startswith("sqlite"):
        import apsw
        conn = apsw.Connection(app.url.removeprefix("sqlite:///"))
        conn.set_busy_timeout(10000)
        conn.execute("BEGIN IMMEDIATE")
    else:
        import psycopg
        conn = psycopg.connect(app.url, autocommit=True)
        conn.execute("BEGIN")
    try:
        yield conn
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise
    finally:
        conn.close()

def rows(conn, text):
    return conn.execute(text).fetchall()

def work(model, unit):
    tell("begin", model, unit, os.getpid(), time.monotonic_ns())
    time.sleep(0.005)
    tell("end", model, unit, os.getpid(), time.monotonic_ns())

# delegator and worker: the side table says who is on which model

@app.task(once="task")
def delegate() -> int:
    app.install()       # before a transaction of our own, as the how-to says: it may have to wait for another writer
    delegated = 0
    while True:
        with transaction() as conn:
            units = rows(conn, "SELECT id, model FROM work ORDER BY id LIMIT 100")
            busy = {model for (model,) in rows(conn, "SELECT model FROM side")}
            for unit, model in units:
                if model in busy:
                    continue
                job = delegated_worker.using(priority=1, conn=conn).enqueue()
                conn.execute(f"INSERT INTO side VALUES ({job.id}, {model}, {unit})")
                conn.execute(f"DELETE FROM work WHERE id = {unit}")
                busy.add(model)
                delegated += 1
        app.wake()
        if not units:
            return delegated
        time.sleep(0.02)

@app.task(max_crashes=100)
def delegated_worker() -> None:
    job = current_job()
    with transaction() as conn:
        ((model, unit),) = rows(conn, f"SELECT model, unit FROM side WHERE job = {job.id}")
    work(model, unit)
    with job.transaction() as conn:
        conn.execute(f"DELETE FROM side WHERE job = {job.id}")
        conn.execute(f"INSERT INTO done VALUES ({unit})")

# a mutex per model, taken by whoever comes

@app.task(max_crashes=100)
def mutexed_worker(quota: int = 20) -> int:
    done = last = 0
    with app.semaphore("workers", WORKERS, wait=0) as permit:
        if not permit:
            return 0
        while done < quota:
            with transaction() as conn:
                page = rows(conn, f"SELECT id, model FROM work WHERE id > {last} ORDER BY id LIMIT 20")
            if not page:
                break
            for unit, model in page:
                last = unit
                with app.mutex(f"model/{model}", wait=0) as lock:
                    if lock:
                        done += do_first(model, lock)
                if done >= quota:
                    break
    with transaction() as conn:
        left = rows(conn, "SELECT count(*) FROM work")[0][0]
    if left:
        app.enqueue_many([mutexed_worker.call(quota)] * (2 if done >= quota else 1))
    return done

def do_first(model, lock):
    "The page was read before the lock: what it says may be done by now."
    with transaction() as conn:
        found = rows(conn, f"SELECT id FROM work WHERE model = {model} ORDER BY id LIMIT 1")
    if not found:
        return 0
    unit = found[0][0]
    work(model, unit)
    with transaction() as conn:
        lock.assert_fence(conn)
        conn.execute(f"DELETE FROM work WHERE id = {unit}")
        conn.execute(f"INSERT INTO done VALUES ({unit})")
    return 1
"""


class Place:
    def __init__(self, folder: Path, tasks: Any) -> None:
        self.folder, self.tasks, self.app = folder, tasks, tasks.app

    def fill(self, units: int, models: int) -> None:
        (self.folder / "told").unlink(missing_ok=True)
        with self.tasks.transaction() as conn:
            for table in ("work (id int, model int)", "side (job bigint, model int UNIQUE, unit int)", "done (id int)"):
                conn.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                conn.execute(f"DELETE FROM {table.split()[0]}")
            for unit in range(1, units + 1):
                conn.execute(f"INSERT INTO work VALUES ({unit}, {unit % models})")

    def rows(self, text: str) -> list[Any]:
        with self.tasks.transaction() as conn:
            return [row[0] for row in conn.execute(text).fetchall()]

    def kill_one(self) -> list[str] | None:
        """A worker in the middle of a unit, killed; what is told of it: that it is over."""
        told = lines(self.folder / "told")
        ended = {(line[2], line[3]) for line in told if line[0] != "begin"}
        inside = [line for line in told if line[0] == "begin" and (line[2], line[3]) not in ended]
        if not inside:
            return None
        _, model, unit, pid, _ = random.choice(inside[-3:])
        moment = time.monotonic_ns()
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
        self.tasks.tell("killed", model, unit, pid, moment)
        return inside[-1]

    def finish(self, units: int, kills: int, within: float) -> None:
        for _ in range(kills):
            eventually(lambda: self.kill_one() or not self.rows("SELECT id FROM work LIMIT 1"), within=within)
        eventually(lambda: len(self.rows("SELECT id FROM done")) >= units, within=within, every=0.1)
        eventually(lambda: self.app.count(state="open") == 0, within=30, every=0.1)

    def check(self, units: int) -> None:
        assert sorted(self.rows("SELECT id FROM done")) == list(range(1, units + 1))
        spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        begun: dict[tuple[str, str], int] = {}
        for word, model, unit, pid, moment in lines(self.folder / "told"):
            if word == "begin":
                begun[unit, pid] = int(moment)
            elif (unit, pid) in begun:
                spans[int(model)].append((begun.pop((unit, pid)), int(moment), int(unit)))
        for number, of_model in spans.items():
            of_model.sort()
            assert all(one[1] <= other[0] for one, other in pairwise(of_model)), f"two units of {number} at once"
            order = [which for _, _, which in of_model]
            assert order == sorted(order), f"model {number} out of order"
        all_spans = sorted(span for of_model in spans.values() for span in of_model)
        assert any(one[1] > other[0] for one, other in pairwise(all_spans)), "nothing ran in parallel"


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("usecase52")
    (folder / "tasks.py").write_text(_TASKS)
    with ExitStack() as stack:
        url = sqlite_url(folder)
        if request.param == "postgres":
            databases = request.getfixturevalue("databases")
            url = databases.url(stack.enter_context(databases.fresh(request.getfixturevalue("template"))))
        tasks = load_module("tasks", folder, url)
        stack.callback(tasks.app.close)
        for _ in "ab":
            node = NodeProcess.start("tasks:app", url, "--max", "3", cwd=folder)
            stack.callback(node.end)
        eventually(lambda: len(tasks.app.nodes()) == 2, within=20)
        yield Place(folder, tasks)


SIZES = [pytest.param(60, 12, 3, id="60"), pytest.param(10_000, 1_000, 50, id="10000", marks=pytest.mark.soak)]


@pytest.mark.parametrize(("units", "models", "kills"), SIZES)
def test_usecase52_delegator_and_worker_with_a_side_table(place: Place, units: int, models: int, kills: int) -> None:
    place.fill(units, models)
    place.tasks.delegate.using(retry=-1).enqueue()

    place.finish(units, kills, within=30 + units * 0.1)
    place.check(units)
    assert place.rows("SELECT job FROM side") == []


@pytest.mark.parametrize(("units", "models", "kills"), SIZES)
def test_usecase52_a_mutex_per_model_with_the_look_inside(place: Place, units: int, models: int, kills: int) -> None:
    place.fill(units, models)
    place.app.enqueue_many([place.tasks.mutexed_worker.call()] * 3)

    place.finish(units, kills, within=30 + units * 0.1)
    place.check(units)
    assert [one.name for one in place.app.locks()] == []
