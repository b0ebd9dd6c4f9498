"""What was measured, in Markdown: on the terminal, and in docs/ with a chart."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from statistics import median

from beside.bars import judged
from beside.chart import Bar, chart
from beside.installing import BENCHMARKS
from beside.results import Results
from beside.services import SETTINGS, TITLES

PAGE = BENCHMARKS.parent / "docs" / "explanation" / "peers.md"
CHART = BENCHMARKS.parent / "docs" / "peers.svg"
BEGIN, END = "<!-- measured: from here on `make bench` writes -->", "<!-- measured: until here -->"
CHARTED = "drain, 2"
UNITS = {
    **dict.fromkeys(("pick-up p50", "pick-up p99", "half load p50", "half load p99"), "ms"),
    **dict.fromkeys(("steady load, left over", "steady load, dead rows at most"), "jobs"),
    **dict.fromkeys(
        ("steady load, memory in the beginning", "steady load, memory in the end"), "MB"
    ),
    "steady load, stored": "bytes a job",
    **dict.fromkeys(
        ("enqueue, of a bare commit", "enqueue, bulk, of a copy of the same rows"), "%"
    ),
    "idle node, of a core": "%",
    "idle node, supervisor": "MB",
}


def lines(results: Results) -> Iterator[str]:
    yield _about(results)
    yield from ("", "### The bars", "", "| bar | wanted | found | |", "|---|---|---|---|")
    for one in judged(results):
        yield f"| {one.bar} | {one.wanted} | {one.found} | {'met' if one.met else '**missed**'} |"
    for figure in [figure for figure, rounds in results.rounds.items() if rounds]:
        yield from ("", f"### {_heading(figure)}", "", *_table(results, figure))
    yield from (
        "",
        "### Versions and settings",
        "",
        "| | version | a job is run in | settings |",
        "|---|---|---|---|",
    )
    for title, (contender, version) in results.peers.items():
        yield f"| {title} | {version} | {contender.adapter.runs} | {contender.adapter.settings} |"
    yield ""
    yield "; ".join(f"{TITLES[on]}: {settings}" for on, settings in SETTINGS.items()) + "."
    for title, reason in results.absent.items():
        yield from ("", f"Not measured: {title}: {reason}")
    for fault in results.wrong:
        yield from ("", f"WRONG: {fault}")


def write(results: Results) -> None:
    """Between the marks of the page, and the chart."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text("\n".join([before + BEGIN, "", *lines(results), "", END + after]))
    bars = [
        _bar(title, values, title.startswith("genba"))
        for title, values in results.rounds[CHARTED].items()
    ]
    bars += [
        _bar(f"raw limit ({TITLES[on]})", values, False) for on, values in results.limits.items()
    ]
    below = f"jobs/s, 2 workers, backlog of {results.plan.backlog:,}; median and spread of {results.plan.rounds} rounds"
    CHART.write_text(chart("Drain of jobs that do nothing", below, bars))


def _bar(title: str, values: Sequence[float], ours: bool) -> Bar:
    return Bar(title, median(values), min(values), max(values), ours)


def _about(results: Results) -> str:
    plan, machine = results.plan, f"{os.cpu_count()} cores, Python {platform.python_version()}"
    rounds = f"{plan.rounds} round{'s' * (plan.rounds > 1)}"
    busy = f"load {results.load:.1f} before it began" + ": **others were at work**" * (
        results.load > 1
    )
    return f"{machine}, {busy}; {rounds} in {results.seconds / 60:.0f} minutes, a backlog of {plan.backlog:,}."


def _heading(figure: str) -> str:
    if figure.startswith("drain, "):
        count = figure.removeprefix("drain, ")
        return f"Drain, {count} worker{'s' * (count != '1')}"
    return {"enqueue": "Enqueue, one by one"}.get(figure, figure[0].upper() + figure[1:])


def _table(results: Results, figure: str) -> Iterator[str]:
    wait = UNITS.get(figure) == "ms"
    limited = figure.startswith("drain, ")
    rounds = results.rounds[figure]
    yield f"| | {UNITS.get(figure, 'jobs/s')} | spread | to genba |" + " to the limit |" * limited
    yield "|---|---:|---:|---:|" + "---:|" * limited
    for title in sorted(rounds, key=lambda one: median(rounds[one]), reverse=not wait):
        row = [title, *_value(rounds[title]), _ratio(results.to_ours(figure, title), "{:.2f}")]
        if limited:
            row.append(_ratio(results.to_limit(figure, title), "{:.0%}"))
        yield "| " + " | ".join(row) + " |"
    if limited:
        for on, values in results.limits.items():
            yield (
                "| "
                + " | ".join([f"raw limit ({TITLES[on]})", *_value(values), "–", "100%"])
                + " |"
            )


def _value(values: Sequence[float]) -> tuple[str, str]:
    return _number(median(values)), f"{_number(min(values))} – {_number(max(values))}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
