from __future__ import annotations

import enum
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.enqueue.arguments import MAX_PAYLOAD_BYTES, Arguments, encode_checkpoint, encode_plain
from genba.enqueue.identity import call_identity, key_identity
from genba.errors import BadArguments, BadTask, PayloadTooLarge

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(str):
    pass


@dataclass
class Point:
    x: int
    y: float = 0.0
    more: Any = None


@dataclass(eq=False)
class Nameless:
    x: int


class Order(msgspec.Struct):
    id: int
    lines: list[Point] = []


class Address(TypedDict):
    street: str


class Pair(NamedTuple):
    a: int
    b: str


def taking(annotation: Any) -> Arguments:
    def task(value): ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return Arguments.of(task)


def anything(*args, **kwargs): ...


def there_and_back(
    arguments: Arguments, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments.decode(arguments.encode(args, kwargs))


def add(x: int, y: int = 1) -> int:
    return x + y


ADD = Arguments.of(add)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
ints = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | ints | st.floats(allow_nan=False, allow_infinity=False) | text
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
)


def exact(value: Any) -> Any:
    """Return the value with its types, so that 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return dict, [(key, exact(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(
            (exact(item) for item in value), key=repr
        )  # its own order is a matter of chance
    return type(value), repr(value)


# -- what comes back


@given(plain, plain)
def test_plain_json_comes_back_as_it_was(a, b):
    def task(a, *, b): ...

    assert exact(there_and_back(Arguments.of(task), a, b=b)) == exact(((a,), {"b": b}))


@given(st.lists(plain, max_size=3), st.dictionaries(text, plain, max_size=3))
def test_calls_without_the_code_reach_a_function_that_takes_anything(args, kwargs):
    kwargs.pop("*", None)
    back = Arguments.of(anything).decode(encode_plain(tuple(args), kwargs))
    assert exact(back) == exact((tuple(args), kwargs))


@given(ints, text, st.floats(allow_nan=False, allow_infinity=False), st.booleans() | st.none())
def test_scalars_come_back_through_their_annotations(i, s, f, b):
    def task(i: int, s: str, f: float, b: bool | None = None): ...

    arguments = Arguments.of(task)
    assert exact(there_and_back(arguments, i, s, f, b)) == exact(((i, s, f, b), {}))
    assert exact(there_and_back(arguments, i, s, f, b)) == exact(
        ((i, s, f, b), {})
    )  # the shape is known now


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (datetime, datetime(2026, 1, 1, 3, tzinfo=UTC)),
        (date, date(2026, 1, 1)),
        (timedelta, timedelta(seconds=1.5)),
        (UUID, UUID(int=7)),
        (Decimal, Decimal("1.10")),
        (bytes, b"\x00\xff"),
        (Colour, Colour.RED),
        (Level, Level.LOW),
        (Literal["a", "b"], "b"),
        (Annotated[int, msgspec.Meta(gt=0)], 5),
        (int | None, None),
        (int | float, 1.0),
        (tuple[int, ...], (1, 2)),
        (tuple, (1, "a")),
        (set[str], {"b", "a"}),
        (frozenset[int], frozenset({1})),
        (dict[int, str], {1: "a"}),
        (dict[Colour, int], {Colour.RED: 1}),
        (list[Point], [Point(1, 2.0, ["x"])]),
        (Order, Order(1, [Point(1)])),
        (Address, {"street": "x"}),
        (Pair, Pair(1, "b")),
        (Sequence[int], [1, 2]),
        (object, {"a": [1]}),
        (list[datetime | None], [None, datetime(2026, 1, 1)]),  # noqa: DTZ001 - naive is what is tested
    ],
)
def test_annotated_values_come_back_as_their_type(annotation, value):
    arguments = taking(annotation)
    assert exact(there_and_back(arguments, value)) == exact(((value,), {}))
    payload, why = arguments.encode_result(value)
    assert why is None
    assert exact(arguments.decode_result(payload)) == exact(value)


@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_that_its_zone_has_twice_keeps_its_moment(fold):
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Zurich"), fold=fold)
    ((back,), _) = there_and_back(taking(datetime), twice)
    assert back.timestamp() == twice.timestamp()


def test_objects_without_equality_are_compared_by_their_fields():
    ((back,), _) = there_and_back(taking(Nameless), Nameless(3))
    assert back.x == 3


@pytest.mark.parametrize(
    ("annotation", "value"), [(float, 3), (list[float], [3]), (float | None, 3)]
)
def test_an_int_for_a_float_is_stored_as_a_float(annotation, value):
    arguments = taking(annotation)
    same = json.loads(json.dumps(value), parse_int=float)
    assert exact(there_and_back(arguments, value)) == exact(((same,), {}))
    assert arguments.encode((value,), {}) == arguments.encode((same,), {})


# -- the payload


def test_a_payload_has_the_parameters_in_signature_order_with_defaults():
    assert ADD.encode((1,), {}) == b'{"x":1,"y":1}'
    assert ADD.encode((), {"y": 2, "x": 1}) == b'{"x":1,"y":2}'


def test_equal_sets_are_equal_payloads():
    words = [f"w{i}" for i in range(50)]
    encode = taking(set[str]).encode
    assert encode((set(words),), {}) == encode(({*reversed(words)},), {})


def test_the_order_of_keys_in_a_dict_is_kept():
    ((back,), _) = there_and_back(taking(dict), {"b": 1, "a": 2})
    assert list(back) == ["b", "a"]


def test_what_python_takes_by_position_is_under_a_star():
    def positional_only(a, /, b, *, c=3): ...
    def variadic(a, b=2, *rest: int, c: int = 3, **more: float): ...

    assert Arguments.of(positional_only).encode((1, 2), {}) == b'{"*":[1],"b":2,"c":3}'
    payload = Arguments.of(variadic).encode((1, 2, 3, 4), {"z": 1})
    assert payload == b'{"*":[1,2,3,4],"c":3,"z":1.0}'
    assert Arguments.of(variadic).decode(payload) == ((1, 2, 3, 4), {"c": 3, "z": 1.0})
    assert there_and_back(Arguments.of(positional_only), 1, b=2) == ((1, 2), {"c": 3})


def test_a_positional_only_name_may_be_a_keyword_too():
    def task(a, /, **more): ...

    assert there_and_back(Arguments.of(task), 1, a=2) == ((1,), {"a": 2})


def test_positional_arguments_of_a_caller_without_the_code_find_their_parameters():
    assert ADD.decode(encode_plain((1,), {"y": 5})) == ((1, 5), {})
    assert ADD.decode(encode_plain((1,), {})) == ((1,), {})
    with pytest.raises(BadArguments, match="multiple values for argument 'x'"):
        ADD.decode(encode_plain((1,), {"x": 5}))


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((1,), {}, {"a": 1, "b": 2, "rest": [], "c": 3}),
        ((1, 5, 6, 7), {"c": 8, "z": 9}, {"a": 1, "b": 5, "rest": [6, 7], "c": 8, "z": 9}),
        ((1,), {"b": 4}, {"a": 1, "b": 4, "rest": [], "c": 3}),
        (
            (1,),
            {"a": 4, "rest": 5},
            {"a": 1, "b": 2, "rest": [], "c": 3},
        ),  # of `more`; the parameters come first
    ],
)
def test_arguments_are_known_by_name_however_they_were_given(args, kwargs, named):
    def task(a, /, b=2, *rest, c=3, **more): ...

    arguments = Arguments.of(task)
    assert arguments.by_name(arguments.encode(args, kwargs)) == named


def test_arguments_of_a_caller_without_the_code_get_their_names_too():
    assert ADD.by_name(encode_plain((1,), {"y": 5})) == {"x": 1, "y": 5}
    assert ADD.by_name(encode_plain((), {"x": 1})) == {"x": 1}
    assert ADD.by_name(encode_plain((1, 2, 3), {})) == {
        "x": 1,
        "y": 2,
        "*": [3],
    }  # too many: nothing is hidden


def test_a_star_cannot_be_the_name_of_an_argument():
    with pytest.raises(BadArguments, match=r"\*"):
        encode_plain((), {"*": 1})


def test_missing_arguments_get_the_defaults_of_the_code_that_runs():
    assert ADD.decode(b'{"x":4}') == ((4, 1), {})


def test_changing_a_value_after_the_call_changes_nothing():
    items = [1]
    payload = taking(list).encode((items,), {})
    items.append(2)
    assert payload == b'{"value":[1]}'


# -- defaults


def test_a_default_that_cannot_be_stored_stays_with_the_function():
    missing = object()

    def task(a: int, b: Any = missing, c: int = 3, *, d: Any = missing): ...

    arguments = Arguments.of(task)
    assert arguments.encode((1,), {}) == b'{"a":1,"c":3}'
    assert arguments.encode((1, missing), {"d": missing}) == b'{"a":1,"c":3}'
    assert arguments.decode(b'{"a":1,"c":3}') == ((1,), {"c": 3})
    assert there_and_back(arguments, 1, 2, d=4) == ((1, 2, 3), {"d": 4})


def test_a_default_of_none_widens_the_annotation():
    def task(x: int = None): ...  # type: ignore[assignment]  # noqa: RUF013 - what old code has

    assert there_and_back(Arguments.of(task)) == ((None,), {})
    assert there_and_back(Arguments.of(task), 3) == ((3,), {})
    with pytest.raises(BadArguments):
        Arguments.of(task).encode(("3",), {})


def test_a_mutable_default_is_stored():
    def task(x: list[int] = [1]): ...  # noqa: B006 - what old code has

    assert Arguments.of(task).encode((), {}) == b'{"x":[1]}'


# -- what is refused


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"^add: missing a required argument: 'x'; it takes \(x, y=…\)$"),
        ((1, 2, 3), {}, "too many positional"),
        ((1,), {"z": 2}, "unexpected keyword argument 'z'"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
        (("1",), {}, "argument `x`: expected `int`, got `str`"),
        ((True,), {}, "argument `x`: expected `int`, got `bool`"),
        ((1.0,), {}, "argument `x`: expected `int`, got `float`"),
        ((None,), {}, "argument `x`: expected `int`"),
        ((1, Level.LOW), {}, "argument `y`: a value of type Level would come back as int"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_parameter(args, kwargs, message):
    add_called_add = Arguments.of(add, name="add")
    with pytest.raises(BadArguments, match=message):
        add_called_add.encode(args, kwargs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "`value`: a value of type tuple would come back as list"),
        ({"a"}, "`value`: a value of type set"),
        (
            datetime(2026, 1, 1, tzinfo=UTC),
            "`value`: a value of type datetime would come back as str",
        ),
        (b"x", "`value`: a value of type bytes"),
        (Word("x"), "`value`: a value of type Word"),
        (Colour.RED, "`value`: a value of type Colour"),
        (Level.LOW, "`value`: a value of type Level"),
        (Point(1), "`value`: a value of type Point would come back as dict"),
        (Pair(1, "b"), "`value`: a value of type Pair"),
        ({1: "a"}, r"`value\[1\]`: a key of type int"),
        ({None: "a"}, r"`value\[None\]`: a key of type NoneType"),
        ({"a": {Word("b"): 1}}, "`value.a.b`: a key of type Word"),
        ([1, 2, {"name": (1,)}], r"`value\[2\].name`: a value of type tuple"),
        (
            [1, 2, {"a b": object()}],
            r"`value\[2\]\['a b'\]`: a value of type object cannot be stored",
        ),
        (math.nan, "`value`: nan is not a JSON number"),
        ([1.0, -math.inf], r"`value\[1\]`: -inf is not a JSON number"),
        ("a\0b", "`value`: the text has a NUL"),
        (["a", "a\0b"], r"`value\[1\]`: the text has a NUL"),
        ({"a": {"b\0": 1}}, "the key has a NUL"),
        ("\ud800", "`value`: the text has a lone surrogate"),
        (["é", "\ud800"], r"`value\[1\]`: the text has a lone surrogate"),
        ({"\ud800": 1}, "the key has a lone surrogate"),
        (2**64, "`value`: an int must be within"),
        ([0, -(2**63) - 1], r"`value\[1\]`: an int must be within"),
        pytest.param(10**5000, "`value`: an int must be within", id="huge"),
        (object(), "`value`: a value of type object cannot be stored as JSON"),
        (print, "cannot be stored as JSON"),
    ],
)
def test_a_value_that_would_change_is_refused_with_its_path(value, message):
    def task(value): ...

    arguments = Arguments.of(task)
    with pytest.raises(BadArguments, match=message) as caught:
        arguments.encode((value,), {})
    with pytest.raises(BadArguments):
        encode_plain((value,), {})
    stored, why = arguments.encode_result(value)
    assert stored is None
    assert why
    assert (str(caught.value) + why).encode()  # the words can be printed and stored


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (list[int], [1, 2, "x"], r"`value\[2\]`: expected `int`, got `str`"),
        (list[Point], [Point(1), Point(2, more=(1,))], r"`value\[1\].more`: a value of type tuple"),
        (Point, Order(1), "value"),
        (Sequence[int], (1, 2), "a value of type tuple would come back as list"),
        (set[int], {Level.LOW}, "a value of type Level would come back as int"),
        (set[str], {"a\0"}, "NUL"),
        (float, 2**53 + 1, "would come back as"),
        (float, True, "expected `float`, got `bool`"),
        (str, Word("a"), "a value of type Word cannot be stored as JSON"),
        (
            str | datetime,
            datetime(2026, 1, 1, tzinfo=UTC),
            "a value of type datetime would come back as str",
        ),
        (Annotated[int, msgspec.Meta(gt=0)], 0, "expected `int` >= 1"),
        (Literal["a"], "b", "invalid enum value 'b'"),
        (Address, {"street": "x", "town": "y"}, "`value.town`"),
        (Decimal, Decimal("NaN"), "value"),
        (Colour, "red", "a value of type str would come back as Colour"),
    ],
)
def test_a_value_must_be_what_its_annotation_makes_of_it(annotation, value, message):
    with pytest.raises(BadArguments, match=message):
        taking(annotation).encode((value,), {})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_has_a_limit():
    arguments = taking(Any)
    arguments.encode((nested(100),), {})
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(101), nested(5000), endless):
        with pytest.raises(BadArguments, match="nested deeper than 100"):
            arguments.encode((value,), {})
        assert arguments.encode_result(value)[0] is None


@pytest.mark.parametrize("annotation", [str, Any, list[str]])
def test_a_payload_over_the_limit_is_refused_with_both_sizes(annotation):
    arguments = taking(annotation)
    frame = len(b'{"value":""}') + (2 if annotation == list[str] else 0)

    def of_size(size: int) -> Any:
        word = "x" * (size - frame)
        return [word] if annotation == list[str] else word

    assert len(arguments.encode((of_size(MAX_PAYLOAD_BYTES),), {})) == MAX_PAYLOAD_BYTES
    with pytest.raises(PayloadTooLarge, match="1,048,577 bytes as JSON; at most 1,048,576"):
        arguments.encode((of_size(MAX_PAYLOAD_BYTES + 1),), {})


def test_the_name_of_a_keyword_is_checked_too():
    with pytest.raises(BadArguments, match="NUL"):
        encode_plain((), {"a\0": 1})
    with pytest.raises(BadArguments, match="surrogate"):
        encode_plain((), {"\ud800": 1})


# -- what no longer fits


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"*":1}', "not a JSON object"),
        (b'{"x":' * 3000, "not a JSON object"),
        (b"{}", "do not fit: missing a required argument: 'x'"),
        (b'{"x":1,"z":2}', "do not fit: got an unexpected keyword argument 'z'"),
        (b'{"x":"1"}', "do not fit: argument `x`: expected `int`, got `str`"),
        (b'{"*":[1,2,3]}', "too many positional"),
    ],
)
def test_stored_arguments_that_no_longer_fit_are_refused(payload, message):
    with pytest.raises(BadArguments, match=message):
        ADD.decode(payload)


# -- functions of every kind


def test_annotations_may_name_what_is_defined_later():
    def task(value: Later) -> Later:
        return value

    arguments = Arguments.of(task)
    assert there_and_back(arguments, Later(1)) == ((Later(1),), {})


@dataclass
class Later:
    x: int
    tags: list[str] = field(default_factory=list)


def test_an_annotation_that_cannot_be_resolved_counts_as_any():
    def task(a: Unknown, b: int, c: [][0] = None): ...  # type: ignore[valid-type]

    arguments = Arguments.of(task)
    assert there_and_back(arguments, [1], 2) == (([1], 2, None), {})
    with pytest.raises(BadArguments):
        arguments.encode(([1], "2"), {})


def test_coroutines_methods_partials_and_callables_have_arguments():
    class Job:
        def run(self, x: int): ...

        def __call__(self, y: Point): ...

    async def coroutine(x: int): ...

    assert Arguments.of(Job.run, skip_first=True).encode((1,), {}) == b'{"x":1}'
    assert Arguments.of(Job().run).encode((1,), {}) == b'{"x":1}'
    assert Arguments.of(Job()).encode((Point(1),), {}) == b'{"y":{"x":1,"y":0.0,"more":null}}'
    assert Arguments.of(coroutine).encode((1,), {}) == b'{"x":1}'
    assert Arguments.of(functools.partial(add, 1)).encode((), {"y": 2}) == b'{"y":2}'


def test_a_wrapped_function_keeps_its_own_annotations():
    @functools.wraps(add)
    def wrapper(*args, **kwargs): ...

    with pytest.raises(BadArguments):
        Arguments.of(wrapper).encode(("1",), {})


def test_a_function_without_parameters_takes_none():
    def task(): ...

    assert Arguments.of(task).encode((), {}) == b"{}"
    assert Arguments.of(task).decode(b"{}") == ((), {})


def test_names_that_a_struct_could_not_have_are_no_problem():
    def task(self, cls, __x=1, *, __struct_fields__=2): ...

    assert there_and_back(Arguments.of(task), 1, 2) == ((1, 2, 1), {"__struct_fields__": 2})


def test_something_without_a_signature_is_no_task():
    with pytest.raises(BadTask):
        Arguments.of(max)


def test_a_description_is_plain_json():
    def task(
        a: int, /, b: str | None = "x", *rest: Point, c: Unknown, d=(1, 2), **more
    ) -> list[int]:
        return []

    described = Arguments.of(task).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["returns"] == "list[int]"
    assert described["parameters"] == [
        {"name": "a", "kind": "positional_only", "required": True, "annotation": "int"},
        {
            "name": "b",
            "kind": "positional_or_keyword",
            "required": False,
            "annotation": "str | None",
            "default": "x",
        },
        {"name": "rest", "kind": "var_positional", "required": False, "annotation": "Point"},
        {"name": "c", "kind": "keyword_only", "required": True, "annotation": "Unknown"},
        {"name": "d", "kind": "keyword_only", "required": False},
        {"name": "more", "kind": "var_keyword", "required": False},
    ]


# -- results


@given(plain)
def test_a_plain_result_comes_back_whatever_the_annotation_says(value):
    def task() -> int:
        return 1

    arguments = Arguments.of(task)
    payload, why = arguments.encode_result(value)
    assert why is None
    assert exact(arguments.decode_result(payload)) == exact(value)


def test_a_result_that_would_become_another_type_is_not_kept():
    stored, why = taking(datetime).encode_result("2026-01-01T00:00:00Z")
    assert stored is None
    assert why is not None
    assert "would come back as datetime" in why


def test_a_result_over_the_limit_is_not_kept():
    stored, why = ADD.encode_result("x" * MAX_PAYLOAD_BYTES)
    assert stored is None
    assert why == "result: 1,048,578 bytes as JSON; at most 1,048,576 are kept"


def test_a_hostile_result_is_never_an_error():
    class Hostile:
        def __eq__(self, other):
            raise RuntimeError

        def __repr__(self):
            raise RuntimeError

        __hash__ = object.__hash__

    @dataclass
    class Broken:
        x: int = 1

        def __getattribute__(self, name):
            raise RuntimeError("no")

    for value in (Hostile(), [Hostile()], Broken(), {"a": Broken()}, {Hostile: 1}):
        stored, why = ADD.encode_result(value)
        assert stored is None
        assert why


def test_no_result_is_null():
    assert ADD.encode_result(None) == (b"null", None)
    assert ADD.decode_result(b"null") is None
    assert ADD.decode_result(None) is None


# -- identity


@given(st.dictionaries(text, plain, min_size=2, max_size=4), text)
def test_an_identity_ignores_the_order_of_keys(values, task):
    forth = encode_plain((), {"d": values})
    back = encode_plain((), {"d": dict(reversed(values.items()))})
    assert call_identity(task, forth) == call_identity(task, back)
    assert len(call_identity(task, forth)) == 16


def test_identities_tell_tasks_arguments_and_keys_apart():
    one, two = ADD.encode((1, 2), {}), ADD.encode((2, 1), {})
    identities = [
        call_identity("a", one),
        call_identity("a", two),
        call_identity("b", one),
        call_identity("a", None),
        call_identity("b", None),
        key_identity("a"),
        key_identity("b"),
    ]
    assert len(set(identities)) == len(identities)


def test_a_checkpoint_that_cannot_be_kept_names_the_call_that_it_was_in() -> None:
    with pytest.raises(
        BadArguments, match=r"^save: argument `saved`: the text has a NUL character"
    ):
        encode_checkpoint("a\0b")
