"""The screen of `genba top`: what it shows of an overview, and what a key does.

It needs no terminal and no database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from genba.cli.output import clean

if TYPE_CHECKING:
    from genba.client.job import Job
    from genba.reports.overview import Overview

SECTIONS = ("queues", "nodes", "running", "failures")
HELP = "↑↓ Tab choose   q quit   "
_KEYS = {
    "\x1b[A": "up",
    "k": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "j": "down",
    "\x1bOB": "down",
    "\t": "next",
    "\x1b[C": "next",
    "\x1b[Z": "previous",
    "\x1b[D": "previous",
    "q": "quit",
    "\x03": "quit",
}
_BAR = 10  # columns of a progress bar


@dataclass(frozen=True, slots=True)
class Action:
    """An action: `verb` on `target`, confirmed with `y` if it cannot be undone."""

    verb: str
    section: str
    target: Any  # a job's id, or the name of a queue or node
    words: str
    ask: bool


@dataclass(frozen=True, slots=True)
class KeyAction:
    key: str
    name: str
    ask: bool = False


KEY_ACTIONS: dict[str, tuple[KeyAction, ...]] = {
    "queues": (KeyAction("p", "pause"), KeyAction("r", "resume")),
    "nodes": (KeyAction("d", "drain", ask=True),),
    "running": (KeyAction("c", "cancel", ask=True), KeyAction("x", "kill", ask=True)),
    "failures": (KeyAction("r", "requeue"), KeyAction("D", "delete", ask=True)),
}


@dataclass(frozen=True, slots=True)
class Screen:
    """The marked row, the action to confirm, and the last message."""

    section: str = "running"
    chosen: dict[str, Any] = field(default_factory=dict)  # section: target
    pending: Action | None = None
    message: str = ""
    closed: bool = False

    def press(self, key: str, overview: Overview) -> tuple[Screen, Action | None]:
        """Return the screen after this key, and the action to do now."""
        if self.pending is not None:
            action = self.pending if key in ("y", "Y") else None
            return replace(self, pending=None, message="" if action else "nothing done"), action
        move = _KEYS.get(key)
        if move == "quit":
            return replace(self, closed=True), None
        if move in ("next", "previous"):
            return self._turn(1 if move == "next" else -1, overview), None
        if move in ("up", "down"):
            return self._move(1 if move == "down" else -1, overview), None
        for verb in KEY_ACTIONS[self.section]:
            if key == verb.key:
                return self._begin(verb, overview)
        return self, None

    def _begin(self, verb: KeyAction, overview: Overview) -> tuple[Screen, Action | None]:
        target = self.target(overview)
        if target is None:
            return replace(self, message=f"nothing to {verb.name}"), None
        what = {"queues": "queue", "nodes": "node"}.get(self.section, "job")
        action = Action(
            verb.name, self.section, target, f"{verb.name} {what} {clean(target)}", verb.ask
        )
        return (replace(self, pending=action), None) if verb.ask else (self, action)

    def target(self, overview: Overview) -> Any:
        """Return the marked row of this section; the first if that is gone, None if it is empty."""
        listed = targets(overview, self.section)
        chosen = self.chosen.get(self.section)
        return chosen if chosen in listed else listed[0] if listed else None

    def _move(self, step: int, overview: Overview) -> Screen:
        listed = targets(overview, self.section)
        here = listed.index(self.target(overview)) if listed else 0
        if not 0 <= here + step < len(listed):
            return self._turn(step, overview, ends=True)
        return replace(self, chosen={**self.chosen, self.section: listed[here + step]}, message="")

    def _turn(self, step: int, overview: Overview, *, ends: bool = False) -> Screen:
        """Mark the next section with rows; with `ends` its near end, and none after the last."""
        place = SECTIONS.index(self.section)
        for i in range(1, len(SECTIONS)):
            if ends and not 0 <= place + step * i < len(SECTIONS):
                break
            section = SECTIONS[(place + step * i) % len(SECTIONS)]
            if listed := targets(overview, section):
                chosen = (
                    {**self.chosen, section: listed[0 if step > 0 else -1]} if ends else self.chosen
                )
                return replace(self, section=section, chosen=chosen, message="")
        return self


def targets(overview: Overview, section: str) -> list[Any]:
    if section in ("running", "failures"):
        return [job.id for job in getattr(overview, section)]
    return [row.name for row in getattr(overview, section)]


def draw(screen: Screen, overview: Overview, title: str, width: int, height: int) -> list[Text]:
    """Draw exactly `height` lines of at most `width` columns."""
    rooms = share_lines(
        {section: len(targets(overview, section)) for section in SECTIONS},
        height - 2 - len(SECTIONS),
    )
    lines = [_title(overview, title, width)]
    for section in SECTIONS:
        lines += _section(screen, overview, section, rooms[section], width)
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines[: height - 1], _foot(screen, width)]


def share_lines(needed: dict[str, int], room: int) -> dict[str, int]:
    """Share the lines between sections, evenly, and none more than it has rows."""
    lines = dict.fromkeys(needed, 0)
    while room > 0 and (short := [name for name in needed if lines[name] < needed[name]]):
        for name in short[:room]:
            lines[name] += 1
        room -= min(room, len(short))
    return lines


def _title(overview: Overview, title: str, width: int) -> Text:
    counts = "  ".join(
        f"{count} {state}" for state, count in sorted(overview.states.items()) if count
    )
    left, right = f"genba top  {clean(title)}", f"{overview.at:%H:%M:%S}Z"
    middle = set_cell_size(f"{left}  {counts or 'nothing is open'}", max(0, width - len(right) - 1))
    return Text(f"{middle} {right}", style="bold")


def _foot(screen: Screen, width: int) -> Text:
    if screen.pending is not None:
        return Text(set_cell_size(f"{screen.pending.words}?  y / n", width), style="bold yellow")
    verbs = "  ".join(f"{verb.key} {verb.name}" for verb in KEY_ACTIONS[screen.section])
    message = f"   {clean(screen.message)}" if screen.message else ""
    return Text(set_cell_size(f"{HELP}{verbs}{message}", width), style="dim")


Row = tuple[Any, Sequence[str], str]  # target, cells, style
Column = tuple[str, int]  # head, width; the last column takes the rest


def _section(screen: Screen, overview: Overview, section: str, room: int, width: int) -> list[Text]:
    columns, rows = _TABLES[section](overview)
    here = section == screen.section
    marked = screen.target(overview) if here else None
    places = [i for i, row in enumerate(rows) if row[0] == marked]
    first = max(0, min(places[0] - room // 2, len(rows) - room)) if places else 0
    more = f"  {len(rows)} in all" if len(rows) > room else ""
    head = _line([name for name, _ in columns], columns, width)
    lines = [
        Text(
            set_cell_size(f"{head.rstrip()}{more}", width),
            style="bold reverse" if here else "reverse dim",
        )
    ]
    for target, cells, style in rows[first : first + room]:
        mark = here and target == marked
        lines.append(
            Text(_line(cells, columns, width), style=f"{style} reverse" if mark else style)
        )
    return lines


def rows_of(overview: Overview, section: str) -> tuple[list[str], list[Sequence[str]]]:
    """Return a section as a plain table: heads and cells."""
    columns, rows = _TABLES[section](overview)
    return [name for name, _ in columns], [cells for _, cells, _ in rows]


def _line(cells: Sequence[str], columns: Sequence[Column], width: int) -> str:
    parts = [
        set_cell_size(clean(cell), size)
        for cell, (_, size) in zip(cells[:-1], columns[:-1], strict=True)
    ]
    text = " ".join([*parts, clean(cells[-1])])
    return (
        set_cell_size(text, width)
        if cell_len(text) > width
        else text + " " * (width - cell_len(text))
    )


def _queues(overview: Overview) -> tuple[list[Column], list[Row]]:
    columns = [
        ("QUEUE", 22),
        ("WAITING", 8),
        ("PARKED", 7),
        ("LATER", 7),
        ("RUNNING", 8),
        ("OLDEST", 8),
        ("", 0),
    ]
    rows: list[Row] = []
    for one in overview.queues:
        waiting = f"{one.waiting}{'+' if one.more else ''}"
        cells = [
            one.name,
            waiting,
            str(one.parked),
            str(one.scheduled),
            str(one.running),
            _age(one.oldest, overview.at),
        ]
        rows.append(
            (one.name, [*cells, "PAUSED" if one.paused else ""], "yellow" if one.paused else "")
        )
    return columns, rows


def _nodes(overview: Overview) -> tuple[list[Column], list[Row]]:
    columns = [
        ("NODE", 22),
        ("STATE", 9),
        ("HOST", 16),
        ("PID", 8),
        ("BUSY", 8),
        ("UP", 8),
        ("QUEUES", 0),
    ]
    rows: list[Row] = []
    for one in overview.nodes:
        busy, up = f"{one.busy}/{one.slots}", _age(one.started, overview.at)
        cells = [one.name, one.state, one.host, str(one.pid), busy, up, ",".join(one.queues)]
        rows.append((one.name, cells, "" if one.state == "live" else "yellow"))
    return columns, rows


def _running(overview: Overview) -> tuple[list[Column], list[Row]]:
    columns = [
        ("RUNNING", 9),
        ("TASK", 22),
        ("NODE", 14),
        ("FOR", 8),
        ("PROGRESS", _BAR + 5),
        ("", 0),
    ]
    rows: list[Row] = []
    for job in overview.running:
        since = job.claimed
        node = overview.node_names.get(job.record.node or 0, "?")
        note = job.progress.note or ""
        asked = "asked to stop" if job.record.cancel_requested else note
        cells = [
            str(job.id),
            job.task,
            node,
            _age(since, overview.at),
            _bar(float(job.progress)),
            asked,
        ]
        rows.append((job.id, cells, "yellow" if job.record.cancel_requested else ""))
    return columns, rows


def _failures(overview: Overview) -> tuple[list[Column], list[Row]]:
    columns = [("FAILED", 9), ("TASK", 22), ("STATE", 9), ("AGO", 8), ("WHY", 0)]
    rows: list[Row] = []
    for job in overview.failures:
        cells = [str(job.id), job.task, str(job.state), _age(job.finished, overview.at), _why(job)]
        rows.append((job.id, cells, "red"))
    return columns, rows


def _why(job: Job[Any]) -> str:
    return f"{job.error['type']}: {job.error['message']}" if job.error else job.reason or ""


def _bar(percent: float) -> str:
    full = round(percent / 100 * _BAR)
    return f"{'━' * full}{'─' * (_BAR - full)} {percent:3.0f}%"


def _age(since: datetime | None, now: datetime) -> str:
    if since is None:
        return "-"
    seconds = max(0, int((now - since).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            rest = {"d": 3600, "h": 60, "m": 1}[unit]
            return f"{seconds // size}{unit}{seconds % size // rest:02}"
    return f"{seconds}s"


_TABLES: dict[str, Callable[[Any], tuple[list[Column], list[Row]]]] = {
    "queues": _queues,
    "nodes": _nodes,
    "running": _running,
    "failures": _failures,
}
