"""Guard, zygote and workers as real processes, with real signals."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from genba.node.processes import guard, linux
from genba.node.processes.pool import (
    AppImported,
    GuardDied,
    ImportFailed,
    LeftoversSwept,
    Pool,
    PoolEvent,
    SpawnFailed,
    WorkerEnded,
    WorkerStarted,
    ZygoteDied,
)
from genba.storage.nodes.leftover_processes import end_leftovers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the process tree is built on Linux calls"
)

E = TypeVar("E")
WITHIN = 20.0  # never waited for when all is well

APP = """
class App:
    def hello(self):
        return {"url": "sqlite:///jobs.db", "namespace": "shop", "tasks": []}

app = App()
"""

# A worker that runs what it is sent, and answers with what that has put into `answer`.
ZYGOTE = """
import os, signal, socket, sys
from genba.worker.zygote import main

def stray(work=signal.pause):
    "The pid of a process in a session of its own whose parent is gone."
    out, into = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(into, str(os.getpid()).encode())
            while True:
                work()
        os._exit(0)
    os.wait()
    pid = int(os.read(out, 20))
    os.close(out), os.close(into)
    return pid

def hop():
    if os.fork():
        os._exit(0)

def run(app, slot, sock, token_fd, shm_fd):
    while text := sock.recv(65536).decode():
        scope = globals() | {"app": app, "slot": slot, "sock": sock, "fds": (token_fd, shm_fd), "answer": None}
        exec(text, scope)
        sock.send(repr(scope["answer"]).encode())

if __name__ == "__main__":
    main(sys.argv, run)
"""

# A node: two workers with a stray each; tells all pids, then every event, and starts again after a dead guard.
NODE = """
import json, os, select, socket, sys
from genba.node.processes.pool import *

pool = Pool("shop", env=dict(os.environ), node_title=f"/node[{os.getpid()}]", zygote=["zygote.py"])

def events():
    poll = select.poll()
    poll.register(pool.sockets[0], select.POLLIN)
    while True:
        poll.poll()
        yield from pool.ready()

def tree():
    pids = {"guard": pool.guard_pid, "workers": [], "strays": []}
    pool.start()
    coming = events()
    assert isinstance(next(coming), AppImported)
    for slot in range(2):
        ours, theirs = socket.socketpair()
        out, into = os.pipe()
        pool.spawn(slot, theirs, out, into)
        os.close(out), os.close(into), theirs.close()
        started = next(coming)
        assert isinstance(started, WorkerStarted), started
        ours.send(b"answer = stray()")
        pids["workers"].append(started.pid)
        pids["strays"].append(int(ours.recv(100)))
        kept.append(ours)
    pids["guard"], pids["zygote"] = pool.guard_pid, pool.zygote_pid
    print(json.dumps(pids), flush=True)
    return coming

kept = []
coming = tree()
for event in coming:
    print(json.dumps([type(event).__name__, repr(event)]), flush=True)
    if isinstance(event, GuardDied):
        coming = tree()
"""


@dataclass
class DrivenPool:
    """A pool, the events it has given, and our ends of the workers' sockets."""

    pool: Pool
    workers: dict[int, socket.socket] = field(default_factory=dict)
    events: list[PoolEvent] = field(default_factory=list)

    def next(self, kind: type[E], when: Callable[[E], bool] = lambda _: True) -> E:
        """The first event of this kind, taken out; waits for it."""
        deadline = time.monotonic() + WITHIN
        while True:
            for event in self.events:
                if isinstance(event, kind) and when(event):
                    self.events.remove(event)
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__}; got {self.events}"
            select.select(self.pool.sockets, [], [], left)
            self.events += self.pool.ready()

    def ask_for(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        out, into = os.pipe()
        assert self.pool.spawn(slot, theirs, out, into)
        theirs.close()
        os.close(out)
        os.close(into)
        ours.settimeout(WITHIN)
        if slot in self.workers:
            self.workers[slot].close()
        self.workers[slot] = ours

    def spawn(self, slot: int = 0) -> WorkerStarted:
        self.ask_for(slot)
        return self.next(WorkerStarted, lambda event: event.slot == slot)

    def tell(self, code: str, slot: int = 0) -> None:
        self.workers[slot].send(code.encode())

    def ask(self, expression: str, slot: int = 0) -> Any:
        self.tell(f"answer = {expression}", slot)
        return eval(self.workers[slot].recv(65536).decode(), {})  # our own repr

    def close(self) -> None:
        self.pool.end()
        for sock in self.workers.values():
            sock.close()


def environment(**more: str) -> dict[str, str]:
    source = str(Path(guard.__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "zygote.py").write_text(ZYGOTE)
    (tmp_path / "node.py").write_text(NODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def open_pool(place: Path) -> Iterator[Callable[..., DrivenPool]]:
    driven: list[DrivenPool] = []

    def open_one(target: str = "shop:app", **more: str) -> DrivenPool:
        pool = Pool(target, env=environment(**more), node_title="/node[8]", zygote=["zygote.py"])
        driven.append(DrivenPool(pool))
        pool.start()
        return driven[-1]

    yield open_one
    for driven_pool in driven:
        driven_pool.close()
    linux.adopt_orphans(False)


@pytest.fixture
def driven_pool(open_pool: Callable[..., DrivenPool]) -> DrivenPool:
    driven_pool = open_pool()
    driven_pool.next(AppImported)
    return driven_pool


class NodeRun:
    """The node of NODE, in a process of its own."""

    def __init__(self, place: Path, **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "node.py"], cwd=place, env=environment(**more), stdout=subprocess.PIPE
        )

    def line(self) -> Any:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], WITHIN)
        assert ready, "the node is silent"
        return json.loads(self.process.stdout.readline())

    def until(self, kind: str) -> list[str]:
        seen: list[str] = []
        while not seen or seen[-1] != kind:
            seen.append(self.line()[0])
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def run_node(place: Path) -> Iterator[Callable[..., NodeRun]]:
    runs: list[NodeRun] = []

    def run(**more: str) -> NodeRun:
        runs.append(NodeRun(place, **more))
        return runs[-1]

    yield run
    for node in runs:
        node.close()


def watch(*pids: int) -> dict[int, int]:
    """A pidfd for each, so that no later process can be taken for them."""
    return {pid: os.pidfd_open(pid) for pid in pids}


def deaths(watched: dict[int, int], within: float) -> set[int]:
    """Those that are dead, at the latest after `within` seconds."""
    deadline = time.monotonic() + within
    dead = {
        pid
        for pid, pidfd in watched.items()
        if linux.ended(pidfd, max(0, deadline - time.monotonic()))
    }
    for pidfd in watched.values():
        os.close(pidfd)
    return dead


def everyone(pids: dict[str, Any]) -> list[int]:
    return [pids["guard"], pids["zygote"], *pids["workers"], *pids["strays"]]


def open_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


# The zygote


def test_the_zygote_says_hello_with_what_the_app_says(open_pool: Callable[..., DrivenPool]) -> None:
    hello = open_pool("shop").next(AppImported)

    assert hello.contents == {
        "url": "sqlite:///jobs.db",
        "namespace": "shop",
        "tasks": [],
        "threads": [],
        "loop": None,
    }


def test_a_hello_may_be_larger_than_a_packet(
    open_pool: Callable[..., DrivenPool], place: Path
) -> None:
    (place / "large.py").write_text(APP.replace("[]", "['x' * 3_000_000]"))

    hello = open_pool("large").next(AppImported)

    assert len(hello.contents["tasks"][0]) == 3_000_000


def test_threads_left_by_the_import_are_named(
    open_pool: Callable[..., DrivenPool], place: Path
) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()"
    (place / "threaded.py").write_text(thread + APP)

    assert open_pool("threaded").next(AppImported).contents["threads"] == ["poller"]


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("1 / 0", "broken:app", "cannot import broken:app: ZeroDivisionError: division by zero"),
        ("x = = 1", "broken", "cannot import broken: SyntaxError: invalid syntax"),
        ("import sys; sys.exit('no')", "broken", "cannot import broken: SystemExit: no"),
        ("import nothing_here", "broken", "ModuleNotFoundError: No module named 'nothing_here'"),
        ("", "broken", "cannot import broken: broken has no Genba app"),
        ("", "broken:app", "cannot import broken:app: broken has no 'app'"),
        ("app = 1", "broken:app", "broken.app is of type int, not a Genba app"),
        (APP + "other = App()", "broken", "name broken:app or broken:other"),
        (APP.replace("return", "raise OSError;"), "broken", "cannot import broken: OSError"),
    ],
)
def test_an_app_that_cannot_be_imported_is_explained(
    open_pool: Callable[..., DrivenPool], place: Path, source: str, target: str, text: str
) -> None:
    (place / "broken.py").write_text(source)
    driven_pool = open_pool(target)

    assert text in driven_pool.next(ImportFailed).message
    assert os.waitstatus_to_exitcode(driven_pool.next(ZygoteDied).status) == 3


def test_a_worker_is_a_clean_process_of_its_own(open_pool: Callable[..., DrivenPool]) -> None:
    driven_pool = open_pool(GENBA_INCARNATION="i-1")
    driven_pool.next(AppImported)
    worker = driven_pool.spawn(5)

    assert driven_pool.ask("os.getpid(), os.getpgrp(), slot", 5) == (worker.pid, worker.pid, 5)
    assert driven_pool.ask("signal.getsignal(signal.SIGTERM) is signal.SIG_DFL", 5)
    assert driven_pool.ask("signal.pthread_sigmask(signal.SIG_BLOCK, ())", 5) == set()
    assert driven_pool.ask("os.environ['GENBA_WORKER']", 5) == "1"
    # stdin, stdout, stderr, its three, and the one that lists.
    assert driven_pool.ask("len(os.listdir('/proc/self/fd'))", 5) == 7
    assert driven_pool.pool.zygote_pid
    assert title_of(driven_pool.pool.zygote_pid) == "genba-shop: /node[8]/zygote"
    assert title_of(worker.pid) == "genba-shop: /node[8]/worker[5]"
    assert b"GENBA_INCARNATION=i-1" in Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")


# How workers end


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("os._exit(3)", 3 << 8),
        ("sys.exit(4)", 4 << 8),
        ("os.kill(os.getpid(), 9)", 9),
        ("os.abort()", signal.SIGABRT),
        ("1 / 0", 1 << 8),
    ],
)
def test_the_end_of_a_worker_is_reported_with_what_it_used(
    driven_pool: DrivenPool, code: str, status: int
) -> None:
    worker = driven_pool.spawn()
    driven_pool.tell(
        f"import time\nwhile time.process_time() < 0.05: pass\nkept = b'x' * 50_000_000\n{code}"
    )

    ended = driven_pool.next(WorkerEnded)

    assert (ended.slot, ended.pid) == (0, worker.pid)
    assert ended.status is not None
    assert ended.status & ~0x80 == status  # without the flag for a core file
    assert 50_000 <= ended.cpu_micros < 5_000_000
    assert ended.peak_kb > 50_000


def test_a_worker_whose_socket_is_closed_returns(driven_pool: DrivenPool) -> None:
    driven_pool.spawn()
    driven_pool.workers[0].close()

    assert driven_pool.next(WorkerEnded).status == 0


def test_a_signal_reaches_a_worker_while_it_lives(driven_pool: DrivenPool) -> None:
    driven_pool.spawn()

    assert driven_pool.pool.signal(0, signal.SIGTERM)
    assert driven_pool.next(WorkerEnded).status == signal.SIGTERM
    assert not driven_pool.pool.signal(0, signal.SIGTERM)


def test_a_slot_has_one_worker(driven_pool: DrivenPool) -> None:
    driven_pool.spawn()

    with pytest.raises(ValueError, match="slot 0"):
        driven_pool.pool.spawn(0, driven_pool.workers[0], 0, 0)


def test_a_worker_comes_in_milliseconds_and_leaves_no_descriptor_behind(
    driven_pool: DrivenPool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driven_pool.pool.guard_pid
    assert driven_pool.pool.zygote_pid
    pids = (os.getpid(), driven_pool.pool.guard_pid, driven_pool.pool.zygote_pid)

    def cycle() -> float:
        asked = time.perf_counter()
        driven_pool.spawn()
        took = time.perf_counter() - asked
        driven_pool.workers.pop(0).close()
        driven_pool.next(WorkerEnded)
        driven_pool.pool.sweep(1)
        driven_pool.next(LeftoversSwept)
        return took

    cycle()
    before = [open_fds(pid) for pid in pids]
    times = sorted(cycle() for _ in range(200))

    assert [open_fds(pid) for pid in pids] == before
    with capsys.disabled():
        print(
            f"\nspawn: p50 {statistics.median(times) * 1e3:.2f} ms, p99 {times[197] * 1e3:.2f} ms"
        )


def test_many_workers_asked_for_at_once_all_come(driven_pool: DrivenPool) -> None:
    for slot in range(50):
        driven_pool.ask_for(slot)

    assert len({driven_pool.next(WorkerStarted).pid for _ in range(50)}) == 50


# Sweeping


def test_a_sweep_ends_what_a_dead_worker_left_and_spares_the_others(
    driven_pool: DrivenPool,
) -> None:
    driven_pool.spawn(0)
    driven_pool.spawn(1)
    strays = watch(driven_pool.ask("stray()", 0), driven_pool.ask("stray()", 0))
    spared = driven_pool.ask("stray()", 1)
    driven_pool.pool.signal(0, signal.SIGKILL)
    driven_pool.next(WorkerEnded)

    driven_pool.pool.sweep(77)
    swept = driven_pool.next(LeftoversSwept)

    assert (swept.token, swept.killed, swept.unkillable) == (77, 2, 0)
    assert deaths(strays, within=0) == set(strays)
    assert deaths(watch(spared), within=0) == set()
    assert driven_pool.ask("os.getpid()", 1)


def test_a_sweep_ends_deep_trees_and_those_that_keep_forking(driven_pool: DrivenPool) -> None:
    driven_pool.spawn()
    deep = driven_pool.ask(
        "stray(lambda: (os.fork() == 0 and (os.fork() == 0 and signal.pause(), signal.pause())))"
    )
    driven_pool.ask("[stray(hop) for _ in range(3)]")
    driven_pool.pool.signal(0, signal.SIGKILL)
    driven_pool.next(WorkerEnded)
    watched = watch(deep)

    driven_pool.pool.sweep(1)

    assert driven_pool.next(LeftoversSwept).killed > 4
    assert deaths(watched, within=0) == {deep}
    assert driven_pool.pool.guard_pid
    assert guard.children(driven_pool.pool.guard_pid) == [driven_pool.pool.zygote_pid]


def test_both_ways_to_list_children_agree(driven_pool: DrivenPool) -> None:
    for slot in range(3):
        driven_pool.spawn(slot)
    assert driven_pool.pool.zygote_pid

    assert len(guard.children(driven_pool.pool.zygote_pid)) == 3
    assert sorted(guard.children(driven_pool.pool.zygote_pid)) == sorted(
        guard.children_by_scan(driven_pool.pool.zygote_pid)
    )


# A dead zygote


def test_workers_outlive_the_zygote_and_a_new_one_joins_them(driven_pool: DrivenPool) -> None:
    old, second = driven_pool.spawn(0), driven_pool.spawn(1)
    assert driven_pool.pool.zygote_pid
    os.kill(driven_pool.pool.zygote_pid, signal.SIGKILL)

    assert driven_pool.next(ZygoteDied) == ZygoteDied(signal.SIGKILL, restarting=False)
    assert not driven_pool.pool.spawn(2, driven_pool.workers[0], 0, 0)
    driven_pool.pool.sweep(1)
    driven_pool.next(LeftoversSwept)
    assert driven_pool.ask("os.getpid()") == old.pid
    driven_pool.tell("os._exit(5)")
    assert driven_pool.next(WorkerEnded).status == 5 << 8

    driven_pool.pool.restart_zygote()
    driven_pool.next(AppImported)
    assert driven_pool.spawn(0).pid != old.pid
    assert driven_pool.ask("os.getpid()", 1) == second.pid
    driven_pool.pool.signal(1, signal.SIGKILL)
    ended = driven_pool.next(WorkerEnded)
    assert (ended.pid, ended.status) == (second.pid, signal.SIGKILL)


def test_a_living_zygote_can_be_replaced(driven_pool: DrivenPool, place: Path) -> None:
    worker = driven_pool.spawn(0)
    (place / "shop.py").write_text(APP.replace('"shop"', '"newer shop"'))

    driven_pool.pool.restart_zygote()

    assert driven_pool.next(ZygoteDied).restarting
    assert driven_pool.next(AppImported).contents["namespace"] == "newer shop"
    assert driven_pool.ask("os.getpid()") == worker.pid
    assert driven_pool.spawn(1).pid


def test_workers_that_a_dead_zygote_owed_are_reported(driven_pool: DrivenPool) -> None:
    assert driven_pool.pool.zygote_pid
    os.kill(driven_pool.pool.zygote_pid, signal.SIGSTOP)
    driven_pool.ask_for(3)
    driven_pool.ask_for(4)
    os.kill(driven_pool.pool.zygote_pid, signal.SIGKILL)

    assert driven_pool.next(SpawnFailed).slot == 3
    assert driven_pool.next(SpawnFailed).slot == 4
    driven_pool.next(ZygoteDied)
    driven_pool.pool.restart_zygote()
    driven_pool.next(AppImported)
    assert driven_pool.spawn(3).pid


def test_a_zygote_and_its_workers_killed_at_once_are_each_reported_once(
    driven_pool: DrivenPool,
) -> None:
    pids = [driven_pool.spawn(slot).pid for slot in range(8)]
    assert driven_pool.pool.zygote_pid
    for pid in [*pids[:4], driven_pool.pool.zygote_pid, *pids[4:]]:
        os.kill(pid, signal.SIGKILL)

    driven_pool.next(ZygoteDied)
    ended = [driven_pool.next(WorkerEnded) for _ in pids]
    driven_pool.pool.sweep(1)
    driven_pool.next(LeftoversSwept)

    assert sorted(event.pid for event in ended) == sorted(pids)
    assert {event.status for event in ended} <= {signal.SIGKILL, None}
    assert driven_pool.events == []


def test_a_zygote_that_does_not_read_is_killed_instead_of_waited_for(
    driven_pool: DrivenPool,
) -> None:
    assert driven_pool.pool.zygote_pid
    os.kill(driven_pool.pool.zygote_pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        slots = 0
        while driven_pool.pool.spawn(slots, theirs, theirs.fileno(), theirs.fileno()):
            slots += 1
            assert slots < 5000

    driven_pool.next(ZygoteDied)
    assert all(driven_pool.next(SpawnFailed).slot == slot for slot in range(slots))


# A dead guard, a dead node


def test_a_missed_beat_ends_everything(driven_pool: DrivenPool) -> None:
    worker = driven_pool.spawn()
    watched = watch(worker.pid, driven_pool.ask("stray()"))
    driven_pool.pool.beat(30)
    driven_pool.pool.beat(0.2)

    died = driven_pool.next(GuardDied)

    assert os.waitstatus_to_exitcode(died.status) == guard.MISSED_BEAT
    assert died.slots == (0,)
    assert deaths(watched, within=0) == set(watched)
    driven_pool.pool.start()
    driven_pool.next(AppImported)
    assert driven_pool.spawn().pid


def test_a_beat_can_be_taken_back(driven_pool: DrivenPool) -> None:
    driven_pool.pool.beat(0.3)
    driven_pool.pool.beat(0)
    select.select([], [], [], 0.6)  # what must not happen has no event to wait for

    assert driven_pool.pool.ready() == []
    assert driven_pool.spawn().pid


def test_the_guard_ignores_the_signals_of_a_terminal_and_a_service_manager(
    driven_pool: DrivenPool,
) -> None:
    assert driven_pool.pool.guard_pid
    assert driven_pool.pool.zygote_pid
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(driven_pool.pool.guard_pid, number)
        os.kill(driven_pool.pool.zygote_pid, number)

    assert driven_pool.spawn().pid


def test_end_leaves_nothing(driven_pool: DrivenPool) -> None:
    worker = driven_pool.spawn()
    assert driven_pool.pool.guard_pid
    assert driven_pool.pool.zygote_pid
    watched = watch(
        worker.pid,
        driven_pool.ask("stray()"),
        driven_pool.pool.guard_pid,
        driven_pool.pool.zygote_pid,
    )

    assert driven_pool.pool.end() == 0

    assert deaths(watched, within=0) == set(watched)
    assert driven_pool.pool.end() == 0


def test_a_stopped_guard_does_not_keep_the_node_from_ending(driven_pool: DrivenPool) -> None:
    worker = driven_pool.spawn()
    watched = watch(worker.pid)
    assert driven_pool.pool.guard_pid
    os.kill(driven_pool.pool.guard_pid, signal.SIGSTOP)

    assert driven_pool.pool.end(within=0.2) == 0

    assert deaths(watched, within=0) == {worker.pid}


def test_everything_ends_within_a_second_of_a_killed_node(run_node: Callable[..., NodeRun]) -> None:
    node = run_node()
    watched = watch(*everyone(node.line()))

    node.process.kill()

    assert deaths(watched, within=1) == set(watched)


def test_a_node_whose_guard_is_killed_ends_everything_and_can_start_again(
    run_node: Callable[..., NodeRun],
) -> None:
    node = run_node()
    pids = node.line()
    watched = watch(*everyone(pids))

    os.kill(pids["guard"], signal.SIGKILL)

    assert node.until("GuardDied") == ["GuardDied"]
    assert deaths(watched, within=0) == set(watched)
    assert node.line()["guard"] != pids["guard"]


def test_leftovers_of_a_node_and_a_guard_killed_at_once_are_found(
    run_node: Callable[..., NodeRun],
) -> None:
    dead, alive = str(uuid.uuid4()), str(uuid.uuid4())  # the search goes over the whole machine
    node = run_node(GENBA_INCARNATION=dead)
    other = run_node(GENBA_INCARNATION=alive)
    pids = node.line()
    spared = watch(*everyone(other.line()))
    strays = watch(*pids["strays"])
    node.process.send_signal(signal.SIGSTOP)
    os.kill(pids["guard"], signal.SIGKILL)
    node.process.kill()
    assert not any(linux.ended(pidfd) for pidfd in strays.values())

    assert end_leftovers({dead, "never-seen"}) >= len(strays)

    assert deaths(strays, within=1) == set(strays)
    assert deaths(spared, within=0) == set()
    assert end_leftovers({dead}) == 0


# The guard alone


@pytest.fixture
def bare_guard() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "/nowhere/python"]
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), guard.NODE_FD)]
    pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions)
    theirs.close()
    ours.settimeout(WITHIN)
    yield ours
    ours.close()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_worker_that_was_never_reaped_is_reported_gone(bare_guard: socket.socket) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()

    bare_guard.send(f"KNOW {gone.pid} 1".encode())

    assert bare_guard.recv(100) == f"GONE {gone.pid}".encode()


def test_a_python_that_cannot_be_started_is_reported(bare_guard: socket.socket) -> None:
    with open(os.devnull) as null:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", null.fileno()))]
        bare_guard.sendmsg([b"START"], rights)

    assert bare_guard.recv(100) == f"ZYGOTE_DIED 0 {127 << 8}".encode()


def test_a_sweep_waits_until_the_workers_of_a_dead_zygote_are_known(
    bare_guard: socket.socket,
) -> None:
    bare_guard.send(b"START")  # fails, without a descriptor
    bare_guard.send(b"SWEEP 1")
    assert bare_guard.recv(100).startswith(b"ZYGOTE_DIED")
    bare_guard.settimeout(0.2)
    with pytest.raises(TimeoutError):
        bare_guard.recv(100)

    bare_guard.settimeout(WITHIN)
    bare_guard.send(b"SETTLED")

    assert bare_guard.recv(100) == b"SWEPT 1 0 0"
