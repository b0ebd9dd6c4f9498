"""A function's arguments and result, as JSON and back, without a change of type on the way.

A payload is one JSON object with the parameters in signature order.  Arguments that Python must
take by position (positional-only parameters, and all positional ones of a function with `*args`)
are a list under the key `"*"`.  The keys of `**kwargs` are beside the others.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any

import msgspec
from msgspec.structs import astuple

from genba.enqueue.codec import (
    UNDECODABLE,
    Codec,
    annotation_text,
    namespace_of,
    resolve_annotation,
    validation_text,
)
from genba.enqueue.parameters import ParameterStruct, TaskParameter
from genba.enqueue.round_trip import UNENCODABLE, encode, flaw_of_text, storable_scalars
from genba.errors import BadArguments, BadTask, PayloadTooLarge

MAX_PAYLOAD_BYTES = 1024 * 1024

POSITIONAL_KEY = "*"

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Arguments:
    """The arguments and the result of one function: binds, checks, stores and restores them.

    Annotations are read at the first use, not at import, so they may name what the module defines
    later.  An annotation that cannot be resolved counts as `Any`.
    """

    def __init__(self, name: str, signature: Signature, namespace: Mapping[str, Any]) -> None:
        self.name = name
        self.signature = signature
        self._namespace = namespace

    @classmethod
    def of(
        cls, fn: Callable[..., Any], *, skip_first: bool = False, name: str | None = None
    ) -> Arguments:
        """Read the parameters of `fn`; `skip_first` leaves out the `self` of an unbound method."""
        name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError) as error:
            raise BadTask(
                f"{name}: Python cannot tell its parameters ({error}); wrap it in a function"
            ) from error
        if skip_first:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls(name, signature, namespace_of(fn))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Encode a call with its defaults; BadArguments names the parameter that does not fit.

        An int for a float parameter is stored, and restored, as a float.  A default that cannot be
        stored stays out of the payload: the function itself applies it.
        """
        # Every enqueue comes here.  The struct binds and encodes a plain call in C.  Other calls
        # fall back to `_encode_bound`, which checks each value.
        struct = self._struct
        if struct is None:
            return self._encode_bound(self._bind(args, kwargs))
        try:
            bound = struct.make(*args, **kwargs)
        except TypeError:
            self._bind(args, kwargs)  # raises with a better message
            raise
        values = astuple(bound)
        shape = tuple(map(type, values))
        size_only = struct.shapes.get(shape)
        if size_only is None and not struct.learn(shape):
            return self._encode_bound(dict(zip(struct.names, values, strict=True)))
        try:
            payload = encode(bound)
        except UNENCODABLE:
            return self._encode_bound(dict(zip(struct.names, values, strict=True)))
        short = size_only and len(payload) <= struct.max_safe_length
        if not short and not storable_scalars(values):
            return self._encode_bound(dict(zip(struct.names, values, strict=True)))
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise self._too_large(payload)
        return payload

    def decode(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Restore a typed call; BadArguments if the payload does not fit the function any more."""
        struct = self._struct
        if struct is None:
            return self._decode_bound(payload)
        try:
            values = astuple(struct.read(payload))
        except UNDECODABLE:
            return self._decode_bound(payload)
        if struct.may_omit and msgspec.UNSET in values:
            return self._decode_bound(payload)
        if struct.keyword_names:
            n = struct.positional_count
            return values[:n], dict(zip(struct.keyword_names, values[n:], strict=True))
        return values, {}

    def by_name(self, payload: bytes) -> dict[str, Any]:
        """Return the arguments of `payload` by name, as plain JSON values."""
        parameters = self.signature.parameters.items()
        return arguments_by_name(
            payload, ((name, parameter.kind.name.lower()) for name, parameter in parameters)
        )

    def prepare(self) -> None:
        """Read the annotations now, for all processes that are forked from this one."""
        with suppress(Exception):  # an error is reported by the first call that meets it
            self._returns  # noqa: B018
            if self._struct is not None:
                self._struct.read(b"{}")

    def describe(self) -> dict[str, Any]:
        """Return the signature as plain JSON, for clients that do not have the code."""
        return {
            "parameters": [parameter.describe() for parameter in self._parameters.values()],
            "returns": annotation_text(self.signature.return_annotation),
        }

    def encode_result(self, value: Any) -> tuple[bytes | None, str | None]:
        """Encode a result as JSON, or return None and why it cannot be kept; never raises."""
        if value is None:
            return b"null", None
        try:
            payload = self._returns.store(value, "result")
        except BadArguments as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 - user code runs here: properties, __eq__, enums
            return None, f"result: cannot be stored as JSON: {type(error).__name__}"
        if len(payload) > MAX_PAYLOAD_BYTES:
            return None, (
                f"result: {len(payload):,} bytes as JSON; at most {MAX_PAYLOAD_BYTES:,} are kept"
            )
        return payload, None

    def decode_result(self, payload: bytes | None) -> Any:
        """Restore a result by the return annotation, or as plain JSON if it does not fit."""
        return None if payload is None else self._returns.load(payload)

    # binding

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"{self.name}: {error}; it takes {self._call_text()}") from None
        bound.apply_defaults()
        return bound.arguments

    def _encode_bound(self, values: Mapping[str, Any]) -> bytes:
        positional: list[msgspec.Raw] = []
        named: dict[str, msgspec.Raw | list[msgspec.Raw]] = {}
        for name, parameter in self._parameters.items():
            value = values[name]
            if parameter.kind is Parameter.VAR_POSITIONAL:
                positional += (
                    self._store(parameter, item, f"{name}[{i}]") for i, item in enumerate(value)
                )
            elif parameter.kind is Parameter.VAR_KEYWORD:
                if POSITIONAL_KEY in value:
                    raise BadArguments(
                        f'{self.name}: "{POSITIONAL_KEY}" cannot be the name of an argument; '
                        "choose another name"
                    )
                for key in value:
                    named[key] = self._store(parameter, value[key], key)
            elif parameter.omits(value):
                continue
            elif parameter.in_list:
                positional.append(self._store(parameter, value, name))
            else:
                named[name] = self._store(parameter, value, name)
        payload = self._joined({POSITIONAL_KEY: positional, **named} if positional else named)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise self._too_large(payload)
        return payload

    def _store(self, parameter: TaskParameter, value: Any, path: str) -> msgspec.Raw:
        try:
            return msgspec.Raw(parameter.codec.store(value, path))
        except BadArguments as error:
            raise BadArguments(f"{self.name}: argument {error}") from error.__cause__

    def _joined(self, parts: Mapping[str, Any]) -> bytes:
        for key in parts:
            if (flaw := flaw_of_text(key)) is not None:
                raise BadArguments(f"{self.name}: argument {key!a}: its name {flaw}")
        return encode(parts)

    def _decode_bound(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            named: dict[str, Any] = _decode_object(payload)
            positional = _decode_list(named.pop(POSITIONAL_KEY, b"[]"))
        except UNDECODABLE as error:
            raise BadArguments(
                f"{self.name}: the stored arguments are not a JSON object of arguments"
            ) from error
        try:
            bound = self.signature.bind(*positional, **named)
        except TypeError as error:
            raise BadArguments(
                f"{self.name}: the stored arguments do not fit: {error}; "
                f"it takes {self._call_text()}"
            ) from None
        for name, raw in bound.arguments.items():
            parameter = self._parameters[name]
            if parameter.kind is Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(
                    self._load(parameter, item, f"{name}[{i}]") for i, item in enumerate(raw)
                )
            elif parameter.kind is Parameter.VAR_KEYWORD:
                bound.arguments[name] = {
                    key: self._load(parameter, item, key) for key, item in raw.items()
                }
            else:
                bound.arguments[name] = self._load(parameter, raw, name)
        return bound.args, bound.kwargs

    def _load(self, parameter: TaskParameter, raw: msgspec.Raw, path: str) -> Any:
        try:
            return parameter.codec.decode(raw)
        except UNDECODABLE as error:
            raise BadArguments(
                f"{self.name}: the stored arguments do not fit: "
                f"argument {validation_text(error, path)}"
            ) from None

    def _too_large(self, payload: bytes) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{self.name}: the arguments take {len(payload):,} bytes as JSON; "
            f"at most {MAX_PAYLOAD_BYTES:,} are allowed"
        )

    def _call_text(self) -> str:
        parts = []
        for parameter in self._parameters.values():
            stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
            star = stars.get(parameter.kind, "")
            default = "" if parameter.required or star else "=…"
            parts.append(f"{star}{parameter.name}{default}")
        return f"({', '.join(parts)})"

    # read once, at the first use

    @cached_property
    def _parameters(self) -> dict[str, TaskParameter]:
        parameters = self.signature.parameters
        has_varargs = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
        return {
            name: TaskParameter.of(parameter, self._namespace, has_varargs)
            for name, parameter in parameters.items()
        }

    @cached_property
    def _returns(self) -> Codec:
        hint = resolve_annotation(self.signature.return_annotation, self._namespace)
        return Codec(hint, fallback=True)

    @cached_property
    def _struct(self) -> ParameterStruct | None:
        return ParameterStruct.of(self._parameters.values())


# The signature of an unknown function: its values must be plain JSON.
_ANY = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)
_UNKNOWN = Arguments("enqueue", _ANY, {})
_CHECKPOINT = Arguments("save", _ANY, {})


def encode_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Encode a call of a function that this process does not have; values must be plain JSON."""
    return _UNKNOWN.encode(args, kwargs)


def encode_checkpoint(value: Any) -> bytes:
    """Encode a checkpoint for the next attempt; it must be plain JSON."""
    return _CHECKPOINT.encode((), {"saved": value})


def arguments_by_name(payload: bytes, parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a call's arguments by the names of these parameters (name and kind), as plain JSON.

    The values of `*args` are a list under its name; values without a parameter stay under `"*"`.
    """
    values = msgspec.json.decode(payload, type=dict[str, Any])
    positional, named = deque(values.pop(POSITIONAL_KEY, ())), dict[str, Any]()
    for name, kind in parameters:
        if kind == "var_positional":
            named[name] = list(positional)
            positional.clear()
        elif positional and kind.startswith("positional"):
            named[name] = positional.popleft()
    if positional:
        named[POSITIONAL_KEY] = list(positional)
    return {**named, **{name: value for name, value in values.items() if name not in named}}
