"""Codecs: store and restore the values of one annotation as JSON, without a change of type."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from types import NoneType, SimpleNamespace, UnionType
from typing import Any

import msgspec

from genba.enqueue.round_trip import (
    SCALARS,
    UNENCODABLE,
    RoundTripCheck,
    decode_plain,
    encode,
    storable_scalars,
)
from genba.errors import BadArguments

UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_encode_ordered_sets = msgspec.json.Encoder(order="deterministic").encode


class Codec:
    """Stores and restores the values of one annotation.

    With `fallback`, a stored value that does not fit the annotation is restored as plain JSON.
    """

    __slots__ = ("decode", "exact", "hint", "load")

    def __init__(self, hint: Any, *, fallback: bool = False) -> None:
        try:
            decoder = msgspec.json.Decoder(hint)
        except Exception:  # noqa: BLE001 - annotations of user classes can raise anything
            hint = Any
            decoder = msgspec.json.Decoder(Any)
        self.hint = hint
        self.exact = _exact_types(hint)
        self.decode: Callable[[bytes | msgspec.Raw], Any] = decoder.decode
        self.load = self._load_or_plain if fallback else self.decode

    def _load_or_plain(self, payload: bytes | msgspec.Raw) -> Any:
        try:
            return self.decode(payload)
        except UNDECODABLE:
            return decode_plain(payload)

    def store(self, value: Any, path: str) -> bytes:
        """Encode a value as JSON that decodes to an equal value of the same type.

        The message of BadArguments begins with the path of the first value that cannot be stored.
        """
        if type(value) in self.exact and storable_scalars((value,)):
            try:
                return encode(value)
            except UnicodeEncodeError:
                pass
        check = RoundTripCheck()
        try:
            restored = self.load(encode(value))
        except (*UNENCODABLE, *UNDECODABLE) as error:
            raise BadArguments(
                check.flaw(value, value, path, 0) or validation_text(error, path)
            ) from error
        flaw = check.flaw(value, restored, path, 0)
        if flaw is not None:
            raise BadArguments(flaw)
        # Equal calls must be equal payloads: 1 and 1.0 for a float, and one set in two orders.
        return _encode_ordered_sets(restored) if check.has_sets else encode(restored)


def validation_text(error: BaseException, path: str) -> str:
    """Return msgspec's error text with our path instead of its `$`."""
    if not isinstance(error, msgspec.ValidationError):
        return f"`{path}`: {error}"
    text, _, where = str(error).partition(" - at `$")
    return f"`{path}{where.rstrip('`')}`: {text[:1].lower()}{text[1:]}"


def _exact_types(hint: Any) -> frozenset[type]:
    """Return the scalar types whose storable values all fit this hint and are restored as is."""
    if hint is Any or hint is object:
        return SCALARS
    if hint in (str, int, float, bool, NoneType):
        return frozenset({hint})
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return frozenset().union(*map(_exact_types, typing.get_args(hint)))
    return frozenset()


def resolve_annotation(annotation: Any, namespace: Mapping[str, Any]) -> Any:
    """Return the type of an annotation, or Any if it is missing or cannot be resolved."""
    if annotation is Parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, dict(namespace), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - the text of a user's annotation can raise anything
        return Any


def annotation_text(annotation: Any) -> str | None:
    """Return an annotation as text, or None if it is missing."""
    if annotation is Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def namespace_of(fn: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the globals of the module that defines a function, for resolving its annotations."""
    inner: Any = inspect.unwrap(fn)
    while isinstance(inner, partial):
        inner = inspect.unwrap(inner.func)
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__globals__"):
        inner = getattr(type(inner).__call__, "__func__", type(inner).__call__)
    return getattr(inner, "__globals__", {})
