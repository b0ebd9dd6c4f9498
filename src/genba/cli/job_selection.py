"""The options that select jobs: by id, by key, or by filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from genba.cli.name_arguments import NameOf

if TYPE_CHECKING:
    from genba.client.app import Genba
    from genba.client.job import Job

F = TypeVar("F", bound=Callable[..., Any])

ID = click.IntRange(1, 2**63 - 1)


def id_options(command: F) -> F:
    """Add the arguments that name jobs by id or key."""
    ids = click.argument("ids", nargs=-1, type=ID, metavar="[ID]…")
    keys = click.option(
        "--key", "keys", multiple=True, metavar="KEY", help="The job with this key."
    )
    return ids(keys(command))


def filter_options(command: F) -> F:
    """Add the options that filter jobs."""
    for option in (
        click.option("--error", metavar="TEXT", help="Only jobs with this text in the last error."),
        click.option(
            "--until", metavar="DURATION", help='Only jobs enqueued longer ago than "10m".'
        ),
        click.option("--since", metavar="DURATION", help='Only jobs enqueued in the last "1h".'),
        click.option("--parent", type=ID, metavar="ID", help="Only children of this job."),
        click.option(
            "--node",
            multiple=True,
            type=NameOf("node"),
            help="Only jobs that run on this node; repeatable.",
        ),
        click.option(
            "--schedule",
            multiple=True,
            type=NameOf("schedule"),
            help="Only jobs of this schedule; repeatable.",
        ),
        click.option("--tag", multiple=True, help="Only jobs with this tag; repeatable."),
        click.option(
            "--queue",
            multiple=True,
            type=NameOf("queue"),
            help="Only jobs in this queue; repeatable.",
        ),
        click.option(
            "--task", multiple=True, type=NameOf("task"), help="Only jobs of this task; repeatable."
        ),
        click.option(
            "--state",
            multiple=True,
            type=NameOf("state"),
            help="open, final, any, or a state; repeatable.",
        ),
    ):
        command = option(command)
    return command


def find_named(app: Genba, ids: Sequence[int], keys: Sequence[str]) -> list[Job[Any]]:
    if not ids and not keys:
        raise click.UsageError("no job is named; give an ID, or --key KEY")
    return [*(app.job(id) for id in dict.fromkeys(ids)), *(app.job(key=key) for key in keys)]
