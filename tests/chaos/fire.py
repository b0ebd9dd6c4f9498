"""Real nodes at work, and what goes wrong with them, out of one seed; in the end nothing may be lost or doubled.

`EVERYWHERE` is what can happen on both engines, `Disk` and `Way` add what can happen to the one and the other.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg
from tests.chaos.network import Network, Proxy
from tests.support import NodeProcess, eventually, lines, load_module, without_settings
from tests.support.postgres_server import Server

from genba.errors import StoreError
from genba.node.processes.guard import children
from genba.storage.engines.sqlite.write_queue import WriteQueue

LEASE = 2.0
PAST = LEASE * 1.5
AHEAD = 100  # jobs that are left when something goes wrong: a tenth of a second of work, so that it hits some of them

APP = """
import os, time
from genba import Genba, current_job

app = Genba()

@app.task(max_crashes=1000)
def work(path: str, word: str, load: str = "") -> str:
    job = current_job()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"\\n{word} {job.id} {job.attempt} {os.getpid()} {job.fence}\\n".replace(", ", ",").encode())
    os.close(fd)
    time.sleep(0.004)
    return word
"""

PRODUCER = """
import os, sys
import fire
path, word = sys.argv[1:]
if fire.app.url.startswith("sqlite"):
    import apsw
    conn = apsw.Connection(fire.app.url.removeprefix("sqlite:///"))
    conn.set_busy_timeout(60_000)
    conn.execute("BEGIN IMMEDIATE")
else:
    import psycopg
    conn = psycopg.connect(fire.app.url)
job = fire.work.using(conn=conn, key="paused").enqueue(path, word)
print("inside", flush=True)
sys.stdin.readline()
conn.execute("COMMIT")
print("done" if job.created else "was there", flush=True)
"""


def load(url: str, folder: Path) -> Any:
    (folder / "fire.py").write_text(APP)
    return load_module("fire", folder, url, lease=LEASE)


Kind = Callable[["Fire"], bool]  # False: there is nothing to hit yet, try again


class Fire:
    def __init__(
        self,
        seed: int,
        app: Any,
        folder: Path,
        starts: Sequence[Callable[[], NodeProcess]],
        kinds: Mapping[str, Kind],
    ) -> None:
        self.random = random.Random(seed)
        self.app = app
        self.folder = folder
        self.hits: Counter[str] = Counter()
        self.refused = 0  # calls of ours that ended with an error
        self.span = PAST
        self._kinds = kinds
        self._starts = starts
        self._started: list[NodeProcess] = []
        self.nodes = [self._start(place) for place in range(len(starts))]
        self._effects = folder / "effects"
        self._promised: set[str] = set()
        self._named = 0
        self._ends: list[threading.Timer] = []
        self._outlived: set[str] = (
            set()
        )  # pids of workers of nodes that were stopped until they were declared dead
        eventually(lambda: len(app.app.nodes()) == len(starts), within=60)

    def _start(self, place: int) -> NodeProcess:
        self._started.append(self._starts[place]())
        return self._started[-1]

    def burn(self, jobs: int, faults: Sequence[str]) -> None:
        for turn, kind in enumerate(faults):
            self._tend()
            self.produce(jobs * (turn + 1) // len(faults) - len(self._promised))
            eventually(self._advanced, within=120, every=0.02)
            time.sleep(self.random.uniform(0, 0.02))  # any phase of what goes on
            eventually(lambda: self._kinds[kind](self), within=120, every=0.05)  # noqa: B023  asked at once
            self.hits[kind] += 1
        eventually(self._ended, within=180, every=0.1)
        eventually(self._drained, within=180, every=0.1)

    def _ended(self) -> bool:
        """Say whether all lasting faults are over; a node that rescues may have to be started for that."""
        self._tend()
        return not any(end.is_alive() for end in self._ends)

    def _advanced(self) -> bool:
        self._tend()
        ran = self._effects.read_bytes().count(b")\n") if self._effects.exists() else 0
        return ran >= len(self._promised) - AHEAD

    def _drained(self) -> bool:
        self._tend()
        with suppress(StoreError):
            return bool(self.app.app.count(state=["waiting", "scheduled", "running"]) == 0)
        return False

    def _tend(self) -> None:
        """Start nodes that have ended again, as a service manager does."""
        for place, node in enumerate(self.nodes):
            if node.ended:
                self.nodes[place] = self._start(place)

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        timer.name = "it ends"
        timer.start()
        self._ends.append(timer)

    def word(self) -> str:
        self._named += 1
        return str(self._named)

    def produce(self, count: int) -> None:
        """Enqueue until all are promised.

        A call that failed may have happened, so its jobs get other names the next time.
        """
        while count > 0 and not self.ask_for([self.word() for _ in range(count)]):
            time.sleep(0.05)

    def ask_for(self, words: Sequence[str], load: str = "") -> bool:
        try:
            self.app.app.enqueue_many(
                [self.app.work.call(str(self._effects), word, load) for word in words]
            )
        except StoreError:
            self.refused += 1
            return False
        self._promised.update(words)
        return True

    def pause_a_producer(self) -> None:
        """In the middle of its transaction, for a while; what it has promised then must come."""
        word = self.word()
        producer = Producer(self.app.app.url, self.folder, self._effects, word)
        if not producer.inside:  # something else has hit it before
            producer.end()
            return
        producer.pause()

        def go_on() -> None:
            if producer.end() == "done":
                self._promised.add(word)

        self.later(self.span, go_on)

    def outlive(self, node: NodeProcess) -> bool:
        """It is stopped until others have buried it; False if it had nothing to do just then, or was just writing."""
        pids = workers(node)
        _signal(signal.SIGSTOP, [node.pid])
        eventually(lambda: psutil.Process(node.pid).status() == psutil.STATUS_STOPPED)
        if self._writes(node) or not self._has_jobs(node):
            _signal(signal.SIGCONT, [node.pid])
            return False
        self._outlived.update(map(str, pids))

        def wake_up() -> None:
            try:
                eventually(
                    lambda: self._knows(lambda record: record.pid != node.pid),
                    within=120,
                    every=0.1,
                )
            finally:
                _signal(signal.SIGCONT, [node.pid])

        self.later(0, wake_up)
        return True

    def _writes(self, node: NodeProcess) -> bool:
        """Say whether it writes now; on SQLite no other process could while it is stopped."""
        url = self.app.app.url
        return (
            url.startswith("sqlite")
            and WriteQueue.of(Path(url.removeprefix("sqlite:///"))).holder() == node.pid
        )

    def _has_jobs(self, node: NodeProcess) -> bool:
        with suppress(StoreError):
            ids = {record.id for record in self.app.app.nodes() if record.pid == node.pid}
            return any(job.record.node in ids for job in self.app.app.jobs(state="running"))
        return False

    def _knows(self, what: Callable[[Any], bool]) -> bool:
        """Whether that is true of all living nodes."""
        with suppress(StoreError):
            return all(map(what, self.app.app.nodes()))
        return False

    def check(self) -> None:
        app = self.app.app
        assert app.count(state="any") == app.count(state="succeeded")
        assert app.verify().faults == []
        for node in self._started:
            assert not node.ended or node.tree() == [], "a dead node has left processes"
        # A process killed while it writes leaves half a line. Each starts with a newline, so only its own is lost.
        entries = [line for line in lines(self._effects) if line and line[-1].endswith(")")]
        missing = self._promised - {word for word, *_ in entries}
        assert not missing, f"promised, and never run: {missing}"
        fences = [fence for *_, fence in entries]
        assert len(fences) == len(set(fences)), "two runs have the same fence"
        runs: dict[tuple[str, str], list[int]] = defaultdict(list)
        for word, job, attempt, *_ in entries:
            runs[word, job].append(int(attempt))
        assert len(runs) == len({word for word, _ in runs}), "one request, two jobs"
        for (word, job), attempts in runs.items():
            if len(attempts) > 1:
                causes = {one.number: one.cause for one in app.job(int(job)).attempts}
                assert sorted(set(attempts)) == sorted(attempts), (
                    f"job {word}: one attempt, two runs"
                )
                assert causes[max(causes)] == "returned"
                repeated = [causes[n] for n in attempts if n != max(causes)]
                assert not {"returned", "exception"} & set(repeated), (
                    f"job {word} ran again without a reason: {causes}"
                )
        self._check_late_ends(entries)
        self.repeated = sum(len(attempts) > 1 for attempts in runs.values())

    def missed(self) -> list[str]:
        """Return what a run should contain and this one did not: on a busy machine a fault can miss."""
        situations = {
            "a node that wakes up with results of attempts it has lost": self.late,
            "a job that a fault made run again": self.repeated,
        }
        return [name for name, count in situations.items() if not count]

    def _check_late_ends(self, entries: Sequence[Sequence[str]]) -> None:
        """Of jobs that had returned below a node that was buried: it had their ends in its hands when it woke up."""
        late = [(job, int(attempt)) for _, job, attempt, pid, _ in entries if pid in self._outlived]
        causes = {
            (job, one.number): one.cause
            for job, _ in late
            for one in self.app.app.job(int(job)).attempts
        }
        self.late = sum(causes[one] != "returned" for one in late)
        for node in self._started:
            assert "refuses what this node writes" not in node.log, (
                "a late end was taken for a good one"
            )


class Producer:
    """A process with a transaction of its own, in which it has enqueued a job with a key; it commits on request."""

    def __init__(self, url: str, folder: Path, effects: Path, word: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRODUCER, str(effects), word],
            cwd=folder,
            env={**without_settings(os.environ), "GENBA_URL": url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.inside = self._process.stdout.readline() == "inside\n"

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> str:
        """It goes on, and commits; what it said then."""
        self._process.send_signal(signal.SIGCONT)
        said, _ = self._process.communicate("\n", timeout=120)
        return said.strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


# the processes of a node


def guard(node: NodeProcess) -> int | None:
    return next(iter(children(node.pid)), None)


def workers(node: NodeProcess) -> list[int]:
    """Return the pids of its workers, also after the death of the zygote."""
    parent = guard(node)
    return [pid for pid in _below(parent) if b"/worker[" in _title(pid)] if parent else []


def zygote(node: NodeProcess) -> int | None:
    """If it has come so far that there are workers."""
    parent = guard(node)
    found = [pid for pid in children(parent) if b"/worker[" not in _title(pid)] if parent else []
    return found[0] if found and workers(node) else None


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _workers(fire: Fire) -> list[int]:
    return [worker for node in fire.nodes for worker in workers(node)]


def _below(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (*_below(child), child)]


# what goes wrong


def _signal(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill(fire: Fire, found: Sequence[int]) -> bool:
    if found:
        _signal(signal.SIGKILL, [fire.random.choice(found)])
    return bool(found)


def kill_worker(fire: Fire) -> bool:
    return _kill(fire, _workers(fire))


def kill_zygote(fire: Fire) -> bool:
    return _kill(fire, [found for node in fire.nodes if (found := zygote(node))])


def kill_guard(fire: Fire) -> bool:
    return _kill(fire, [found for node in fire.nodes if workers(node) and (found := guard(node))])


def kill_node(fire: Fire) -> bool:
    node = fire.random.choice(fire.nodes)
    if not workers(node):
        return False
    node.kill9()
    return True


def kill_at_once(node: NodeProcess) -> None:
    """A node and its guard, so that neither can end what the other leaves."""
    both = [node.pid, *children(node.pid)]
    _signal(signal.SIGSTOP, both)
    eventually(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in both))
    _signal(signal.SIGKILL, both)
    node.wait()


def kill_node_and_guard(fire: Fire) -> bool:
    node = fire.random.choice(fire.nodes)
    if not workers(node):
        return False
    kill_at_once(node)
    return True


def _pause(fire: Fire, pids: Sequence[int]) -> bool:
    _signal(signal.SIGSTOP, pids)
    fire.later(fire.span, partial(_signal, signal.SIGCONT, pids))
    return bool(pids)


def pause_worker(fire: Fire) -> bool:
    found = _workers(fire)
    return bool(found) and _pause(fire, [fire.random.choice(found)])


def pause_node(fire: Fire) -> bool:
    """Its workers go on, until its guard ends them: when it wakes up it has results of what others run by then."""
    node = fire.random.choice(fire.nodes)
    return bool(workers(node)) and fire.outlive(node)


def freeze_node(fire: Fire) -> bool:
    """With all its processes, as a machine that sleeps; nothing ends anything."""
    node = fire.random.choice(fire.nodes)
    return bool(workers(node)) and _pause(fire, [*_below(node.pid), node.pid])


def pause_producer(fire: Fire) -> bool:
    fire.pause_a_producer()
    return True


EVERYWHERE: dict[str, Kind] = {
    "kill worker": kill_worker, "kill zygote": kill_zygote, "kill guard": kill_guard, "kill node": kill_node,
    "pause worker": pause_worker, "pause node": pause_node, "freeze node": freeze_node,
    "pause producer": pause_producer, "kill node and guard": kill_node_and_guard,
}  # fmt: skip
QUICK = ("kill worker", "kill worker", "kill zygote", "kill node")


class Disk:
    """A small disk, for a SQLite file; only root can have one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        self.full = False
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "genba-test", str(folder))

    def fill(self, fire: Fire) -> bool:
        """Until a write of ours is refused; then it is full for a second more."""
        if self.full:
            return False
        self.occupy()
        refused = fire.refused
        while fire.refused == refused:  # what is free inside of SQLite's files is used up first
            fire.ask_for([fire.word()], load="x" * 500_000)
        fire.later(1, self.free)
        return True

    def occupy(self) -> None:
        self.full = True
        with self._ballast.open("ab", buffering=0) as file:
            size = 1 << 20
            while size >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
                except OSError:
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink()
        self.full = False

    def close(self) -> None:
        _run("umount", "--lazy", str(self.folder))

    @property
    def kinds(self) -> dict[str, Kind]:
        return {"full disk": self.fill}


HANG_UP = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


class Way:
    """The way of one node to a PostgreSQL, and that itself."""

    def __init__(
        self, server: Server, proxy: Proxy, network: Network | None, outage: float
    ) -> None:
        self._server, self._proxy, self._network, self._outage = server, proxy, network, outage
        self._away = threading.Lock()

    def end_sessions(self, fire: Fire) -> bool:
        with (
            suppress(psycopg.OperationalError),
            psycopg.connect(self._server.url, autocommit=True) as conn,
        ):
            conn.execute(HANG_UP)
            return True
        return False

    def crash(self, fire: Fire) -> bool:
        return self._take_away(fire, 0)

    def outage(self, fire: Fire) -> bool:
        return self._take_away(fire, self._outage)

    def _take_away(self, fire: Fire, seconds: float) -> bool:
        if not self._away.acquire(blocking=False):
            return False
        command = self._server.crash()

        def come_back() -> None:
            self._server.start(command)
            self._away.release()

        fire.later(seconds, come_back)
        return True

    def stall(self, fire: Fire) -> bool:
        self._proxy.stall()
        fire.later(fire.span, self._proxy.flow)
        return True

    def cut(self, fire: Fire) -> bool:
        assert self._network is not None
        self._network.cut()
        fire.later(fire.span, self._network.heal)
        return True

    @property
    def kinds(self) -> dict[str, Kind]:
        found: dict[str, Kind] = {
            "end sessions": self.end_sessions, "crash": self.crash, "outage": self.outage, "stall": self.stall,
        }  # fmt: skip
        return {**found, "cut": self.cut} if self._network else found


def plan(seed: int, kinds: Sequence[str], faults: int) -> list[str]:
    """Each kind once, and then what costs no waiting, in any order."""
    chance = random.Random(seed)
    more = [chance.choice(QUICK) for _ in range(faults - len(kinds))]
    order = [*kinds, *more]
    chance.shuffle(order)
    return order


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)
