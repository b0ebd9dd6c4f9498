"""Stored JSON, read without trust: whoever can write into the database may have written anything there."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

UNREADABLE = "unreadable"  # stands for what nobody can make sense of
DECODE_ERRORS = (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    RecursionError,
)  # what reading it may raise


def read_json(written: str | bytes | None, kind: type[T], otherwise: T) -> T:
    """What it says; `otherwise`, if nothing stands there or it is not of this kind."""
    if not written:
        return otherwise
    try:
        return msgspec.json.decode(written, type=kind)
    except DECODE_ERRORS:
        return otherwise


def read_any_json(written: str | bytes | None) -> Any:
    """What it says, for those who only look; None if nothing stands there, UNREADABLE if it says nothing."""
    return read_json(written, Any, UNREADABLE) if written else None
