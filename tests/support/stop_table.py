"""Every stubborn job × every way to stop it: how long that takes, what is left of it, what it is said to have died of.

`python -m tests.support.stop_table` measures it on both engines and writes the table
into docs/explanation/processes.md.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT, Databases, NodeProcess, eventually, lines, load_app, sqlite_url

DOCUMENT = ROOT / "docs" / "explanation" / "processes.md"
BEGIN, END = "<!-- stop table: python -m tests.support.stop_table -->", "<!-- end of stop table -->"

JOBS: Mapping[str, str] = {
    "sleep": "`time.sleep(1e6)`",
    "busy_loop": "`while True: pass`",
    "blocking_c_call": "blocking C call that keeps the GIL",
    "sigterm_ignored": "SIGTERM ignored",
    "setsid_grandchild": "double fork, deaf grandchild in its own session",
    "ten_threads": "10 threads",
}


@dataclass(frozen=True)
class Way:
    title: str
    bound: float  # seconds until nothing of it runs any more
    cause: str
    states: tuple[str, ...]
    crashes: int = 0


TIMEOUT, GRACE, DRAIN_GRACE = 2.0, 0.4, 1.0

WAYS: Mapping[str, Way] = {
    "timeout": Way("timeout 2 s, grace 0.4 s", TIMEOUT + GRACE + 1, "timeout", ("timed_out",)),
    "cancel": Way("cancel, grace 0.4 s", GRACE + 1, "cancelled", ("cancelled",)),
    "kill": Way("kill", 1.0, "killed", ("cancelled",)),
    "node SIGKILL": Way(
        "SIGKILL of the node", 1.0, "node lost", ("scheduled", "waiting"), crashes=1
    ),
    "drain": Way("drain, grace 1 s", DRAIN_GRACE + 2, "drain", ("waiting",)),
}


@dataclass(frozen=True)
class Cell:
    took: float
    left: tuple[str, ...]  # of its processes and threads, when it was over
    cause: str
    state: str
    crashes: int
    retries: int


@dataclass(frozen=True)
class _Patient:
    """One running job, with a handle on each of its processes; the worker's is the first."""

    job: Any
    name: str
    way: str
    pids: tuple[int, ...]
    handles: tuple[int, ...]

    def living(self) -> list[int]:
        return [
            pid for pid, handle in zip(self.pids, self.handles, strict=True) if not _over(handle)
        ]

    def left(self) -> tuple[str, ...]:
        """A worker that runs nothing may stay, if no thread of the job is left in it."""
        worker = self.pids[0]
        found = [f"process {pid}" for pid in self.living() if pid != worker]
        if not _over(self.handles[0]):
            threads = len(os.listdir(f"/proc/{worker}/task"))
            found += [f"{threads - 1} threads"] if threads > 1 else []
        return tuple(found)


def _over(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])


class Ward:
    """Three nodes: one stays, one is killed, one drains."""

    def __init__(self, url: str, folder: Path) -> None:
        self._module = load_app("hard_to_stop", url, folder)
        self.app = self._module.app
        self._reports = folder / "reports"
        many = ["--max", str(len(JOBS) * 3)]
        settings = {"stays": many, "dies": many, "drains": [*many, "--grace", f"{DRAIN_GRACE}s"]}
        self.nodes = {
            name: NodeProcess.start(
                "hard_to_stop:app", url, "--name", name, "-q", name, *more, cwd=folder
            )
            for name, more in settings.items()
        }
        eventually(lambda: len(self.app.nodes()) == len(self.nodes), within=30)

    def close(self) -> None:
        for node in self.nodes.values():
            node.end()
            sys.stdout.write(node.log)
        self.app.close()

    def admit(self, way: str, queue: str, **options: Any) -> list[Any]:
        calls = [
            getattr(self._module, name).using(queue=queue, tags=[way, name], **options)
            for name in JOBS
        ]
        return list(self.app.enqueue_many([call.call(str(self._reports)) for call in calls]))

    def patients(self, jobs: list[Any]) -> list[_Patient]:
        """When all of them run, and are as stubborn as they get."""
        pids_of: dict[int, tuple[int, ...]] = {}

        def all_have_reported() -> bool:
            pids_of.update({int(id): tuple(map(int, pids)) for id, *pids in lines(self._reports)})
            return all(job.id in pids_of for job in jobs)

        eventually(all_have_reported, within=30)
        return [self._patient(job, pids_of[job.id]) for job in jobs]

    def _patient(self, job: Any, pids: tuple[int, ...]) -> _Patient:
        way, name = job.refresh().tags
        return _Patient(job, name, way, pids, tuple(map(os.pidfd_open, pids)))


def run(url: str, folder: Path) -> dict[tuple[str, str], Cell]:
    """All cells, on one database; `folder` is for files."""
    ward = Ward(url, folder)
    with ExitStack() as stack:
        stack.callback(ward.close)
        cancelled = ward.admit("cancel", "stays", grace=GRACE)
        killed = ward.admit("kill", "stays", grace=60)
        lost = ward.admit("node SIGKILL", "dies")
        drained = ward.admit("drain", "drains")
        patients = ward.patients([*cancelled, *killed, *lost, *drained])
        late = ward.patients(ward.admit("timeout", "stays", timeout=TIMEOUT, grace=GRACE))
        for patient in (*patients, *late):
            for handle in patient.handles:
                stack.callback(os.close, handle)
        ways = {
            way: [patient for patient in (*patients, *late) if patient.way == way] for way in WAYS
        }
        cells = _cells(ways["cancel"], lambda patient: patient.job.cancel())
        cells |= _cells(ways["kill"], lambda patient: patient.job.kill())
        cells |= _cells(ways["timeout"])
        # Their starts are on record by now, so that to be lost counts as a crash.
        cells |= _without_node(ways["node SIGKILL"], ward.nodes["dies"], signal.SIGKILL)
        cells |= _without_node(ways["drain"], ward.nodes["drains"], signal.SIGTERM)
    return cells


def _cells(
    patients: list[_Patient], stop: Callable[[_Patient], object] | None = None
) -> dict[tuple[str, str], Cell]:
    """Measure jobs of a living node: they are over when the store says so."""
    begun: dict[int, float] = {}
    for patient in patients:
        begun[patient.job.id] = time.monotonic()
        if stop is not None:
            stop(patient)
    cells: dict[tuple[str, str], Cell] = {}

    def look() -> bool:
        for patient in patients:
            where = patient.name, patient.way
            if where not in cells and patient.job.refresh().state != "running":
                took = time.monotonic() - begun[patient.job.id]
                attempt = patient.job.attempts[-1]
                if stop is None:
                    took = (attempt.ended - attempt.started).total_seconds()
                cells[where] = _cell(patient, took, patient.left())
        return len(cells) == len(patients)

    eventually(look, within=30)
    return cells


def _without_node(
    patients: list[_Patient], node: NodeProcess, number: int
) -> dict[tuple[str, str], Cell]:
    """Measure jobs of a node that ends: they are over when their processes are gone."""
    begun = time.monotonic()
    node.signal(number)
    took: dict[str, float] = {}

    def look() -> bool:
        took.update(
            {
                p.name: time.monotonic() - begun
                for p in patients
                if p.name not in took and not p.living()
            }
        )
        return len(took) == len(patients)

    eventually(look, within=30, every=0.002)
    node.wait()
    eventually(lambda: not node.tree(), within=2)  # the guard is the last
    eventually(
        lambda: all(patient.job.refresh().state != "running" for patient in patients), within=30
    )
    return {(p.name, p.way): _cell(p, took[p.name], ()) for p in patients}


def _cell(patient: _Patient, took: float, left: tuple[str, ...]) -> Cell:
    job = patient.job
    return Cell(took, left, job.attempts[-1].cause, job.state.value, job.crashes, job.retries)


# the table in the document


def table(engines: Mapping[str, Mapping[tuple[str, str], Cell]]) -> str:
    rows = [["", *(way.title for way in WAYS.values())], ["---"] * (len(WAYS) + 1)]
    rows.append(["*at most*", *(f"*{way.bound:.1f} s*" for way in WAYS.values())])
    for name, title in JOBS.items():
        took = [[cells[name, way].took for cells in engines.values()] for way in WAYS]
        rows.append(
            [title, *(" / ".join(f"{seconds:.2f}" for seconds in each) + " s" for each in took)]
        )
    rows.append(["*cause*", *(f"*{way.cause}*" for way in WAYS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def documented() -> list[list[str]]:
    """The rows of the table in the document, as words."""
    found = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", DOCUMENT.read_text(), re.DOTALL)
    assert found, f"{DOCUMENT} has no stop table"
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in found[1].split("\n")
        if line
    ]


def write(text: str) -> None:
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def faults(name: str, way: str, cell: Cell, slack: float = 0.0) -> list[str]:
    """What is not as promised."""
    promised = WAYS[way]
    pids_of = []
    if cell.took > promised.bound + slack:
        pids_of.append(f"took {cell.took:.2f} s, not {promised.bound:.1f} s at most")
    if cell.left:
        pids_of.append(f"left {', '.join(cell.left)}")
    if cell.cause != promised.cause or cell.state not in promised.states:
        pids_of.append(
            f"{cell.state} by {cell.cause}, not {promised.states[0]} by {promised.cause}"
        )
    if (cell.crashes, cell.retries) != (promised.crashes, 0):
        pids_of.append(f"counted {cell.crashes} crashes and {cell.retries} retries")
    return [f"{name} × {way}: {fault}" for fault in pids_of]


@contextmanager
def _databases() -> Iterator[dict[str, tuple[str, Path]]]:
    from tests.support.postgres_server import own_server

    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        databases = Databases(stack.enter_context(own_server(durable=False)))
        postgres = databases.url(stack.enter_context(databases.fresh()))
        yield {"SQLite": (sqlite_url(folders[0]), folders[0]), "PostgreSQL": (postgres, folders[1])}


def main() -> int:
    with _databases() as databases:
        engines = {engine: run(url, folder) for engine, (url, folder) in databases.items()}
    wrong = [
        f"{engine}, {fault}"
        for engine, cells in engines.items()
        for where, cell in cells.items()
        for fault in faults(*where, cell)
    ]
    write(table(engines))
    print(table(engines))
    print("\n".join(wrong) or "all as promised")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
