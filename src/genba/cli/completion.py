"""`genba completion`: what a shell must read so that Tab completes commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from genba.cli.output import Asked, common, pass_asked, say_json

VARIABLE = "_GENBA_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common
@pass_asked
def completion(asked: Asked, shell: str) -> None:
    """The script for SHELL; names of tasks, queues, nodes, schedules and locks come from the database.

    \b
    Example:
      genba completion bash > ~/.local/share/bash-completion/completions/genba
    """
    kind = get_completion_class(shell)
    assert kind is not None
    text = kind(click.get_current_context().find_root().command, {}, "genba", VARIABLE).source()
    say_json({"shell": shell, "text": text}) if asked.json else click.echo(text)
