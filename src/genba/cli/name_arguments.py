"""Arguments that are names, which the shell completes from the database."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from genba.cli.output import Invocation, clean
from genba.domain.states import State
from genba.errors import GenbaError

if TYPE_CHECKING:
    from genba.client.app import Genba

_MOST_NAMES = 200  # in one completion

_LISTED: dict[str, Callable[[Genba], Iterable[str]]] = {
    "node": lambda app: [node.name for node in app.nodes()],
    "queue": lambda app: app.queues,
    "task": lambda app: app.tasks,
    "schedule": lambda app: [schedule.name for schedule in app.schedules()],
    "lock": lambda app: [lock.name for lock in app.locks()],
}


class NameOf(click.types.StringParamType):
    """A text that names a task, queue, node or the like: its `kind`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that match; none if the database fails: Tab must not print errors."""
        if self._kind == "state":
            names: Iterable[str] = ["open", "final", "any", *State]
        else:
            with ctx:
                names = self._known((ctx.find_object(Invocation) or Invocation()).app())
        matching = [
            str(name) for name in names if str(name).startswith(incomplete) and clean(name) == name
        ]
        return [CompletionItem(name) for name in matching[:_MOST_NAMES]]

    def _known(self, app: Genba) -> list[str]:
        file = app.url.removeprefix("sqlite:///").partition("?")[0]
        if file != app.url and not os.path.exists(file):
            return []  # a query would create the file
        try:
            return sorted(_LISTED[self._kind](app))
        except GenbaError:
            return []
