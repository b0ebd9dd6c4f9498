"""Statements for many rows, in the form that SQLite runs fastest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from genba.storage.engines.database import Row
from genba.storage.engines.queries import PARAMETER, Query

ROWS_PER_STATEMENT = (256, 64, 16, 4, 1)  # few sizes, so that all of them stay prepared
_ROWS = "/* rows */"


class BatchStatement:
    """A statement for many rows.

    A *wide* one, with `FROM /* rows */ AS batch`, takes up to 256 rows at a time. Each step of
    SQLite releases Python's lock and takes it again, and another thread may keep it for
    milliseconds: with many rows per step, a node's loop and its writer thread run beside each
    other instead of in turns. A wide statement returns its first columns, or nothing.
    """

    def __init__(self, query: Query) -> None:
        self.wide = _ROWS in query.text
        text, _, returning = query.text.partition("RETURNING ")
        self.returning = f"RETURNING {returning}" if returning else ""
        self.returned = returning.count(",") + 1
        if self.wide:
            used = [name for name in query.columns if f"batch.{name}" in text]
            self._pick_used = itemgetter(*map(query.columns.index, used))
            self._width = len(used)
            text = re.sub(r"\bbatch\.(\w+)", lambda m: f"batch.column{used.index(m[1]) + 1}", text)
            self._before, self._after = map(PARAMETER.findall, text.split(_ROWS))
        else:
            text += self.returning
            self._order = PARAMETER.findall(text)
            self._columns = query.columns
        # "?" and not "?1": for these, sqlite3 takes a row of values.
        self.text = PARAMETER.sub("?", text)
        self._texts: dict[tuple[int, str], str] = {}

    def in_order(self, rows: Sequence[Row], shared: Mapping[str, Any]) -> Sequence[Row]:
        """Order the values of each row, and the shared ones, as the statement uses them."""
        if self._order == list(self._columns):
            return rows
        same = [name for name in dict.fromkeys(self._order) if name not in self._columns]
        places = [*self._columns, *same]
        # One place too many, so that itemgetter returns a tuple in every case.
        pick = itemgetter(*map(places.index, self._order), 0)
        more = tuple(shared[name] for name in same)
        return [pick((*row, *more))[:-1] for row in rows]

    def side_by_side(self, rows: Sequence[Row], shared: Mapping[str, Any]) -> Row:
        """Flatten the values of all rows, between the shared values before and after them."""
        before, after = ([shared[name] for name in names] for names in (self._before, self._after))
        return tuple(chain(before, chain.from_iterable(map(self._pick_used, rows)), after))

    def for_rows(self, count: int, returning: str) -> str:
        """Return the text of a wide statement for that many rows."""
        key = (count, returning)
        if key not in self._texts:
            row = f"({', '.join('?' * self._width)})"
            self._texts[key] = (
                self.text.replace(_ROWS, f"(VALUES {', '.join([row] * count)})") + returning
            )
        return self._texts[key]
