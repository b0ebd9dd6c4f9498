"""`genba event`: print events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from genba.cli.output import Invocation, common_options, pass_invocation, say

if TYPE_CHECKING:
    from genba.client.event import Event


@click.group()
@common_options
def event() -> None:
    """Events of jobs, nodes and workers."""


@event.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--kind", "kinds", multiple=True, metavar="NAME", help="Only events of this kind.")
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME", help="Only events of jobs of this task."
)
@click.option("--after", metavar="CURSOR", help="Only events after the one with this cursor.")
@click.option("--new", is_flag=True, help="Only events from now on.")
@common_options
@pass_invocation
def tail(
    invocation: Invocation,
    follow: bool,
    kinds: tuple[str, ...],
    tasks: tuple[str, ...],
    after: str | None,
    new: bool,
) -> None:
    """Print events, oldest first, one a line.

    \b
    Example: genba event tail --follow --kind failed
    """
    app = invocation.app()
    if new:
        after = app.newest_event()
    for event in app.events(after=after, kinds=kinds or None, task=tasks or None, block=follow):
        say_event(event, invocation.json)


def say_event(event: Event, as_json: bool) -> None:
    if as_json:
        head = {
            "kind": event.kind,
            "job": event.job_id,
            "node": event.node,
            "at": event.at.isoformat(),
        }
        click.echo(json.dumps({"cursor": event.cursor, **head, "data": event.data}))
        return
    subject = (
        f"job {event.job_id}"
        if event.job_id is not None
        else f"node {event.node}"
        if event.node is not None
        else ""
    )
    data = " ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in event.data.items()
    )
    say(f"{event.at:%Y-%m-%d %H:%M:%S.%f}Z  {event.kind:<12} {subject:<12} {data}".rstrip())
