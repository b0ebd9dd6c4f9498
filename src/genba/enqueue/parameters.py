"""The parameters of a task's function, and their struct, which encodes a plain call in C."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from types import NoneType
from typing import Any

import msgspec

from genba.enqueue.codec import Codec, annotation_text, resolve_annotation
from genba.enqueue.round_trip import SCALARS, decode_plain, encode
from genba.errors import BadArguments

_LIMITED_BY_SIZE: frozenset[type] = frozenset({int, bool, NoneType})
_MAX_SHAPES = 64
_MAX_INT_DIGITS = 19  # an int outside the limits has more


@dataclass(frozen=True, slots=True)
class TaskParameter:
    """One parameter of a task's function."""

    name: str
    kind: Any
    codec: Codec
    annotation: str | None
    default: Any
    stored_default: bytes | None  # None: there is no default, or it cannot be stored
    in_list: bool  # stored by position, in the list of positional arguments

    @classmethod
    def of(
        cls, parameter: Parameter, namespace: Mapping[str, Any], has_varargs: bool
    ) -> TaskParameter:
        """Read a parameter; `has_varargs` says whether the function takes `*args`."""
        hint = resolve_annotation(parameter.annotation, namespace)
        default = parameter.default
        if default is None and hint is not Any:
            # The hint is a value here and may not support the | operator.
            hint = typing.Optional[hint]  # noqa: UP045
        codec = Codec(hint)
        in_list = parameter.kind is Parameter.POSITIONAL_ONLY or (
            has_varargs and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        return cls(
            parameter.name,
            parameter.kind,
            codec,
            annotation_text(parameter.annotation),
            default,
            _stored_default(codec, parameter),
            in_list,
        )

    @property
    def required(self) -> bool:
        variadic = self.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return self.default is Parameter.empty and not variadic

    @property
    def may_omit(self) -> bool:
        """Whether the default cannot be stored, so that the payload leaves it out."""
        return self.default is not Parameter.empty and self.stored_default is None

    def omits(self, value: Any) -> bool:
        """Return whether the payload leaves out this value."""
        return self.may_omit and (value is self.default or value is msgspec.UNSET)

    def describe(self) -> dict[str, Any]:
        """Return the parameter as plain JSON, for clients that do not have the code."""
        described: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind.name.lower(),
            "required": self.required,
        }
        if self.annotation is not None:
            described["annotation"] = self.annotation
        if self.stored_default is not None:
            described["default"] = decode_plain(self.stored_default)
        return described


def _stored_default(codec: Codec, parameter: Parameter) -> bytes | None:
    if parameter.default is Parameter.empty:
        return None
    try:
        return codec.store(parameter.default, parameter.name)
    except BadArguments:
        return None


@dataclass(frozen=True, slots=True)
class ParameterStruct:
    """The parameters as a msgspec struct, which binds, encodes and decodes a plain call in C.

    A shape is the exact types of a call's values.  Values of a learned shape need no round-trip
    check; `shapes` says whether only the size of an int can be wrong.
    """

    make: Callable[..., msgspec.Struct]
    read: Callable[[bytes], msgspec.Struct]
    names: tuple[str, ...]
    positional_count: int
    keyword_names: tuple[str, ...]
    may_omit: bool
    max_safe_length: int  # no int in a payload of at most this length is outside the limits
    exact: tuple[frozenset[type], ...]
    shapes: dict[tuple[type, ...], bool]

    @classmethod
    def of(cls, parameters: Iterable[TaskParameter]) -> ParameterStruct | None:
        """Make the struct of these parameters, or None if it would not bind them as Python does."""
        parameters = tuple(parameters)
        fields: dict[Any, list[Any]] = {
            Parameter.POSITIONAL_OR_KEYWORD: [],
            Parameter.KEYWORD_ONLY: [],
        }
        for parameter in parameters:
            kind = parameter.kind
            if kind not in fields or parameter.in_list or parameter.name.startswith("__"):
                return None
            fields[kind].append(_field(parameter))
        positional, keyword_only = fields.values()
        base = msgspec.defstruct("Positional", positional, gc=False)
        struct = msgspec.defstruct(
            "Bound", keyword_only, bases=(base,), kw_only=True, gc=False, forbid_unknown_fields=True
        )
        names = tuple(parameter.name for parameter in parameters)
        return cls(
            make=struct,
            read=msgspec.json.Decoder(struct).decode,
            names=names,
            positional_count=len(positional),
            keyword_names=names[len(positional) :],
            may_omit=any(parameter.may_omit for parameter in parameters),
            max_safe_length=len(encode(dict.fromkeys(names, 1))) - 1 + _MAX_INT_DIGITS,
            exact=tuple(parameter.codec.exact for parameter in parameters),
            shapes={},
        )

    def learn(self, shape: tuple[type, ...]) -> bool:
        """Return whether each of these types is restored as it is; remember the shape if so."""
        if not all(kind in exact for kind, exact in zip(shape, self.exact, strict=True)):
            return False
        if len(self.shapes) < _MAX_SHAPES:
            self.shapes[shape] = _LIMITED_BY_SIZE.issuperset(shape)
        return True


def _field(parameter: TaskParameter) -> Any:
    name, hint = parameter.name, parameter.codec.hint
    if parameter.required:
        return name, hint
    if parameter.may_omit:
        # The hint is a value here and may not support the | operator.
        return name, typing.Union[hint, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007
    default = parameter.default
    if type(default) in SCALARS:
        return name, hint, default
    return name, hint, msgspec.field(default_factory=lambda: default)
