"""`genba task`: what nodes can run; switch it off and on, change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from genba.cli.job import read_arguments
from genba.cli.name_arguments import NameOf
from genba.cli.output import Asked, common, moment_text, pass_asked, say, say_json, table
from genba.errors import BadOption

_reason = click.option("--reason", metavar="TEXT", help="Kept with the event.")


@click.group()
@common
def task() -> None:
    """Tasks: what nodes can run, and what operators say about it."""


@task.command(name="ls")
@common
@pass_asked
def list_tasks(asked: Asked) -> None:
    """The tasks that nodes have declared, and what operators have changed.

    \b
    Example:
      genba task ls
    """
    told = [one.to_json() for one in asked.app().tasks.values()]
    if asked.json:
        say_json(told)
    elif not told:
        say("no node has declared a task yet")
    else:
        table(
            ["TASK", "ENABLED", "QUEUE", "CHANGED", "BY", "AT", "TITLE"],
            [
                [
                    one["name"],
                    "yes" if one["enabled"] else "NO",
                    one["queue"],
                    _words(one["override"]),
                    one["changed_by"],
                    moment_text(one["changed_at"]),
                    one["title"],
                ]
                for one in told
            ],
        )


def _words(override: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(override.items()))


@task.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("task"))
@_reason
@common
@pass_asked
def disable(asked: Asked, names: Sequence[str], reason: str | None) -> int:
    """Let no job of the tasks NAMES start, and none be enqueued; those that run see should_stop.

    \b
    Example:
      genba task disable tasks.render --reason "the disk is full"
    """
    return _switch(asked, names, False, reason)


@task.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("task"))
@_reason
@common
@pass_asked
def enable(asked: Asked, names: Sequence[str], reason: str | None) -> int:
    """Let the tasks NAMES run again; what has waited comes back in its old order.

    \b
    Example:
      genba task enable tasks.render
    """
    return _switch(asked, names, True, reason)


def _switch(asked: Asked, names: Sequence[str], on: bool, reason: str | None) -> int:
    app = asked.app()
    word = "enabled" if on else "disabled"
    told = []
    for name in names:
        control = app.tasks[name]
        told.append(
            {"name": name, "changed": control.enable(reason) if on else control.disable(reason)}
        )
    if asked.json:
        say_json(told)
    else:
        for one in told:
            say(f"{one['name']} {word}" if one["changed"] else f"{one['name']} was {word} already")
    return 0 if all(one["changed"] for one in told) else 1


@task.command()
@click.argument("template")
@click.argument("n", type=click.IntRange(0), required=False)
@click.option("--reset", is_flag=True, help="Let the code decide again.")
@common
@pass_asked
def limit(asked: Asked, template: str, n: int | None, reset: bool) -> None:
    """Let N jobs of each bucket of a limit run at a time, over what the code says; stops nobody.

    \b
    Examples:
      genba task limit "tenant:{tenant}" 3
      genba task limit "tenant:{tenant}" --reset
    """
    if (n is None) != reset:
        raise BadOption("give either N, how many may run at a time, or --reset")
    asked.app().set_limit(template, n)
    if asked.json:
        say_json({"template": template, "n": n})
    else:
        say(f"{template}: as the code says" if n is None else f"{template}: {n} at a time")


@task.command(name="set")
@click.argument("name", type=NameOf("task"))
@click.argument("words", nargs=-1, metavar="[OPTION=VALUE]…")
@click.option(
    "--reset",
    "back",
    multiple=True,
    metavar="OPTION",
    help="Let the code decide again; repeatable.",
)
@click.option("--reset-all", is_flag=True, help="Let the code decide about all options again.")
@common
@pass_asked
def set_task(
    asked: Asked, name: str, words: Sequence[str], back: Sequence[str], reset_all: bool
) -> None:
    """Change options of the task NAME for jobs that are enqueued from now on, over what its code says.

    A value that reads as JSON is JSON (5, null, {"times": 3}), anything else is text.

    \b
    Examples:
      genba task set tasks.render timeout=10m priority=5
      genba task set tasks.render "cron=0 4 * * *" tz=Europe/Zurich
      genba task set tasks.render --reset timeout
    """
    args, changes = read_arguments(words)
    if args:
        raise BadOption(f"{args[0]!r} is no change: write OPTION=VALUE, for example timeout=5m")
    if not (changes or back or reset_all):
        raise BadOption("nothing to change: give OPTION=VALUE, --reset OPTION or --reset-all")
    control = asked.app().tasks[name]
    now: dict[str, Any] = {}
    if reset_all or back:
        now = control.reset(*(() if reset_all else back))
    if changes:
        now = control.set(**changes)
    if asked.json:
        say_json({"name": name, "override": now})
    else:
        say(f"{name}: {_words(now)}" if now else f"{name}: as its code says")
