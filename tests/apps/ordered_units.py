"""UseCase52 in four forms, as a node runs it: units of work, two of one model never at a time.  A node gets a copy.

The data are three tables: `work` (what is to be done), `side` (which job has which model, for the first form), `done`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genba import Genba, Limit, RetryJob, TaskFull, current_job

app = Genba()
here = os.path.dirname(os.path.abspath(__file__))
PARALLEL = 4  # workers of the last form
_mine: list[Any] = [0, None]  # the process, and its connection


def tell(*words: object) -> None:
    fd = os.open(os.path.join(here, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


def connection() -> Any:
    if _mine[0] != os.getpid():
        if app.url.startswith("sqlite"):
            import apsw

            conn: Any = apsw.Connection(app.url.removeprefix("sqlite:///"))
            conn.set_busy_timeout(20_000)
            conn.execute("PRAGMA synchronous = OFF")  # processes are killed here, machines are not
        else:
            import psycopg

            conn = psycopg.connect(app.url, autocommit=True)
        _mine[:] = os.getpid(), conn
    return _mine[1]


@contextmanager
def transaction() -> Iterator[Any]:
    conn = connection()
    conn.execute("BEGIN IMMEDIATE" if app.url.startswith("sqlite") else "BEGIN")
    try:
        yield conn
        conn.execute("COMMIT")
    except BaseException:
        conn.execute("ROLLBACK")
        raise


def rows(text: str, conn: Any = None) -> list[Any]:
    return list((conn or connection()).execute(text).fetchall())


def work(model: int, unit: int) -> None:
    tell("begin", model, unit, os.getpid(), time.monotonic_ns())
    time.sleep(0.003)
    tell("end", model, unit, os.getpid(), time.monotonic_ns())


# delegator and worker: the side table says which job has which model


@app.task(once="task", max_crashes=1000)
def delegate() -> int:
    app.install()  # before a transaction of our own, as the how-to says: it may have to wait for another writer
    delegated = 0
    while True:
        with transaction() as conn:
            units = rows("SELECT id, model FROM work ORDER BY id LIMIT 100", conn)
            busy = {model for (model,) in rows("SELECT model FROM side", conn)}
            for unit, model in units:
                if model not in busy:
                    job = delegated_worker.using(priority=1, conn=conn).enqueue()
                    conn.execute(f"INSERT INTO side VALUES ({job.id}, {model}, {unit})")
                    conn.execute(f"DELETE FROM work WHERE id = {unit}")
                    busy.add(model)
                    delegated += 1
        app.wake()
        if not units:
            return delegated
        time.sleep(0.01)


@app.task(max_crashes=1000)
def delegated_worker() -> None:
    job = current_job()
    ((model, unit),) = rows(f"SELECT model, unit FROM side WHERE job = {job.id}")
    work(model, unit)
    with job.transaction() as conn:
        conn.execute(f"DELETE FROM side WHERE job = {job.id}")
        conn.execute(f"INSERT INTO done VALUES ({unit})")


# message groups: a stripe for each model


@app.task(limits=[Limit("model:{model}", 1, ordered=True)], max_crashes=1000, retry=1)
def message(model: int, unit: int) -> None:
    if unit % 17 == 3 and not current_job().retries:
        raise RetryJob(delay="20ms")
    work(model, unit)
    with current_job().transaction() as conn:
        conn.execute(f"INSERT INTO done VALUES ({unit})")


# a delegator that stops while enough waits


@app.task(exclusive=True, max_crashes=1000)
def throttle(many: int) -> int:
    app.install()
    full = False
    while not full:
        with transaction() as conn:
            units = rows(f"SELECT id, model FROM work ORDER BY id LIMIT {many}", conn)
            try:
                for unit, model in units:
                    throttled.using(conn=conn).enqueue(model, unit)
                    conn.execute(f"DELETE FROM work WHERE id = {unit}")
            except TaskFull:
                full = True
        app.wake()
        if not units:
            return current_job().attempt
    current_job().retry(delay="50ms")
    return 0


@app.task(max_waiting=60, limits=[Limit("throttled:{model}", 1, ordered=True)], max_crashes=1000)
def throttled(model: int, unit: int) -> None:
    work(model, unit)
    with current_job().transaction() as conn:
        conn.execute(f"INSERT INTO done VALUES ({unit})")


# a mutex for each model, taken by the first job that comes


@app.task(max_crashes=1000)
def mutexed(quota: int) -> int:
    done = last = 0
    with app.semaphore("workers", PARALLEL, wait=0) as permit:
        if not permit:
            return 0
        while done < quota:
            page = rows(f"SELECT id, model FROM work WHERE id > {last} ORDER BY id LIMIT 20")
            if not page:
                break
            for unit, model in page:
                last = unit
                with app.mutex(f"model/{model}", wait=0) as lock:
                    if lock:
                        done += do_model(model, lock)
                if done >= quota:
                    break
    if rows("SELECT id FROM work LIMIT 1"):
        app.enqueue_many([mutexed.call(quota)] * (2 if done >= quota else 1))
    return done


def do_model(model: int, lock: Any) -> int:
    """The page was read before the lock: what it says may be done by now."""
    done = 0
    for (unit,) in rows(f"SELECT id FROM work WHERE model = {model} ORDER BY id"):
        work(model, unit)
        with transaction() as conn:
            lock.assert_fence(conn)
            conn.execute(f"DELETE FROM work WHERE id = {unit}")
            conn.execute(f"INSERT INTO done VALUES ({unit})")
        done += 1
    return done
