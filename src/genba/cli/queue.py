"""`genba queue`: see how long they are, pause and resume them, empty them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import Asked, common, moment_text, note, pass_asked, say, say_json, table


@click.group()
@common
def queue() -> None:
    """Queues: where jobs wait."""


@queue.command(name="ls")
@common
@pass_asked
def list_queues(asked: Asked) -> None:
    """The queues that nodes serve or that have jobs, with what waits in them and why.

    \b
    Example:
      genba queue ls
    """
    told = asked.app().queues.to_json()
    if asked.json:
        say_json(told)
    elif not told:
        say("there is no queue yet")
    else:
        table(
            ["QUEUE", "PAUSED", "WAITING", "PARKED", "BY", "PARKED ON"],
            [
                [
                    one["name"],
                    _paused(one),
                    one["waiting"],
                    sum(one["parked"].values()),
                    one["changed_by"],
                    ", ".join(sorted(one["parked"])),
                ]
                for one in told
            ],
        )


def _paused(one: dict[str, Any]) -> str:
    if not one["paused"]:
        return "-"
    return f"until {moment_text(one['paused_until'])}" if one["paused_until"] else "YES"


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@click.option(
    "--until", metavar="MOMENT|DURATION", help='Go on by itself then: "30m", "2026-01-31T03:00Z".'
)
@click.option("--reason", metavar="TEXT", help="Kept with the event.")
@common
@pass_asked
def pause(asked: Asked, names: Sequence[str], until: str | None, reason: str | None) -> None:
    """Let no job of the queues NAMES start; jobs can still be enqueued, and what runs goes on.

    \b
    Example:
      genba queue pause render --until 30m
    """
    app = asked.app()
    for name in names:
        app.queues[name].pause(until, reason)
    if asked.json:
        say_json([{"name": name, "paused": True} for name in names])
    else:
        for name in names:
            say(f"{name} paused")


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@common
@pass_asked
def resume(asked: Asked, names: Sequence[str]) -> int:
    """Let the jobs of the queues NAMES start again.

    \b
    Example:
      genba queue resume render
    """
    app = asked.app()
    told = [(name, app.queues[name].resume()) for name in names]
    if asked.json:
        say_json([{"name": name, "resumed": done} for name, done in told])
    else:
        for name, done in told:
            say(f"{name} resumed" if done else f"{name} was not paused")
    return 0 if all(done for _, done in told) else 1


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@click.option("--running", is_flag=True, help="Kill what runs, too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
@pass_asked
def flush(asked: Asked, names: Sequence[str], running: bool, yes: bool) -> int:
    """Delete every job of the queues NAMES that is open and does not run.

    Final jobs and their history stay; so do schedules, which go on to make jobs.

    \b
    Example:
      genba queue flush render --yes
    """
    app = asked.app()
    there = app.count(queue=names) - (0 if running else app.count(queue=names, state="running"))
    if there and not yes:
        if asked.json:
            raise click.UsageError("with --json nobody is asked; --yes deletes without asking")
        note(f"This deletes {there} open jobs of {', '.join(names)}.")
        if not _confirmed():
            note("nothing was deleted")
            return 1
    gone = app.flush(queue=names, running=running)
    say_json({"queues": list(names), "deleted": gone}) if asked.json else say(
        f"{gone} jobs deleted"
    )
    return 0


def _confirmed() -> bool:
    try:
        return click.confirm("Delete them?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("nobody is there to answer; --yes deletes without asking") from None
