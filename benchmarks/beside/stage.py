"""One measurement of one peer: an empty place, its side of the conversation, its workers, the marks of its jobs."""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from beside.installing import BENCHMARKS, Adapter, Unavailable
from beside.services import TITLES, Services

LOOK = 0.005  # seconds between two looks at the marks
MANY = 1 << 16  # bytes
START_WITHIN = 60.0
END_WITHIN = 10.0
FILLERS, FEW = (
    4,
    500,
)  # processes that enqueue a backlog one by one, and what is not worth a second one
PREFETCHED = 2_000  # jobs that a peer may have taken from its store and not yet run


class Contender(NamedTuple):
    """A peer on one database or broker."""

    adapter: Adapter
    on: str

    @property
    def title(self) -> str:
        return f"{self.adapter.title} ({TITLES[self.on]})"


class Wrong(Exception):
    """Jobs did not run, or not all of them: this measurement is void."""


class Drained(NamedTuple):
    """From the first job's mark to the moment when the peer's own store had no job left, or until time was up."""

    rate: float
    whole: bool


class Stage:
    def __init__(self, contender: Contender, folder: Path, env: dict[str, str]) -> None:
        self._contender, self._folder, self._env = contender, folder, env
        self._marks = Path(env["BENCH_MARKS"])
        self._sides: list[subprocess.Popen[str]] = []
        self._workers: list[subprocess.Popen[bytes]] = []

    def ask(self, what: str, **asked: Any) -> dict[str, Any]:
        return self.asked_all(1, what, [asked])[0]

    def asked_all(self, count: int, what: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same of several processes at once."""
        while len(self._sides) < count:
            self._sides.append(self._side())
        for side, one in zip(self._sides, asked, strict=False):
            assert side.stdin
            try:
                side.stdin.write(json.dumps({"do": what, **one}) + "\n")
                side.stdin.flush()
            except BrokenPipeError:
                raise Unavailable(self._last_words("side")) from None
        return [self._answer(side) for side, _ in zip(self._sides, asked, strict=False)]

    def _side(self) -> subprocess.Popen[str]:
        with (self._folder / "side.log").open("a") as log:
            return subprocess.Popen(
                self._contender.adapter.side,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=_end_with_parent,
            )

    def _answer(self, side: subprocess.Popen[str]) -> dict[str, Any]:
        assert side.stdout
        line = side.stdout.readline()
        if not line:
            raise Unavailable(self._last_words("side"))
        return dict(json.loads(line))

    def _last_words(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        told = [line for line in lines if "Error" in line] or lines or ["it ended and said nothing"]
        return f"{name}: {told[-1].strip()[:200]}"

    def fill(self, count: int, first: int = 0, size: int = 0) -> float | None:
        """The seconds that it took in bulk; who cannot do that has several processes for it, and gets no figure."""
        made = self.ask("many", first=first, count=count, size=size)
        if made["bulk"]:
            return float(made["seconds"])
        each = max(-(-count // FILLERS), FEW)
        parts = [
            {"first": at, "count": min(each, first + count - at), "size": size}
            for at in range(first, first + count, each)
        ]
        self.asked_all(len(parts), "singly", parts)
        return None

    def settle(self) -> None:
        """No plan is to be made for an empty table, and no drain to wait until its backlog is on the disk."""
        if self._contender.on == "postgres":
            with psycopg.connect(self._env["BENCH_URL"], autocommit=True) as conn:
                conn.execute("VACUUM ANALYZE")
                conn.execute("CHECKPOINT")
        os.sync()

    def start(self, workers: int, how: str = "workers") -> None:
        """`how` is the question that gives the commands."""
        with (self._folder / "workers.log").open("ab") as log:
            for command in self.ask(how, count=workers)["commands"]:
                self._workers.append(
                    subprocess.Popen(
                        command,
                        cwd=self._folder,
                        env=self._env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        preexec_fn=_end_with_parent,
                    )
                )

    @property
    def url(self) -> str:
        return self._env["BENCH_URL"]

    @property
    def pids(self) -> list[int]:
        """Of the workers that were started; they may have children."""
        return [one.pid for one in self._workers]

    def marks(self) -> array.array[int]:
        """When each job ran, in ns; 0 for one that did not yet."""
        found = array.array("q")
        found.frombytes(self._marks.read_bytes())
        return found

    def wait_for(self, jobs: int, within: float) -> int:
        """How many of the first `jobs` have run, when all have or time is up."""
        deadline = time.monotonic() + within
        first = (
            0  # that has not run: each mark is read about once, to take no time from whom we watch
        )
        with self._marks.open("rb", buffering=0) as file:
            while time.monotonic() < deadline:
                while first < jobs:
                    file.seek(8 * first)
                    found = array.array("q", file.read(min(MANY, 8 * (jobs - first))))
                    first += found.index(0) if 0 in found else len(found)
                    if 0 in found:
                        break
                if first == jobs:
                    return jobs
                if self._workers and all(one.poll() is not None for one in self._workers):
                    raise Unavailable(self._last_words("workers"))
                time.sleep(LOOK)
        return jobs - self.marks()[:jobs].count(0)

    def _begun(self) -> bool:
        """A job has run; it is one of the first that were enqueued."""
        with self._marks.open("rb") as file:
            return bool(file.read(16 * MANY).strip(b"\0"))

    def drain(self, jobs: int, within: float) -> Drained:
        """For `jobs` that were enqueued before, by workers that have just been started."""
        deadline = time.monotonic() + START_WITHIN
        while not self._begun():
            if time.monotonic() > deadline or all(one.poll() is not None for one in self._workers):
                raise Unavailable(
                    f"no job ran in {START_WITHIN:g} s; {self._last_words('workers')}"
                )
            time.sleep(LOOK)
        if self.wait_for(jobs, within) < jobs:
            left = self.ask("left")["left"]
            marks = [mark for mark in self.marks()[:jobs] if mark]
            if jobs - left > len(marks) + PREFETCHED:
                raise Wrong(
                    f"{len(marks)} of {jobs} jobs have run, and it says that {left} are left"
                )
            return Drained((len(marks) - 1) / ((max(marks) - min(marks)) / 1e9), False)
        deadline = time.monotonic() + START_WITHIN
        while left := self.ask("left")["left"]:
            if time.monotonic() > deadline:
                raise Wrong(f"all {jobs} jobs have run, and it says that {left} are left")
            time.sleep(0.005)
        drained = Drained(jobs / ((time.time_ns() - min(self.marks()[:jobs])) / 1e9), True)
        if fault := self.ask("verify", jobs=jobs)["fault"]:
            raise Wrong(fault)
        return drained

    def end(self) -> None:
        for one in self._workers:
            one.terminate()
        deadline = time.monotonic() + END_WITHIN
        for one in self._workers:
            with suppress(subprocess.TimeoutExpired):
                one.wait(max(0.1, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # and what it has left behind
            one.wait()
        for side in self._sides:
            assert side.stdin
            if side is self._sides[0] and side.poll() is None:
                self.ask("clean")
            side.stdin.close()
            try:
                side.wait(END_WITHIN)
            except subprocess.TimeoutExpired:
                side.kill()
                side.wait()


@contextmanager
def _memory() -> Iterator[Path]:
    """A file that is on no disk: a mark should cost nobody more than it must."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="genba-marks-", dir=place) as name:
        yield Path(name) / "marks"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def stage(
    contender: Contender, services: Services, *, slots: int, workers: int, work: str = "nothing"
) -> Iterator[Stage]:
    """An empty place, prepared, for jobs 0 to `slots`."""
    fresh = services.fresh(contender.on)
    with (
        fresh() as url,
        tempfile.TemporaryDirectory(prefix="genba-peer-") as name,
        _memory() as marks,
    ):
        folder = Path(name)
        marks.write_bytes(bytes(8 * slots))
        env = {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(("GENBA_", "PG"))
            },
            "PYTHONPATH": str(BENCHMARKS),
            "PYTHONWARNINGS": "ignore",
            "BENCH_URL": url,
            "BENCH_ON": contender.on,
            "BENCH_FOLDER": name,
            "BENCH_MARKS": str(marks),
            "BENCH_WORKERS": str(workers),
            "BENCH_WORK": work,
        }
        made = Stage(contender, folder, env)
        try:
            made.ask("prepare")
            yield made
        finally:
            made.end()
