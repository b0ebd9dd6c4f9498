"""`genba db`: put our tables into a database, bring them up to date, look whether all is well, take them out."""

from __future__ import annotations

import sys

import click

from genba.cli.output import Asked, bar, common, note, pass_asked, say, say_json


@click.group()
@common
def db() -> None:
    """The tables of genba, in your database.

    Nobody has to call this: the first command that needs the tables makes them.
    """


@db.command()
@click.option(
    "--create", is_flag=True, help="Make the database too (SQLite: its folder), if it is not there."
)
@common
@pass_asked
def install(asked: Asked, create: bool) -> None:
    """Make the tables; does nothing if they are there and current.

    \b
    Example:
      genba db install --create --url postgresql://localhost/shop
    """
    _install(asked, create)


@db.command()
@common
@pass_asked
def upgrade(asked: Asked) -> None:
    """Bring the tables up to date with this version of genba; jobs stay, nodes may go on.

    \b
    Example:
      genba db upgrade
    """
    _install(asked, create=False)


def _install(asked: Asked, create: bool) -> None:
    app = asked.app()
    with bar("upgrading", lambda: 100, quiet=asked.json) as tell:
        applied = app.install(create=create, tell=lambda done, of: tell(100 * done // of))
    if asked.json:
        say_json({"url": app.shown_url, "applied": applied})
    elif applied:
        say(f"{app.shown_url}: applied {', '.join(applied)}")
    else:
        say(f"{app.shown_url}: up to date, nothing to do")


@db.command()
@click.option(
    "--older-than", metavar="DURATION", help="All that ended longer ago, whatever their tasks say."
)
@common
@pass_asked
def prune(asked: Asked, older_than: str | None) -> None:
    """Delete final jobs that are older than their task wants them kept, with their history.

    Nodes do this by themselves, once a minute.

    \b
    Example:
      genba db prune --older-than 30d
    """
    gone = asked.app().prune(older_than)
    say_json({"deleted": gone}) if asked.json else say(f"{gone} jobs deleted")


@db.command()
@common
@pass_asked
def verify(asked: Asked) -> int:
    """Replay the history of all jobs, and tell what cannot be: exit code 1 if there is anything.

    No job is lost, none has finished twice, no limit was exceeded, no move was illegal, rows and history agree, and
    on SQLite the file is sound.  Nodes may go on meanwhile.

    \b
    Example:
      genba db verify
    """
    app = asked.app()
    found = app.verify()
    if asked.json:
        faults = [{"kind": one.kind, "which": one.which, "what": one.words} for one in found.faults]
        say_json(
            {
                "url": app.shown_url,
                "sound": found.sound,
                "jobs": found.jobs,
                "attempts": found.attempts,
                "events": found.events,
                "complete": found.complete,
                "counts": found.counts,
                "faults": faults,
                "notes": found.notes,
            }
        )
        return int(not found.sound)
    for fault in found.faults:
        say(fault)
    untold = found.counts.total() - len(found.faults)
    if untold:
        say(f"… and {untold} more")
    for remark in found.notes:
        note(remark)
    if not found.complete:
        note("old events were pruned: what came before is not known")
    read = f"{found.jobs} jobs, {found.attempts} attempts, {found.events} events"
    how = ", ".join(f"{count} × {kind}" for kind, count in sorted(found.counts.items()))
    say(
        f"{app.shown_url}: {read}: {how or 'nothing lost, nothing finished twice, no limit exceeded, no illegal move'}"
    )
    return int(not found.sound)


@db.command()
@click.argument("kind", type=click.Choice(["producer", "worker", "reader", "admin"]))
@click.argument("role")
@common
@pass_asked
def grant(asked: Asked, kind: str, role: str) -> None:
    """Give a role of PostgreSQL the rights of a producer, worker, reader or admin, and no others on our tables.

    The role must exist.  Ask as the owner of the tables, and once more after an upgrade.

    \b
    Example:
      genba db grant producer shop_web
    """
    app = asked.app()
    app.grant(role, kind)
    if asked.json:
        say_json({"url": app.shown_url, "role": role, "kind": kind})
    else:
        say(f"{app.shown_url}: {role} is a {kind}")


@db.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@common
@pass_asked
def uninstall(asked: Asked, yes: bool) -> int:
    """Remove the tables of genba, with all jobs in them, and nothing else.

    It lists what it removes and asks first.  What somebody else made beside or upon our tables stays; on PostgreSQL
    an object that depends on them makes it refuse.

    \b
    Example:
      genba db uninstall
    """
    app = asked.app()
    there = app.installed()
    if there and not yes:
        click.echo(
            f"This removes from {app.shown_url}, with all jobs of all namespaces in them:", err=True
        )
        for name in there:
            click.echo(f"  {name}", err=True)
        if not _confirmed():
            click.echo("nothing was removed", err=True)
            return 1
    removed = app.uninstall() if there else []
    if asked.json:
        say_json({"url": app.shown_url, "removed": removed})
    elif removed:
        say(f"{app.shown_url}: removed {', '.join(removed)}")
    else:
        say(f"{app.shown_url}: nothing of genba is there")
    return 0 if removed else 1


def _confirmed() -> bool:
    try:
        return click.confirm("Remove them?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError("nobody is there to answer; --yes removes without asking") from None
