"""`genba top`: a live view of queues, nodes, jobs and failures, with keys to act on them."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from genba.cli.output import Invocation, common_options, job_json, pass_invocation, say_json, table
from genba.domain.duration import duration
from genba.errors import BadOption, GenbaError

if TYPE_CHECKING:
    from rich.live import Live

    from genba.cli.screen import Action, Screen
    from genba.client.app import Genba
    from genba.reports.overview import Overview

LIMIT = 100  # jobs of each kind
_RESIZE_CHECK_SECONDS = 0.25  # how often the size of the terminal is checked
_REASON = "genba top"


@click.command()
@click.option(
    "--every", default="1s", show_default=True, metavar="DURATION", help="How often to refresh."
)
@click.option(
    "--once", is_flag=True, help="Print once and end; the default if stdout is not a terminal."
)
@common_options
@pass_invocation
def top(invocation: Invocation, every: str, once: bool) -> None:
    """Show queues, nodes, running jobs and failures live, with keys to act on them.

    The bottom line shows the keys.  Actions that cannot be undone ask first.

    \b
    Example:
      genba top --every 2s
    """
    pause = duration(every) / 1_000_000
    if pause < 0.1:
        raise BadOption("--every must be at least 100ms")
    app = invocation.app()
    if invocation.json:
        say_json(_json(app.overview(LIMIT)))
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print(app.overview(LIMIT))
    else:
        Top(app, pause).run()


class Top:
    """The loop: query, draw, read keys, act."""

    def __init__(self, app: Genba, pause: float) -> None:
        from genba.cli.screen import Screen

        self._app = app
        self._pause = pause
        self._title = (
            app.shown_url if app.namespace == "default" else f"{app.shown_url} {app.namespace}"
        )
        self._screen: Screen = Screen()
        self._overview: Overview = app.overview(LIMIT)
        self._next = time.monotonic() + pause

    def run(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        with (
            _keys() as (fd, signals),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            self._draw(live)
            while not self._screen.closed:
                if signals:  # an exception that is raised in a destructor gets lost
                    raise _end(signals[0])
                size = console.size
                nap = max(0.0, min(_RESIZE_CHECK_SECONDS, self._next - time.monotonic()))
                keys = _read(fd, nap)
                for key in keys:
                    self._press(key)
                if looked := bool(keys) or time.monotonic() >= self._next:
                    self._look()
                if looked or console.size != size:
                    self._draw(live)

    def _press(self, key: str) -> None:
        self._screen, action = self._screen.press(key, self._overview)
        if action is not None:
            try:
                message = perform(self._app, action)
            except GenbaError as error:
                message = str(error)
            self._screen = replace(self._screen, message=message)

    def _look(self) -> None:
        try:
            self._overview = self._app.overview(LIMIT)
        except GenbaError as error:
            self._screen = replace(self._screen, message=f"cannot refresh: {error}")
        self._next = time.monotonic() + self._pause

    def _draw(self, live: Live) -> None:
        from rich.console import Group

        from genba.cli.screen import draw

        width, height = live.console.size
        live.update(
            Group(*draw(self._screen, self._overview, self._title, width, height)), refresh=True
        )


def perform(app: Genba, action: Action) -> str:
    """Do the action; return its result as text."""
    if action.section == "queues":
        queue = app.queues[action.target]
        done = queue.resume() if action.verb == "resume" else not queue.paused
        if action.verb == "pause":
            queue.pause(reason=_REASON)
    elif action.section == "nodes":
        app.tell_node(action.target, "drain")
        done = True
    else:
        job = app.job(action.target)
        actions: dict[str, Callable[[], bool]] = {
            "cancel": lambda: job.cancel(_REASON),
            "kill": lambda: job.kill(_REASON),
            "requeue": job.requeue,
            "delete": lambda: app.delete_job(job.id),
        }
        done = actions[action.verb]()
    return f"{action.words}: done" if done else f"{action.words}: nothing to do"


def _end(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def _keys() -> Iterator[tuple[int, list[int]]]:
    """Read the keyboard by key, without echo, and collect signals; restore the terminal."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    raw = termios.tcgetattr(fd)
    raw[3] &= ~(termios.ICANON | termios.ECHO)
    raw[6] = list(raw[6])
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
    raw[6][termios.VSUSP] = b"\x00"  # Ctrl-Z would leave the shell on the alternate screen

    signals: list[int] = []

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        signals.append(signum)
        raise _end(signum)

    old = {
        signum: signal.signal(signum, leave)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        termios.tcsetattr(fd, termios.TCSADRAIN, raw)
        yield fd, signals
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for signum, was in old.items():
            signal.signal(signum, was)


def _read(fd: int, within: float) -> list[str]:
    """Return the keys that were pressed; an arrow counts as one."""
    if not select.select([fd], [], [], within)[0]:
        return []
    text = os.read(fd, 1024).decode(errors="replace")
    if not text:
        return ["q"]  # the terminal is gone
    keys: list[str] = []
    while text:
        size = 3 if text[:2] in ("\x1b[", "\x1bO") else 1
        keys.append(text[:size])
        text = text[size:]
    return keys


def _print(overview: Overview) -> None:
    from genba.cli.screen import SECTIONS, rows_of

    for section in SECTIONS:
        heads, rows = rows_of(overview, section)
        table(heads, rows)
        click.echo()


def _json(overview: Overview) -> dict[str, Any]:
    return {
        "at": overview.at,
        "states": overview.states,
        "queues": [asdict(row) for row in overview.queues],
        "nodes": [asdict(row) for row in overview.nodes],
        "running": [job_json(job) for job in overview.running],
        "failures": [job_json(job) for job in overview.failures],
    }
