"""Statements for many rows, as SQLite takes them quickest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from genba.storage.engines.database import PARAMETER, Query, Row

ROWS_PER_STATEMENT = (256, 64, 16, 4, 1)  # of a wide one: few, so that all of them stay prepared
_ROWS = "/* rows */"


class BatchStatement:
    """A statement for many rows.

    One with `FROM /* rows */ AS batch` takes 256 of them at a time.  Each step of SQLite gives Python's lock away and
    wants it back, and another thread may keep it for milliseconds: with many rows to a step the loop and the desk of a
    node run beside each other and not in turns.  Such a statement returns its first columns, or nothing.
    """

    def __init__(self, query: Query) -> None:
        self.wide = _ROWS in query.text
        text, _, returning = query.text.partition("RETURNING ")
        self.returning = f"RETURNING {returning}" if returning else ""
        self.returned = returning.count(",") + 1
        if self.wide:
            used = [name for name in query.columns if f"batch.{name}" in text]
            self._of = itemgetter(*map(query.columns.index, used))
            self._width = len(used)
            text = re.sub(r"\bbatch\.(\w+)", lambda m: f"batch.column{used.index(m[1]) + 1}", text)
            self._before, self._after = map(PARAMETER.findall, text.split(_ROWS))
        else:
            text += self.returning
            self._order = PARAMETER.findall(text)
            self._columns = query.columns
        self.text = PARAMETER.sub("?", text)  # sqlite3 takes a row of values for these, not for ?1
        self._texts: dict[tuple[int, str], str] = {}

    def in_order(self, rows: Sequence[Row], shared: Mapping[str, Any]) -> Sequence[Row]:
        """The values of each row, and those that are the same for all, as the statement names them."""
        if self._order == list(self._columns):
            return rows
        same = [name for name in dict.fromkeys(self._order) if name not in self._columns]
        places = [*self._columns, *same]
        pick = itemgetter(
            *map(places.index, self._order), 0
        )  # one too many, so that it always gives a row
        more = tuple(shared[name] for name in same)
        return [pick((*row, *more))[:-1] for row in rows]

    def abreast(self, rows: Sequence[Row], shared: Mapping[str, Any]) -> Row:
        before, after = ([shared[name] for name in names] for names in (self._before, self._after))
        return tuple(chain(before, chain.from_iterable(map(self._of, rows)), after))

    def for_rows(self, count: int, returning: str) -> str:
        key = (count, returning)
        if key not in self._texts:
            row = f"({', '.join('?' * self._width)})"
            self._texts[key] = (
                self.text.replace(_ROWS, f"(VALUES {', '.join([row] * count)})") + returning
            )
        return self._texts[key]
