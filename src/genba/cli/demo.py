"""`genba demo`: a node at work, on a temporary database."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from genba.cli.child_node import ChildNode, signals_as_exceptions, signals_blocked
from genba.cli.output import (
    Invocation,
    clean,
    common_options,
    note,
    pass_invocation,
    say,
    say_json,
    table,
)
from genba.domain.states import FINAL, State

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from genba.cli.demo_app import Case
    from genba.client.app import Genba
    from genba.client.job import Job

DEADLINE_SECONDS = 22.0  # seconds; the longest job takes 6
LOOK_EVERY_SECONDS = 0.1

TARGET = "genba.cli.demo_app:app"
_WIDE = 110  # columns
_COLOURS: Mapping[str, str] = {
    "blocked": "dim",
    "scheduled": "cyan",
    "waiting": "blue",
    "running": "bold yellow",
    "held": "magenta",
    "succeeded": "green",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "magenta",
}


@click.command()
@common_options
@pass_invocation
def demo(invocation: Invocation) -> int:
    """Watch a node run jobs that work, fail, crash, hang and are cancelled.

    It takes about ten seconds, on an SQLite file in a temporary folder, and leaves nothing behind.
    The exit code is 0 if every job has ended as expected.

    \b
    Example:
      genba demo
    """
    watch = (
        _watch_silently if invocation.json else _watch_live if sys.stdout.isatty() else _watch_lines
    )
    with running_demo() as running:
        watch(running)
        running.node.end()
    if invocation.json:
        say_json(
            {
                "ok": running.ok,
                "seconds": round(running.seconds, 1),
                "jobs": [row.as_json() for row in running.rows],
            }
        )
    else:
        _sum_up(running)
    return 0 if running.ok else 1


@dataclass
class Row:
    """One job of the demo, as last seen."""

    case: Case
    job: Job[Any]
    state: str = ""
    causes: tuple[str, ...] = ()
    seconds: float = 0.0
    running_since: float | None = None
    asked_to_stop: bool = False

    @property
    def ended(self) -> bool:
        return self.state in FINAL or self.state == State.HELD

    @property
    def result(self) -> Any:
        return json.loads(self.job.record.result or b"null")

    @property
    def fault(self) -> str | None:
        """Return what differs from the expected end, or None."""
        case = self.case
        if self.state != case.state:
            return f"is {self.state}, not {case.state}"
        if self.causes != case.causes:
            causes, expected = ", ".join(self.causes), ", ".join(case.causes)
            return f"attempts ended by {causes or 'nothing'}, not by {expected}"
        if self.result != case.result:
            return f"gave {self.result!r}, not {case.result!r}"
        return None

    @property
    def about(self) -> str:
        job = self.job
        if self.state == State.RUNNING:
            return job.progress.note or ""
        if self.state == State.SUCCEEDED:
            return str(self.result)
        if self.state == State.CANCELLED:
            return job.reason or ""
        return (f"{job.error['type']}: {job.error['message']}" if job.error else job.reason) or ""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "title": self.case.title,
            "task": self.job.task,
            "state": self.state,
            "causes": self.causes,
            "fault": self.fault,
        }


@dataclass
class Demo:
    """The node, and the jobs on show."""

    app: Genba
    node: ChildNode
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(row.fault is None for row in self.rows) and not self.node.left_behind

    def watch_rows(self) -> Iterator[list[Row]]:
        """Yield the changed rows, ten times a second, until all jobs have ended."""
        while time.monotonic() < self.began + DEADLINE_SECONDS:
            changed = self._look()
            yield changed
            if all(row.ended for row in self.rows):
                return
            self.node.check_alive()
            time.sleep(LOOK_EVERY_SECONDS)

    def _look(self) -> list[Row]:
        self.seconds = time.monotonic() - self.began
        seen = {job.id: job for job in self.app.jobs(state="any", limit=len(self.rows))}
        changed = []
        for row in self.rows:
            row.job = seen[row.job.id]
            if not row.ended:
                row.seconds = self.seconds
            state, causes = str(row.job.state), tuple(attempt.cause for attempt in row.job.attempts)
            if (state, causes) != (row.state, row.causes):
                row.state, row.causes = state, causes
                changed.append(row)
            self._cancel_in_time(row)
        return changed

    def _cancel_in_time(self, row: Row) -> None:
        if row.case.cancel_after is None or row.asked_to_stop or row.state != State.RUNNING:
            return
        if row.running_since is None:
            row.running_since = self.seconds
        if self.seconds >= row.running_since + row.case.cancel_after:
            row.asked_to_stop = row.job.cancel("the demo has cancelled it")


@contextmanager
def running_demo() -> Iterator[Demo]:
    from genba.cli.demo_app import app, cases

    folder = Path(tempfile.mkdtemp(prefix="genba-demo-"))
    running: Demo | None = None
    with signals_as_exceptions():
        try:
            app.settings = replace(
                app.settings, url=f"sqlite:///{folder / 'genba.db'}", namespace="demo"
            )
            app.install()
            node = ChildNode(app, TARGET, folder, name="demo", min=2, max=5, grace="1s")
            running = Demo(app, node)
            listed = cases()
            jobs = app.enqueue_many([case.call for case in listed])
            running.rows = [Row(case, job) for case, job in zip(listed, jobs, strict=True)]
            yield running
        finally:
            with signals_blocked():
                if running is not None:
                    running.node.end()
                app.close()
                shutil.rmtree(folder, ignore_errors=True)


# Output


def _watch_silently(running: Demo) -> None:
    for _ in running.watch_rows():
        pass


def _watch_lines(running: Demo) -> None:
    say(f"{len(running.rows)} jobs, one node, SQLite in a temporary folder")
    for changed in running.watch_rows():
        for row in changed:
            died = f" after {', '.join(row.causes)}" if row.causes else ""
            say(f"{running.seconds:5.1f} s  {row.case.title:<26}  {row.state}{died}")
        sys.stdout.flush()


def _watch_live(running: Demo) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for _ in running.watch_rows():
            live.update(_picture(running, live.console.width), refresh=True)


def _picture(running: Demo, width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    wide = width >= _WIDE
    picture = Table(
        title=f"genba demo, {running.seconds:.1f} s",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    picture.add_column("id", justify="right", no_wrap=True)
    picture.add_column("job", no_wrap=True)
    picture.add_column("state", min_width=9, no_wrap=True)
    picture.add_column("progress", width=10)
    picture.add_column("attempts ended by", overflow="fold", min_width=12)
    picture.add_column("time", justify="right", no_wrap=True, min_width=6)
    if wide:
        picture.add_column("about", no_wrap=True, overflow="ellipsis", min_width=20)
    for row in running.rows:
        cells = _cells(row)
        picture.add_row(*(cells if wide else cells[:-1]))
    return picture


def _cells(row: Row) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    moving = row.state in (State.RUNNING, State.SUCCEEDED)
    bar = ProgressBar(
        total=100,
        completed=float(row.job.progress),
        complete_style="yellow",
        finished_style="green",
    )
    return [
        str(row.job.id),
        Text(row.case.title),
        Text(row.state, style=_COLOURS.get(row.state, "")),
        bar if moving else "",
        Text(", ".join(row.causes)),
        f"{row.seconds:.1f} s",
        Text(clean(row.about)),
    ]


def _sum_up(running: Demo) -> None:
    say()
    if not sys.stdout.isatty():
        rows = [
            (row.job.id, row.case.title, row.state, ", ".join(row.causes), row.about)
            for row in running.rows
        ]
        table(["ID", "JOB", "STATE", "ATTEMPTS ENDED BY", "ABOUT"], rows)
        say()
    for row in running.rows:
        if row.fault:
            say(f"WRONG: {row.case.title}: {row.fault}")
    if running.node.left_behind:
        say(f"WRONG: {running.node.left_behind} processes did not end by themselves")
    if not running.ok:
        note("not every job has ended as expected")
        return
    counted = Counter(row.state for row in running.rows)
    died = sum(cause.startswith(("exit", "signal")) for row in running.rows for cause in row.causes)
    listed = ", ".join(f"{count} {state}" for state, count in counted.most_common())
    say(f"{len(running.rows)} jobs have ended as expected, in {running.seconds:.1f} s: {listed}.")
    say(f"{died} processes died on the way, and no job was lost.  Nothing is left behind.")
