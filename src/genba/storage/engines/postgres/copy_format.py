"""Rows in the text format of PostgreSQL's COPY."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from genba.storage.engines.database import Row

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def copy_text(rows: Sequence[Row]) -> str:
    """Format rows, column by column: most cells of a batch are the same in all rows."""
    columns: list[Iterable[str]] = []
    same = ""
    for cells in zip(*rows, strict=True):
        if cells.count(cells[0]) == len(cells):
            same += copy_cell(cells[0]) + "\t"
            continue
        if same:
            columns.append(repeat(same[:-1], len(rows)))
            same = ""
        columns.append(
            map(str, cells) if all(type(cell) is int for cell in cells) else map(copy_cell, cells)
        )
    if same:
        columns.append(repeat(same[:-1], len(rows)))
    return "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"


def copy_cell(value: Any) -> str:
    """Format one value."""
    if value is None:
        return "\\N"
    if isinstance(value, bytes):
        return "\\\\x" + value.hex()
    if isinstance(value, str):
        return value if value.isalnum() else value.translate(_ESCAPES)
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value)
