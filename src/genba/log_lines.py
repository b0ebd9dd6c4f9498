"""Log lines of nodes and of the jobs in them: a record is one line and one write, and says where it comes from.

json    one object; what a program reads
pretty  for a person; the traceback of an error follows on lines of its own
pipe    time|level|host|pid|job|task|logger|message

No line is longer than LONGEST: what is left out is marked.  Nothing in it can steer a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from genba.domain.duration import to_datetime
from genba.domain.terminal_text import clean, clean_json

FORMATS = ("json", "pretty", "pipe")
MAX_LINE_BYTES = 4096  # bytes: a pipe takes so much as one piece, whoever else writes into it
JOB_LOG_VARIABLE = (
    "GENBA_LOG_JOBS"  # in the environment of workers: a format, and the name of their node
)
CHAIN = 20  # causes of an error
_CUTS = (1500, 600, 200, 60, 20)  # characters that a text keeps, until the line is short enough
_KNOWN = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
)  # the rest is `extra`
_LONG = ("message", "error", "data")
_OF_JOB = ("job", "task", "attempt")

CurrentJobFields = Callable[[], Mapping[str, Any]]


class LineFormatter(logging.Formatter):
    """`about` is in every line; `inside` is asked which job a record comes from, if it does not say so itself."""

    def __init__(
        self, form: str, about: Mapping[str, Any], inside: CurrentJobFields = dict
    ) -> None:
        super().__init__()
        self._write = {"json": _json, "pretty": _pretty, "pipe": _pipe}[form]
        self._about = {"host": socket.gethostname(), **about}
        self._inside = inside

    def format(self, record: logging.LogRecord) -> str:
        return fit_line(self._write, self._told(record))

    def _told(self, record: logging.LogRecord) -> dict[str, Any]:
        more = {name: value for name, value in vars(record).items() if name not in _KNOWN}
        told: dict[str, Any] = {
            "time": to_datetime(int(record.created * 1_000_000)).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": _message(record),
            "logger": record.name,
            **self._about,
            "pid": record.process or os.getpid(),
            **{name: value for name, value in self._inside().items() if value is not None},
            **{name: more.pop(name) for name in (*_OF_JOB, "error") if name in more},
        }
        if record.exc_info and record.exc_info[1] is not None:
            told["error"] = describe_error(record.exc_info[1])
        if more:
            told["data"] = _plain(more)
        return told


def fit_line(write: Callable[[Mapping[str, Any]], str], told: Mapping[str, Any]) -> str:
    """The line, its texts cut until it is no longer than LONGEST with its end."""
    line = write(told)
    for most in _CUTS:
        if len(line.encode(errors="replace")) < MAX_LINE_BYTES:
            return line
        line = write(
            {name: _cut(value, most) if name in _LONG else value for name, value in told.items()}
        )
    if len(line.encode(errors="replace")) < MAX_LINE_BYTES:
        return line
    bare = {name: value for name, value in told.items() if name not in _LONG}
    return write({**bare, "message": _cut(str(told["message"]), _CUTS[-1])})


def _cut(value: Any, most: int) -> Any:
    """Of a long text the beginning, of a traceback the end: there it says what happened."""
    match value:
        case str() if len(value) > most:
            return f"{value[:most]}… [{len(value) - most} characters left out]"
        case {"traceback": str(trace), **others} if len(trace) > most:
            return {
                **_cut(others, most),
                "traceback": f"[{len(trace) - most} characters left out] …{trace[-most:]}",
            }
        case Mapping():
            rest = {"…": f"[{len(value) - most} left out]"} if len(value) > most else {}
            return {
                **{_cut(name, most): _cut(one, most) for name, one in list(value.items())[:most]},
                **rest,
            }
        case list() | tuple():
            left_out = [f"[{len(value) - most} left out]"] if len(value) > most else []
            return [*(_cut(one, most) for one in value[:most]), *left_out]
        case _:
            return value


def describe_error(error: BaseException) -> dict[str, Any]:
    """Its type, text and traceback, and the chain of what it came from, the nearest first."""
    causes: list[str] = []
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen and len(causes) < CHAIN:
        seen.add(id(cause))
        causes.append(f"{type(cause).__name__}: {_text(cause)}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    told = {"type": type(error).__name__, "message": _text(error)}
    if causes:
        told["causes"] = causes  # type: ignore[assignment]
    trace = "".join(traceback.format_tb(error.__traceback__, limit=-20))
    return {**told, "traceback": trace} if trace else told


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  an exception that cannot tell its text must still be told of
        return f"(its text could not be had: {type(broken).__name__})"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as broken:  # noqa: BLE001  a wrong call of the user's logger must not cost the line
        return f"{record.msg!r} with {record.args!r}: {type(broken).__name__}: {broken}"


def _plain(more: Mapping[str, Any]) -> Any:
    try:
        return msgspec.to_builtins(more, enc_hook=str, str_keys=True)
    except Exception:  # noqa: BLE001  circles, objects that cannot tell their text: the record matters more
        return {str(name): repr(type(value)) for name, value in more.items()}


def _json(told: Mapping[str, Any]) -> str:
    try:
        text = msgspec.json.encode(told, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a letter
        text = json.dumps(told, default=str)
    return text if text.isprintable() else clean_json(text)


def _pretty(told: Mapping[str, Any]) -> str:
    where = "".join(f" {name}={clean(told[name])}" for name in _OF_JOB if name in told)
    more = f" {_json(told['data'])}" if "data" in told else ""
    head = (
        f"{told['time']} {told['level'].upper()} {told['logger']}: {told['message']}{where}{more}"
    )
    return clean(head + _error_lines(told.get("error")), lines=True).replace("\n", "\n  ")


def _error_lines(error: Any) -> str:
    if not isinstance(error, Mapping):
        return "" if error is None else f"\n{error}"
    causes = "".join(f"\nfrom {cause}" for cause in error.get("causes", ()))
    trace = "".join(f"\n{line}" for line in str(error.get("traceback", "")).splitlines())
    return f"{trace}\n{error.get('type')}: {error.get('message')}{causes}"


def _pipe(told: Mapping[str, Any]) -> str:
    error = told.get("error")
    why = f" ({error.get('type')}: {error.get('message')})" if isinstance(error, Mapping) else ""
    names = ("time", "level", "host", "pid", "job", "task", "logger", "message")
    cells = {**{name: told.get(name, "") for name in names}, "message": f"{told['message']}{why}"}
    return "|".join(clean(cells[name]).replace("|", "\\|") for name in names)


class LineHandler(logging.Handler):
    """Writes to a descriptor: a line at a time, whole, and never waiting for a lock that a dead process holds."""

    def __init__(self, fd: int, line: LineFormatter) -> None:
        super().__init__()
        self._fd = fd
        self.setFormatter(line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._fd, self.format(record).encode(errors="replace") + b"\n")
        except OSError:
            return  # nobody reads it any more
        except Exception:  # noqa: BLE001  a line that cannot be written must not harm who wrote it
            self.handleError(record)
