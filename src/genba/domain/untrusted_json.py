"""Read stored JSON without trust: other programs can write anything into the database."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

UNREADABLE = "unreadable"  # shown in place of a value that cannot be decoded
DECODE_ERRORS = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    RecursionError,
)  # what reading it may raise


def read_json(written: str | bytes | None, kind: type[T], otherwise: T) -> T:
    """Decode a value of this kind; `otherwise` if the text is missing or of another kind."""
    if not written:
        return otherwise
    try:
        return msgspec.json.decode(written, type=kind)
    except DECODE_ERRORS:
        return otherwise


def read_any_json(written: str | bytes | None) -> Any:
    """Decode any JSON for display; None if it is missing, UNREADABLE if it cannot be decoded."""
    return read_json(written, Any, UNREADABLE) if written else None
