"""Log lines of nodes and their jobs: each record is one line, one write, and names its origin.

json    one object, for programs
pretty  for people; the traceback of an error follows on separate lines
pipe    time|level|host|pid|job|task|logger|message

No line is longer than MAX_LINE_BYTES; omitted text is marked.  Control characters are escaped.
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
MAX_LINE_BYTES = 4096  # a write of at most this size into a pipe is not mixed with other writes
JOB_LOG_VARIABLE = "GENBA_LOG_JOBS"  # in workers' environment: a format and the name of their node
MAX_CAUSES = 20  # of an error
_TEXT_LENGTHS = (1500, 600, 200, 60, 20)  # tried in this order until the line is short enough
_KNOWN = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
)  # the rest is `extra`
_LONG = ("message", "error", "data")
_JOB_FIELDS = ("job", "task", "attempt")

CurrentJobFields = Callable[[], Mapping[str, Any]]


class LineFormatter(logging.Formatter):
    """Formats a record as one line.

    `constant` fields are in every line; `job_fields` returns the fields of the current job, for
    records that do not name their job.
    """

    def __init__(
        self, form: str, constant: Mapping[str, Any], job_fields: CurrentJobFields = dict
    ) -> None:
        super().__init__()
        self._write = {"json": _json, "pretty": _pretty, "pipe": _pipe}[form]
        self._constant = {"host": socket.gethostname(), **constant}
        self._job_fields = job_fields

    def format(self, record: logging.LogRecord) -> str:
        return fit_line(self._write, self._fields(record))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        extra = {name: value for name, value in vars(record).items() if name not in _KNOWN}
        line: dict[str, Any] = {
            "time": to_datetime(int(record.created * 1_000_000)).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": _message(record),
            "logger": record.name,
            **self._constant,
            "pid": record.process or os.getpid(),
            **{name: value for name, value in self._job_fields().items() if value is not None},
            **{name: extra.pop(name) for name in (*_JOB_FIELDS, "error") if name in extra},
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = describe_error(record.exc_info[1])
        if extra:
            line["data"] = _plain(extra)
        return line


def fit_line(write: Callable[[Mapping[str, Any]], str], fields: Mapping[str, Any]) -> str:
    """Write the line; shorten its texts until it fits MAX_LINE_BYTES with its line end."""
    line = write(fields)
    for length in _TEXT_LENGTHS:
        if len(line.encode(errors="replace")) < MAX_LINE_BYTES:
            return line
        line = write(
            {
                name: _shortened(value, length) if name in _LONG else value
                for name, value in fields.items()
            }
        )
    if len(line.encode(errors="replace")) < MAX_LINE_BYTES:
        return line
    bare = {name: value for name, value in fields.items() if name not in _LONG}
    return write({**bare, "message": _shortened(str(fields["message"]), _TEXT_LENGTHS[-1])})


def _shortened(value: Any, length: int) -> Any:
    """Keep the beginning of a long text and the end of a traceback, where the error is."""
    match value:
        case str() if len(value) > length:
            return f"{value[:length]}… [{len(value) - length} characters left out]"
        case {"traceback": str(trace), **others} if len(trace) > length:
            return {
                **_shortened(others, length),
                "traceback": f"[{len(trace) - length} characters left out] …{trace[-length:]}",
            }
        case Mapping():
            items = list(value.items())[:length]
            rest = {"…": f"[{len(value) - length} left out]"} if len(value) > length else {}
            return {
                **{_shortened(name, length): _shortened(item, length) for name, item in items},
                **rest,
            }
        case list() | tuple():
            left_out = [f"[{len(value) - length} left out]"] if len(value) > length else []
            return [*(_shortened(item, length) for item in value[:length]), *left_out]
        case _:
            return value


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the type, text and traceback of an error, and the chain of its causes."""
    causes: list[str] = []
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen and len(causes) < MAX_CAUSES:
        seen.add(id(cause))
        causes.append(f"{type(cause).__name__}: {_text(cause)}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    described: dict[str, Any] = {"type": type(error).__name__, "message": _text(error)}
    if causes:
        described["causes"] = causes
    trace = "".join(traceback.format_tb(error.__traceback__, limit=-20))
    return {**described, "traceback": trace} if trace else described


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  an error whose __str__ raises must be logged, too
        return f"(its text could not be read: {type(broken).__name__})"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as broken:  # noqa: BLE001  a wrong call of the logger must not lose the line
        return f"{record.msg!r} with {record.args!r}: {type(broken).__name__}: {broken}"


def _plain(extra: Mapping[str, Any]) -> Any:
    try:
        return msgspec.to_builtins(extra, enc_hook=str, str_keys=True)
    except Exception:  # noqa: BLE001  cycles, or a __str__ that raises: the record matters more
        return {str(name): repr(type(value)) for name, value in extra.items()}


def _json(fields: Mapping[str, Any]) -> str:
    try:
        text = msgspec.json.encode(fields, enc_hook=str).decode()
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(fields, default=str)
    return text if text.isprintable() else clean_json(text)


def _pretty(fields: Mapping[str, Any]) -> str:
    job = "".join(f" {name}={clean(fields[name])}" for name in _JOB_FIELDS if name in fields)
    data = f" {_json(fields['data'])}" if "data" in fields else ""
    level = fields["level"].upper()
    head = f"{fields['time']} {level} {fields['logger']}: {fields['message']}{job}{data}"
    return clean(head + _error_lines(fields.get("error")), lines=True).replace("\n", "\n  ")


def _error_lines(error: Any) -> str:
    if not isinstance(error, Mapping):
        return "" if error is None else f"\n{error}"
    causes = "".join(f"\nfrom {cause}" for cause in error.get("causes", ()))
    trace = "".join(f"\n{line}" for line in str(error.get("traceback", "")).splitlines())
    return f"{trace}\n{error.get('type')}: {error.get('message')}{causes}"


def _pipe(fields: Mapping[str, Any]) -> str:
    error = fields.get("error")
    cause = f" ({error.get('type')}: {error.get('message')})" if isinstance(error, Mapping) else ""
    names = ("time", "level", "host", "pid", "job", "task", "logger", "message")
    cells = {name: fields.get(name, "") for name in names}
    cells["message"] = f"{fields['message']}{cause}"
    return "|".join(clean(cells[name]).replace("|", "\\|") for name in names)


class LineHandler(logging.Handler):
    """Writes each line to a descriptor in one call, without a lock that a dead process may hold."""

    def __init__(self, fd: int, line: LineFormatter) -> None:
        super().__init__()
        self._fd = fd
        self.setFormatter(line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._fd, self.format(record).encode(errors="replace") + b"\n")
        except OSError:
            return  # the reader has gone
        except Exception:  # noqa: BLE001  a line that cannot be written must not fail its caller
            self.handleError(record)
