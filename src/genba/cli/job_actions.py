"""`genba job cancel|kill|hold|resume|requeue`: for single jobs, or for all that match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from genba.cli.job_selection import filter_options, find_named, id_options
from genba.cli.output import Invocation, bar, common_options, note, pass_invocation, say, say_json
from genba.domain.states import FINAL

if TYPE_CHECKING:
    from genba.client.job import Job

F = TypeVar("F", bound=Callable[..., Any])

_reason = click.option("--reason", metavar="TEXT", help="Stored with the job.")


def many_options(command: F) -> F:
    """Add the options that select many jobs."""
    return filter_options(
        click.option("--dry-run", is_flag=True, help="Only print how many jobs match.")(command)
    )


def _act_on_each(
    invocation: Invocation,
    jobs: Callable[[], Sequence[Job[Any]]],
    act: Callable[[Job[Any]], bool],
    not_done: str,
) -> int:
    results = [(job, act(job)) for job in jobs()]
    told = [
        {"id": job.id, "done": done, "state": str(job.refresh().state)} for job, done in results
    ]
    if invocation.json:
        say_json(told)
        return 0 if all(done for _, done in results) else 1
    for job, done in results:
        asked_to_stop = job.state not in FINAL and job.record.cancel_requested
        now = f"{job.state}, asked to stop" if asked_to_stop else str(job.state)
        if done:
            say(f"{job.id} {now}")
        else:
            note(f"{job.id} is {job.state}: {not_done}")
    return 0 if all(done for _, done in results) else 1


def _act_on_matching(
    invocation: Invocation,
    is_named: bool,
    done_word: str,
    act: Callable[..., int],
    options: Mapping[str, Any],
) -> int | None:
    """Act on all jobs that match; None if jobs were named by id or key."""
    dry_run = options["dry_run"]
    filters = {
        name: value
        for name, value in options.items()
        if value not in (None, ()) and name != "dry_run"
    }
    if is_named and (filters or dry_run):
        raise click.UsageError(
            "give either IDs and keys, or --state, --task, --queue and the like, not both"
        )
    if not filters:
        if dry_run:
            raise click.UsageError("--dry-run needs --state, --task, --queue or the like")
        return None
    if dry_run:
        count = act(**filters, dry_run=True)
    else:
        with bar(done_word, lambda: act(**filters, dry_run=True), quiet=invocation.json) as tell:
            count = act(**filters, tell=tell)
    if invocation.json:
        say_json({"count": count, "dry_run": dry_run})
    else:
        say(f"{count} jobs would be {done_word}" if dry_run else f"{count} jobs {done_word}")
    return 0


@click.command()
@id_options
@many_options
@_reason
@common_options
@pass_invocation
def cancel(
    invocation: Invocation,
    /,
    ids: Sequence[int],
    keys: Sequence[str],
    reason: str | None,
    **filters: Any,
) -> int:
    """Cancel jobs; a running job is asked to stop, and killed when its grace is over.

    \b
    Example:
      genba job cancel 42 --reason "wrong file"
    """
    app = invocation.app()
    code = _act_on_matching(
        invocation, bool(ids or keys), "cancelled", partial(app.cancel_many, reason=reason), filters
    )
    if code is not None:
        return code
    return _act_on_each(
        invocation,
        lambda: find_named(app, ids, keys),
        lambda job: job.cancel(reason),
        "nothing to cancel",
    )


@click.command()
@id_options
@_reason
@common_options
@pass_invocation
def kill(
    invocation: Invocation, ids: Sequence[int], keys: Sequence[str], reason: str | None
) -> int:
    """Cancel jobs without a grace: a running job is killed at once.

    \b
    Example:
      genba job kill 42
    """
    return _act_on_each(
        invocation,
        lambda: find_named(invocation.app(), ids, keys),
        lambda job: job.kill(reason),
        "nothing to kill",
    )


@click.command()
@id_options
@many_options
@click.option(
    "--reason", default="by hand", show_default=True, metavar="TEXT", help="Stored with the job."
)
@common_options
@pass_invocation
def hold(
    invocation: Invocation, /, ids: Sequence[int], keys: Sequence[str], reason: str, **filters: Any
) -> int:
    """Keep jobs from starting until they are resumed.

    \b
    Example:
      genba job hold 42 --reason "ask Ann first"
    """
    app = invocation.app()
    code = _act_on_matching(
        invocation, bool(ids or keys), "held", partial(app.hold_many, reason=reason), filters
    )
    if code is not None:
        return code
    cannot = "only a job that has not started can be held"
    return _act_on_each(
        invocation, lambda: find_named(app, ids, keys), lambda job: job.hold(reason), cannot
    )


@click.command()
@id_options
@many_options
@common_options
@pass_invocation
def resume(
    invocation: Invocation, /, ids: Sequence[int], keys: Sequence[str], **filters: Any
) -> int:
    """Release held jobs.

    \b
    Example:
      genba job resume 42
    """
    app = invocation.app()
    code = _act_on_matching(invocation, bool(ids or keys), "resumed", app.resume_many, filters)
    if code is not None:
        return code
    return _act_on_each(
        invocation, lambda: find_named(app, ids, keys), lambda job: job.resume(), "it is not held"
    )


@click.command()
@id_options
@many_options
@common_options
@pass_invocation
def requeue(
    invocation: Invocation, /, ids: Sequence[int], keys: Sequence[str], **filters: Any
) -> int:
    """Run final jobs again, with a new budget of retries.

    \b
    Example:
      genba job requeue 42
    """
    app = invocation.app()
    code = _act_on_matching(invocation, bool(ids or keys), "requeued", app.requeue_many, filters)
    if code is not None:
        return code
    return _act_on_each(
        invocation,
        lambda: find_named(app, ids, keys),
        lambda job: job.requeue(),
        "only a final job can be requeued",
    )


ACTIONS: tuple[click.Command, ...] = (cancel, kill, hold, resume, requeue)
