"""`genba doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import click

from genba.cli.output import (
    Invocation,
    clean,
    common_options,
    painted,
    pass_invocation,
    say,
    say_json,
)


@click.command()
@common_options
@pass_invocation
def doctor(invocation: Invocation) -> int:
    """Look at the database, the nodes and what waits; the exit code is 1 if something is wrong.

    \b
    Example:
      genba doctor
    """
    findings = invocation.app().doctor()
    wrong = sum(finding.wrong for finding in findings)
    if invocation.json:
        rows = [
            {
                "kind": finding.kind,
                "wrong": finding.wrong,
                "text": finding.text,
                "todo": finding.todo,
                "data": dict(finding.data),
            }
            for finding in findings
        ]
        say_json({"wrong": wrong, "findings": rows})
        return 1 if wrong else 0
    for finding in findings:
        mark, colour = (
            ("WRONG", "red")
            if finding.wrong
            else ("note", "yellow")
            if finding.todo
            else ("ok", "green")
        )
        click.echo(painted(f"{mark:<5}", colour) + f"  {clean(finding.text)}")
        if finding.todo:
            say(f"       {finding.todo}")
    say(
        "nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    )
    return 1 if wrong else 0
