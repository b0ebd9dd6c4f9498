"""`genba task`: list, disable, enable and change tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from genba.cli.job import read_arguments
from genba.cli.name_arguments import NameOf
from genba.cli.output import (
    Invocation,
    common_options,
    moment_text,
    pass_invocation,
    say,
    say_json,
    table,
)
from genba.errors import BadOption

_reason = click.option("--reason", metavar="TEXT", help="Stored with the event.")


@click.group()
@common_options
def task() -> None:
    """Tasks that nodes have declared, and the overrides of operators."""


@task.command(name="ls")
@common_options
@pass_invocation
def list_tasks(invocation: Invocation) -> None:
    """List the tasks that nodes have declared, and what operators have changed.

    \b
    Example:
      genba task ls
    """
    tasks = [task.to_json() for task in invocation.app().tasks.values()]
    if invocation.json:
        say_json(tasks)
    elif not tasks:
        say("no node has declared a task yet")
    else:
        table(
            ["TASK", "ENABLED", "QUEUE", "CHANGED", "BY", "AT", "TITLE"],
            [
                [
                    task["name"],
                    "yes" if task["enabled"] else "NO",
                    task["queue"],
                    _words(task["override"]),
                    task["changed_by"],
                    moment_text(task["changed_at"]),
                    task["title"],
                ]
                for task in tasks
            ],
        )


def _words(override: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(override.items()))


@task.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("task"))
@_reason
@common_options
@pass_invocation
def disable(invocation: Invocation, names: Sequence[str], reason: str | None) -> int:
    """Start and enqueue no more jobs of the tasks NAMES; running jobs see should_stop.

    \b
    Example:
      genba task disable tasks.render --reason "the disk is full"
    """
    return _switch(invocation, names, False, reason)


@task.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("task"))
@_reason
@common_options
@pass_invocation
def enable(invocation: Invocation, names: Sequence[str], reason: str | None) -> int:
    """Run the tasks NAMES again; waiting jobs keep their order.

    \b
    Example:
      genba task enable tasks.render
    """
    return _switch(invocation, names, True, reason)


def _switch(invocation: Invocation, names: Sequence[str], on: bool, reason: str | None) -> int:
    app = invocation.app()
    word = "enabled" if on else "disabled"
    results = []
    for name in names:
        control = app.tasks[name]
        results.append(
            {"name": name, "changed": control.enable(reason) if on else control.disable(reason)}
        )
    if invocation.json:
        say_json(results)
    else:
        for result in results:
            say(
                f"{result['name']} {word}"
                if result["changed"]
                else f"{result['name']} was {word} already"
            )
    return 0 if all(result["changed"] for result in results) else 1


@task.command()
@click.argument("template")
@click.argument("n", type=click.IntRange(0), required=False)
@click.option("--reset", is_flag=True, help="Use the value of the code again.")
@common_options
@pass_invocation
def limit(invocation: Invocation, template: str, n: int | None, reset: bool) -> None:
    """Run at most N jobs of each bucket of a limit at a time, instead of what the code says.

    Jobs that run already are not stopped.

    \b
    Examples:
      genba task limit "tenant:{tenant}" 3
      genba task limit "tenant:{tenant}" --reset
    """
    if (n is None) != reset:
        raise BadOption("give either N, how many may run at a time, or --reset")
    invocation.app().set_limit(template, n)
    if invocation.json:
        say_json({"template": template, "n": n})
    else:
        say(f"{template}: as the code says" if n is None else f"{template}: {n} at a time")


@task.command(name="set")
@click.argument("name", type=NameOf("task"))
@click.argument("words", nargs=-1, metavar="[OPTION=VALUE]…")
@click.option(
    "--reset",
    "reset_names",
    multiple=True,
    metavar="OPTION",
    help="Use the value of the code again; repeatable.",
)
@click.option("--reset-all", is_flag=True, help="Use the values of the code for all options again.")
@common_options
@pass_invocation
def set_task(
    invocation: Invocation,
    name: str,
    words: Sequence[str],
    reset_names: Sequence[str],
    reset_all: bool,
) -> None:
    """Change options of the task NAME for new jobs, instead of what its code says.

    A value that reads as JSON is JSON (5, null, {"times": 3}), anything else is text.

    \b
    Examples:
      genba task set tasks.render timeout=10m priority=5
      genba task set tasks.render "cron=0 4 * * *" tz=Europe/Zurich
      genba task set tasks.render --reset timeout
    """
    args, changes = read_arguments(words)
    if args:
        raise BadOption(f"{args[0]!r} is not a change; write OPTION=VALUE, for example timeout=5m")
    if not (changes or reset_names or reset_all):
        raise BadOption("nothing to change: give OPTION=VALUE, --reset OPTION or --reset-all")
    control = invocation.app().tasks[name]
    override: dict[str, Any] = {}
    if reset_all or reset_names:
        override = control.reset(*(() if reset_all else reset_names))
    if changes:
        override = control.set(**changes)
    if invocation.json:
        say_json({"name": name, "override": override})
    else:
        say(f"{name}: {_words(override)}" if override else f"{name}: as its code says")
