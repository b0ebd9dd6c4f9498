"""`genba node`: start a node, see which are alive."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import click

from genba.cli.output import Asked, clean, common, moment_text, pass_asked, say, say_json, table
from genba.domain.duration import duration, to_datetime
from genba.errors import BadOption
from genba.node.settings import POOLS, NodeSettings
from genba.options import NAME

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")
_LONGEST_NAME = 200


@click.group()
@common
def node() -> None:
    """Nodes run jobs: each is a supervisor and its workers."""


@node.command()
@click.argument("target")
@click.option("--name", metavar="NAME", help="Unique among the living nodes; by default host-pid.")
@click.option(
    "-q",
    "--queues",
    multiple=True,
    metavar="QUEUE[:SLOTS],…",
    help="The queues it serves, and at most how many jobs of each at a time; by default the queue `default`.",
)
@click.option("--pool", type=click.Choice(POOLS), help="How workers come and go; by default dynamic.")
@click.option("--min", "least", type=int, metavar="N", help="Workers that are always there; by default 1.")
@click.option(
    "--max", "most", type=int, metavar="N", help="At most so many workers; by default one per core, at least 2."
)
@click.option("--grace", metavar="DURATION", help="How long running jobs may go on after SIGTERM; by default 30s.")
@common
@pass_asked
def start(asked: Asked, /, target: str, **given: Any) -> int:
    """Run the jobs of TARGET ("module:app") until SIGTERM or Ctrl-C.

    The module is imported from the current directory or the Python path, in a process of its own.  On SIGTERM no
    new job is started, the running ones get their grace, and what is left goes back to the queue.

    --url and --namespace hold for an app that does not name its own: `Genba()`.

    \b
    Example:
      genba node start tasks:app -q render:2,default:8 --max 8
    """
    if sys.platform != "linux":
        raise BadOption(f"a node runs on Linux only, not on {sys.platform}; enqueue and query work here")
    _check_target(target)
    settings = _settings(target, given)
    for variable, value in (("GENBA_URL", asked.url), ("GENBA_NAMESPACE", asked.namespace)):
        if value:
            os.environ[variable] = value  # the zygote's app reads it
    from genba.node.loop import EXIT_IMPORT, run

    code = run(settings)
    return 2 if code == EXIT_IMPORT else code


def _settings(target: str, given: dict[str, Any]) -> NodeSettings:
    read: dict[str, Any] = {
        "name": _name(given["name"]) if given["name"] is not None else None,
        "queues": _queues(",".join(given["queues"])) if given["queues"] else None,
        "pool": given["pool"],
        "min": given["least"],
        "max": given["most"],
        "grace": duration(given["grace"]) if given["grace"] is not None else None,
    }
    return NodeSettings(target=target, **{name: value for name, value in read.items() if value is not None})


def _check_target(target: str) -> None:
    path, _, attribute = target.partition(":")
    if _TARGET.fullmatch(target) and not path.endswith(".py"):
        return
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    meant = f"{module}:{attribute or 'app'}"
    hint = f"; did you mean {meant}?" if meant != target and _TARGET.fullmatch(meant) else ""
    raise BadOption(f'{target!r} is no target: it is "module:app", the module as `import` takes it{hint}')


def _name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or clean(name) != name:
        raise BadOption(f"--name must be 1 to {_LONGEST_NAME} printable characters, not {name!r}")
    return name


def _queues(text: str) -> dict[str, int | None]:
    """ "render:2,default" is two slots for render, and for default as many as there are."""
    found: dict[str, int | None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, slots = part.rpartition(":")
        if not colon or not slots.isdecimal():
            name, slots = part, ""
        if not NAME.fullmatch(name):
            raise BadOption(f"-q: {name!r} is no queue: a letter or _, then letters, digits, _ . : # -")
        if name in found:
            raise BadOption(f"-q: queue {name!r} stands there twice")
        if slots and int(slots) < 1:
            raise BadOption(f"-q: queue {name!r} needs at least 1 slot; leave it out if it is not to be served")
        found[name] = int(slots) if slots else None
    return found


@node.command(name="ls")
@common
@pass_asked
def list_nodes(asked: Asked) -> None:
    """The nodes that are alive.

    \b
    Example:
      genba node ls
    """
    import msgspec

    app = asked.app()
    nodes = [
        {
            "name": one.name,
            "host": one.host,
            "pid": one.pid,
            "state": one.state,
            "slots": one.slots,
            "queues": msgspec.json.decode(one.queues),
            "tasks": msgspec.json.decode(one.tasks),
            "started": to_datetime(one.started_at),
            "version": one.version,
        }
        for one in app.nodes()
    ]
    if asked.json:
        say_json(nodes)
    elif not nodes:
        say("no node is alive")
    else:
        columns = ("name", "state", "host", "pid", "slots", "queues", "started")
        shown = [{**one, "queues": ",".join(one["queues"]), "started": moment_text(one["started"])} for one in nodes]
        table([column.upper() for column in columns], [[one[column] for column in columns] for one in shown])
