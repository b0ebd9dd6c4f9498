"""`genba event`: what happens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from genba.cli.output import Asked, common, pass_asked, say

if TYPE_CHECKING:
    from genba.client.event import Event


@click.group()
@common
def event() -> None:
    """What happens to jobs, nodes and workers."""


@event.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--kind", "kinds", multiple=True, metavar="NAME", help="Only these.")
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="Only of jobs of these tasks.")
@click.option("--after", metavar="CURSOR", help="Only what came after this event.")
@click.option("--new", is_flag=True, help="Only what happens from now on.")
@common
@pass_asked
def tail(
    asked: Asked,
    follow: bool,
    kinds: tuple[str, ...],
    tasks: tuple[str, ...],
    after: str | None,
    new: bool,
) -> None:
    """Print what has happened, an event a line.

    \b
    Example: genba event tail --follow --kind failed
    """
    app = asked.app()
    if new:
        app.store.install()
        after = app.store.events.end().cursor
    for told in app.events(after=after, kinds=kinds or None, task=tasks or None, block=follow):
        say_event(told, asked.json)


def say_event(told: Event, as_json: bool) -> None:
    if as_json:
        of = {"kind": told.kind, "job": told.job_id, "node": told.node, "at": told.at.isoformat()}
        click.echo(json.dumps({"cursor": told.cursor, **of, "data": told.data}))
        return
    whose = (
        f"job {told.job_id}"
        if told.job_id is not None
        else f"node {told.node}"
        if told.node is not None
        else ""
    )
    more = " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in told.data.items()
    )
    say(f"{told.at:%Y-%m-%d %H:%M:%S.%f}Z  {told.kind:<12} {whose:<12} {more}".rstrip())
