"""`genba schedule`: list, add, change, pause and delete schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any, cast

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
from genba.domain.schedule import rule_to_json
from genba.domain.untrusted_json import UNREADABLE

if TYPE_CHECKING:
    from genba.client.schedule import Schedule, Tick
    from genba.options.schedule_rule import RuleOptions


@click.group()
@common_options
def schedule() -> None:
    """Rules that make jobs, by cron or at intervals.

    Code declares them by app.recur(…) or @app.task(cron=…), an operator by genba schedule add.
    """


def rule_options(command: Any) -> Any:
    """Add the options of a rule."""
    for option in reversed(
        [
            click.option(
                "--cron",
                metavar="TEXT",
                help='Five fields or a macro: "0 3 * * mon-fri", "@daily".',
            ),
            click.option("--tz", metavar="ZONE", help="The time zone of --cron; by default UTC."),
            click.option(
                "--every",
                metavar="DURATION",
                help="This long after the end of the previous run; -1: at once.",
            ),
            click.option("--base", metavar="MOMENT", help="With --every: base + k × every."),
            click.option(
                "--reference", type=click.Choice(["end", "start"]), help="What --every counts from."
            ),
            click.option(
                "--misfire",
                type=click.Choice(["once", "all", "skip"]),
                help="What to do about missed ticks.",
            ),
            click.option(
                "--overlap",
                type=click.Choice(["allow", "queue", "skip"]),
                help="What to do about a tick while a run is open.",
            ),
            click.option("--start", metavar="MOMENT", help="No ticks before it."),
            click.option("--until", metavar="MOMENT", help="No ticks after it."),
            click.option("--max-runs", type=int, metavar="N", help="At most N jobs in all."),
            click.option(
                "--jitter",
                metavar="DURATION",
                help="Start each run later, by a random time up to this.",
            ),
            click.option(
                "--grace", metavar="DURATION", help="Skip a tick that is later than this."
            ),
            click.option(
                "--pause-after-failures",
                type=int,
                metavar="N",
                help="Pause after N failures in a row.",
            ),
        ]
    ):
        command = option(command)
    return command


def _rule_options(options: dict[str, Any], without: Sequence[str] = ()) -> RuleOptions:
    fields = dict.fromkeys(word.replace("-", "_") for word in without)
    fields |= {name: value for name, value in options.items() if value is not None}
    if fields.get("every") == "-1":
        fields["every"] = -1
    return cast("RuleOptions", fields)


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.argument("task")
@click.argument("words", nargs=-1, metavar="[ARGS]…")
@rule_options
@common_options
@pass_invocation
def add(
    invocation: Invocation, /, name: str, task: str, words: Sequence[str], **options: Any
) -> None:
    """Add the schedule NAME, which makes jobs of TASK; the same rule again changes nothing.

    ARGS are values and key=value pairs, as for `genba job enqueue`.  Code that declares the same
    name does not change it from then on.

    \b
    Examples:
      genba schedule add nightly tasks.report ops --cron "0 3 * * *" --tz Europe/Zurich
      genba schedule add sweep tasks.sweep --every 12h --base 2026-01-01T03:00
    """
    args, kwargs = read_arguments(words)
    app = invocation.app()
    _show(invocation, app.recur(name, app.call(task, args, kwargs), **_rule_options(options)))


@schedule.command("set")
@click.argument("name", type=NameOf("schedule"))
@rule_options
@click.option(
    "--without",
    multiple=True,
    metavar="OPTION",
    help="Remove an option: --without until.  Repeatable.",
)
@common_options
@pass_invocation
def set_(invocation: Invocation, /, name: str, without: Sequence[str], **options: Any) -> None:
    """Change the rule of a schedule from now on; a run in progress is not affected.

    Code that declares the schedule does not change it back, until it is deleted.

    \b
    Examples:
      genba schedule set nightly --cron "0 4 * * *" --jitter 5m
      genba schedule set nightly --every 12h --without until
    """
    _show(invocation, invocation.app().schedule(name).set(**_rule_options(options, without)))


@schedule.command()
@common_options
@pass_invocation
def ls(invocation: Invocation) -> None:
    """List the schedules, with their next moment.

    \b
    Example:
      genba schedule ls
    """
    schedules = invocation.app().schedules()
    if invocation.json:
        say_json([_json(schedule) for schedule in schedules])
        return
    table(
        ("NAME", "TASK", "WHEN", "NEXT", "RUNS", "STATE"),
        [
            (
                schedule.name,
                schedule.task,
                _words(schedule),
                _next(schedule),
                schedule.runs,
                _state(schedule),
            )
            for schedule in schedules
        ],
    )


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.option(
    "-n", "count", default=5, show_default=True, type=click.IntRange(1, 1000), help="How many."
)
@common_options
@pass_invocation
def next(invocation: Invocation, name: str, count: int) -> None:
    """Show the next moments of a schedule, in its own time zone.

    \b
    Example:
      genba schedule next nightly -n 3
    """
    moments = invocation.app().schedule(name).next(count)
    if invocation.json:
        say_json({"name": name, "next": [moment.isoformat() for moment in moments]})
        return
    for moment in moments:
        say(moment.isoformat(sep=" "))


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.option(
    "-n", "count", default=20, show_default=True, type=click.IntRange(1, 10_000), help="How many."
)
@common_options
@pass_invocation
def ticks(invocation: Invocation, name: str, count: int) -> None:
    """Show the ticks of a schedule, latest first: the job of each, or why there is none.

    \b
    Example:
      genba schedule ticks nightly -n 3
    """
    history = invocation.app().schedule(name).ticks(count)
    if invocation.json:
        say_json([asdict(tick) for tick in history])
        return
    rows = [(moment_text(tick.moment), tick.job_id or "-", _why_not(tick)) for tick in history]
    table(("MOMENT", "JOB", "WHY NOT"), rows)


def _why_not(tick: Tick) -> str:
    more = (
        f", {'many' if tick.count is None else tick.count} up to {moment_text(tick.last)}"
        if tick.count != 1
        else ""
    )
    return f"{tick.skipped}{more}" if tick.skipped else ""


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.option("--reason", help="Shown with the schedule.")
@common_options
@pass_invocation
def pause(invocation: Invocation, name: str, reason: str | None) -> int:
    """Pause a schedule: no run starts until it is resumed; a run in progress goes on.

    \b
    Example:
      genba schedule pause nightly --reason "the printer is broken"
    """
    return _print_done(
        invocation,
        name,
        invocation.app().schedule(name).pause(reason),
        "paused",
        "was paused already",
    )


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common_options
@pass_invocation
def resume(invocation: Invocation, name: str) -> int:
    """Resume a paused schedule with its next moment.

    \b
    Example:
      genba schedule resume nightly
    """
    return _print_done(
        invocation, name, invocation.app().schedule(name).resume(), "resumed", "was not paused"
    )


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common_options
@pass_invocation
def trigger(invocation: Invocation, name: str) -> int:
    """Run a schedule once, now; its next moments stay.

    \b
    Example:
      genba schedule trigger nightly
    """
    job = invocation.app().schedule(name).trigger()
    if invocation.json:
        say_json({"name": name, "job": job.id if job else None})
    else:
        say(f"job {job.id}" if job else f'{name}: a run of it is open, and overlap="skip"')
    return 0 if job else 1


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common_options
@pass_invocation
def delete(invocation: Invocation, name: str) -> int:
    """Delete a schedule.

    A schedule that code declares comes back when a node starts: pause it instead.

    \b
    Example:
      genba schedule delete nightly
    """
    invocation.app().schedule(name).delete()
    return _print_done(invocation, name, True, "deleted", "")


def _print_done(invocation: Invocation, name: str, done: bool, word: str, otherwise: str) -> int:
    if invocation.json:
        say_json({"name": name, word: done})
    else:
        say(f"{name}: {word if done else otherwise}")
    return 0 if done else 1


def _show(invocation: Invocation, schedule: Schedule) -> None:
    if invocation.json:
        say_json(_json(schedule))
    else:
        say(f"{schedule.name}: {schedule.rule.words()}, next {_next(schedule)}")


def _next(schedule: Schedule) -> str:
    moments = [] if schedule.paused or schedule.fault else schedule.next(1)
    return moment_text(moments[0].astimezone(UTC)) if moments else "-"


def _words(schedule: Schedule) -> str:
    return UNREADABLE if schedule.fault else schedule.rule.words()


def _state(schedule: Schedule) -> str:
    if schedule.paused:
        return f"paused: {schedule.reason}"
    return "by hand" if schedule.by_hand else "in code"


def _json(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "task": schedule.task,
        "queue": None if schedule.fault else schedule.queue,
        "args": schedule.args,
        "rule": None if schedule.fault else rule_to_json(schedule.rule),
        "paused": schedule.paused,
        "reason": schedule.reason,
        "runs": schedule.runs,
        "failures": schedule.failures,
        "by_hand": schedule.by_hand,
        "next": [] if schedule.fault else [moment.isoformat() for moment in schedule.next(1)],
    }
