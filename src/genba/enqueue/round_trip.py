"""The round-trip check: find the first place where a value would change if stored as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from types import NoneType
from typing import Any

import msgspec

MAX_DEPTH = 100
MIN_INT, MAX_INT = -(2**63), 2**64 - 1
SCALARS: frozenset[type] = frozenset({str, int, float, bool, NoneType})
# ValueError includes UnicodeEncodeError.
UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)

encode = msgspec.json.Encoder().encode
decode_plain = msgspec.json.Decoder().decode


class RoundTripCheck:
    """Compares a value with the value restored from its JSON.

    `has_sets` says afterwards whether the value contains a set.
    """

    __slots__ = ("has_sets",)

    def __init__(self) -> None:
        self.has_sets = False

    def flaw(self, value: Any, back: Any, path: str, depth: int) -> str | None:
        """Describe the first place that would change or cannot be stored, or return None."""
        kind = type(value)
        if kind in SCALARS:
            return _flaw_of_scalar(value, back, path)
        if depth >= MAX_DEPTH:
            return f"`{path[:100]}…`: nested deeper than {MAX_DEPTH}"
        if kind is not type(back):
            return _came_back(value, back, path)
        if isinstance(value, (list, tuple)):
            return self._flaw_of_sequence(value, back, path, depth)
        if isinstance(value, dict):
            return self._flaw_of_mapping(value, back, path, depth)
        if isinstance(value, (set, frozenset)):
            self.has_sets = True
            return self._flaw_of_set(value, back, path, depth)
        names = _field_names(value)
        if names is not None:
            pairs = ((name, getattr(value, name), getattr(back, name)) for name in names)
            return self._first(
                self.flaw(own, other, f"{path}.{name}", depth + 1) for name, own, other in pairs
            )
        return _flaw_of_leaf(value, back, path)

    def _flaw_of_sequence(self, value: Any, back: Any, path: str, depth: int) -> str | None:
        if len(value) != len(back):
            return f"`{path}`: its length would change from {len(value)} to {len(back)}"
        kinds = list(map(type, value))
        scalars = back is not value and kinds == list(map(type, back)) and SCALARS.issuperset(kinds)
        if scalars and value == back and storable_scalars(value):
            return None  # the short way for a long list of numbers or texts
        return self._first(
            self.flaw(own, other, f"{path}[{i}]", depth + 1)
            for i, (own, other) in enumerate(zip(value, back, strict=True))
        )

    def _flaw_of_mapping(self, value: Any, back: Any, path: str, depth: int) -> str | None:
        keys = {key: key for key in back}
        for key, own in value.items():
            here = f"{path}{_step(key)}"
            if key not in keys or type(keys[key]) is not type(key):
                kind = type(key).__name__
                return f"`{here}`: a key of type {kind} would be lost or come back as text"
            flaw = _flaw_of_key(key, here) or self.flaw(own, back[key], here, depth + 1)
            if flaw is not None:
                return flaw
        return None if len(value) == len(back) else f"`{path}`: would come back with more keys"

    def _flaw_of_set(self, value: Any, back: Any, path: str, depth: int) -> str | None:
        members = {member: member for member in back}
        if value != back:
            return f"`{path}`: would come back as another set"
        return self._first(
            self.flaw(member, members[member], f"{path}{{}}", depth + 1) for member in value
        )

    @staticmethod
    def _first(flaws: Iterable[str | None]) -> str | None:
        return next((flaw for flaw in flaws if flaw is not None), None)


def storable_scalars(values: Iterable[Any]) -> bool:
    """Return whether these scalars may be stored; the encoder itself refuses lone surrogates."""
    for value in values:
        kind = type(value)
        if kind is int:
            if not MIN_INT <= value <= MAX_INT:
                return False
        elif kind is str:
            if "\0" in value:
                return False
        elif kind is float and not math.isfinite(value):
            return False
    return True


def _flaw_of_scalar(value: Any, back: Any, path: str) -> str | None:
    if isinstance(value, str) and (flaw := flaw_of_text(value)) is not None:
        return f"`{path}`: the text {flaw}"
    if not storable_scalars((value,)):
        limit = (
            "an int must be within -2**63 … 2**64-1"
            if type(value) is int
            else f"{value} is not a JSON number"
        )
        return f"`{path}`: {limit}"
    if type(value) is type(back) or (type(value) is int and type(back) is float):
        return None if value == back else f"`{path}`: {value!r} would come back as {back!r}"
    return _came_back(value, back, path)


def flaw_of_text(text: str) -> str | None:
    """Describe why a text cannot be stored, or return None."""
    if "\0" in text:
        return "has a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "has a lone surrogate, which is not Unicode"
    return None


def _flaw_of_key(key: Any, path: str) -> str | None:
    if isinstance(key, str):
        flaw = flaw_of_text(key)
        return None if flaw is None else f"{path!a}: the key {flaw}"
    try:
        encode({key: None})
    except UNENCODABLE:
        return f"`{path}`: a key of type {type(key).__name__} cannot be stored as JSON"
    return None


def _flaw_of_leaf(value: Any, back: Any, path: str) -> str | None:
    try:
        raw = encode(value)
    except UNENCODABLE:
        return f"`{path}`: a value of type {type(value).__name__} cannot be stored as JSON"
    if b"\\u0000" in raw and "\0" in str(decode_plain(raw)):
        return f"`{path}`: the text has a NUL character"
    if isinstance(value, datetime) and value.tzinfo is not None and back.tzinfo is not None:
        # Between zones, Python compares a time that its zone has twice as unequal to every other.
        value, back = value.astimezone(UTC), back.astimezone(UTC)
    return None if value == back else f"`{path}`: would come back as another {type(value).__name__}"


def _came_back(value: Any, back: Any, path: str) -> str:
    given, got = type(value).__name__, type(back).__name__
    return (
        f"`{path}`: a value of type {given} would come back as {got}; "
        f"annotate it as {given}, or pass a {got}"
    )


def _field_names(value: Any) -> Iterable[str] | None:
    """Return the field names of a struct, dataclass or attrs object, or None."""
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    attributes = getattr(type(value), "__attrs_attrs__", None)
    return None if attributes is None else [attribute.name for attribute in attributes]


def _step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
