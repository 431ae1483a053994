from __future__ import annotations

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.field_types import MISMATCH, FieldTypeError, convert, fit, parse_value


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("3", "int", 3),
        ("-1", "int", -1),
        ("3", "float", 3.0),
        ("1e-3", "float", 1e-3),
        ("inf", "float", float("inf")),
        ("[1.0, inf]", "list[float]", [1.0, float("inf")]),
        ("{a: -inf}", "dict[str, float]", {"a": float("-inf")}),
        ("inf", "str", "inf"),
        ("True", "bool", True),
        ("3", "str", "3"),
        ("[1", "str", "[1"),
        ("'3'", "str", "3"),
        ("", "str", ""),
        ("true", "str", "true"),
        ("None", "str | None", None),
        ("3", "typing.Optional[int]", 3),
        ("3", "float | int", 3),
        ("3", "Union[int, str]", 3),
        ("[1,4,1]", "list[int]", [1, 4, 1]),
        ("[1,4,1]", "tuple[int, ...]", (1, 4, 1)),
        ("[1,a]", "tuple[int, str]", (1, "a")),
        ("[data, fsdp]", "collections.abc.Sequence[str]", ["data", "fsdp"]),
        ("[1, 2]", "Sequence[float] | None", [1.0, 2.0]),
        ("{a: 1}", "dict[str, float]", {"a": 1.0}),
        ("adam", "Literal['adam', 'sgd']", "adam"),
        ("3", "'int | None'", 3),
        ("bfloat16", None, "bfloat16"),
        ("8x4", None, "8x4"),
        ("3", "SomeClass", 3),
        ("bfloat16", "SomeClass", "bfloat16"),
    ],
)
def test_text_is_parsed_as_the_type_of_the_field(text, annotation, expected):
    value = parse_value(text, annotation)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation", "value", "expected"),
    [
        ("1.0", "int", 1.0, "int"),
        ("True", "int", True, "int"),
        ("1", "bool", 1, "bool"),
        ("true", "bool", "true", "bool"),
        ("false", None, "false", None),
        ("None", "int", None, "int"),
        ("[1,x]", "list[int]", [1, "x"], "list[int]"),
        ("[1,2]", "tuple[int, int, int]", [1, 2], "tuple[int, int, int]"),
        ("3", "list[int]", 3, "list[int]"),
        ("rmsprop", "Literal['adam', 'sgd']", "rmsprop", None),
        ("[1,4", "list[int]", "[1,4", "list[int]"),
        ("[1,4", None, "[1,4", None),
    ],
)
def test_text_of_another_type_raises(raises, text, annotation, value, expected):
    with raises(FieldTypeError, value=value, expected=expected):
        parse_value(text, annotation)


class Color(enum.Enum):
    RED = "r"


@pytest.mark.parametrize("value", ["r", "Color.RED", "RED", Color.RED])
def test_member_may_be_given_by_value_or_name(value):
    assert fit(value, Color) is Color.RED
    assert fit("Color.BLUE", Color) is MISMATCH


_LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(_LITERALS)
def test_repr_of_a_literal_is_parsed_to_an_equal_value(value):
    assert parse_value(repr(value)) == value


@given(
    st.integers() | st.floats() | st.text() | st.none(), st.sampled_from(["int", "str", "float"])
)
def test_conversion_is_idempotent(value, annotation):
    try:
        converted = convert(value, annotation)
    except FieldTypeError:
        return
    again = convert(converted, annotation)
    assert again is converted


@pytest.mark.parametrize(
    "text",
    ["-" * 100_000 + "1", "[" + "-" * 3_000 + "1]", "a" + ".b" * 100_000, "1" + "+1j" * 50_000],
    ids=lambda text: text[:6],
)
def test_deeply_nested_literal_raises(raises, text):
    with raises(FieldTypeError, value=text):
        parse_value(text)


@pytest.mark.parametrize("text", ["9**9**9", "2**10"])
def test_arithmetic_is_not_computed(text):
    assert parse_value(text) == text
