"""The tasks that tests run.  A node gets a copy of this file in its own folder; tests load it by the fixture `jobs`.

Each task does one thing that can be seen from outside: what it returns, or a file.  Files are written by O_APPEND,
one line in one write, so that no death of a process and no other writer can hide what has run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

from genba import FailJob, Genba, RetryJob, current_job

app = Genba()


@dataclass
class Order:
    number: int
    price: Decimal
    at: datetime


def tell(path: str, *words: object) -> None:
    """One line that is there whatever happens next."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(str(word).replace(" ", "") for word in words) + "\n").encode())
    os.close(fd)


# what can be run


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task
async def add_later(x: int, y: int = 1) -> int:
    await asyncio.sleep(0)
    return x + y


@app.task
class Greet:
    """A class with `run`."""

    def __init__(self) -> None:
        self.word = "hello"

    def run(self, name: str) -> str:
        return f"{self.word} {name}"


class Counter:
    def __init__(self) -> None:
        self.start = 10

    @app.task
    def up(self, by: int) -> int:
        return self.start + by

    @app.task
    async def up_later(self, by: int) -> int:
        return self.start + by


@app.task
def typed(order: Order, ids: tuple[UUID, ...], tags: set[str]) -> Order:
    assert all(isinstance(id, UUID) for id in ids)
    assert isinstance(tags, set)
    return Order(order.number + 1, order.price * 2, order.at)


@app.task
def where() -> int:
    return os.getpid()


@app.task
def sum_of_deps() -> int:
    return sum(current_job().deps.values())


@app.task
def about_me() -> dict[str, object]:
    job = current_job()
    return {
        "id": job.id,
        "attempt": job.attempt,
        "task": job.task,
        "retries": job.retries,
        "crashes": job.crashes,
    }


@app.task
def write(path: str, word: str) -> None:
    """An effect: which job, which attempt, which process."""
    job = current_job()
    tell(path, word, job.id, job.attempt, os.getpid())


@app.task
def write_slowly(path: str, word: str, pause: float) -> None:
    job = current_job()
    tell(path, word, job.id, job.attempt, os.getpid(), os.getppid(), job.fence)
    time.sleep(pause)


# how it can end


@app.task
def fail(text: str) -> None:
    try:
        raise KeyError("the root")
    except KeyError as root:
        raise ValueError(text) from root


@app.task
def fail_for_good(text: str) -> None:
    raise FailJob(text)


@app.task
def fail_at_first(times: int) -> int:
    attempt = current_job().attempt
    if attempt <= times:
        raise RuntimeError(f"attempt {attempt}")
    return attempt


@app.task
def ask_for_retry(times: int, delay: float | str | None = None) -> int:
    attempt = current_job().attempt
    if attempt <= times:
        raise RetryJob("not yet", delay=delay)
    return attempt


@app.task
def return_what_cannot_be_kept() -> object:
    return object()


@app.task(max_crashes=2)
def exit_with(code: int) -> None:
    os._exit(code)


@app.task(max_crashes=1)
def die_of(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


@app.task
def die_at_first(path: str) -> int:
    job = current_job()
    tell(path, "run", job.id, job.attempt, os.getpid())
    if job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return job.attempt


@app.task(at_most_once=True)
def once_only(path: str) -> None:
    tell(path, "run", current_job().attempt)
    os._exit(1)


# what takes its time


@app.task
def wait_for(path: str) -> str:
    """Runs until `path` exists; says in `path`.started that it runs."""
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.005)
    return "opened"


@app.task
async def wait_for_later(path: str) -> str:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        await asyncio.sleep(0.005)
    return "opened"


@app.task
def stop_when_asked(path: str) -> str:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not job.should_stop:
        time.sleep(0.005)
    tell(f"{path}.stopped", job.id, job.attempt, job.cancel_requested)
    return "stopped"


@app.task
def count_to(path: str, total: int) -> None:
    """Tells its progress up to a half, and the rest once `path` exists."""
    job = current_job()
    for i in range(total // 2):
        job.progress(i + 1, total, note=f"step {i + 1}")
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.005)
    job.progress(total, total)


@app.task
def show_life(path: str, how: str) -> str:
    """As wait_for, and with signs of life."""
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        job.heartbeat() if how == "heartbeat" else job.progress(1, 2)
        time.sleep(0.005)
    return "opened"


@app.task
def ignore_sigterm(path: str) -> None:
    """Deaf, and with a child that has left the session, and a grandchild that has lost its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _leave_children(path)
    tell(f"{path}.started", current_job().id, current_job().attempt, os.getpid())
    while True:
        time.sleep(1)


@app.task(max_crashes=1)
def eat_memory(path: str, megabytes: int, by_child: bool = False) -> str:
    """Holds so much until `path` exists; also in a child that has left the session."""
    job = current_job()
    if by_child:
        code = f"import os, time; os.setsid(); x = b'x' * ({megabytes} << 20); time.sleep(600)"
        tell(f"{path}.children", subprocess.Popen([sys.executable, "-S", "-c", code]).pid)
    else:
        block = b"x" * (megabytes << 20)
        assert block
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        time.sleep(0.005)
    return "full"


@app.task(max_crashes=1)
def burn(path: str) -> None:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    while not os.path.exists(path):
        pass


@app.task(at_most_once=True)
def wait_once(path: str) -> str:
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    try:
        while not os.path.exists(path):
            time.sleep(0.005)
    except BaseException as error:
        tell(f"{path}.stopped", job.id, type(error).__name__)
        raise
    return "opened"


def _part(way: str) -> None:
    match way:
        case "raise":
            raise ValueError("in the child")
        case "sys.exit":
            sys.exit(0)


@app.task
def fork(way: str) -> int:
    """The child comes out of the call, too; the number of the parent is the result."""
    child = os.fork()
    if child == 0:
        _part(way)
        return 0
    os.waitpid(child, 0)
    return os.getpid()


@app.task
async def fork_later(way: str) -> int:
    return fork(way)


@app.task(concurrency=3)
async def fork_in_company(way: str) -> int:
    return fork(way)


@app.task
def leave_children(path: str) -> str:
    _leave_children(path)
    return "returned"


_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""


def _leave_children(path: str) -> None:
    """Two processes, with their pids in `path`.children when this returns."""
    file = f"{path}.children"
    subprocess.Popen([sys.executable, "-S", "-c", _CHILD, file])
    while not os.path.exists(file) or len(Path(file).read_text().split()) < 2:
        time.sleep(0.005)


# what it can say about itself


def _connect() -> object:
    """The driver's own connection, for tables of the user's."""
    if app.url.startswith("sqlite:"):
        import apsw

        conn = apsw.Connection(app.url.removeprefix("sqlite:///"))
        conn.set_busy_timeout(10_000)
        return conn
    import psycopg

    return psycopg.connect(app.url, autocommit=True)


def book(conn: object, word: str) -> None:
    conn.execute(f"INSERT INTO ledger (word) VALUES ('{word}')")  # type: ignore[attr-defined]


@app.task
def ask_for(*wishes: str, then: str = "return") -> str:
    """Asks for one outcome after the other; `apply` after a wish applies it at once."""
    job = current_job()
    if job.attempt > 1:
        return f"attempt {job.attempt}"
    last = None
    for wish in wishes:
        match wish.split(":"):
            case ["succeed"]:
                last = job.succeed()
            case ["succeed", result]:
                last = job.succeed(result)
            case ["fail", reason]:
                last = job.fail(reason)
            case ["hold", reason]:
                last = job.hold(reason)
            case ["retry", delay]:
                last = job.retry(delay=float(delay))
            case ["now"]:
                last = job.retry("now")
            case ["counted"]:
                last = job.retry(delay=0, free=False)
            case ["apply"]:
                assert last is not None
                last.apply()
    match then:
        case "raise":
            raise ValueError("after all")
        case "FailJob":
            raise FailJob("for good")
        case "RetryJob":
            raise RetryJob("once more")
    return then


@app.task(explicit_outcome=True)
def be_explicit(wish: str | None = None) -> str:
    job = current_job()
    if wish == "succeed":
        job.succeed("as asked")
    elif wish == "apply":
        job.succeed("applied").apply()
    elif wish == "hold":
        job.hold("by hand")
    return "returned"


@app.task
def apply_twice() -> list[str]:
    """Log the errors that a second and a third outcome raise."""
    job = current_job()
    first = job.succeed("first")
    first.apply()
    for again in (first.apply, lambda: job.fail("no"), lambda: job.transaction().__enter__()):
        try:
            again()
        except Exception as error:
            job.log(type(error).__name__)
    return ["returned"]


@app.task
def wait_for_retry(path: str, times: int) -> int:
    """UseCase45: asks for a retry now, so many times."""
    job = current_job()
    tell(path, job.id, job.attempt)
    if job.attempt <= times:
        job.retry("now")
    return job.attempt


@app.task
def apply_and_wait(path: str) -> str:
    """Ends well at once, and goes on."""
    job = current_job()
    job.succeed("applied").apply()
    return wait_for(path)


@app.task(max_crashes=9)
def walk(path: str, steps: int) -> list[int]:
    """Saves after each step, dies after the first and third attempt's step, fails after the second's."""
    job = current_job()
    done = job.saved or []
    for step in range(len(done), steps):
        tell(path, step, job.attempt)
        done.append(step)
        job.save(done)
        if job.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.attempt == 2:
            raise RuntimeError("on the way")
    return done


@app.task
def save_badly() -> str:
    job = current_job()
    answers = []
    for value in ((1, 2), {1: 2}, float("nan"), "x" * 2_000_000, {"a": [1, {"b": object()}]}):
        try:
            job.save(value)
        except Exception as error:
            answers.append(type(error).__name__)
    assert job.saved is None
    return " ".join(answers)


@app.task
def save_late(path: str) -> str:
    """Saves when `path` exists, and tells what that gave."""
    wait_for(path)
    try:
        current_job().save("late")
    except Exception as error:
        tell(f"{path}.error", type(error).__name__)
    return "late"


@app.task
def talk(size: int = 0) -> None:
    job = current_job()
    print("from stdout")
    print("from stderr", file=sys.stderr)
    logging.getLogger("jobs").warning("from logging")
    job.log("from", "log")
    sys.stdout.buffer.write(b"from bytes\n")
    for _ in range(size // 1_000_000):
        print("x" * 1_000_000)
    print("the end \0 \udc80")


@app.task
def talk_and_die(how: str) -> None:
    print("last words")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("loud")
    if how == "hang":
        time.sleep(60)
    if how == "apply":
        current_job().succeed().apply()
        print("and more")


@app.task
def say_progress(done: float, note: str, how: str = "return") -> None:
    job = current_job()
    job.progress(done, 200, note)
    job.heartbeat()
    if how == "raise":
        raise ValueError("on the way")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "apply":
        job.fail("given up").apply()


@app.task
def count_on(path: str) -> None:
    """A step every millisecond, until `path` exists."""
    job = current_job()
    tell(f"{path}.started", job.id, job.attempt, os.getpid())
    step = 0
    while not os.path.exists(path):
        step += 1
        job.progress(step, 1_000_000)
        time.sleep(0.001)


@app.task(progress_every="2s")
def rarely(path: str) -> None:
    count_on(path)


@app.task
def measure_progress(n: int) -> list[float]:
    """Seconds for n calls, without and with a note."""
    job = current_job()
    answers = []
    for note in (None, "tile 17"):
        began = time.perf_counter()
        for i in range(n):
            job.progress(i, n, note)
        answers.append(time.perf_counter() - began)
    return answers


class Curse(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Doom(ValueError):
    pass


def _deep(n: int = 0) -> int:
    return _deep(n + 1) + 1


@app.task
def end_badly(how: str) -> object:
    match how:
        case "exit":
            sys.exit(0)
        case "exit text":
            sys.exit("a text")
        case "interrupt":
            raise KeyboardInterrupt
        case "recursion":
            return _deep()
        case "memory":
            return bytearray(1 << 60)
        case "curse":
            raise Curse
        case "caused by a curse":
            raise ValueError("outer") from Curse()
        case "generator exit":
            raise GeneratorExit
        case "group":
            raise ExceptionGroup("many", [ValueError("one"), Curse()])
        case "object":
            return object()
        case "huge":
            return "x" * 2_000_000
        case "long":
            raise ValueError("y" * 10_000_000)
        case "doom":
            raise Doom("doomed")
        case "timeout":
            raise TimeoutError("too late")
    raise AssertionError(how)


@app.task
async def end_badly_later(how: str) -> object:
    await asyncio.sleep(0)
    return end_badly(how)


# effects in the job's own transaction


@app.task
def pay(word: str, how: str = "return", path: str = "") -> str:
    job = current_job()
    if how == "die before":
        with job.transaction() as conn:
            book(conn, word)
            if job.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return "unreached"
    with job.transaction() as conn:
        book(conn, word)
        job.save("booked")
        add.using(conn=conn, key=f"child of {job.id}").enqueue(1)
        job.succeed(f"paid {word}")
        if how == "raise inside":
            raise ValueError("changed my mind")
        if how == "wait inside":
            wait_for(path)
        if how == "slowly":
            time.sleep(0.01)
    if how == "slowly":
        time.sleep(0.02)
    if how == "die after":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise after":
        raise ValueError("too late")
    return "not the result"


@app.task
async def pay_later(word: str, how: str = "return") -> str:
    job = current_job()
    async with job.transaction() as conn:
        book(conn, word)
        await job.asave("booked")
        if how == "raise inside":
            raise ValueError("changed my mind")
        job.succeed(f"paid {word}")
    return "not the result"


@app.task
async def end_itself_later(word: str) -> str:
    job = current_job()
    if job.attempt == 1:
        await job.asave(word)
        raise ValueError("once more")
    found = await job.adeps()
    await job.aclone(priority=1, key=f"copy of {word}", delay="1h")
    await job.succeed([job.saved, *found.values()]).aapply()
    return "not the result"


@app.task
def leave_open(word: str) -> str:
    conn = current_job().transaction().__enter__()
    book(conn, word)
    return "left open"


@app.task
def take_too_long(word: str, seconds: float) -> str:
    with current_job().transaction() as conn:
        book(conn, word)
        time.sleep(seconds)
        book(conn, f"{word} again")
    return "took its time"


@app.task
def produce(case: str) -> None:
    """UseCase51: a transaction, new jobs, and the end of this one."""
    job = current_job()
    if case == "commit":
        conn = _connect()
        begin = "BEGIN IMMEDIATE" if app.url.startswith("sqlite:") else "BEGIN"
        conn.execute(begin)  # type: ignore[attr-defined]
        book(conn, case)
        consume.using(conn=conn).enqueue(case)
        conn.execute("COMMIT")  # type: ignore[attr-defined]
        conn.close()  # type: ignore[attr-defined]
        app.wake()
    elif case == "rollback":
        try:
            with job.transaction() as conn:
                consume.using(conn=conn).enqueue(case)
                book(conn, "commit")  # a duplicate
        except Exception as error:
            job.log(type(error).__name__)
    else:
        with job.transaction() as conn:
            book(conn, case)
            consume.using(conn=conn).enqueue(case)


@app.task
def consume(case: str) -> str:
    return case


@app.task
def pay_when(word: str, path: str) -> str:
    """Pays when `path` exists, and tells what kept it from that."""
    wait_for(path)
    try:
        with current_job().transaction() as conn:
            book(conn, word)
    except Exception as error:
        tell(f"{path}.error", type(error).__name__)
    return "paid"


@app.task
def look_at_settings() -> None:
    job = current_job()
    with job.transaction() as conn:
        job.succeed(conn.execute("SHOW enable_seqscan").fetchone()[0])


@app.task
def let_others_talk(size: int, die: bool = False) -> None:
    """Another program, and the descriptors themselves."""
    print("from python")
    subprocess.run(
        [sys.executable, "-S", "-c", f"print('from a child'); print('x' * {size})"], check=True
    )
    os.write(2, b"from a descriptor\n")
    if die:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task
def ask_long(word: str) -> None:
    """A statement that does not end, in the job's own transaction."""
    with current_job().transaction() as conn:
        book(conn, word)
        if app.url.startswith("sqlite:"):
            for _ in range(1_000_000):
                conn.execute("SELECT max(length(hex(randomblob(10000)))) FROM ledger").fetchall()
        else:
            conn.execute("SELECT pg_sleep(30)")
