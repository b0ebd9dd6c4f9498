"""`genba completion`: the script with which a shell completes commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from genba.cli.output import Invocation, common_options, pass_invocation, say_json

VARIABLE = "_GENBA_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
@pass_invocation
def completion(invocation: Invocation, shell: str) -> None:
    """Print the completion script for SHELL; it completes names from the database, too.

    \b
    Example:
      genba completion bash > ~/.local/share/bash-completion/completions/genba
    """
    kind = get_completion_class(shell)
    assert kind is not None
    text = kind(click.get_current_context().find_root().command, {}, "genba", VARIABLE).source()
    say_json({"shell": shell, "text": text}) if invocation.json else click.echo(text)
