"""A function's arguments and result, as JSON and back, without a change of type on the way.

A payload is one JSON object with the parameters in signature order.  What Python must take by position
(positional-only parameters, and all positional ones of a function with `*args`) is a list under the key `"*"`;
the keys of `**kwargs` stand beside the others.
"""

from __future__ import annotations

import inspect
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from inspect import Parameter, Signature
from types import NoneType, SimpleNamespace, UnionType
from typing import Any

import msgspec
from msgspec.structs import astuple

from genba.enqueue.round_trip import (
    SCALARS,
    UNENCODABLE,
    RoundTripCheck,
    decode_plain,
    encode,
    flaw_of_text,
    sound,
)
from genba.errors import BadArguments, BadTask, PayloadTooLarge

MAX_PAYLOAD_BYTES = 1024 * 1024

POSITIONAL_KEY = "*"

_ROOMY: frozenset[type] = frozenset({int, bool, NoneType})  # wrong only by their size
_MAX_SHAPES = 64
_DIGITS = 19  # an int outside the limits has more

_encode_sets = msgspec.json.Encoder(order="deterministic").encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode

_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class Arguments:
    """What one function takes and returns: binds, checks, stores and restores it.

    Annotations are read at the first use, not at import, so they may name what the module defines later.  One that
    cannot be resolved counts as `Any`.
    """

    def __init__(self, name: str, signature: Signature, namespace: Mapping[str, Any]) -> None:
        self.name = name
        self.signature = signature
        self._namespace = namespace

    @classmethod
    def of(
        cls, fn: Callable[..., Any], *, skip_first: bool = False, name: str | None = None
    ) -> Arguments:
        """The arguments of `fn`; `skip_first` leaves out the `self` of an unbound method."""
        name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError) as error:
            raise BadTask(
                f"{name}: Python cannot tell its parameters ({error}); wrap it in a function"
            ) from error
        if skip_first:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls(name, signature, _namespace_of(fn))

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The payload of this call, defaults applied; BadArguments names the parameter that does not fit.

        An int given for a float is stored, and comes back, as a float.  A default that cannot be stored stays out of
        the payload: the function itself applies it.
        """
        form = self._form
        if form is None:
            return self._encode_bound(self._bind(args, kwargs))
        try:
            bound = form.make(*args, **kwargs)
        except TypeError:
            self._bind(args, kwargs)  # it has the better words
            raise
        values = astuple(bound)
        shape = tuple(map(type, values))
        roomy = form.shapes.get(shape)
        if roomy is None and not form.learn(shape):
            return self._encode_bound(dict(zip(form.names, values, strict=True)))
        try:
            payload = encode(bound)
        except UNENCODABLE:
            return self._encode_bound(dict(zip(form.names, values, strict=True)))
        if not (roomy and len(payload) <= form.short) and not sound(values):
            return self._encode_bound(dict(zip(form.names, values, strict=True)))
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise self._too_large(payload)
        return payload

    def decode(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call that `payload` stands for, typed; BadArguments if it does not fit the function any more."""
        form = self._form
        if form is None:
            return self._decode_bound(payload)
        try:
            values = astuple(form.read(payload))
        except _UNDECODABLE:
            return self._decode_bound(payload)
        if form.omits and msgspec.UNSET in values:
            return self._decode_bound(payload)
        if form.by_name:
            n = form.by_position
            return values[:n], dict(zip(form.by_name, values[n:], strict=True))
        return values, {}

    def by_name(self, payload: bytes) -> dict[str, Any]:
        """The arguments of `payload` by name, as plain JSON values."""
        return by_name(
            payload,
            ((name, one.kind.name.lower()) for name, one in self.signature.parameters.items()),
        )

    def prepare(self) -> None:
        """Read the annotations now, for all the processes that are forked from this one."""
        with suppress(Exception):  # whatever is wrong with them is told by the call that meets it
            self._returns  # noqa: B018
            if self._form is not None:
                self._form.read(b"{}")

    def describe(self) -> dict[str, Any]:
        """The signature as plain JSON, for clients that do not have the code."""
        return {
            "parameters": [slot.describe() for slot in self._slots.values()],
            "returns": _annotation_text(self.signature.return_annotation),
        }

    def encode_result(self, value: Any) -> tuple[bytes | None, str | None]:
        """The result as JSON, or None and the reason why it cannot be kept; never raises."""
        if value is None:
            return b"null", None
        try:
            payload = self._returns.store(value, "result")
        except BadArguments as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 - user code runs here: properties, __eq__, enums
            return None, f"result: cannot be stored as JSON: {type(error).__name__}"
        if len(payload) > MAX_PAYLOAD_BYTES:
            return (
                None,
                f"result: {len(payload):,} bytes as JSON; at most {MAX_PAYLOAD_BYTES:,} are kept",
            )
        return payload, None

    def decode_result(self, payload: bytes | None) -> Any:
        """The result, typed by the return annotation, or as plain JSON where that does not fit."""
        return None if payload is None else self._returns.load(payload)

    # -- binding

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadArguments(f"{self.name}: {error}; it takes {self._call_text()}") from None
        bound.apply_defaults()
        return bound.arguments

    def _encode_bound(self, values: Mapping[str, Any]) -> bytes:
        by_position: list[msgspec.Raw] = []
        by_name: dict[str, msgspec.Raw | list[msgspec.Raw]] = {}
        for name, slot in self._slots.items():
            value = values[name]
            if slot.kind is Parameter.VAR_POSITIONAL:
                by_position += (
                    self._store(slot, item, f"{name}[{i}]") for i, item in enumerate(value)
                )
            elif slot.kind is Parameter.VAR_KEYWORD:
                if POSITIONAL_KEY in value:
                    raise BadArguments(
                        f'{self.name}: "{POSITIONAL_KEY}" cannot be the name of an argument'
                    )
                for key in value:
                    by_name[key] = self._store(slot, value[key], key)
            elif slot.omitted(value):
                continue
            elif slot.starred:
                by_position.append(self._store(slot, value, name))
            else:
                by_name[name] = self._store(slot, value, name)
        payload = self._joined({POSITIONAL_KEY: by_position, **by_name} if by_position else by_name)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise self._too_large(payload)
        return payload

    def _store(self, slot: _Slot, value: Any, path: str) -> msgspec.Raw:
        try:
            return msgspec.Raw(slot.codec.store(value, path))
        except BadArguments as error:
            raise BadArguments(f"{self.name}: argument {error}") from error.__cause__

    def _joined(self, parts: Mapping[str, Any]) -> bytes:
        for key in parts:
            if (flaw := flaw_of_text(key)) is not None:
                raise BadArguments(f"{self.name}: argument {key!a}: its name {flaw}")
        return encode(parts)

    def _decode_bound(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            by_name: dict[str, Any] = _decode_object(payload)
            by_position = _decode_list(by_name.pop(POSITIONAL_KEY, b"[]"))
        except _UNDECODABLE as error:
            raise BadArguments(
                f"{self.name}: the stored arguments are not a JSON object of arguments"
            ) from error
        try:
            bound = self.signature.bind(*by_position, **by_name)
        except TypeError as error:
            text = f"{self.name}: the stored arguments do not fit: {error}; it takes {self._call_text()}"
            raise BadArguments(text) from None
        for name, raw in bound.arguments.items():
            slot = self._slots[name]
            if slot.kind is Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(
                    self._load(slot, one, f"{name}[{i}]") for i, one in enumerate(raw)
                )
            elif slot.kind is Parameter.VAR_KEYWORD:
                bound.arguments[name] = {
                    key: self._load(slot, one, key) for key, one in raw.items()
                }
            else:
                bound.arguments[name] = self._load(slot, raw, name)
        return bound.args, bound.kwargs

    def _load(self, slot: _Slot, raw: msgspec.Raw, path: str) -> Any:
        try:
            return slot.codec.decode(raw)
        except _UNDECODABLE as error:
            text = f"{self.name}: the stored arguments do not fit: argument {_validation_text(error, path)}"
            raise BadArguments(text) from None

    def _too_large(self, payload: bytes) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{self.name}: the arguments take {len(payload):,} bytes as JSON; at most {MAX_PAYLOAD_BYTES:,} are allowed"
        )

    def _call_text(self) -> str:
        parts = []
        for slot in self._slots.values():
            star = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(slot.kind, "")
            parts.append(f"{star}{slot.name}{'' if slot.required or star else '=…'}")
        return f"({', '.join(parts)})"

    # -- read once, at the first use

    @cached_property
    def _slots(self) -> dict[str, _Slot]:
        parameters = self.signature.parameters
        variadic = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values())
        return {name: _Slot.of(p, self._namespace, variadic) for name, p in parameters.items()}

    @cached_property
    def _returns(self) -> _Codec:
        return _Codec(_resolve(self.signature.return_annotation, self._namespace), fallback=True)

    @cached_property
    def _form(self) -> _Form | None:
        return _Form.of(self._slots.values())


# Nothing is known about the function: its values must be plain JSON.
_ANY = Signature(
    [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]
)
_UNKNOWN = Arguments("enqueue", _ANY, {})
_CHECKPOINT = Arguments("save", _ANY, {})


def encode_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The payload of a call of a function that this process does not have; the values must be plain JSON."""
    return _UNKNOWN.encode(args, kwargs)


def encode_checkpoint(value: Any) -> bytes:
    """As the next attempt finds it; plain JSON, too."""
    return _CHECKPOINT.encode((), {"saved": value})


def by_name(payload: bytes, parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The arguments of a call by the names of these parameters (name and kind), as plain JSON values.

    What `*args` took is a list under its name; what no parameter takes stays under `"*"`.
    """
    values = msgspec.json.decode(payload, type=dict[str, Any])
    given, named = deque(values.pop(POSITIONAL_KEY, ())), dict[str, Any]()
    for name, kind in parameters:
        if kind == "var_positional":
            named[name] = list(given)
            given.clear()
        elif given and kind.startswith("positional"):
            named[name] = given.popleft()
    if given:
        named[POSITIONAL_KEY] = list(given)
    return {**named, **{name: value for name, value in values.items() if name not in named}}


def identity(task: str, payload: bytes | None) -> bytes:
    """16 bytes that are equal for equal calls, whatever the order of keys; without a payload, of the task alone."""
    digest = blake2b(
        task.encode(), digest_size=16, person=b"genba task" if payload is None else b"genba call"
    )
    if payload is not None:
        digest.update(b"\0" + _encode_sorted(decode_plain(payload)))
    return digest.digest()


def key_identity(key: str) -> bytes:
    """16 bytes for a key that the caller chose; never those of a task or a call."""
    return blake2b(key.encode(), digest_size=16, person=b"genba key").digest()


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter."""

    name: str
    kind: Any
    codec: _Codec
    annotation: str | None
    default: Any
    stored_default: bytes | None
    starred: bool

    @classmethod
    def of(cls, parameter: Parameter, namespace: Mapping[str, Any], variadic: bool) -> _Slot:
        hint = _resolve(parameter.annotation, namespace)
        default = parameter.default
        if default is None and hint is not Any:
            hint = typing.Optional[hint]  # noqa: UP045 - the hint is a value here, and may not know the | operator
        codec = _Codec(hint)
        stored = None
        if default is not Parameter.empty:
            try:
                stored = codec.store(default, parameter.name)
            except BadArguments:
                stored = None
        starred = parameter.kind is Parameter.POSITIONAL_ONLY or (
            variadic and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        text = _annotation_text(parameter.annotation)
        return cls(parameter.name, parameter.kind, codec, text, default, stored, starred)

    @property
    def required(self) -> bool:
        variadic = self.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return self.default is Parameter.empty and not variadic

    @property
    def may_omit(self) -> bool:
        return self.default is not Parameter.empty and self.stored_default is None

    def omitted(self, value: Any) -> bool:
        return self.may_omit and (value is self.default or value is msgspec.UNSET)

    def describe(self) -> dict[str, Any]:
        text: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind.name.lower(),
            "required": self.required,
        }
        if self.annotation is not None:
            text["annotation"] = self.annotation
        if self.stored_default is not None:
            text["default"] = decode_plain(self.stored_default)
        return text


@dataclass(frozen=True, slots=True)
class _Form:
    """The signature as a msgspec struct, which binds, encodes and decodes a plain call in C.

    A shape is the exact types of a call's values; the shapes seen here need no look at how they come back.  The value
    says whether only the size of an int can be wrong.
    """

    make: Callable[..., msgspec.Struct]
    read: Callable[[bytes], msgspec.Struct]
    names: tuple[str, ...]
    by_position: int
    by_name: tuple[str, ...]
    omits: bool
    short: int
    exact: tuple[frozenset[type], ...]
    shapes: dict[tuple[type, ...], bool]

    @classmethod
    def of(cls, slots: Iterable[_Slot]) -> _Form | None:
        """The form of these parameters, or None if a struct cannot bind them as Python does."""
        slots = tuple(slots)
        by_kind: dict[Any, list[Any]] = {
            Parameter.POSITIONAL_OR_KEYWORD: [],
            Parameter.KEYWORD_ONLY: [],
        }
        for slot in slots:
            if slot.kind not in by_kind or slot.starred or slot.name.startswith("__"):
                return None
            by_kind[slot.kind].append(_field(slot))
        first, second = by_kind.values()
        positional = msgspec.defstruct("Positional", first, gc=False)
        bound = msgspec.defstruct(
            "Bound", second, bases=(positional,), kw_only=True, gc=False, forbid_unknown_fields=True
        )
        names = tuple(slot.name for slot in slots)
        return cls(
            make=bound,
            read=msgspec.json.Decoder(bound).decode,
            names=names,
            by_position=len(first),
            by_name=names[len(first) :],
            omits=any(slot.may_omit for slot in slots),
            short=len(encode(dict.fromkeys(names, 1))) - 1 + _DIGITS,
            exact=tuple(slot.codec.exact for slot in slots),
            shapes={},
        )

    def learn(self, shape: tuple[type, ...]) -> bool:
        """Whether each of these types comes back as it is; remembered, if so."""
        if not all(kind in exact for kind, exact in zip(shape, self.exact, strict=True)):
            return False
        if len(self.shapes) < _MAX_SHAPES:
            self.shapes[shape] = _ROOMY.issuperset(shape)
        return True


def _field(slot: _Slot) -> Any:
    if slot.required:
        return slot.name, slot.codec.hint
    if slot.may_omit:
        return slot.name, typing.Union[slot.codec.hint, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007 - as above
    default = slot.default
    if type(default) in SCALARS:
        return slot.name, slot.codec.hint, default
    return slot.name, slot.codec.hint, msgspec.field(default_factory=lambda: default)


class _Codec:
    """Stores and restores the values of one annotation; with `fallback`, as plain JSON where it does not fit."""

    __slots__ = ("decode", "exact", "hint", "load")

    def __init__(self, hint: Any, *, fallback: bool = False) -> None:
        try:
            decoder = msgspec.json.Decoder(hint)
        except Exception:  # noqa: BLE001 - resolving the annotations of somebody's classes can raise anything
            hint = Any
            decoder = msgspec.json.Decoder(Any)
        self.hint = hint
        self.exact = _exact_types(hint)
        self.decode: Callable[[bytes | msgspec.Raw], Any] = decoder.decode
        self.load = self._load_or_plain if fallback else self.decode

    def _load_or_plain(self, payload: bytes | msgspec.Raw) -> Any:
        try:
            return self.decode(payload)
        except _UNDECODABLE:
            return decode_plain(payload)

    def store(self, value: Any, path: str) -> bytes:
        """JSON that comes back as an equal value of the same type; BadArguments starts with the path of the flaw."""
        if type(value) in self.exact and sound((value,)):
            try:
                return encode(value)
            except UnicodeEncodeError:
                pass
        comparison = RoundTripCheck()
        try:
            back = self.load(encode(value))
        except (*UNENCODABLE, *_UNDECODABLE) as error:
            raise BadArguments(
                comparison.flaw(value, value, path, 0) or _validation_text(error, path)
            ) from error
        flaw = comparison.flaw(value, back, path, 0)
        if flaw is not None:
            raise BadArguments(flaw)
        # Equal calls must be equal payloads: 1 and 1.0 for a float, and one set in two orders.
        return _encode_sets(back) if comparison.sets else encode(back)


def _validation_text(error: BaseException, path: str) -> str:
    """msgspec's words, with our path in place of its `$`."""
    if not isinstance(error, msgspec.ValidationError):
        return f"`{path}`: {error}"
    text, _, where = str(error).partition(" - at `$")
    return f"`{path}{where.rstrip('`')}`: {text[:1].lower()}{text[1:]}"


def _exact_types(hint: Any) -> frozenset[type]:
    """The scalar types whose every sound value fits this hint and comes back as it is."""
    if hint is Any or hint is object:
        return SCALARS
    if hint in (str, int, float, bool, NoneType):
        return frozenset({hint})
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return frozenset().union(*map(_exact_types, typing.get_args(hint)))
    return frozenset()


def _resolve(annotation: Any, namespace: Mapping[str, Any]) -> Any:
    if annotation is Parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, dict(namespace), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - so can evaluating somebody's text
        return Any


def _annotation_text(annotation: Any) -> str | None:
    if annotation is Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _namespace_of(fn: Callable[..., Any]) -> Mapping[str, Any]:
    inner: Any = inspect.unwrap(fn)
    while isinstance(inner, partial):
        inner = inspect.unwrap(inner.func)
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__globals__"):
        inner = getattr(type(inner).__call__, "__func__", type(inner).__call__)
    return getattr(inner, "__globals__", {})
