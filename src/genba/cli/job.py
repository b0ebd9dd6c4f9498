"""`genba job`: enqueue, look, wait, steer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from genba.cli.event import say_event
from genba.cli.job_selection import ID, chosen, named, which
from genba.cli.output import (
    Asked,
    attempt_json,
    bar,
    clean,
    common,
    job_json,
    moment_text,
    note,
    pass_asked,
    say,
    say_json,
    seconds_text,
    shows_bars,
    table,
)
from genba.domain.duration import duration
from genba.domain.states import FINAL, State
from genba.errors import BadArguments, UnknownTask, WaitTimeout

if TYPE_CHECKING:
    from genba.client.app import Genba
    from genba.client.job import Attempt, Job

F = TypeVar("F", bound=Callable[..., Any])

_LOOK = 0.5  # seconds between two moves of a bar
_PAIR = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


@click.group()
@common
def job() -> None:
    """Jobs: enqueue, look, wait, steer."""


@job.command(name="tail")
@click.argument("id", type=ID)
@click.option("-f", "--follow", is_flag=True, help="Go on until it is final.")
@common
@pass_asked
def tail_job(asked: Asked, id: int, follow: bool) -> None:
    """What has happened to a job, and what happens to it from now on.

    \b
    Example: genba job tail 42 --follow
    """
    app = asked.app()
    target = app.job(id)
    for told in app.events(job=target, block=follow and target.state not in FINAL):
        say_event(told, asked.json)
        if follow and told.kind in FINAL and target.refresh().state in FINAL:
            return


# look


@job.command(name="ls")
@chosen
@click.option("--key", multiple=True, help="Only with this key; repeatable.")
@click.option("--oldest", "order", flag_value="oldest", default=None, help="The oldest first.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=50,
    show_default=True,
    help="At most so many, the newest.",
)
@click.option(
    "--before", type=ID, metavar="ID", help="Only older ones: the ID where the last page ended."
)
@common
@pass_asked
def list_jobs(asked: Asked, /, limit: int, **given: Any) -> None:
    """Jobs, the newest first; those that are not final unless --state says otherwise.

    \b
    Example:
      genba job ls --state failed --since 1h
    """
    app = asked.app()
    wanted: dict[str, Any] = {
        name: value for name, value in given.items() if value not in (None, ())
    }
    found = app.jobs(**wanted, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    if asked.json:
        say_json([job_json(one) for one in found])
    elif not found:
        note("no job")
    else:
        table(["ID", "STATE", "TASK", "QUEUE", "DUE", "TRY", "%", "ABOUT"], map(_line, found))
        if more:
            note(f"there are more: --before {found[-1].id}")


def _line(one: Job[Any]) -> list[object]:
    done = f"{one.progress:.0f}" if one.state in (State.RUNNING, State.SUCCEEDED) else ""
    return [
        one.id,
        one.state,
        one.task,
        one.queue,
        moment_text(one.due),
        one.record.attempt,
        done,
        _about(one),
    ]


def _about(one: Job[Any]) -> str:
    if one.state == State.RUNNING:
        return one.progress.note or ""
    if one.state == State.SUCCEEDED:
        return ""
    return one.reason or (f"{one.error['type']}: {one.error['message']}" if one.error else "")


@job.command()
@which
@common
@pass_asked
def show(asked: Asked, ids: Sequence[int], keys: Sequence[str]) -> None:
    """All that is known about a job, with every attempt that has ended.

    \b
    Example:
      genba job show 42
    """
    app = asked.app()
    found = [(one, one.attempts) for one in named(app, ids, keys)]
    if asked.json:
        told = [
            {**job_json(one), "attempts": [attempt_json(a) for a in tries]} for one, tries in found
        ]
        say_json(told[0] if len(told) == 1 else told)
        return
    nodes = app.node_names()
    for one, tries in found:
        _show(one, tries, nodes)


def _lowered(one: Job[Any]) -> str:
    given, crashes = one.record.priority, one.record.crashes
    return (
        f" ({given}, less {crashes} for its {'crash' if crashes == 1 else 'crashes'})"
        if crashes
        else ""
    )


def _show(one: Job[Any], tries: Sequence[Attempt], nodes: Mapping[int, str]) -> None:
    record, progress = one.record, one.progress
    facts = {
        "job": one.id,
        "task": one.task,
        "state": one.state + (f" ({one.reason})" if one.reason else ""),
        "queue": f"{one.queue}, priority {one.priority}" + _lowered(one),
        "key": one.key,
        "tags": ", ".join(one.tags),
        "arguments": msgspec.json.encode(one.args).decode(),
        "result": record.result.decode(errors="replace") if record.result else None,
        "progress": f"{progress:.1f} %" + (f" ({progress.note})" if progress.note else "")
        if record.progress
        else None,
        "enqueued": moment_text(one.enqueued),
        "due": moment_text(one.due),
        "finished": moment_text(one.finished) if one.finished else None,
        "options": record.options,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            say(f"{name + ':':<11}{value}")
    if tries:
        table(
            ["attempt", "cause", "started", "took", "cpu", "memory", "node", "pid", "error"],
            [
                [
                    one.number,
                    one.cause,
                    moment_text(one.started or one.claimed),
                    seconds_text(one.started or one.claimed, one.ended),
                    "-" if one.cpu is None else f"{one.cpu:.3f} s",
                    "-" if one.peak_memory is None else f"{one.peak_memory / 2**20:.0f} MB",
                    None if one.node is None else nodes.get(one.node, one.node),
                    one.pid,
                    f"{one.error['type']}: {one.error['message']}" if one.error else "",
                ]
                for one in tries
            ],
        )
    if one.error and one.error.get("traceback"):
        say(one.error["traceback"].rstrip(), lines=True)


@job.command()
@which
@common
@pass_asked
def explain(asked: Asked, ids: Sequence[int], keys: Sequence[str]) -> None:
    """Why a job is not running, and who is in its way.

    \b
    Example:
      genba job explain 42
    """
    told = [one.explain() for one in named(asked.app(), ids, keys)]
    if asked.json:
        listed = [
            {
                "job": one.job_id,
                "state": str(one.state),
                "reasons": [{"kind": r.kind, "text": r.text, "data": r.data} for r in one.reasons],
                "start": one.start,
            }
            for one in told
        ]
        say_json(listed[0] if len(listed) == 1 else listed)
        return
    for one in told:
        say(one)


# enqueue and wait


@job.command()
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGS]…")
@click.option(
    "--app", "target", metavar="MODULE:APP", help="Import this app, and check the arguments."
)
@click.option("--queue", metavar="NAME")
@click.option("--priority", type=int, metavar="N", help="Higher starts first.")
@click.option("--at", metavar="MOMENT", help='Not before: "2026-01-31T03:00+01:00", "+1 hour".')
@click.option("--delay", metavar="DURATION", help='Not before this time has passed: "5m".')
@click.option(
    "--key", metavar="KEY", help="An open job with this key is returned instead of a second one."
)
@click.option("--timeout", metavar="DURATION", help="An attempt that takes longer is ended.")
@click.option(
    "--retry",
    metavar="N",
    help='N retries after the first try, or JSON: {"times": 3, "delay": "1s"}.',
)
@click.option(
    "--after",
    type=ID,
    multiple=True,
    metavar="ID",
    help="Only after this job has succeeded; repeatable.",
)
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Repeatable.")
@common
@pass_asked
def enqueue(
    asked: Asked, /, name: str, words: Sequence[str], target: str | None, **options: Any
) -> None:
    """Enqueue the task NAME, and print the id of the job.

    ARGS are values and key=value pairs.  A value that reads as JSON is JSON (5, true, null, [1,2], "5"), anything
    else is text.  After -- an argument may begin with a dash.

    Without --app nothing is checked: the job waits for a node that knows the task.

    \b
    Examples:
      genba job enqueue tasks.add 1 y=2
      genba job enqueue tasks.greet name='"42"' --delay 5m --retry 3
      genba job enqueue tasks.add --app tasks:app -- -1 2
    """
    app = asked.app(target)
    if target is not None and name not in app.task_table():
        known = ", ".join(sorted(app.task_table())) or "none"
        raise UnknownTask(f"{target} has no task {name!r}; it has: {known}")
    args, kwargs = read_arguments(words)
    given = {option: value for option, value in options.items() if value not in (None, ())}
    if "retry" in given:
        given["retry"] = _value(given["retry"])
    made = app.submit([app.call(name, args, kwargs, given)])[0]
    if asked.json:
        say_json({"id": made.id, "created": made.created})
        return
    say(made.id)
    if not made.created:
        note(f"job {made.id} is open and has this identity: no second one was enqueued")


def read_arguments(words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional values and key=value pairs, in any order."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        pair = _PAIR.fullmatch(word)
        if pair is None:
            args.append(_value(word))
        elif pair[1] in kwargs:
            raise BadArguments(f"argument {pair[1]!r} is given twice")
        else:
            kwargs[pair[1]] = _value(pair[2])
    return tuple(args), kwargs


def _value(word: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(word)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return word


@job.command()
@which
@click.option("--timeout", metavar="DURATION", help="Give up after this time, with exit code 1.")
@click.option("--any", "first", is_flag=True, help="Until one of them is final, instead of all.")
@common
@pass_asked
def wait(
    asked: Asked, ids: Sequence[int], keys: Sequence[str], timeout: str | None, first: bool
) -> int:
    """Wait until jobs are final; the exit code is 0 if they have succeeded.

    \b
    Example:
      genba job wait 42 --timeout 5m
    """
    app = asked.app()
    jobs, until = named(app, ids, keys), "any" if first else "all"
    ended = (
        app.wait(jobs, timeout=timeout, until=until)
        if asked.json or not shows_bars()
        else _watch(app, jobs, timeout, until)
    )
    for one in ended:
        one.refresh()
    if asked.json:
        say_json([job_json(one) for one in ended])
    else:
        for one in ended:
            result = one.record.result
            about = clean(result.decode(errors="replace")) if result else _about(one)
            say(f"{one.id} {one.state} {about}".rstrip())
    return 0 if all(one.state == State.SUCCEEDED for one in ended) else 1


def _watch(app: Genba, jobs: Sequence[Job[Any]], timeout: str | None, until: str) -> list[Job[Any]]:
    """As `app.wait`, and a bar tells meanwhile how far they are."""
    end = None if timeout is None else time.monotonic() + duration(timeout) / 1_000_000
    with bar("waiting", lambda: 100 * len(jobs)) as tell:
        while True:
            left = _LOOK if end is None else max(0.0, min(_LOOK, end - time.monotonic()))
            try:
                return app.wait(jobs, timeout=left, until=until)
            except WaitTimeout:
                tell(_percent(app, jobs))
                if end is not None and time.monotonic() >= end:
                    return app.wait(jobs, timeout=0, until=until)


def _percent(app: Genba, jobs: Sequence[Job[Any]]) -> int:
    """Of all of them together; of many only who has ended, which is one question."""
    if len(jobs) > 20:
        states = app.store.states([one.id for one in jobs])
        return 100 * sum(states.get(one.id) in FINAL for one in jobs)
    return sum(100 if one.refresh().state in FINAL else int(one.progress) for one in jobs)


@job.command(name="run")
@click.argument("id", type=ID)
@click.option("--here", is_flag=True, required=True, help="In this process: the only way there is.")
@click.option(
    "--app", "target", required=True, metavar="MODULE:APP", help="The app that has its task."
)
@common
@pass_asked
def run_job(asked: Asked, id: int, here: bool, target: str) -> int:
    """Run one job in the foreground, with no timer, so that breakpoint() and pdb work.

    The job must be waiting, scheduled or held.  Nobody else gets it meanwhile, and how it ends is written as for any
    other run.  Break it off (Ctrl-C, or q in pdb), and it is as it was before.

    \b
    Example:
      genba job run 42 --here --app tasks:app
    """
    from genba.node.foreground import ForegroundNode
    from genba.worker.foreground import run_in_foreground

    app = asked.app(target)
    found = app.job(id)
    if found.task not in app.task_table():
        raise UnknownTask(f"{target} has no task {found.task!r}, which job {id} is of")
    finished = ForegroundNode(app.store, app.settings.lease).run(
        id, lambda *given: run_in_foreground(app, *given)
    )
    found.refresh()
    if asked.json:
        say_json({**job_json(found), "attempts": [attempt_json(one) for one in found.attempts]})
    elif not finished:
        note(f"job {id} was broken off, and is {found.state} as before")
    else:
        _show(found, found.attempts, app.node_names())
    return 0 if found.state == State.SUCCEEDED else 1
