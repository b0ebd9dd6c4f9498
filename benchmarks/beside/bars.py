"""The bars: what genba is to reach beside the peers and the limits of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from beside.results import Results

POSTGRES, SQLITE = "genba (PostgreSQL)", "genba (SQLite)"
LEAST = {"enqueue, of a bare commit": 85, "enqueue, bulk, of a copy of the same rows": 50}  # %
MOST = {
    "pick-up p50": (4, "ms"),
    "pick-up p99": (12, "ms"),
    "idle node, of a core": (0.5, "%"),
    "idle node, supervisor": (60, "MB"),
}


class Judged(NamedTuple):
    bar: str
    wanted: str
    found: str
    met: bool


def judged(results: Results) -> Iterator[Judged]:
    """Those for which the run has figures."""
    drains = {title: median(values) for title, values in results.rounds["drain, 2"].items()}
    peers = {
        title: rate for title, rate in drains.items() if not results.peers[title][0].adapter.is_ours
    }
    if POSTGRES in drains:
        ours = drains[POSTGRES]
        yield from _times("drain on PostgreSQL, to the fastest peer", ours, peers, 1.1)
        python = {
            title: rate
            for title, rate in peers.items()
            if results.peers[title][0].adapter.file.suffix == ".py"
        }
        yield from _times("drain on PostgreSQL, to the fastest peer in Python", ours, python, 2.0)
        yield _share(
            "drain on PostgreSQL, to the raw limit", ours / median(results.limits["postgres"]), 0.45
        )
    if SQLITE in drains:
        ours = drains[SQLITE]
        huey = {title: rate for title, rate in peers.items() if title == "Huey (SQLite)"}
        yield from _times("drain on SQLite, to Huey", ours, huey, 15.0)
        yield _share(
            "drain on SQLite, to the raw limit", ours / median(results.limits["sqlite"]), 0.35
        )
    for figure, wanted in LEAST.items():
        for title, found in _medians(results, figure):
            yield Judged(f"{figure}, {title}", f"≥ {wanted:g} %", f"{found:.0f} %", found >= wanted)
    for figure, (most, unit) in MOST.items():
        for title, found in _medians(results, figure):
            yield Judged(
                f"{figure}, {title}", f"≤ {most:g} {unit}", f"{found:.2g} {unit}", found <= most
            )
    forks = {
        title: median(values) for title, values in results.rounds["a process for each job"].items()
    }
    for title in (SQLITE, POSTGRES):
        if title in forks:
            rq = {name: rate for name, rate in forks.items() if name.startswith("RQ")}
            yield from _times(f"a process for each job, {title}, to RQ", forks[title], rq, 5.0)
    few = dict(_medians(results, "drain over 10,000"))
    for backlog in ("1,000,000", "5,000,000"):
        for title, rate in _medians(results, f"drain over {backlog}"):
            if title in few:
                yield _share(f"drain over {backlog}, to 10,000, {title}", rate / few[title], 0.85)


def _medians(results: Results, figure: str) -> Iterator[tuple[str, float]]:
    """Of ours."""
    for title in (SQLITE, POSTGRES):
        if values := results.rounds[figure].get(title):
            yield title, median(values)


def _times(name: str, ours: float, peers: dict[str, float], wanted: float) -> Iterator[Judged]:
    if peers:
        best = max(peers, key=lambda title: peers[title])
        found = ours / peers[best]
        who = f", {best}" if len(peers) > 1 else ""
        yield Judged(f"{name}{who}", f"≥ {wanted:g} ×", f"{found:.2f} ×", found >= wanted)


def _share(name: str, found: float, wanted: float) -> Judged:
    return Judged(name, f"≥ {wanted:.0%}", f"{found:.0%}", found >= wanted)
