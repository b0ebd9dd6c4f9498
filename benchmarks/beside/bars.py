"""The bars: what genba is to reach beside the peers and the limits of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from beside.results import Results

POSTGRES, SQLITE = "genba (PostgreSQL)", "genba (SQLite)"


class Judged(NamedTuple):
    bar: str
    wanted: str
    found: str
    met: bool


def judged(results: Results) -> Iterator[Judged]:
    """Those for which the run has figures."""
    drains = {title: median(values) for title, values in results.rounds["drain, 2"].items()}
    peers = {title: rate for title, rate in drains.items() if not results.peers[title][0].adapter.is_ours}
    if POSTGRES in drains:
        ours = drains[POSTGRES]
        yield from _times("drain on PostgreSQL, to the fastest peer", ours, peers, 1.1)
        python = {title: rate for title, rate in peers.items() if results.peers[title][0].adapter.file.suffix == ".py"}
        yield from _times("drain on PostgreSQL, to the fastest peer in Python", ours, python, 2.0)
        yield _share("drain on PostgreSQL, to the raw limit", ours / median(results.limits["postgres"]), 0.45)
    if SQLITE in drains:
        ours = drains[SQLITE]
        huey = {title: rate for title, rate in peers.items() if title == "Huey (SQLite)"}
        yield from _times("drain on SQLite, to Huey", ours, huey, 15.0)
        yield _share("drain on SQLite, to the raw limit", ours / median(results.limits["sqlite"]), 0.35)
    for figure, most in (("pick-up p50", 4.0), ("pick-up p99", 12.0)):
        for title in (SQLITE, POSTGRES):
            if values := results.rounds[figure].get(title):
                found = median(values)
                yield Judged(f"{figure}, {title}", f"≤ {most:g} ms", f"{found:.1f} ms", found <= most)


def _times(name: str, ours: float, peers: dict[str, float], wanted: float) -> Iterator[Judged]:
    if peers:
        best = max(peers, key=lambda title: peers[title])
        found = ours / peers[best]
        who = f", {best}" if len(peers) > 1 else ""
        yield Judged(f"{name}{who}", f"≥ {wanted:g} ×", f"{found:.2f} ×", found >= wanted)


def _share(name: str, found: float, wanted: float) -> Judged:
    return Judged(name, f"≥ {wanted:.0%}", f"{found:.0%}", found >= wanted)
