"""`genba lock`: who holds which lock, who waits, and taking one away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import Asked, common, moment_text, note, pass_asked, say, say_json, table

if TYPE_CHECKING:
    from genba.client.lock import LockUser


@click.group()
@common
def lock() -> None:
    """Mutexes and semaphores: `app.mutex`, `app.semaphore`."""


@lock.command()
@common
@pass_asked
def ls(asked: Asked) -> None:
    """List the locks that are held or waited for, with holders, and waiters in their order.

    \b
    Example:
      genba lock ls
    """
    states = asked.app().locks()
    if asked.json:
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
@click.option("--token", type=int, metavar="N", help="Only the place with this token.")
@common
@pass_asked
def break_(asked: Asked, name: str, token: int | None) -> int:
    """Take a lock from whoever holds it; the next in line gets it.

    The holder is not stopped.  It finds out when it asks (`lock.check()`, `lock.assert_fence(conn)`), or when it gives
    the lock back; until then two may believe that they have it.  Of a job, `genba job kill` frees its locks too, and
    ends it first.

    \b
    Example:
      genba lock break stock/7
    """
    broken = asked.app().break_lock(name, token=token)
    if asked.json:
        say_json({"name": name, "broken": broken})
    elif broken:
        say(f"{name}: taken away from {', '.join(f'token {number}' for number in broken)}")
    else:
        note(f"genba: nobody holds {name}" + ("" if token is None else f" with token {token}"))
    return 0 if broken else 1
