"""What all commands share: the common options, and output as text, tables or JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from genba.domain.terminal_text import clean as clean
from genba.domain.untrusted_json import read_any_json
from genba.errors import BadOption

if TYPE_CHECKING:
    from genba.client.app import Genba
    from genba.client.job import Attempt, Job

F = TypeVar("F", bound=Callable[..., Any])

_GAP = "  "
_COLOURS = {
    "succeeded": "green",
    "running": "cyan",
    "live": "green",
    "failed": "red",
    "timed_out": "red",
    "cancelled": "yellow",
    "held": "magenta",
    "draining": "yellow",
}


@dataclass
class Invocation:
    """The values of the common options; the last one on the command line wins."""

    url: str | None = None
    namespace: str | None = None
    json: bool = False

    def app(self, target: str | None = None) -> Genba:
        """Return an app without tasks, or import `target`; the options override its settings."""
        from genba.client.app import Genba

        if target is None:
            app = Genba(self.url, namespace=self.namespace)
        else:
            app = _imported(target, show=not self.json)
            settings = app.settings
            app.settings = replace(
                settings,
                url=self.url or settings.url,
                namespace=self.namespace or settings.namespace,
            )
        click.get_current_context().call_on_close(app.close)
        return app


def _imported(target: str, show: bool) -> Genba:
    from genba.client.app import Genba
    from genba.worker.load_app import explain, load

    try:
        app = load(target)
    except (Exception, SystemExit) as error:  # raised by the user's module
        failure = explain(target, error)
        if show:
            click.echo(failure.frames, nl=False, err=True)
        raise BadOption(failure.message) from error
    if not isinstance(app, Genba):
        raise BadOption(f"cannot import {target}: it is a {type(app).__name__}, not a Genba app")
    return app


def _remember(context: click.Context, param: click.Parameter, value: Any) -> None:
    if value and param.name:
        setattr(context.ensure_object(Invocation), param.name, value)


def common_options(command: F) -> F:
    """Add the options that every command has; `pass_invocation` gives their values."""
    for option in (
        click.option("--json", is_flag=True, help="Print JSON, also for errors.", **_QUIET),
        click.option("--namespace", metavar="NAME", help="Instead of GENBA_NAMESPACE.", **_QUIET),
        click.option("--url", metavar="URL", help="The database, instead of GENBA_URL.", **_QUIET),
    ):
        command = option(command)
    return command


_QUIET: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": _remember}
pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


# Output


def say(text: object = "", *, lines: bool = False) -> None:
    click.echo(clean(text, lines=lines))


def note(text: object) -> None:
    """Print a remark for a person on stderr."""
    click.echo(clean(text), err=True)


def say_json(value: object, *, err: bool = False) -> None:
    text = json.dumps(value, indent=2 if sys.stdout.isatty() else None, default=_plain)
    click.echo(text.replace("\x7f", "\\u007f"), err=err)


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def painted(text: object, colour: str | None) -> str:
    """Escape control characters, and add a colour if stdout is a terminal that shows colours."""
    plain = clean(text)
    return click.style(plain, fg=colour) if colour and in_colour() else plain


def shows_bars() -> bool:
    """Return whether to show progress bars: on stderr, if it is a terminal."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def bar(
    words: str, total: Callable[[], int], *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar during the block; call what it yields with the work done so far.

    `total` is called only if the bar is shown.
    """
    if quiet or not shows_bars():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(clean(words), total=total())
        yield lambda done: progress.update(task, completed=done)


def in_colour() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns; on a terminal, cut at its edge and with states in colour."""
    from rich.cells import cell_len, set_cell_size

    lines = [[clean("" if cell is None else cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    edge = (
        shutil.get_terminal_size().columns
        if sys.stdout.isatty()
        else sum(widths) + len(_GAP) * len(widths)
    )
    states = [head == "STATE" for head in heads]
    for number, line in enumerate(lines):
        left, parts = edge, []
        for i, (cell, width, is_state) in enumerate(zip(line, widths, states, strict=True)):
            whole = cell if i == len(line) - 1 else cell + " " * (width - cell_len(cell)) + _GAP
            part = whole if cell_len(whole) <= left else set_cell_size(whole, left)
            left -= cell_len(part)
            parts.append(painted(part, _COLOURS.get(cell) if is_state and number else None))
        click.echo("".join(parts).rstrip())


def moment_text(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}Z" if moment else "-"


# Jobs as text and as JSON


def job_json(job: Job[Any]) -> dict[str, Any]:
    record, progress = job.record, job.progress
    return {
        "id": job.id,
        "task": job.task,
        "state": str(job.state),
        "queue": job.queue,
        "priority": job.priority,
        "key": job.key,
        "tags": job.tags,
        "args": job.args,
        "result": read_any_json(record.result),
        "error": job.error,
        "reason": job.reason,
        "progress": {
            "percent": float(progress),
            "done": progress.done,
            "total": progress.total,
            "note": progress.note,
        },
        "attempt": record.attempt,
        "retries": job.retries,
        "crashes": job.crashes,
        "parent": record.parent_id,
        "enqueued": job.enqueued,
        "due": job.due,
        "finished": job.finished,
    }


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "cause": attempt.cause,
        "claimed": attempt.claimed,
        "started": attempt.started,
        "ended": attempt.ended,
        "node": attempt.node,
        "pid": attempt.pid,
        "cpu": attempt.cpu,
        "peak_memory": attempt.peak_memory,
        "error": attempt.error,
        "log": attempt.log,
    }


def seconds_text(start: datetime | None, end: datetime | None) -> str:
    return f"{(end - start).total_seconds():.3f} s" if start and end else "-"
