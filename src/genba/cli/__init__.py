"""The command line, `genba`: one noun per group, one module per noun.

No command imports the app, rich or a driver before it needs them: `node start` becomes the
supervisor, which stays small.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from genba.cli.bench import bench
from genba.cli.completion import VARIABLE, completion
from genba.cli.db import db
from genba.cli.demo import demo
from genba.cli.doctor import doctor
from genba.cli.event import event
from genba.cli.job import job
from genba.cli.job_actions import ACTIONS
from genba.cli.lock import lock
from genba.cli.node import node
from genba.cli.output import clean, common_options, note, say_json
from genba.cli.queue import queue
from genba.cli.schedule import schedule
from genba.cli.task import task
from genba.cli.top import top
from genba.cli.unit import unit
from genba.errors import (
    BadArguments,
    BadOption,
    BadTask,
    GenbaError,
    JobNotFound,
    ScheduleNotFound,
    StoreError,
    UnknownTask,
)

INTERRUPTED = 130
CODES: Sequence[tuple[type[GenbaError], int]] = (
    (StoreError, 3),
    (JobNotFound, 4),
    (ScheduleNotFound, 4),
    (UnknownTask, 4),
    (BadArguments, 2),
    (BadOption, 2),
    (BadTask, 2),
)

EPILOG = """\b
Exit codes:
  0    success
  1    a job that was waited for did not succeed in time, or there was nothing to do
  2    wrong usage or wrong input
  3    the database cannot be reached or used
  4    there is no such job, task or schedule
  130  interrupted

\b
Settings, the later wins: [tool.genba] in ./pyproject.toml, GENBA_URL and
GENBA_NAMESPACE, the options here.  GENBA_TRACEBACK=1 prints the traceback of an error.
"""


class Program(click.Group):
    """A group that prints every error as one sentence, and exits with its code."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        _open_streams()
        words = list(sys.argv[1:] if args is None else args)
        options = {
            "prog_name": "genba",
            **options,
            "standalone_mode": False,
            "complete_var": VARIABLE,
        }
        as_json = "--json" in words  # not from the parser: the error may be in parsing
        try:
            if not all(map(_is_text, words)):
                raise click.UsageError("the command line has bytes that are not UTF-8")
            code = super().main(words, *more, **options)
        except click.Abort:
            with _full_stderr_ignored():
                note("genba: interrupted")
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            with _full_stderr_ignored():
                if as_json:
                    _say_error(type(error).__name__, error.format_message())
                else:
                    error.show()
            sys.exit(error.exit_code)
        except GenbaError as error:
            text = " ".join(str(error).split()) or type(error).__name__
            _report(error, text, as_json=as_json)
            sys.exit(exit_code(error))
        except OSError as error:  # usually on writing our output: a full disk
            _discard(1)
            where = f"{error.filename}: " if error.filename else ""
            text = f"cannot read or write: {where}{error.strerror or error}"
            _report(error, text, as_json=as_json)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Open /dev/null for a closed stream (`>&-`), so that no file opened later takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


@contextmanager
def _full_stderr_ignored() -> Iterator[None]:
    """Keep the exit code when stderr cannot be written either: it may be on the same disk."""
    try:
        yield
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """Send the stream to /dev/null.

    Python writes what is still in its buffers when it ends. If that fails, it exits with 120.
    """
    with open(os.devnull, "w") as nowhere, suppress(OSError):
        os.dup2(nowhere.fileno(), descriptor)


def _is_text(word: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def exit_code(error: GenbaError) -> int:
    return next((code for kind, code in CODES if isinstance(error, kind)), 1)


def _report(error: Exception, text: str, *, as_json: bool) -> None:
    with _full_stderr_ignored():
        if os.environ.get("GENBA_TRACEBACK") == "1":
            traceback.print_exc()
        if as_json:
            _say_error(type(error).__name__, text)
        else:
            note(f"genba: {text}")


def _say_error(kind: str, message: str) -> None:
    say_json({"error": {"type": kind, "message": clean(message)}}, err=True)


def _print_version(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        try:
            click.echo(f"genba {version('genba')}")
        except PackageNotFoundError:
            click.echo("genba, not installed: run from its source")
        context.exit()


@click.group(cls=Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@common_options
def main() -> None:
    """A distributed task manager: durable jobs, in processes it can always stop.

    Every command has its own --help.
    """


for command in ACTIONS:
    job.add_command(command)
for command in (
    demo,
    node,
    job,
    task,
    queue,
    schedule,
    event,
    lock,
    db,
    top,
    doctor,
    unit,
    bench,
    completion,
):
    main.add_command(command)
