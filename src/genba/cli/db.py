"""`genba db`: create, upgrade, verify, prune and remove the tables of genba."""

from __future__ import annotations

import sys

import click

from genba.cli.output import Invocation, bar, common_options, note, pass_invocation, say, say_json

_ALL_IS_WELL = "nothing lost, nothing finished twice, no limit exceeded, no illegal move"


@click.group()
@common_options
def db() -> None:
    """The tables of genba, in your database.

    The first command that needs the tables creates them, so `db install` is optional.
    """


@db.command()
@click.option(
    "--create",
    is_flag=True,
    help="Create the database too (SQLite: its folder), if it does not exist.",
)
@common_options
@pass_invocation
def install(invocation: Invocation, create: bool) -> None:
    """Create the tables, unless they exist and are current.

    \b
    Example:
      genba db install --create --url postgresql://localhost/shop
    """
    _install(invocation, create)


@db.command()
@common_options
@pass_invocation
def upgrade(invocation: Invocation) -> None:
    """Upgrade the tables to this version of genba; jobs stay, and nodes may go on.

    \b
    Example:
      genba db upgrade
    """
    _install(invocation, create=False)


def _install(invocation: Invocation, create: bool) -> None:
    app = invocation.app()
    with bar("upgrading", lambda: 100, quiet=invocation.json) as tell:
        applied = app.install(create=create, tell=lambda done, of: tell(100 * done // of))
    if invocation.json:
        say_json({"url": app.shown_url, "applied": applied})
    elif applied:
        say(f"{app.shown_url}: applied {', '.join(applied)}")
    else:
        say(f"{app.shown_url}: up to date, nothing to do")


@db.command()
@click.option(
    "--older-than",
    metavar="DURATION",
    help="All jobs that ended longer ago, instead of the time of their task.",
)
@common_options
@pass_invocation
def prune(invocation: Invocation, older_than: str | None) -> None:
    """Delete final jobs, with their history, that are older than their task keeps them.

    Nodes do this once a minute.

    \b
    Example:
      genba db prune --older-than 30d
    """
    deleted = invocation.app().prune(older_than)
    say_json({"deleted": deleted}) if invocation.json else say(f"{deleted} jobs deleted")


@db.command()
@common_options
@pass_invocation
def verify(invocation: Invocation) -> int:
    """Replay the history of all jobs, and print what is wrong: then the exit code is 1.

    It checks that no job is lost or has finished twice, no limit was exceeded, no move was illegal,
    rows and history agree, and on SQLite the file is sound.  Nodes may go on meanwhile.

    \b
    Example:
      genba db verify
    """
    app = invocation.app()
    report = app.verify()
    if invocation.json:
        faults = [
            {"kind": fault.kind, "which": fault.which, "what": fault.words}
            for fault in report.faults
        ]
        say_json(
            {
                "url": app.shown_url,
                "sound": report.sound,
                "jobs": report.jobs,
                "attempts": report.attempts,
                "events": report.events,
                "complete": report.complete,
                "counts": report.counts,
                "faults": faults,
                "notes": report.notes,
            }
        )
        return int(not report.sound)
    for fault in report.faults:
        say(fault)
    not_listed = report.counts.total() - len(report.faults)
    if not_listed:
        say(f"… and {not_listed} more")
    for remark in report.notes:
        note(remark)
    if not report.complete:
        note("old events were pruned: what happened before them is not checked")
    counted = f"{report.jobs} jobs, {report.attempts} attempts, {report.events} events"
    summary = ", ".join(f"{count} × {kind}" for kind, count in sorted(report.counts.items()))
    say(f"{app.shown_url}: {counted}: {summary or _ALL_IS_WELL}")
    return int(not report.sound)


@db.command()
@click.argument("kind", type=click.Choice(["producer", "worker", "reader", "admin"]))
@click.argument("role")
@common_options
@pass_invocation
def grant(invocation: Invocation, kind: str, role: str) -> None:
    """Give a PostgreSQL role the rights of a producer, worker, reader or admin, and no others.

    The role must exist.  Run it as the owner of the tables, and again after an upgrade.

    \b
    Example:
      genba db grant producer shop_web
    """
    app = invocation.app()
    app.grant(role, kind)
    if invocation.json:
        say_json({"url": app.shown_url, "role": role, "kind": kind})
    else:
        say(f"{app.shown_url}: {role} is a {kind}")


@db.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@common_options
@pass_invocation
def uninstall(invocation: Invocation, yes: bool) -> int:
    """Remove the tables of genba, with all jobs in them, and nothing else.

    It lists what it removes, and asks first.  Other objects in the database stay; on PostgreSQL it
    fails if one of them depends on the tables.

    \b
    Example:
      genba db uninstall
    """
    app = invocation.app()
    tables = app.installed()
    if tables and not yes:
        click.echo(
            f"This removes from {app.shown_url}, with all jobs of all namespaces in them:", err=True
        )
        for table in tables:
            click.echo(f"  {table}", err=True)
        if not _confirmed():
            click.echo("nothing was removed", err=True)
            return 1
    removed = app.uninstall() if tables else []
    if invocation.json:
        say_json({"url": app.shown_url, "removed": removed})
    elif removed:
        say(f"{app.shown_url}: removed {', '.join(removed)}")
    else:
        say(f"{app.shown_url}: there are no tables of genba")
    return 0 if removed else 1


def _confirmed() -> bool:
    try:
        return click.confirm("Remove them?", err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.UsageError(
            "stdin is not a terminal, so nothing can be confirmed; --yes removes without asking"
        ) from None
