"""The guard of the speed: has the drain become slower, beside the limit of the same minute?

    .venv/bin/python benchmarks/guard.py             fails if a ratio is a third below the one in guard.json
    .venv/bin/python benchmarks/guard.py --verbose   says each round

A node with two workers stands by; a round is the raw limit on a bare table, then jobs that appear all at once and are
drained.  Both meet the same load, but not alike: beside a dozen busy processes the ratio doubles, since the limit is
one process and genba several that are given time; beside a single one it falls, since then the limit still has a core
and genba no longer two.  So the guard sees less on a loaded machine, and must never fail there: what is recorded is low
for a quiet one, and an engine fails only if the median of five rounds is too low three times in a row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from measure.databases import Databases, postgres_databases, sqlite_databases
from measure.limits import Raw, raw
from measure.node import Node, started
from measure.tasks import app, number

RECORDED = Path(__file__).with_name("guard.json")
JOBS = 4_000
ROUNDS = 5
TRIES = 3
FALLEN = 2 / 3  # of what is recorded
WITHIN = 30.0  # seconds for a drain, which takes a quarter of one


class Drains:
    """A node that stands by, and a bare table beside it."""

    def __init__(self, node: Node, ours: Raw, bare: Raw) -> None:
        self._node, self._ours, self._bare = node, ours, bare
        self._given = 0

    def round(self) -> tuple[float, float]:
        """Jobs a second: the limit's, and ours."""
        return self._bare.drain(JOBS), self._drain()

    def _drain(self) -> float:
        jobs = app.enqueue_many([number.call(n) for n in range(JOBS)])
        began = time.perf_counter()
        self._given += JOBS
        last = jobs[-1].id
        while not (self._ours.is_final(last) and self._ours.finished() >= self._given):
            self._node.must_live()
            if time.perf_counter() - began > WITHIN:
                raise SystemExit(f"{self._ours.finished()} of {self._given} jobs in {WITHIN:g} s")
            time.sleep(0.005)
        return JOBS / (time.perf_counter() - began)


@contextmanager
def drains(fresh: Databases) -> Iterator[Drains]:
    with fresh() as url, fresh() as other:
        app.settings = replace(app.settings, url=url, namespace="guard")
        try:
            app.install()
            with raw(url) as ours, raw(other) as bare, started(2) as node:
                node.join()
                yield Drains(node, ours, bare)
                if ours.waiting() or node.left_behind:
                    raise SystemExit(f"{ours.waiting()} jobs are still waiting")
        finally:
            app.close()


def guard(engine: str, fresh: Databases, recorded: float, verbose: bool) -> bool:
    """Whether one of the tries reaches what must be reached."""
    least = recorded * FALLEN
    with drains(fresh) as place:
        place.round()  # connections, statements and caches are made
        for _ in range(TRIES):
            rounds = [place.round() for _ in range(ROUNDS)]
            ratio = median(ours / limit for limit, ours in rounds)
            print(
                f"{engine:9} drain {median(ours for _, ours in rounds):>7,.0f}/s, {ratio:4.0%} of the limit "
                f"({median(limit for limit, _ in rounds):,.0f}/s); recorded {recorded:.0%}, at least {least:.0%}",
                flush=True,
            )
            if verbose:
                print(
                    "          " + " ".join(f"{ours:,.0f}/{limit:,.0f}" for limit, ours in rounds),
                    flush=True,
                )
            if ratio >= least:
                return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    recorded = json.loads(RECORDED.read_text())
    places = {"sqlite": sqlite_databases, "postgres": postgres_databases}
    fallen = []
    for engine, place in places.items():
        with place() as fresh:
            if not guard(engine, fresh, recorded[engine], asked.verbose):
                fallen.append(engine)
    for engine in fallen:
        print(
            f"the drain on {engine} has become slower by more than a third: see docs/explanation/speed.md"
        )
    return 1 if fallen else 0


if __name__ == "__main__":
    sys.exit(main())
