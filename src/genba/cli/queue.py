"""`genba queue`: list, pause, resume and flush queues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import (
    Invocation,
    common_options,
    moment_text,
    note,
    pass_invocation,
    say,
    say_json,
    table,
)


@click.group()
@common_options
def queue() -> None:
    """Queues: where jobs wait."""


@queue.command(name="ls")
@common_options
@pass_invocation
def list_queues(invocation: Invocation) -> None:
    """List the queues that nodes serve or that have jobs, with their waiting and parked jobs.

    \b
    Example:
      genba queue ls
    """
    queues = invocation.app().queues.to_json()
    if invocation.json:
        say_json(queues)
    elif not queues:
        say("there is no queue yet")
    else:
        table(
            ["QUEUE", "PAUSED", "WAITING", "PARKED", "BY", "PARKED ON"],
            [
                [
                    queue["name"],
                    _paused(queue),
                    queue["waiting"],
                    sum(queue["parked"].values()),
                    queue["changed_by"],
                    ", ".join(sorted(queue["parked"])),
                ]
                for queue in queues
            ],
        )


def _paused(queue: dict[str, Any]) -> str:
    if not queue["paused"]:
        return "-"
    return f"until {moment_text(queue['paused_until'])}" if queue["paused_until"] else "YES"


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@click.option(
    "--until", metavar="MOMENT|DURATION", help='Resume by itself then: "30m", "2026-01-31T03:00Z".'
)
@click.option("--reason", metavar="TEXT", help="Stored with the event.")
@common_options
@pass_invocation
def pause(
    invocation: Invocation, names: Sequence[str], until: str | None, reason: str | None
) -> None:
    """Start no more jobs of the queues NAMES; enqueuing works, and running jobs go on.

    \b
    Example:
      genba queue pause render --until 30m
    """
    app = invocation.app()
    for name in names:
        app.queues[name].pause(until, reason)
    if invocation.json:
        say_json([{"name": name, "paused": True} for name in names])
    else:
        for name in names:
            say(f"{name} paused")


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@common_options
@pass_invocation
def resume(invocation: Invocation, names: Sequence[str]) -> int:
    """Start jobs of the queues NAMES again.

    \b
    Example:
      genba queue resume render
    """
    app = invocation.app()
    results = [(name, app.queues[name].resume()) for name in names]
    if invocation.json:
        say_json([{"name": name, "resumed": done} for name, done in results])
    else:
        for name, done in results:
            say(f"{name} resumed" if done else f"{name} was not paused")
    return 0 if all(done for _, done in results) else 1


@queue.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("queue"))
@click.option("--running", is_flag=True, help="Kill running jobs, too.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common_options
@pass_invocation
def flush(invocation: Invocation, names: Sequence[str], running: bool, yes: bool) -> int:
    """Delete all open jobs of the queues NAMES, except running ones.

    Final jobs and their history stay; schedules stay, and go on to make jobs.

    \b
    Example:
      genba queue flush render --yes
    """
    app = invocation.app()
    open_jobs = app.count(queue=names) - (0 if running else app.count(queue=names, state="running"))
    if open_jobs and not yes:
        if invocation.json:
            raise click.UsageError("--json needs --yes, which deletes without asking")
        note(f"This deletes {open_jobs} open jobs of {', '.join(names)}.")
        if not _confirmed():
            note("nothing was deleted")
            return 1
    deleted = app.flush(queue=names, running=running)
    say_json({"queues": list(names), "deleted": deleted}) if invocation.json else say(
        f"{deleted} jobs deleted"
    )
    return 0


def _confirmed() -> bool:
    try:
        return click.confirm("Delete them?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError(
            "stdin is not a terminal, so nothing can be confirmed; --yes deletes without asking"
        ) from None
