"""Columns of a batch, dumped to PostgreSQL arrays in one call.

psycopg dumps a list element by element, in Python, and chooses the type by the values; a batch of
five hundred jobs has ten such lists. The classes here wrap a column's cells, have one type each,
and pack in one call.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import chain
from typing import Any

INT8, INT8_ARRAY = 20, 1016
TEXT, TEXT_ARRAY = 25, 1009
BYTEA, BYTEA_ARRAY = 17, 1001


class IntColumn(tuple[Any, ...]):
    __slots__ = ()


class TextColumn(tuple[Any, ...]):
    __slots__ = ()


class BytesColumn(tuple[Any, ...]):
    __slots__ = ()


def _head(length: int, nulls: bool, element: int) -> bytes:
    return struct.pack(">iiiii", 1, int(nulls), element, length, 1)


@lru_cache(maxsize=64)
def _ints(length: int) -> struct.Struct:
    return struct.Struct(">" + "iq" * length)


def dump_ints(cells: tuple[Any, ...]) -> bytes:
    head = _head(len(cells), None in cells, INT8)
    if None not in cells:
        return head + _ints(len(cells)).pack(
            *chain.from_iterable(zip((8,) * len(cells), cells, strict=True))
        )
    return head + b"".join(
        b"\xff\xff\xff\xff" if c is None else struct.pack(">iq", 8, c) for c in cells
    )


def dump_bytes(cells: tuple[Any, ...], element: int = BYTEA) -> bytes:
    length = struct.Struct(">i").pack
    parts = [b"\xff\xff\xff\xff" if c is None else length(len(c)) + c for c in cells]
    return _head(len(cells), None in cells, element) + b"".join(parts)


def dump_texts(cells: tuple[Any, ...]) -> bytes:
    return dump_bytes(tuple(None if c is None else c.encode() for c in cells), TEXT)


def register(adapters: Any) -> None:
    """Register our columns; send every int as bigint (one type, one prepared statement)."""
    for kind, dumper in _dumpers().items():
        adapters.register_dumper(kind, dumper)


@lru_cache(maxsize=1)
def _dumpers() -> dict[type, Any]:
    from psycopg.adapt import Dumper
    from psycopg.pq import Format
    from psycopg.types.numeric import Int8Dumper

    def column_dumper(array: int, pack: Any) -> Any:
        class Column(Dumper):
            format = Format.BINARY
            oid = array

            def dump(self, obj: Any) -> bytes:
                return pack(obj)  # type: ignore[no-any-return]

        return Column

    return {
        int: Int8Dumper,
        IntColumn: column_dumper(INT8_ARRAY, dump_ints),
        TextColumn: column_dumper(TEXT_ARRAY, dump_texts),
        BytesColumn: column_dumper(BYTEA_ARRAY, dump_bytes),
    }
