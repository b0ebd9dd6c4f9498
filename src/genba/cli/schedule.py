"""`genba schedule`: what runs again and again, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any, cast

import click

from genba.cli.job import read_arguments
from genba.cli.name_arguments import NameOf
from genba.cli.output import Asked, common, moment_text, pass_asked, say, say_json, table
from genba.domain.schedule import rule_to_json
from genba.domain.untrusted_json import UNREADABLE

if TYPE_CHECKING:
    from genba.client.schedule import Schedule, Tick
    from genba.options.schedule_rule import RuleOptions


@click.group()
@common
def schedule() -> None:
    """Rules that make jobs: by cron, or every so often.

    They are made in code, by app.recur(…) or @app.task(cron=…), or by hand: genba schedule add.
    """


def rule_options(command: Any) -> Any:
    """The options that say when."""
    for option in reversed(
        [
            click.option(
                "--cron",
                metavar="TEXT",
                help='Five fields or a macro: "0 3 * * mon-fri", "@daily".',
            ),
            click.option(
                "--tz", metavar="ZONE", help="The time zone of --cron; UTC if it is not said."
            ),
            click.option(
                "--every",
                metavar="DURATION",
                help="So long after the end of the run before; -1: at once.",
            ),
            click.option("--base", metavar="MOMENT", help="With --every: base + k × every."),
            click.option(
                "--reference", type=click.Choice(["end", "start"]), help="What --every counts from."
            ),
            click.option(
                "--misfire",
                type=click.Choice(["once", "all", "skip"]),
                help="Ticks that nobody made.",
            ),
            click.option(
                "--overlap",
                type=click.Choice(["allow", "queue", "skip"]),
                help="A tick while one is open.",
            ),
            click.option("--start", metavar="MOMENT", help="The first moment that counts."),
            click.option("--until", metavar="MOMENT", help="The last one."),
            click.option(
                "--max-runs", type=int, metavar="N", help="How many jobs it makes in all."
            ),
            click.option(
                "--jitter", metavar="DURATION", help="Each run starts up to so much later."
            ),
            click.option("--grace", metavar="DURATION", help="Later than this a tick is given up."),
            click.option(
                "--pause-after-failures", type=int, metavar="N", help="So many in a row pause it."
            ),
        ]
    ):
        command = option(command)
    return command


def _given(options: dict[str, Any], without: Sequence[str] = ()) -> RuleOptions:
    found = dict.fromkeys(word.replace("-", "_") for word in without)
    found |= {name: value for name, value in options.items() if value is not None}
    if found.get("every") == "-1":
        found["every"] = -1
    return cast("RuleOptions", found)


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.argument("task")
@click.argument("words", nargs=-1, metavar="[ARGS]…")
@rule_options
@common
@pass_asked
def add(asked: Asked, /, name: str, task: str, words: Sequence[str], **options: Any) -> None:
    """Let TASK run again and again, under the NAME; the same again changes nothing.

    ARGS are values and key=value pairs, as of `genba job enqueue`.  Code that declares the same name does not change
    it from then on.

    \b
    Examples:
      genba schedule add nightly tasks.report ops --cron "0 3 * * *" --tz Europe/Zurich
      genba schedule add sweep tasks.sweep --every 12h --base 2026-01-01T03:00
    """
    args, kwargs = read_arguments(words)
    app = asked.app()
    _show(asked, app.recur(name, app.call(task, args, kwargs), **_given(options)))


@schedule.command("set")
@click.argument("name", type=NameOf("schedule"))
@rule_options
@click.option(
    "--without",
    multiple=True,
    metavar="OPTION",
    help="Take one away: --without until.  Repeatable.",
)
@common
@pass_asked
def set_(asked: Asked, /, name: str, without: Sequence[str], **options: Any) -> None:
    """Change when a schedule runs, from now on; a run that is under way ends as it began.

    Code that declares the schedule does not change it back, until it is deleted.

    \b
    Examples:
      genba schedule set nightly --cron "0 4 * * *" --jitter 5m
      genba schedule set nightly --every 12h --without until
    """
    _show(asked, asked.app().schedule(name).set(**_given(options, without)))


@schedule.command()
@common
@pass_asked
def ls(asked: Asked) -> None:
    """List the schedules, with their next moment.

    \b
    Example:
      genba schedule ls
    """
    found = asked.app().schedules()
    if asked.json:
        say_json([_json(one) for one in found])
        return
    table(
        ("NAME", "TASK", "WHEN", "NEXT", "RUNS", "STATE"),
        [(one.name, one.task, _words(one), _next(one), one.runs, _state(one)) for one in found],
    )


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.option(
    "-n", "count", default=5, show_default=True, type=click.IntRange(1, 1000), help="How many."
)
@common
@pass_asked
def next(asked: Asked, name: str, count: int) -> None:
    """Show the next moments of a schedule, in its own time zone.

    \b
    Example:
      genba schedule next nightly -n 3
    """
    moments = asked.app().schedule(name).next(count)
    if asked.json:
        say_json({"name": name, "next": [moment.isoformat() for moment in moments]})
        return
    for moment in moments:
        say(moment.isoformat(sep=" "))


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@click.option(
    "-n", "count", default=20, show_default=True, type=click.IntRange(1, 10_000), help="How many."
)
@common
@pass_asked
def ticks(asked: Asked, name: str, count: int) -> None:
    """Show what came of a schedule's moments, the latest first: a job, or the reason why not.

    \b
    Example:
      genba schedule ticks nightly -n 3
    """
    found = asked.app().schedule(name).ticks(count)
    if asked.json:
        say_json([asdict(tick) for tick in found])
        return
    rows = [(moment_text(tick.moment), tick.job_id or "-", _why_not(tick)) for tick in found]
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
@click.option("--reason", help="Why, for those who see it.")
@common
@pass_asked
def pause(asked: Asked, name: str, reason: str | None) -> int:
    """No run starts until it is resumed; one that runs, runs on.

    \b
    Example:
      genba schedule pause nightly --reason "the printer is broken"
    """
    return _tell(
        asked, name, asked.app().schedule(name).pause(reason), "paused", "was paused already"
    )


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common
@pass_asked
def resume(asked: Asked, name: str) -> int:
    """Let a paused schedule go on with its next moment.

    \b
    Example:
      genba schedule resume nightly
    """
    return _tell(asked, name, asked.app().schedule(name).resume(), "resumed", "was not paused")


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common
@pass_asked
def trigger(asked: Asked, name: str) -> int:
    """Run it once, now; its rhythm stays as it is.

    \b
    Example:
      genba schedule trigger nightly
    """
    job = asked.app().schedule(name).trigger()
    if asked.json:
        say_json({"name": name, "job": job.id if job else None})
    else:
        say(f"job {job.id}" if job else f'{name}: a run of it is open, and overlap="skip"')
    return 0 if job else 1


@schedule.command()
@click.argument("name", type=NameOf("schedule"))
@common
@pass_asked
def delete(asked: Asked, name: str) -> int:
    """It makes no more jobs.  What code declares comes back when a node starts: pause that instead.

    \b
    Example:
      genba schedule delete nightly
    """
    asked.app().schedule(name).delete()
    return _tell(asked, name, True, "deleted", "")


def _tell(asked: Asked, name: str, done: bool, word: str, otherwise: str) -> int:
    if asked.json:
        say_json({"name": name, word: done})
    else:
        say(f"{name}: {word if done else otherwise}")
    return 0 if done else 1


def _show(asked: Asked, one: Schedule) -> None:
    if asked.json:
        say_json(_json(one))
    else:
        say(f"{one.name}: {one.rule.words()}, next {_next(one)}")


def _next(one: Schedule) -> str:
    moments = [] if one.paused or one.fault else one.next(1)
    return moment_text(moments[0].astimezone(UTC)) if moments else "-"


def _words(one: Schedule) -> str:
    return UNREADABLE if one.fault else one.rule.words()


def _state(one: Schedule) -> str:
    if one.paused:
        return f"paused: {one.reason}"
    return "by hand" if one.by_hand else "in code"


def _json(one: Schedule) -> dict[str, Any]:
    return {
        "name": one.name,
        "task": one.task,
        "queue": None if one.fault else one.queue,
        "args": one.args,
        "rule": None if one.fault else rule_to_json(one.rule),
        "paused": one.paused,
        "reason": one.reason,
        "runs": one.runs,
        "failures": one.failures,
        "by_hand": one.by_hand,
        "next": [] if one.fault else [moment.isoformat() for moment in one.next(1)],
    }
