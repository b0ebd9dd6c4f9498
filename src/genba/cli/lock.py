"""`genba lock`: list locks with their holders and waiters, and break one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import (
    Invocation,
    common_options,
    moment_text,
    note,
    pass_invocation,
    say,
    say_json,
    table,
)

if TYPE_CHECKING:
    from genba.client.lock import LockUser


@click.group()
@common_options
def lock() -> None:
    """Mutexes and semaphores: `app.mutex`, `app.semaphore`."""


@lock.command()
@common_options
@pass_invocation
def ls(invocation: Invocation) -> None:
    """List the locks that are held or waited for, with their holders, and waiters in order.

    \b
    Example:
      genba lock ls
    """
    states = invocation.app().locks()
    if invocation.json:
        say_json(
            [
                {
                    "name": state.name,
                    "n": state.n,
                    "holders": [_json(user) for user in state.holders],
                    "waiters": [_json(user) for user in state.waiters],
                }
                for state in states
            ]
        )
        return
    if not states:
        note("no lock is held")
        return
    rows = [
        (
            state.name,
            state.n,
            what,
            user.token,
            user.node or user.host,
            user.pid,
            user.job,
            moment_text(user.since),
        )
        for state in states
        for what, users in (("holds", state.holders), ("waits", state.waiters))
        for user in users
    ]
    table(("NAME", "N", "WHAT", "TOKEN", "NODE", "PID", "JOB", "SINCE"), rows)


def _json(user: LockUser) -> dict[str, Any]:
    return {
        "node": user.node,
        "host": user.host,
        "pid": user.pid,
        "job": user.job,
        "attempt": user.attempt,
        "since": user.since,
        "token": user.token,
    }


@lock.command(name="break")
@click.argument("name", type=NameOf("lock"))
@click.option("--token", type=int, metavar="N", help="Only the holder with this token.")
@common_options
@pass_invocation
def break_(invocation: Invocation, name: str, token: int | None) -> int:
    """Take a lock away from its holder; the next waiter gets it.

    The holder is not stopped.  It notices at its next check (`lock.check()`,
    `lock.assert_fence(conn)`), or when it releases the lock; until then two holders may act.  If
    the holder is a job, `genba job kill` is safer: it ends the job, and then frees its locks.

    \b
    Example:
      genba lock break stock/7
    """
    broken = invocation.app().break_lock(name, token=token)
    if invocation.json:
        say_json({"name": name, "broken": broken})
    elif broken:
        say(f"{name}: taken away from {', '.join(f'token {number}' for number in broken)}")
    else:
        note(f"genba: {name} is not held" + ("" if token is None else f" with token {token}"))
    return 0 if broken else 1
