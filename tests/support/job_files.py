"""Reading the files that test jobs write: one line for each event, in words."""

from __future__ import annotations

from pathlib import Path

from tests.support.waiting import eventually


def lines(path: Path | str) -> list[list[str]]:
    """Return the words of each line; an empty list if there is no file."""
    try:
        return [line.split() for line in Path(path).read_text().splitlines()]
    except FileNotFoundError:
        return []


def started(path: Path | str, count: int = 1, within: float = 30) -> list[list[str]]:
    """Wait for `count` lines of `path`.started, and return all: id, attempt and pid of each start."""
    eventually(lambda: len(lines(f"{path}.started")) >= count, within=within)
    return lines(f"{path}.started")
