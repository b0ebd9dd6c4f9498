"""`genba node`: start a node, see which are alive, steer them."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import Asked, clean, common, moment_text, pass_asked, say, say_json, table
from genba.client.settings import read_node
from genba.domain.duration import duration, to_datetime
from genba.domain.pool_settings import POOLS
from genba.errors import BadOption
from genba.log_lines import FORMATS
from genba.node.settings import SPAWNS, NodeSettings
from genba.node.watch.load_gate import LoadGate
from genba.options.parse import NAME_PATTERN, parse_size

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
    help="The queues it serves, and at most how many jobs of each at a time; by default `default` and all "
    "that its tasks and schedules name.",
)
@click.option(
    "--pool", type=click.Choice(POOLS), help="How workers come and go; by default dynamic."
)
@click.option(
    "--min", "least", type=int, metavar="N", help="Workers that are always there; by default 1."
)
@click.option(
    "--max",
    "most",
    type=int,
    metavar="N",
    help="At most so many workers; by default one per core, at least 2.",
)
@click.option(
    "--grace",
    metavar="DURATION",
    help="How long running jobs may go on after SIGTERM; by default 30s.",
)
@click.option(
    "--max-dedicated",
    type=int,
    metavar="N",
    help="Jobs with dedicated=True at a time; by default 8.",
)
@click.option(
    "--recycle-after",
    multiple=True,
    metavar="N|SIZE",
    help="Replace a worker after so many jobs, or when it has been larger than, for example, 500M. Repeatable.",
)
@click.option(
    "--max-load", metavar="LOAD", help="Claim nothing while the load per CPU is above this."
)
@click.option(
    "--min-free-memory", metavar="SIZE", help="Claim nothing while less memory than this is free."
)
@click.option(
    "--spawn",
    type=click.Choice(SPAWNS),
    help="How workers start: forked from a process that has the app (default), or each importing it anew.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Tell /metrics, /livez, /readyz there; by default on localhost.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    help="By default pretty on a terminal, json elsewhere.",
)
@click.option(
    "--log-jobs",
    is_flag=True,
    default=None,
    help="Have what jobs log among the lines of the node, too.",
)
@click.option(
    "--reload",
    is_flag=True,
    help="For development: import the app again when one of its files changes.",
)
@click.option("--debug", is_flag=True, help="For development: one worker, no timeouts, a loud log.")
@common
@pass_asked
def start(asked: Asked, /, target: str, **given: Any) -> int:
    """Run the jobs of TARGET ("module:app") until SIGTERM or Ctrl-C.

    The module is imported from the current directory or the Python path, in a process of its own.  On SIGTERM no
    new job is started, the running ones get their grace, and what is left goes back to the queue.  On SIGHUP it
    reads pool, min and max again from pyproject.toml.

    --url and --namespace hold for an app that does not name its own: `Genba()`.

    \b
    Example:
      genba node start tasks:app -q render:2,default:8 --max 8
    """
    if sys.platform != "linux":
        raise BadOption(
            f"a node runs on Linux only, not on {sys.platform}; enqueue and query work here"
        )
    check_target(target)
    settings = _settings(target, given)

    def reread() -> NodeSettings:
        return _settings(target, given)

    for variable, value in (("GENBA_URL", asked.url), ("GENBA_NAMESPACE", asked.namespace)):
        if value:
            os.environ[variable] = value  # the zygote's app reads it
    from genba.node.loop import CannotImport, run

    try:
        return run(settings, reread)
    except CannotImport as error:
        if not asked.json:
            click.echo(error.frames, nl=False, err=True)
        raise BadOption(str(error)) from None


def _settings(target: str, given: dict[str, Any]) -> NodeSettings:
    """The command line over the environment over the project."""
    said = {**given, "min": given["least"], "max": given["most"]}
    said = {
        **read_node(),
        **{name: value for name, value in said.items() if value not in (None, ())},
    }
    read: dict[str, Any] = {
        "name": _name(said["name"]) if "name" in said else None,
        "queues": _queues(",".join(_several(said["queues"]))) if "queues" in said else None,
        "more_queues": "queues" not in said,
        "pool": said.get("pool"),
        **{name: _whole(name, said.get(name)) for name in ("min", "max", "max_dedicated")},
        "grace": duration(said["grace"]) if "grace" in said else None,
        "gate": LoadGate(
            _load(said.get("max_load")), parse_size("min_free_memory", said.get("min_free_memory"))
        ),
        **_recycling(said.get("recycle_after", ())),
        "metrics": _address(said["metrics"]) if "metrics" in said else None,
        "log_format": said.get("log_format"),
        "log_jobs": _flag("log_jobs", said.get("log_jobs")),
        **{name: given[name] for name in ("spawn", "reload", "debug")},
    }
    if given["debug"]:
        if any(given[name] is not None for name in ("pool", "least", "most")):
            raise BadOption("--debug means one worker: leave out --pool, --min and --max")
        read |= {"pool": "static", "min": 1, "max": 1}
    return NodeSettings(
        target=target, **{name: value for name, value in read.items() if value is not None}
    )


def _several(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def _whole(name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise BadOption(f"{name} must be a whole number, not {value!r}") from None


def _address(value: Any) -> tuple[str, int]:
    """Where others can ask; a port of 0 is any that is free."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise BadOption(f"metrics must be a port, or host:port, not {value!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _flag(name: str, value: Any) -> bool | None:
    known = {
        None: None,
        True: True,
        False: False,
        "1": True,
        "true": True,
        "0": False,
        "false": False,
    }
    if value not in known:
        raise BadOption(f"{name} must be true or false, not {value!r}")
    return known[value]


def _load(value: Any) -> float | None:
    try:
        load = None if value is None else float(value)
    except (TypeError, ValueError):
        load = math.nan
    if load is not None and not math.isfinite(load):
        raise BadOption(f"max_load must be a number like 1.5, not {value!r}")
    return load


def _recycling(values: Any) -> dict[str, int | None]:
    """A plain number counts jobs, one with a unit is a size."""
    found: dict[str, int | None] = {}
    for value in _several(values) if values != () else []:
        if value.isdecimal():
            found["recycle_jobs"] = int(value)
        else:
            found["recycle_memory"] = parse_size("recycle_after", value)
    return found


def check_target(target: str) -> None:
    path, _, attribute = target.partition(":")
    if _TARGET.fullmatch(target) and not path.endswith(".py"):
        return
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    meant = f"{module}:{attribute or 'app'}"
    hint = f"; did you mean {meant}?" if meant != target and _TARGET.fullmatch(meant) else ""
    raise BadOption(
        f'{target!r} is no target: it is "module:app", the module as `import` takes it{hint}'
    )


def _name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or clean(name) != name:
        raise BadOption(f"--name must be 1 to {_LONGEST_NAME} printable characters, not {name!r}")
    return name


def _queues(text: str) -> dict[str, int | None]:
    """ "render:2,default" is two slots for render, and for default as many as there are."""
    found: dict[str, int | None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, slots = part.rpartition(":")
        if not colon:
            name, slots = part, ""
        elif slots and not (slots.isascii() and slots.isdecimal() and len(slots) < 10):
            raise BadOption(
                f"-q: {part!r}: after the last colon stands how many slots, a whole number; a queue whose name has a "
                f"colon is written with its slots ({part}:8), or with a colon behind it ({part}:)"
            )
        if not NAME_PATTERN.fullmatch(name):
            raise BadOption(
                f"-q: {name!r} is no queue: a letter or _, then letters, digits, _ . : # -"
            )
        if name in found:
            raise BadOption(f"-q: queue {name!r} stands there twice")
        if slots and int(slots) < 1:
            raise BadOption(
                f"-q: queue {name!r} needs at least 1 slot; leave it out if it is not to be served"
            )
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
    app = asked.app()
    nodes: list[dict[str, Any]] = [
        {
            "name": one.name,
            "host": one.host,
            "pid": one.pid,
            "state": one.state,
            "slots": one.slots,
            "queues": one.serves,
            "tasks": one.knows,
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
        shown = [
            {**one, "queues": ",".join(one["queues"]), "started": moment_text(one["started"])}
            for one in nodes
        ]
        table(
            [column.upper() for column in columns],
            [[one[column] for column in columns] for one in shown],
        )


@node.command(name="set")
@click.argument("name", type=NameOf("node"))
@click.option("--pool", type=click.Choice(POOLS), help="How workers come and go.")
@click.option("--min", "least", type=int, metavar="N", help="Workers that are always there.")
@click.option("--max", "most", type=int, metavar="N", help="At most so many workers.")
@common
@pass_asked
def set_node(
    asked: Asked, name: str, pool: str | None, least: int | None, most: int | None
) -> None:
    """Change the pool of the running node NAME.

    Workers that are too many end what they run first.  It holds until the node ends, or is told otherwise.

    \b
    Example:
      genba node set web1-1 --max 16
    """
    given = {"pool": pool, "min": least, "max": most}
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise BadOption("nothing to change: give --pool, --min or --max")
    asked.app().tell_node(name, "set", changes)
    _told(
        asked,
        name,
        f"node {name}: told to have {', '.join(f'{key} {value}' for key, value in changes.items())}",
    )


@node.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("node"))
@common
@pass_asked
def drain(asked: Asked, names: tuple[str, ...]) -> None:
    """Let the nodes NAMES end: they claim nothing more, and give their jobs the grace.

    \b
    Example:
      genba node drain web1-1
    """
    for name in names:
        asked.app().tell_node(name, "drain")
        _told(asked, name, f"node {name} drains")


@node.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("node"))
@common
@pass_asked
def stop(asked: Asked, names: tuple[str, ...]) -> None:
    """Let the nodes NAMES end now: a drain without the grace; what runs goes back to the queue, uncounted.

    \b
    Example:
      genba node stop web1-1
    """
    for name in names:
        asked.app().tell_node(name, "stop")
        _told(asked, name, f"node {name} stops")


def _told(asked: Asked, name: str, text: str) -> None:
    say_json({"name": name, "told": True}) if asked.json else say(text)
