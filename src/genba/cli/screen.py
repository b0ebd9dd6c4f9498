"""The screen of `genba top`: what it shows of one look, and what a key means; no terminal, no database."""

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
class Act:
    """Something to do: `verb` to `target`, after a yes if it cannot be taken back."""

    verb: str
    section: str
    target: Any  # a job's id, or the name of a queue or node
    words: str
    ask: bool


@dataclass(frozen=True, slots=True)
class Verb:
    key: str
    name: str
    ask: bool = False


VERBS: dict[str, tuple[Verb, ...]] = {
    "queues": (Verb("p", "pause"), Verb("r", "resume")),
    "nodes": (Verb("d", "drain", ask=True),),
    "running": (Verb("c", "cancel", ask=True), Verb("x", "kill", ask=True)),
    "failures": (Verb("r", "requeue"), Verb("D", "delete", ask=True)),
}


@dataclass(frozen=True, slots=True)
class Screen:
    """Where the mark is, what is being asked, and the last thing that was said."""

    section: str = "running"
    chosen: dict[str, Any] = field(default_factory=dict)  # section: target
    question: Act | None = None
    said: str = ""
    over: bool = False

    def press(self, key: str, seen: Overview) -> tuple[Screen, Act | None]:
        """After this key; and what is to be done now."""
        if self.question is not None:
            act = self.question if key in ("y", "Y") else None
            return replace(self, question=None, said="" if act else "left alone"), act
        move = _KEYS.get(key)
        if move == "quit":
            return replace(self, over=True), None
        if move in ("next", "previous"):
            return self._turn(1 if move == "next" else -1, seen), None
        if move in ("up", "down"):
            return self._move(1 if move == "down" else -1, seen), None
        for verb in VERBS[self.section]:
            if key == verb.key:
                return self._begin(verb, seen)
        return self, None

    def _begin(self, verb: Verb, seen: Overview) -> tuple[Screen, Act | None]:
        target = self.target(seen)
        if target is None:
            return replace(self, said=f"nothing to {verb.name}"), None
        what = {"queues": "queue", "nodes": "node"}.get(self.section, "job")
        act = Act(verb.name, self.section, target, f"{verb.name} {what} {clean(target)}", verb.ask)
        return (replace(self, question=act), None) if verb.ask else (self, act)

    def target(self, seen: Overview) -> Any:
        """What is marked in this section; the first if what was marked is gone, None if there is nothing."""
        listed = targets(seen, self.section)
        chosen = self.chosen.get(self.section)
        return chosen if chosen in listed else listed[0] if listed else None

    def _move(self, step: int, seen: Overview) -> Screen:
        listed = targets(seen, self.section)
        here = listed.index(self.target(seen)) if listed else 0
        if not 0 <= here + step < len(listed):
            return self._turn(step, seen, ends=True)
        return replace(self, chosen={**self.chosen, self.section: listed[here + step]}, said="")

    def _turn(self, step: int, seen: Overview, *, ends: bool = False) -> Screen:
        """The next section that has something; with `ends` its near end, and none behind the last."""
        place = SECTIONS.index(self.section)
        for i in range(1, len(SECTIONS)):
            if ends and not 0 <= place + step * i < len(SECTIONS):
                break
            section = SECTIONS[(place + step * i) % len(SECTIONS)]
            if listed := targets(seen, section):
                chosen = (
                    {**self.chosen, section: listed[0 if step > 0 else -1]} if ends else self.chosen
                )
                return replace(self, section=section, chosen=chosen, said="")
        return self


def targets(seen: Overview, section: str) -> list[Any]:
    if section in ("running", "failures"):
        return [job.id for job in getattr(seen, section)]
    return [one.name for one in getattr(seen, section)]


def draw(screen: Screen, seen: Overview, title: str, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` columns."""
    rooms = share(
        {section: len(targets(seen, section)) for section in SECTIONS}, height - 2 - len(SECTIONS)
    )
    lines = [_title(seen, title, width)]
    for section in SECTIONS:
        lines += _section(screen, seen, section, rooms[section], width)
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines[: height - 1], _foot(screen, width)]


def share(wanted: dict[str, int], room: int) -> dict[str, int]:
    """How many lines each section gets: as many as it wants, if that leaves the others their part."""
    given = dict.fromkeys(wanted, 0)
    while room > 0 and (hungry := [name for name in wanted if given[name] < wanted[name]]):
        for name in hungry[:room]:
            given[name] += 1
        room -= min(room, len(hungry))
    return given


def _title(seen: Overview, title: str, width: int) -> Text:
    counts = "  ".join(f"{count} {state}" for state, count in sorted(seen.states.items()) if count)
    left, right = f"genba top  {clean(title)}", f"{seen.at:%H:%M:%S}Z"
    middle = set_cell_size(f"{left}  {counts or 'nothing is open'}", max(0, width - len(right) - 1))
    return Text(f"{middle} {right}", style="bold")


def _foot(screen: Screen, width: int) -> Text:
    if screen.question is not None:
        return Text(set_cell_size(f"{screen.question.words}?  y / n", width), style="bold yellow")
    verbs = "  ".join(f"{verb.key} {verb.name}" for verb in VERBS[screen.section])
    said = f"   {clean(screen.said)}" if screen.said else ""
    return Text(set_cell_size(f"{HELP}{verbs}{said}", width), style="dim")


Row = tuple[Any, Sequence[str], str]  # target, cells, style
Column = tuple[str, int]  # head, width; the last one takes what is left


def _section(screen: Screen, seen: Overview, section: str, room: int, width: int) -> list[Text]:
    columns, rows = _TABLES[section](seen)
    here = section == screen.section
    marked = screen.target(seen) if here else None
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


def rows_of(seen: Overview, section: str) -> tuple[list[str], list[Sequence[str]]]:
    """A section as a plain table: heads and cells."""
    columns, rows = _TABLES[section](seen)
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


def _queues(seen: Overview) -> tuple[list[Column], list[Row]]:
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
    for one in seen.queues:
        waiting = f"{one.waiting}{'+' if one.more else ''}"
        cells = [
            one.name,
            waiting,
            str(one.parked),
            str(one.scheduled),
            str(one.running),
            _age(one.oldest, seen.at),
        ]
        rows.append(
            (one.name, [*cells, "PAUSED" if one.paused else ""], "yellow" if one.paused else "")
        )
    return columns, rows


def _nodes(seen: Overview) -> tuple[list[Column], list[Row]]:
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
    for one in seen.nodes:
        busy, up = f"{one.busy}/{one.slots}", _age(one.started, seen.at)
        cells = [one.name, one.state, one.host, str(one.pid), busy, up, ",".join(one.queues)]
        rows.append((one.name, cells, "" if one.state == "live" else "yellow"))
    return columns, rows


def _running(seen: Overview) -> tuple[list[Column], list[Row]]:
    columns = [
        ("RUNNING", 9),
        ("TASK", 22),
        ("NODE", 14),
        ("FOR", 8),
        ("PROGRESS", _BAR + 5),
        ("", 0),
    ]
    rows: list[Row] = []
    for job in seen.running:
        since = job.claimed
        node = seen.node_names.get(job.record.node or 0, "?")
        note = job.progress.note or ""
        asked = "asked to stop" if job.record.cancel_requested else note
        cells = [
            str(job.id),
            job.task,
            node,
            _age(since, seen.at),
            _bar(float(job.progress)),
            asked,
        ]
        rows.append((job.id, cells, "yellow" if job.record.cancel_requested else ""))
    return columns, rows


def _failures(seen: Overview) -> tuple[list[Column], list[Row]]:
    columns = [("FAILED", 9), ("TASK", 22), ("STATE", 9), ("AGO", 8), ("WHY", 0)]
    rows: list[Row] = []
    for job in seen.failures:
        cells = [str(job.id), job.task, str(job.state), _age(job.finished, seen.at), _why(job)]
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
