"""`genba unit`: a node as a service, for systemd or supervisor."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from genba.cli.node import check_target
from genba.cli.output import Invocation, common_options, note, pass_invocation, say, say_json
from genba.domain.duration import duration
from genba.domain.url import mask_password
from genba.errors import BadOption

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_STOP_MARGIN_SECONDS = 5  # after the grace of a node, which then ends what is left


@dataclass(frozen=True, slots=True)
class Service:
    """A node that a service manager starts and stops."""

    name: str
    target: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    secret: bool  # the URL has a password, which must not be in a file that others may read
    user: str | None
    grace: int  # seconds
    processes: int
    logs: Path


def unit_options(command: Any) -> Any:
    """Add the options that both kinds of service have."""
    for option in (
        click.option(
            "--logs",
            metavar="FOLDER",
            default="/var/log",
            show_default=True,
            help="Where supervisor writes the logs.",
        ),
        click.option(
            "--processes",
            type=click.IntRange(1, 1000),
            default=1,
            show_default=True,
            help="How many nodes.",
        ),
        click.option(
            "--grace",
            default="30s",
            show_default=True,
            metavar="DURATION",
            help="For running jobs.",
        ),
        click.option(
            "--user",
            metavar="NAME",
            help="The user that runs it; by default that of the service manager.",
        ),
        click.option(
            "--folder", metavar="PATH", help="Where the app is; by default the current folder."
        ),
        click.option(
            "--name",
            metavar="NAME",
            help="Of the service; by default genba- and the module's name.",
        ),
        click.argument("words", nargs=-1, metavar="[-- OPTION…]"),
        click.argument("target"),
    ):
        command = option(command)
    return command


@click.group()
@common_options
def unit() -> None:
    """Print the configuration of a node as a service of systemd or supervisor."""


@unit.command()
@unit_options
@common_options
@pass_invocation
def systemd(invocation: Invocation, /, **options: Any) -> None:
    """Print a systemd unit for a node of TARGET; options after -- are for `node start`.

    \b
    Example:
      genba unit systemd tasks:app --folder /srv/shop --user shop -- --max 8
    """
    service = _service(invocation, **options)
    if service.processes > 1:
        instances = [f"{service.name}@{i + 1}" for i in range(min(3, service.processes))]
        note(f"this is a template: enable {', '.join(instances)} …")
    _print(invocation, service, "systemd", systemd_text(service))


@unit.command()
@unit_options
@common_options
@pass_invocation
def supervisor(invocation: Invocation, /, **options: Any) -> None:
    """Print a supervisor program for nodes of TARGET; options after -- are for `node start`.

    \b
    Example:
      genba unit supervisor tasks:app --folder /srv/shop --processes 2 -- --max 8
    """
    service = _service(invocation, **options)
    _print(invocation, service, "supervisor", supervisor_text(service))


def _print(invocation: Invocation, service: Service, kind: str, text: str) -> None:
    if invocation.json:
        say_json({"kind": kind, "name": service.name, "text": text})
    else:
        say(text, lines=True)


def _service(invocation: Invocation, target: str, words: Sequence[str], **options: Any) -> Service:
    check_target(target)
    name = options["name"] or "genba-" + target.partition(":")[0].replace(".", "-").replace(
        "_", "-"
    )
    if not _NAME.fullmatch(name):
        raise BadOption(f"--name must be letters, digits, _ . -, not {name!r}")
    url, namespace = (
        invocation.url or os.environ.get("GENBA_URL"),
        invocation.namespace or os.environ.get("GENBA_NAMESPACE"),
    )
    environment = {"GENBA_URL": url, "GENBA_NAMESPACE": namespace, "PYTHONUNBUFFERED": "1"}
    secret = url is not None and mask_password(url) != url
    if secret:
        del environment["GENBA_URL"]
    script = Path(sys.executable).with_name("genba")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "genba.cli"]
    grace = duration(options["grace"])
    return Service(
        name=name,
        target=target,
        command=(*program, "node", "start", target, "--grace", f"{grace // 1_000_000}s", *words),
        folder=Path(os.path.abspath(options["folder"] or ".")),
        environment={key: value for key, value in environment.items() if value},
        secret=secret,
        user=options["user"],
        grace=grace // 1_000_000,
        processes=options["processes"],
        logs=Path(os.path.abspath(options["logs"])),
    )


def systemd_text(service: Service) -> str:
    several = service.processes > 1
    where = f"{service.name}@.service" if several else f"{service.name}.service"
    secret = f"/etc/genba/{service.name}.env"
    lines = [
        f"# /etc/systemd/system/{where}",
        "[Unit]",
        f"Description=genba node for {service.target}{' (%i)' if several else ''}",
        "Wants=network-online.target",
        "After=network-online.target postgresql.service",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        *([f"User={service.user}"] if service.user else []),
        f"WorkingDirectory={_escaped(str(service.folder))}",
        *(f"Environment={_word(f'{name}={value}')}" for name, value in service.environment.items()),
        *(
            ["# GENBA_URL=… with its password; mode 600", f"EnvironmentFile={secret}"]
            if service.secret
            else []
        ),
        f"ExecStart={' '.join(map(_word, service.command))}",
        "# pool, min and max are read again",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# SIGTERM is for the node, which drains; what is left of its tree afterwards is killed",
        "KillMode=mixed",
        "KillSignal=SIGTERM",
        f"TimeoutStopSec={service.grace + _STOP_MARGIN_SECONDS}",
        "# 2: wrong usage, or an app that cannot be imported: a restart does not help",
        "Restart=always",
        "RestartPreventExitStatus=2",
        "RestartSec=2",
        "# jobs may have many processes; limits per job are options of their task",
        "TasksMax=infinity",
        f"SyslogIdentifier={service.name}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """Quote and escape a word for systemd."""
    escaped = _escaped(text).replace("$", "$$")
    if _PLAIN.fullmatch(escaped.replace("%", "").replace("$", "")):
        return escaped
    inside = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inside}"'


def supervisor_text(service: Service) -> str:
    number = "_%(process_num)02d" if service.processes > 1 else ""
    log = f"{service.logs}/%(program_name)s{number}"
    environment = ",".join(
        f'{name}="{_percent(value)}"' for name, value in service.environment.items()
    )
    lines = [
        f"; /etc/supervisor/conf.d/{service.name}.conf",
        f"[program:{service.name}]",
        f"command={' '.join(map(_shell_word, service.command))}",
        f"process_name=%(program_name)s{number}",
        f"numprocs={service.processes}",
        f"directory={_percent(str(service.folder))}",
        *([f"user={service.user}"] if service.user else []),
        *(
            ["; GENBA_URL has a password: set it in the environment of supervisord"]
            if service.secret
            else []
        ),
        f"environment={environment}",
        "autostart=true",
        "autorestart=true",
        "startsecs=1",
        "startretries=3",
        "; the node drains",
        "stopsignal=TERM",
        f"stopwaitsecs={service.grace + _STOP_MARGIN_SECONDS}",
        "redirect_stderr=false",
        f"stdout_logfile={log}.log",
        "stdout_logfile_maxbytes=10MB",
        "stdout_logfile_backups=10",
        "; the log of the node",
        f"stderr_logfile={log}.err.log",
        "stderr_logfile_maxbytes=10MB",
        "stderr_logfile_backups=10",
    ]
    return "\n".join(lines)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _shell_word(text: str) -> str:
    return shlex.quote(_percent(text))
