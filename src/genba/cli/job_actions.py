"""`genba job cancel|kill|hold|resume|requeue`: one by one, or all that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from genba.cli.job_selection import chosen, named, which
from genba.cli.output import Asked, bar, common, note, pass_asked, say, say_json
from genba.domain.states import FINAL

if TYPE_CHECKING:
    from genba.client.job import Job

F = TypeVar("F", bound=Callable[..., Any])

_reason = click.option("--reason", metavar="TEXT", help="Kept with the job.")


def several(command: F) -> F:
    """Jobs by what they are, instead of by id."""
    return chosen(
        click.option("--dry-run", is_flag=True, help="Only tell how many it would be.")(command)
    )


def _move(
    asked: Asked,
    jobs: Callable[[], Sequence[Job[Any]]],
    move: Callable[[Job[Any]], bool],
    not_done: str,
) -> int:
    moved = [(one, move(one)) for one in jobs()]
    told = [{"id": one.id, "done": done, "state": str(one.refresh().state)} for one, done in moved]
    if asked.json:
        say_json(told)
        return 0 if all(done for _, done in moved) else 1
    for one, done in moved:
        asked_to_stop = one.state not in FINAL and one.record.cancel_requested
        now = f"{one.state}, asked to stop" if asked_to_stop else str(one.state)
        if done:
            say(f"{one.id} {now}")
        else:
            note(f"{one.id} is {one.state}: {not_done}")
    return 0 if all(done for _, done in moved) else 1


def _many(
    asked: Asked, is_named: bool, done: str, act: Callable[..., int], given: Mapping[str, Any]
) -> int | None:
    """Do it to all that fit; None if jobs were named by id or key."""
    dry_run = given["dry_run"]
    wanted = {
        name: value
        for name, value in given.items()
        if value not in (None, ()) and name != "dry_run"
    }
    if is_named and (wanted or dry_run):
        raise click.UsageError(
            "either IDs and keys, or --state, --task, --queue and the like, not both"
        )
    if not wanted:
        if dry_run:
            raise click.UsageError(
                "--dry-run is for jobs chosen by --state, --task, --queue and the like"
            )
        return None
    if dry_run:
        count = act(**wanted, dry_run=True)
    else:
        with bar(done, lambda: act(**wanted, dry_run=True), quiet=asked.json) as tell:
            count = act(**wanted, tell=tell)
    if asked.json:
        say_json({"count": count, "dry_run": dry_run})
    else:
        say(f"{count} jobs would be {done}" if dry_run else f"{count} jobs {done}")
    return 0


@click.command()
@which
@several
@_reason
@common
@pass_asked
def cancel(
    asked: Asked, /, ids: Sequence[int], keys: Sequence[str], reason: str | None, **given: Any
) -> int:
    """Cancel jobs; one that runs is asked to stop, and killed when its grace is over.

    \b
    Example:
      genba job cancel 42 --reason "wrong file"
    """
    app = asked.app()
    many = _many(
        asked, bool(ids or keys), "cancelled", partial(app.cancel_many, reason=reason), given
    )
    if many is not None:
        return many
    return _move(
        asked, lambda: named(app, ids, keys), lambda one: one.cancel(reason), "nothing to cancel"
    )


@click.command()
@which
@_reason
@common
@pass_asked
def kill(asked: Asked, ids: Sequence[int], keys: Sequence[str], reason: str | None) -> int:
    """As cancel, but a running job gets no time to end by itself.

    \b
    Example:
      genba job kill 42
    """
    return _move(
        asked,
        lambda: named(asked.app(), ids, keys),
        lambda one: one.kill(reason),
        "nothing to kill",
    )


@click.command()
@which
@several
@click.option(
    "--reason", default="by hand", show_default=True, metavar="TEXT", help="Kept with the job."
)
@common
@pass_asked
def hold(
    asked: Asked, /, ids: Sequence[int], keys: Sequence[str], reason: str, **given: Any
) -> int:
    """Keep jobs from starting until they are resumed.

    \b
    Example:
      genba job hold 42 --reason "ask Ann first"
    """
    app = asked.app()
    many = _many(asked, bool(ids or keys), "held", partial(app.hold_many, reason=reason), given)
    if many is not None:
        return many
    cannot = "only what has not started can be held"
    return _move(asked, lambda: named(app, ids, keys), lambda one: one.hold(reason), cannot)


@click.command()
@which
@several
@common
@pass_asked
def resume(asked: Asked, /, ids: Sequence[int], keys: Sequence[str], **given: Any) -> int:
    """Let held jobs go on.

    \b
    Example:
      genba job resume 42
    """
    app = asked.app()
    many = _many(asked, bool(ids or keys), "resumed", app.resume_many, given)
    if many is not None:
        return many
    return _move(asked, lambda: named(app, ids, keys), lambda one: one.resume(), "it is not held")


@click.command()
@which
@several
@common
@pass_asked
def requeue(asked: Asked, /, ids: Sequence[int], keys: Sequence[str], **given: Any) -> int:
    """Run final jobs again, with a fresh budget of retries.

    \b
    Example:
      genba job requeue 42
    """
    app = asked.app()
    many = _many(asked, bool(ids or keys), "requeued", app.requeue_many, given)
    if many is not None:
        return many
    return _move(
        asked,
        lambda: named(app, ids, keys),
        lambda one: one.requeue(),
        "only a final job can be requeued",
    )


MOVES: tuple[click.Command, ...] = (cancel, kill, hold, resume, requeue)
