"""`genba node`: start, list, change, drain and stop nodes."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any

import click

from genba.cli.name_arguments import NameOf
from genba.cli.output import (
    Invocation,
    clean,
    common_options,
    moment_text,
    pass_invocation,
    say,
    say_json,
    table,
)
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
@common_options
def node() -> None:
    """Nodes run jobs: each is a supervisor and its workers."""


@node.command()
@click.argument("target")
@click.option("--name", metavar="NAME", help="Unique among live nodes; by default host-pid.")
@click.option(
    "-q",
    "--queues",
    multiple=True,
    metavar="QUEUE[:SLOTS],…",
    help="The queues to serve, with at most SLOTS jobs at a time; by default `default` and all "
    "that its tasks and schedules name.",
)
@click.option(
    "--pool",
    type=click.Choice(POOLS),
    help="How the number of workers changes; by default dynamic.",
)
@click.option("--min", "least", type=int, metavar="N", help="At least N workers; by default 1.")
@click.option(
    "--max",
    "most",
    type=int,
    metavar="N",
    help="At most N workers; by default one per core, at least 2.",
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
    help="Replace a worker after N jobs, or when its peak was larger than SIZE (500M). Repeatable.",
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
    help="How workers start: forked from a process with the app (default), or with an import each.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve /metrics, /livez and /readyz there; by default on localhost.",
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
    help="Write what jobs log among the lines of the node.",
)
@click.option(
    "--reload",
    is_flag=True,
    help="For development: import the app again when one of its files changes.",
)
@click.option(
    "--debug", is_flag=True, help="For development: one worker, no timeouts, a log of every job."
)
@common_options
@pass_invocation
def start(invocation: Invocation, /, target: str, **options: Any) -> int:
    """Run the jobs of TARGET ("module:app") until SIGTERM or Ctrl-C.

    The module is imported from the current directory or the Python path, in a separate process.
    On SIGTERM no new job starts, running jobs get their grace, and the rest goes back to the queue.
    On SIGHUP the node reads pool, min and max again from pyproject.toml.

    --url and --namespace apply to an app without its own: `Genba()`.

    \b
    Example:
      genba node start tasks:app -q render:2,default:8 --max 8
    """
    if sys.platform != "linux":
        raise BadOption(
            f"a node runs on Linux only, not on {sys.platform}; enqueue and query work here"
        )
    check_target(target)
    settings = _settings(target, options)

    def reread() -> NodeSettings:
        return _settings(target, options)

    for variable, value in (
        ("GENBA_URL", invocation.url),
        ("GENBA_NAMESPACE", invocation.namespace),
    ):
        if value:
            os.environ[variable] = value  # the zygote's app reads it
    from genba.node.loop import CannotImport, run

    try:
        return run(settings, reread)
    except CannotImport as error:
        if not invocation.json:
            click.echo(error.frames, nl=False, err=True)
        raise BadOption(str(error)) from None


def _settings(target: str, options: dict[str, Any]) -> NodeSettings:
    """Merge the command line over the environment over pyproject.toml."""
    merged = {**options, "min": options["least"], "max": options["most"]}
    merged = {
        **read_node(),
        **{name: value for name, value in merged.items() if value not in (None, ())},
    }
    read: dict[str, Any] = {
        "name": _name(merged["name"]) if "name" in merged else None,
        "queues": _queues(",".join(_several(merged["queues"]))) if "queues" in merged else None,
        "more_queues": "queues" not in merged,
        "pool": merged.get("pool"),
        **{name: _whole(name, merged.get(name)) for name in ("min", "max", "max_dedicated")},
        "grace": duration(merged["grace"]) if "grace" in merged else None,
        "gate": LoadGate(
            _load(merged.get("max_load")),
            parse_size("min_free_memory", merged.get("min_free_memory")),
        ),
        **_recycling(merged.get("recycle_after", ())),
        "metrics": _address(merged["metrics"]) if "metrics" in merged else None,
        "log_format": merged.get("log_format"),
        "log_jobs": _flag("log_jobs", merged.get("log_jobs")),
        **{name: options[name] for name in ("spawn", "reload", "debug")},
    }
    if options["debug"]:
        if any(options[name] is not None for name in ("pool", "least", "most")):
            raise BadOption("--debug means one worker: leave out --pool, --min and --max")
        read |= {"pool": "static", "min": 1, "max": 1}
    return NodeSettings(
        target=target, **{name: value for name, value in read.items() if value is not None}
    )


def _several(value: Any) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]


def _whole(name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise BadOption(f"{name} must be a whole number, not {value!r}") from None


def _address(value: Any) -> tuple[str, int]:
    """Parse where to serve metrics; port 0 means any free port."""
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
    """Parse a plain number as jobs, and one with a unit as memory."""
    limits: dict[str, int | None] = {}
    for value in _several(values) if values != () else []:
        if value.isdecimal():
            limits["recycle_jobs"] = int(value)
        else:
            limits["recycle_memory"] = parse_size("recycle_after", value)
    return limits


def check_target(target: str) -> None:
    path, _, attribute = target.partition(":")
    if _TARGET.fullmatch(target) and not path.endswith(".py"):
        return
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    meant = f"{module}:{attribute or 'app'}"
    hint = f"; did you mean {meant}?" if meant != target and _TARGET.fullmatch(meant) else ""
    raise BadOption(
        f"{target!r} is not a target; expected module:attribute, for example tasks:app{hint}"
    )


def _name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or clean(name) != name:
        raise BadOption(f"--name must be 1 to {_LONGEST_NAME} printable characters, not {name!r}")
    return name


def _queues(text: str) -> dict[str, int | None]:
    """Parse "render:2,default": two slots for render, all slots for default."""
    queues: dict[str, int | None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, slots = part.rpartition(":")
        if not colon:
            name, slots = part, ""
        elif slots and not (slots.isascii() and slots.isdecimal() and len(slots) < 10):
            raise BadOption(
                f"-q: {part!r}: the part after the last colon must be the number of slots; write "
                f"a queue whose name has a colon with its slots ({part}:8), "
                f"or with a colon at the end ({part}:)"
            )
        if not NAME_PATTERN.fullmatch(name):
            raise BadOption(
                f"-q: {name!r} is not a queue name; "
                "use a letter or _, then letters, digits, _ . : # -"
            )
        if name in queues:
            raise BadOption(f"-q: queue {name!r} is given twice")
        if slots and int(slots) < 1:
            raise BadOption(
                f"-q: queue {name!r} needs at least 1 slot; "
                "leave it out if the node should not serve it"
            )
        queues[name] = int(slots) if slots else None
    return queues


@node.command(name="ls")
@common_options
@pass_invocation
def list_nodes(invocation: Invocation) -> None:
    """List the live nodes.

    \b
    Example:
      genba node ls
    """
    app = invocation.app()
    nodes: list[dict[str, Any]] = [
        {
            "name": node.name,
            "host": node.host,
            "pid": node.pid,
            "state": node.state,
            "slots": node.slots,
            "queues": node.serves,
            "tasks": node.knows,
            "started": to_datetime(node.started_at),
            "version": node.version,
        }
        for node in app.nodes()
    ]
    if invocation.json:
        say_json(nodes)
    elif not nodes:
        say("no node is alive")
    else:
        columns = ("name", "state", "host", "pid", "slots", "queues", "started")
        shown = [
            {**node, "queues": ",".join(node["queues"]), "started": moment_text(node["started"])}
            for node in nodes
        ]
        table(
            [column.upper() for column in columns],
            [[node[column] for column in columns] for node in shown],
        )


@node.command(name="set")
@click.argument("name", type=NameOf("node"))
@click.option("--pool", type=click.Choice(POOLS), help="How the number of workers changes.")
@click.option("--min", "least", type=int, metavar="N", help="At least N workers.")
@click.option("--max", "most", type=int, metavar="N", help="At most N workers.")
@common_options
@pass_invocation
def set_node(
    invocation: Invocation, name: str, pool: str | None, least: int | None, most: int | None
) -> None:
    """Change the pool of the running node NAME.

    Surplus workers end after their job.  The change holds until the node ends, or the next change.

    \b
    Example:
      genba node set web1-1 --max 16
    """
    options = {"pool": pool, "min": least, "max": most}
    changes = {key: value for key, value in options.items() if value is not None}
    if not changes:
        raise BadOption("nothing to change: give --pool, --min or --max")
    invocation.app().tell_node(name, "set", changes)
    _print_told(
        invocation,
        name,
        f"node {name}: asked to set {', '.join(f'{key} {changes[key]}' for key in changes)}",
    )


@node.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("node"))
@common_options
@pass_invocation
def drain(invocation: Invocation, names: tuple[str, ...]) -> None:
    """Drain the nodes NAMES: they claim no more jobs, give running ones their grace, and end.

    \b
    Example:
      genba node drain web1-1
    """
    for name in names:
        invocation.app().tell_node(name, "drain")
        _print_told(invocation, name, f"node {name} drains")


@node.command()
@click.argument("names", nargs=-1, required=True, type=NameOf("node"))
@common_options
@pass_invocation
def stop(invocation: Invocation, names: tuple[str, ...]) -> None:
    """Stop the nodes NAMES now, as drain without a grace; running jobs go back to the queue.

    \b
    Example:
      genba node stop web1-1
    """
    for name in names:
        invocation.app().tell_node(name, "stop")
        _print_told(invocation, name, f"node {name} stops")


def _print_told(invocation: Invocation, name: str, text: str) -> None:
    say_json({"name": name, "told": True}) if invocation.json else say(text)
