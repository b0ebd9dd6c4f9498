"""`genba doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import click

from genba.cli.output import Asked, clean, common, painted, pass_asked, say, say_json


@click.command()
@common
@pass_asked
def doctor(asked: Asked) -> int:
    """Look at the database, the nodes and what waits; the exit code is 1 if something is wrong.

    \b
    Example:
      genba doctor
    """
    found = asked.app().doctor()
    wrong = sum(one.wrong for one in found)
    if asked.json:
        listed = [
            {
                "kind": one.kind,
                "wrong": one.wrong,
                "text": one.text,
                "todo": one.todo,
                "data": dict(one.data),
            }
            for one in found
        ]
        say_json({"wrong": wrong, "findings": listed})
        return 1 if wrong else 0
    for one in found:
        mark, colour = (
            ("WRONG", "red") if one.wrong else ("note", "yellow") if one.todo else ("ok", "green")
        )
        click.echo(painted(f"{mark:<5}", colour) + f"  {clean(one.text)}")
        if one.todo:
            say(f"       {one.todo}")
    say(
        "nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    )
    return 1 if wrong else 0
