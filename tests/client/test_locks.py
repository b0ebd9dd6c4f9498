"""Locks and real processes: a dead holder frees its lock, a frozen one loses it, and no two have it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from tests.support import PATIENCE, NodeProcess, eventually, lines, load_module, without_settings

from genba import BadOption, Genba, IllegalMove, LockLost, LockTimeout

_TASKS = """
import os, signal, subprocess, time
from genba import Genba, LockLost, RetryJob, current_job

app = Genba()
here = os.path.dirname(os.path.abspath(__file__))

def tell(name, *words):
    fd = os.open(os.path.join(here, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@app.task
def hold(name: str, seconds: float = 60, tell_as: str = "held") -> int:
    with app.mutex(name) as lock:
        tell(tell_as, os.getpid(), lock.token)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not current_job().should_stop:
            time.sleep(0.01)
        return lock.token

@app.task
def take_twice(name: str) -> list[bool]:
    with app.mutex(name) as lock, app.mutex(name, wait=0) as again:
        same = [bool(again), lock.token == again.token]
    app.mutex(name).acquire()           # left to the end of the job
    return same

@app.task
def leave_a_child(name: str) -> None:
    app.mutex(name).acquire()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    tell("child", child.pid)

@app.task
async def hold_async(name: str) -> int:
    async with app.mutex(name) as lock:
        return lock.token

@app.task
def in_transaction(name: str) -> None:
    with app.mutex(name) as lock:
        with current_job().transaction() as conn:
            lock.assert_fence(conn)
            conn.execute("INSERT INTO ledger VALUES ('fenced')")
            current_job().succeed(7)

@app.task
def wrong_order(name: str) -> None:
    with current_job().transaction():
        app.mutex(name).acquire()
"""

_CLIENT = """
import sys, time
from genba import Genba
app = Genba(sys.argv[1], lease=float(sys.argv[3]))
with app.mutex(sys.argv[2]) as lock:
    print(lock.token, flush=True)
    sys.stdin.readline()
    print("on", flush=True)
    try:
        lock.check()
        print("ours", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Place:
    def __init__(
        self, url: str, folder: Path, tasks: Any, start: Callable[..., NodeProcess]
    ) -> None:
        self.url, self.folder, self.tasks, self.start = url, folder, tasks, start
        self.app: Genba = tasks.app

    def wait_for_lines(self, name: str, count: int = 1) -> list[list[str]]:
        return eventually(
            lambda: found if len(found := lines(self.folder / name)) >= count else [], within=20
        )

    def client(self, name: str, lease: float = 15) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, self.url, name, str(lease)],
            env=without_settings(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert made.stdout is not None
        assert made.stdout.readline()
        return made


@pytest.fixture(scope="module")
def place(home: tuple[str, Path]) -> Iterator[Place]:
    url, folder = home
    (folder / "tasks.py").write_text(_TASKS)
    with ExitStack() as stack:
        tasks = load_module("tasks", folder, url)
        stack.callback(tasks.app.close)

        def start(*args: str) -> NodeProcess:
            node = NodeProcess.start("tasks:app", url, *args, cwd=folder)
            stack.callback(lambda: print(node.log))
            stack.callback(node.end)
            return node

        place = Place(url, folder, tasks, start)
        start("--max", "4", "--name", "main")
        eventually(tasks.app.nodes, within=60)
        yield place


@pytest.fixture(autouse=True)
def _clean(place: Place) -> None:
    for name in ("held", "child"):
        (place.folder / name).unlink(missing_ok=True)


def seconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def try_once(app: Genba, name: str) -> bool:
    with app.mutex(name, wait=0) as lock:
        return bool(lock)


def test_a_lock_is_waited_for_tried_and_timed_out(place: Place) -> None:
    app = place.app
    with app.mutex("t") as held:
        assert held
        assert held.token > 0
        held.check()
        with app.mutex("t", wait=0) as second:
            assert not second
        with pytest.raises(LockTimeout, match="'t' was not free within 200ms"):
            app.mutex("t", wait="200ms").acquire()
        (state,) = [one for one in app.locks() if one.name == "t"]
        assert (state.n, state.waiters) == (1, [])
        assert state.holder is not None
        assert (state.holder.pid, state.holder.job, state.holder.token) == (
            os.getpid(),
            None,
            held.token,
        )
    assert not held
    assert try_once(app, "t")
    with pytest.raises(LockLost, match="not held"):
        held.release()


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "a\nb", 7])
def test_a_name_that_is_none_is_refused(place: Place, name: Any) -> None:
    with pytest.raises(BadOption, match="printable"):
        place.app.mutex(name)
    with pytest.raises(BadOption, match="whole number"):
        place.app.semaphore("ok", 0)


def test_a_waiter_is_woken_when_the_lock_is_released(place: Place) -> None:
    got: list[float] = []

    def wait() -> None:
        with place.app.mutex("w"):
            got.append(time.monotonic())

    with place.app.mutex("w"):
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: any(one.waiters for one in place.app.locks()))
        released = time.monotonic()
    thread.join(30)
    assert got[0] - released < PATIENCE * 1


def test_inside_one_job_it_is_reentrant_and_goes_with_the_job(place: Place) -> None:
    job = place.tasks.take_twice.enqueue("re")

    assert job.result(timeout=20) == [True, True]
    assert try_once(place.app, "re")
    assert job.refresh().attempts[-1].cause == "returned"


def test_the_holder_is_seen_with_node_pid_and_job(place: Place) -> None:
    job = place.tasks.hold.enqueue("seen")
    ((pid, token),) = place.wait_for_lines("held")

    state = next(one for one in place.app.locks() if one.name == "seen")
    assert state.holder is not None
    assert (state.holder.node, state.holder.pid, state.holder.job) == ("main", int(pid), job.id)
    assert place.app.break_lock("seen") == [int(token)]
    assert try_once(place.app, "seen")
    job.kill()


def test_regression_12_a_killed_worker_frees_its_lock_within_a_second(place: Place) -> None:
    job = place.tasks.hold.using(retry=0).enqueue("k")
    ((pid, token),) = place.wait_for_lines("held")

    os.kill(int(pid), signal.SIGKILL)
    with place.app.mutex("k", wait=PATIENCE * 3) as lock:
        assert lock.token > int(token)
        job.cancel()
    eventually(lambda: job.refresh().attempts)


def test_the_tree_is_dead_before_the_lock_is_free(place: Place) -> None:
    place.tasks.leave_a_child.enqueue("tree")
    ((pid,),) = place.wait_for_lines("child")

    with place.app.mutex("tree", wait=20):
        assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_killed_client_frees_its_lock_within_a_second(place: Place) -> None:
    client = place.client("c")
    client.kill()
    client.communicate()

    assert seconds(lambda: place.app.mutex("c", wait=30).acquire()) < PATIENCE * 1.5


def test_a_killed_waiter_leaves_the_line(place: Place) -> None:
    with place.app.mutex("line"):
        doomed = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, place.url, "line", "15"],
            env=without_settings(os.environ),
        )
        eventually(lambda: any(one.waiters for one in place.app.locks()), within=10)
        doomed.kill()
        doomed.wait()
    assert seconds(lambda: place.app.mutex("line", wait=30).acquire()) < PATIENCE * 3


def test_regression_21_a_frozen_client_loses_its_lock_and_learns_it(place: Place) -> None:
    client = place.client("frozen", lease=2)
    client.send_signal(signal.SIGSTOP)
    try:
        with place.app.mutex("frozen", wait=20):
            client.send_signal(signal.SIGCONT)
            out, _ = client.communicate("go\n", timeout=10)
            assert out.split() == ["on", "LockLost"]
    finally:
        client.kill()


@pytest.mark.parametrize(("number", "lease"), [(signal.SIGKILL, 15), (signal.SIGSTOP, 2)])
def test_a_lock_of_a_lost_node_is_free_although_only_a_client_is_there(
    place: Place, number: int, lease: int
) -> None:
    """The node of this test runs in a namespace of its own: no other node could rescue."""
    app = Genba(place.url, namespace="alone")
    with closing(app):
        env = {"GENBA_NAMESPACE": "alone", "GENBA_LEASE": str(lease)}
        node = NodeProcess.start("tasks:app", place.url, cwd=place.folder, env=env)
        try:
            app.enqueue("tasks.hold", "n", 60, "alone")
            ((_, token),) = place.wait_for_lines("alone")
            node.signal(number)
            assert seconds(lambda: app.mutex("n", wait=30).acquire()) < 12
            assert not [pid for pid in node.tree() if pid != node.pid and _alive(pid)]
            (state,) = [one for one in app.locks() if one.name == "n"]
            assert state.holder is not None
            assert state.holder.token is not None
            assert state.holder.token > int(token)
        finally:
            node.end()
            (place.folder / "alone").unlink(missing_ok=True)


def test_two_processes_never_have_it_at_once(place: Place) -> None:
    code = (
        "import sys, time\nfrom genba import Genba\napp = Genba(sys.argv[1])\n"
        "for _ in range(15):\n"
        "    with app.mutex('hammer') as lock:\n"
        "        start = time.monotonic_ns(); time.sleep(0.001)\n"
        "        print(start, time.monotonic_ns(), lock.token)\n"
    )
    env = without_settings(os.environ)
    runs = [
        subprocess.Popen([sys.executable, "-c", code, place.url], env=env, stdout=subprocess.PIPE)
        for _ in "ab"
    ]
    spans = sorted(
        tuple(map(int, line.split()))
        for run in runs
        for line in run.communicate(timeout=60)[0].splitlines()
    )

    assert len(spans) == 30
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert [span[2] for span in spans] == sorted(span[2] for span in spans)


def test_async_code_waits_without_a_thread_and_a_cancelled_one_leaves_the_line(
    place: Place,
) -> None:
    app = place.app

    async def one() -> int:
        async with app.mutex("async") as lock:
            return lock.token

    async def all_of_them() -> list[Any]:
        async with app.semaphore("other", 2), app.mutex("async"):
            tasks = [asyncio.create_task(one()) for _ in range(12)]
            await asyncio.sleep(0)
            while len(next(s for s in await app.alocks() if s.name == "async").waiters) < 12:
                await asyncio.sleep(0.01)
            tasks[5].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    tokens = asyncio.run(all_of_them())
    assert isinstance(tokens[5], asyncio.CancelledError)
    assert len({token for token in tokens if isinstance(token, int)}) == 11
    assert all(one.name != "async" for one in app.locks())
    assert place.tasks.hold_async.enqueue("async").result(timeout=20) > max(
        t for t in tokens if isinstance(t, int)
    )


def test_after_a_fork_the_lock_stays_with_the_parent(place: Place) -> None:
    script = place.folder / "fork.py"
    script.write_text(
        "import os, sys, warnings\nwarnings.simplefilter('ignore')\nfrom genba import Genba, LockLost\n"
        "app = Genba(sys.argv[1])\n"
        "with app.mutex('fork') as lock:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        try: lock.check(); print('wrong')\n"
        "        except LockLost as error: print(error)\n"
        "        with app.mutex('fork', wait=0) as mine: print('child has it:', bool(mine))\n"
        "if not pid: sys.stdout.flush(); os._exit(0)\n"
        "with app.mutex('fork', wait=5) as again: os.waitpid(pid, 0); again.check(); print('parent on')\n"
    )
    ran = subprocess.run(
        [sys.executable, script, place.url],
        env=without_settings(os.environ),
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert ran.stderr == ""
    assert "stays with process" in ran.stdout
    assert "child has it: False" in ran.stdout
    assert "parent on" in ran.stdout


def _own_connection(url: str) -> Any:
    return (
        apsw.Connection(url.removeprefix("sqlite:///"))
        if url.startswith("sqlite")
        else psycopg.connect(url, autocommit=True)
    )


def test_a_fence_in_the_jobs_own_transaction(place: Place) -> None:
    conn = _own_connection(place.url)
    conn.execute("CREATE TABLE IF NOT EXISTS ledger (word TEXT)")
    job = place.tasks.in_transaction.enqueue("fence")

    assert job.result(timeout=20) == 7
    assert conn.execute("SELECT word FROM ledger").fetchall() == [("fenced",)]
    assert try_once(place.app, "fence")
    conn.close()
    wrong = place.tasks.wrong_order.enqueue("fence")
    with pytest.raises(Exception, match="before transaction"):
        wrong.result(timeout=20)
    assert IllegalMove.__name__ in str(wrong.refresh().error)
