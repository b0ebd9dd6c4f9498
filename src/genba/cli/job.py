"""`genba job`: enqueue jobs, show them, wait for them, change them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from genba.cli.event import say_event
from genba.cli.job_selection import ID, filter_options, find_named, id_options
from genba.cli.output import (
    Invocation,
    attempt_json,
    bar,
    clean,
    common_options,
    job_json,
    moment_text,
    note,
    pass_invocation,
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

_BAR_EVERY_SECONDS = 0.5
_SINGLE_QUERIES = 20  # of more jobs, the bar shows only how many have ended
_PAIR = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


@click.group()
@common_options
def job() -> None:
    """Jobs: enqueue, show, wait, change."""


@job.command(name="tail")
@click.argument("id", type=ID)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is final.")
@common_options
@pass_invocation
def tail_job(invocation: Invocation, id: int, follow: bool) -> None:
    """Print the events of a job, an event a line.

    \b
    Example: genba job tail 42 --follow
    """
    app = invocation.app()
    watched = app.job(id)
    for event in app.events(job=watched, block=follow and watched.state not in FINAL):
        say_event(event, invocation.json)
        if follow and event.kind in FINAL and watched.refresh().state in FINAL:
            return


# Show


@job.command(name="ls")
@filter_options
@click.option("--key", multiple=True, help="Only jobs with this key; repeatable.")
@click.option("--oldest", "order", flag_value="oldest", default=None, help="Oldest first.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=50,
    show_default=True,
    help="At most N jobs.",
)
@click.option(
    "--before",
    type=ID,
    metavar="ID",
    help="Only jobs older than this one: the last ID of the page before.",
)
@common_options
@pass_invocation
def list_jobs(invocation: Invocation, /, limit: int, **options: Any) -> None:
    """List jobs, newest first; without --state, those that are not final.

    \b
    Example:
      genba job ls --state failed --since 1h
    """
    app = invocation.app()
    filters: dict[str, Any] = {
        name: value for name, value in options.items() if value not in (None, ())
    }
    jobs = app.jobs(**filters, limit=limit + 1)
    more, jobs = len(jobs) > limit, jobs[:limit]
    if invocation.json:
        say_json([job_json(job) for job in jobs])
    elif not jobs:
        note("no jobs")
    else:
        table(["ID", "STATE", "TASK", "QUEUE", "DUE", "TRY", "%", "ABOUT"], map(_line, jobs))
        if more:
            note(f"there are more jobs: --before {jobs[-1].id}")


def _line(job: Job[Any]) -> list[object]:
    done = f"{job.progress:.0f}" if job.state in (State.RUNNING, State.SUCCEEDED) else ""
    return [
        job.id,
        job.state,
        job.task,
        job.queue,
        moment_text(job.due),
        job.record.attempt,
        done,
        _about(job),
    ]


def _about(job: Job[Any]) -> str:
    if job.state == State.RUNNING:
        return job.progress.note or ""
    if job.state == State.SUCCEEDED:
        return ""
    return job.reason or (f"{job.error['type']}: {job.error['message']}" if job.error else "")


@job.command()
@id_options
@common_options
@pass_invocation
def show(invocation: Invocation, ids: Sequence[int], keys: Sequence[str]) -> None:
    """Show all about a job, with every attempt that has ended.

    \b
    Example:
      genba job show 42
    """
    app = invocation.app()
    jobs = [(job, job.attempts) for job in find_named(app, ids, keys)]
    if invocation.json:
        shown = [
            {**job_json(job), "attempts": [attempt_json(attempt) for attempt in attempts]}
            for job, attempts in jobs
        ]
        say_json(shown[0] if len(shown) == 1 else shown)
        return
    nodes = app.node_names()
    for job, attempts in jobs:
        _show(job, attempts, nodes)


def _lowered(job: Job[Any]) -> str:
    priority, crashes = job.record.priority, job.record.crashes
    return (
        f" ({priority}, less {crashes} for its {'crash' if crashes == 1 else 'crashes'})"
        if crashes
        else ""
    )


def _show(one: Job[Any], attempts: Sequence[Attempt], nodes: Mapping[int, str]) -> None:
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
    if attempts:
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
                for one in attempts
            ],
        )
    if one.error and one.error.get("traceback"):
        say(one.error["traceback"].rstrip(), lines=True)


@job.command()
@id_options
@common_options
@pass_invocation
def explain(invocation: Invocation, ids: Sequence[int], keys: Sequence[str]) -> None:
    """Explain why a job is not running, and what it waits for.

    \b
    Example:
      genba job explain 42
    """
    explanations = [
        explanation.explain() for explanation in find_named(invocation.app(), ids, keys)
    ]
    if invocation.json:
        rows = [
            {
                "job": explanation.job_id,
                "state": str(explanation.state),
                "reasons": [
                    {"kind": reason.kind, "text": reason.text, "data": reason.data}
                    for reason in explanation.reasons
                ],
                "start": explanation.start,
            }
            for explanation in explanations
        ]
        say_json(rows[0] if len(rows) == 1 else rows)
        return
    for explanation in explanations:
        say(explanation)


# Enqueue and wait


@job.command()
@click.argument("name")
@click.argument("words", nargs=-1, metavar="[ARGS]…")
@click.option(
    "--app", "target", metavar="MODULE:APP", help="Import this app, and check task and arguments."
)
@click.option("--queue", metavar="NAME")
@click.option("--priority", type=int, metavar="N", help="A higher priority starts first.")
@click.option(
    "--at", metavar="MOMENT", help='Start not before: "2026-01-31T03:00+01:00", "+1 hour".'
)
@click.option("--delay", metavar="DURATION", help='Start after this time: "5m".')
@click.option(
    "--key", metavar="KEY", help="If an open job has this key, return it instead of a new job."
)
@click.option("--timeout", metavar="DURATION", help="Stop an attempt that takes longer.")
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
    help="Start after this job has succeeded; repeatable.",
)
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Repeatable.")
@common_options
@pass_invocation
def enqueue(
    invocation: Invocation, /, name: str, words: Sequence[str], target: str | None, **options: Any
) -> None:
    """Enqueue the task NAME, and print the id of the job.

    ARGS are values and key=value pairs.  A value that reads as JSON is JSON (5, null, [1,2], "5"),
    anything else is text.  After -- an argument may begin with a dash.

    Without --app nothing is checked: the job waits for a node that has the task.

    \b
    Examples:
      genba job enqueue tasks.add 1 y=2
      genba job enqueue tasks.greet name='"42"' --delay 5m --retry 3
      genba job enqueue tasks.add --app tasks:app -- -1 2
    """
    app = invocation.app(target)
    if target is not None and name not in app.task_table():
        known = ", ".join(sorted(app.task_table())) or "none"
        raise UnknownTask(f"{target} has no task {name!r}; it has: {known}")
    args, kwargs = read_arguments(words)
    chosen_options = {option: value for option, value in options.items() if value not in (None, ())}
    if "retry" in chosen_options:
        chosen_options["retry"] = _value(chosen_options["retry"])
    job = app.submit([app.call(name, args, kwargs, chosen_options)])[0]
    if invocation.json:
        say_json({"id": job.id, "created": job.created})
        return
    say(job.id)
    if not job.created:
        note(f"job {job.id} is open and has this identity: no new job was enqueued")


def read_arguments(words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split words into positional values and key=value pairs, which come in any order."""
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
@id_options
@click.option(
    "--timeout", metavar="DURATION", help="Stop waiting after this time, with exit code 1."
)
@click.option(
    "--any", "first", is_flag=True, help="Wait until one of the jobs is final, instead of all."
)
@common_options
@pass_invocation
def wait(
    invocation: Invocation,
    ids: Sequence[int],
    keys: Sequence[str],
    timeout: str | None,
    first: bool,
) -> int:
    """Wait until jobs are final; the exit code is 0 if they have succeeded.

    \b
    Example:
      genba job wait 42 --timeout 5m
    """
    app = invocation.app()
    jobs, until = find_named(app, ids, keys), "any" if first else "all"
    ended = (
        app.wait(jobs, timeout=timeout, until=until)
        if invocation.json or not shows_bars()
        else _watch(app, jobs, timeout, until)
    )
    for job in ended:
        job.refresh()
    if invocation.json:
        say_json([job_json(job) for job in ended])
    else:
        for job in ended:
            result = job.record.result
            about = clean(result.decode(errors="replace")) if result else _about(job)
            say(f"{job.id} {job.state} {about}".rstrip())
    return 0 if all(job.state == State.SUCCEEDED for job in ended) else 1


def _watch(app: Genba, jobs: Sequence[Job[Any]], timeout: str | None, until: str) -> list[Job[Any]]:
    """Do as `app.wait`, with a bar that shows the progress."""
    end = None if timeout is None else time.monotonic() + duration(timeout) / 1_000_000
    with bar("waiting", lambda: 100 * len(jobs)) as tell:
        while True:
            left = (
                _BAR_EVERY_SECONDS
                if end is None
                else max(0.0, min(_BAR_EVERY_SECONDS, end - time.monotonic()))
            )
            try:
                return app.wait(jobs, timeout=left, until=until)
            except WaitTimeout:
                tell(_percent(app, jobs))
                if end is not None and time.monotonic() >= end:
                    return app.wait(jobs, timeout=0, until=until)


def _percent(app: Genba, jobs: Sequence[Job[Any]]) -> int:
    """Return the sum of the jobs' percents; many jobs are 0 or 100 each, from one query."""
    if len(jobs) > _SINGLE_QUERIES:
        return 100 * app.group(jobs).progress.done
    return sum(100 if job.refresh().state in FINAL else int(job.progress) for job in jobs)


@job.command(name="run")
@click.argument("id", type=ID)
@click.option(
    "--here",
    is_flag=True,
    required=True,
    help="In this process; required, because there is no other way.",
)
@click.option(
    "--app", "target", required=True, metavar="MODULE:APP", help="The app with the task of the job."
)
@common_options
@pass_invocation
def run_job(invocation: Invocation, id: int, here: bool, target: str) -> int:
    """Run one job in the foreground, with no timer, so that breakpoint() and pdb work.

    The job must be waiting, scheduled or held.  No node runs it meanwhile, and its end is stored as
    for any other run.  If you interrupt it (Ctrl-C, or q in pdb), it is as it was before.

    \b
    Example:
      genba job run 42 --here --app tasks:app
    """
    from genba.node.foreground import ForegroundNode
    from genba.worker.foreground import run_in_foreground

    app = invocation.app(target)
    job = app.job(id)
    if job.task not in app.task_table():
        raise UnknownTask(f"{target} has no task {job.task!r}, the task of job {id}")
    finished = ForegroundNode.of(app).run(id, lambda *call: run_in_foreground(app, *call))
    job.refresh()
    if invocation.json:
        say_json({**job_json(job), "attempts": [attempt_json(attempt) for attempt in job.attempts]})
    elif not finished:
        note(f"job {id} was interrupted, and is {job.state} as before")
    else:
        _show(job, job.attempts, app.node_names())
    return 0 if job.state == State.SUCCEEDED else 1
