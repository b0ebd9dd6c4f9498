"""`genba top`: what is under way, live, with keys to act."""

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

from genba.cli.output import Asked, common, job_json, pass_asked, say_json, table
from genba.domain.duration import duration
from genba.errors import BadOption, GenbaError

if TYPE_CHECKING:
    from rich.live import Live

    from genba.cli.screen import Act, Screen
    from genba.client.app import Genba
    from genba.reports.overview import Overview

LIMIT = 100  # jobs of each kind that one can scroll through
_NAP = 0.25  # seconds between two looks at the size of the terminal
_REASON = "genba top"


@click.command()
@click.option(
    "--every", default="1s", show_default=True, metavar="DURATION", help="How often it looks."
)
@click.option(
    "--once", is_flag=True, help="Print it once and end; so it does where stdout is no terminal."
)
@common
@pass_asked
def top(asked: Asked, every: str, once: bool) -> None:
    """Queues, nodes, running jobs and failures, live; keys pause, drain, cancel, kill and requeue.

    The bottom line tells which keys there are.  What cannot be taken back asks first.

    \b
    Example:
      genba top --every 2s
    """
    pause = duration(every) / 1_000_000
    if pause < 0.1:
        raise BadOption("--every must be at least 100ms")
    app = asked.app()
    if asked.json:
        say_json(_json(app.overview(LIMIT)))
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print(app.overview(LIMIT))
    else:
        Show(app, pause).run()


class Show:
    """The loop: look, draw, read keys, act."""

    def __init__(self, app: Genba, pause: float) -> None:
        from genba.cli.screen import Screen

        self._app = app
        self._pause = pause
        self._title = (
            app.shown_url if app.namespace == "default" else f"{app.shown_url} {app.namespace}"
        )
        self._screen: Screen = Screen()
        self._seen: Overview = app.overview(LIMIT)
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
            while not self._screen.over:
                if signals:  # Python loses what is raised in a destructor
                    raise _end(signals[0])
                size = console.size
                nap = max(0.0, min(_NAP, self._next - time.monotonic()))
                pressed = _read(fd, nap)
                for key in pressed:
                    self._press(key)
                if looked := bool(pressed) or time.monotonic() >= self._next:
                    self._look()
                if looked or console.size != size:
                    self._draw(live)

    def _press(self, key: str) -> None:
        self._screen, act = self._screen.press(key, self._seen)
        if act is not None:
            try:
                said = perform(self._app, act)
            except GenbaError as error:
                said = str(error)
            self._screen = replace(self._screen, said=said)

    def _look(self) -> None:
        try:
            self._seen = self._app.overview(LIMIT)
        except GenbaError as error:
            self._screen = replace(self._screen, said=f"cannot look: {error}")
        self._next = time.monotonic() + self._pause

    def _draw(self, live: Live) -> None:
        from rich.console import Group

        from genba.cli.screen import draw

        width, height = live.console.size
        live.update(
            Group(*draw(self._screen, self._seen, self._title, width, height)), refresh=True
        )


def perform(app: Genba, act: Act) -> str:
    """Do it; what came of it, in words."""
    if act.section == "queues":
        queue = app.queues[act.target]
        done = queue.resume() if act.verb == "resume" else not queue.paused
        if act.verb == "pause":
            queue.pause(reason=_REASON)
    elif act.section == "nodes":
        app.tell_node(act.target, "drain")
        done = True
    else:
        job = app.job(act.target)
        deeds: dict[str, Callable[[], bool]] = {
            "cancel": lambda: job.cancel(_REASON),
            "kill": lambda: job.kill(_REASON),
            "requeue": job.requeue,
            "delete": lambda: app.store.bulk.delete([job.id]) > 0,
        }
        done = deeds[act.verb]()
    return f"{act.words}: done" if done else f"{act.words}: nothing to do"


def _end(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def _keys() -> Iterator[tuple[int, list[int]]]:
    """The keyboard, key by key and unseen, and the signals that came; given back as it was, whatever ends us."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    raw = termios.tcgetattr(fd)
    raw[3] &= ~(termios.ICANON | termios.ECHO)
    raw[6] = list(raw[6])
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
    raw[6][termios.VSUSP] = b"\x00"  # Ctrl-Z would leave the shell on our screen

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
    """The keys that were pressed; an arrow is one."""
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


def _print(seen: Overview) -> None:
    from genba.cli.screen import SECTIONS, rows_of

    for section in SECTIONS:
        heads, rows = rows_of(seen, section)
        table(heads, rows)
        click.echo()


def _json(seen: Overview) -> dict[str, Any]:
    return {
        "at": seen.at,
        "states": seen.states,
        "queues": [asdict(one) for one in seen.queues],
        "nodes": [asdict(one) for one in seen.nodes],
        "running": [job_json(job) for job in seen.running],
        "failures": [job_json(job) for job in seen.failures],
    }
