"""Values from the command line: how text becomes a value, and which value fits which field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit_runner.config.field_types import MismatchError, convert, parse_value
from layerkit_runner.config.overrides import (
    Override,
    check_consistent,
    parse_fields,
    parse_override,
)
from layerkit_runner.errors import FieldError, UsageError


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("3", "int", 3),
        ("1_000", "int", 1000),
        ("-1", "int", -1),
        ("3", "float", 3.0),
        ("1e-3", "float", 1e-3),
        ("inf", "float", float("inf")),
        ("True", "bool", True),
        ("3", "str", "3"),
        ("[1", "str", "[1"),
        ("a b", "str", "a b"),
        ("'3'", "str", "3"),
        ("", "str", ""),
        ("true", "str", "true"),
        ("v5p:8x8x4", "str | None", "v5p:8x8x4"),
        ("None", "str | None", None),
        ("None", "Optional[int]", None),
        ("3", "typing.Optional[int]", 3),
        ("3", "float | int", 3),
        ("3", "Union[int, str]", 3),
        ("x", "Union[int, str]", "x"),
        ("[1,4,1]", "list[int]", [1, 4, 1]),
        ("1,4,1", "list[int]", [1, 4, 1]),
        ("[1,4,1]", "tuple[int, ...]", (1, 4, 1)),
        ("[1,a]", "tuple[int, str]", (1, "a")),
        ("[data, fsdp]", "collections.abc.Sequence[str]", ["data", "fsdp"]),
        ("[1, 2]", "Sequence[float] | None", [1.0, 2.0]),
        ("{a: 1}", "dict[str, float]", {"a": 1.0}),
        ("adam", "Literal['adam', 'sgd']", "adam"),
        ("3", "'int | None'", 3),
        ("bfloat16", None, "bfloat16"),
        ("jnp.bfloat16", None, "jnp.bfloat16"),
        ("8x4", None, "8x4"),
        ("save-nothing", None, "save-nothing"),
        ("None", None, None),
        ("3", "SomeClass", 3),
        ("bfloat16", "SomeClass", "bfloat16"),
    ],
)
def test_text_becomes_the_value_that_the_field_holds(
    text: str, annotation: str | None, expected: Any
):
    value = parse_value(text, annotation)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation", "message"),
    [
        ("three", "int", "expected int, got 'three'"),
        ("1.0", "int", "expected int, got 1.0"),
        ("True", "int", "expected int, got True"),
        ("True", "float", "expected float, got True"),
        ("1", "bool", "expected bool, got 1"),
        ("true", "bool", "expected bool, got 'true'; did you mean True?"),
        ("false", None, "got 'false'; did you mean False?"),
        ("None", "int", "expected int, got None"),
        ("None", "str", "expected str, got None"),
        ("[1,x]", "list[int]", "expected list[int], got [1, 'x']"),
        ("[1,2]", "tuple[int, int, int]", "expected tuple[int, int, int], got [1, 2]"),
        ("3", "list[int]", "expected list[int], got 3"),
        ("rmsprop", "Literal['adam', 'sgd']", "expected Literal['adam', 'sgd'], got 'rmsprop'"),
        (
            "[1,4",
            "list[int]",
            "expected list[int], got '[1,4', which is not a complete Python literal",
        ),
        ("[1,4", None, "got '[1,4', which is not a complete Python literal"),
    ],
)
def test_text_that_does_not_fit_is_refused(text: str, annotation: str | None, message: str):
    with pytest.raises(MismatchError) as caught:
        parse_value(text, annotation)
    assert str(caught.value) == message


_LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(_LITERALS)
def test_what_python_prints_is_read_back(value: Any):
    # Python writes an infinite float as a name, which inside a container is a word like any other.
    if "inf" not in repr(value):
        assert parse_value(repr(value)) == value


@given(
    st.integers() | st.floats() | st.text() | st.none(), st.sampled_from(["int", "str", "float"])
)
def test_what_was_converted_once_stays(value: Any, annotation: str):
    try:
        converted = convert(value, annotation)
    except MismatchError:
        return
    again = convert(converted, annotation)
    assert again is converted


def test_a_path_is_names_and_indices_joined_by_dots():
    assert parse_override("datasets.0.batch_size", "3").parts == ("datasets", "0", "batch_size")
    with pytest.raises(UsageError) as caught:
        parse_override("datasets[0].batch_size", "3")
    assert str(caught.value).endswith("; write --fdl.datasets.0.batch_size=3")
    for path in ("", "task..model", "0.x", "task.model.", "task/model"):
        with pytest.raises(UsageError, match="a path is names and indices"):
            parse_override(path, "3")


def test_the_same_override_twice_is_one():
    twice = [Override("A", "1"), Override("A", "1")]
    assert check_consistent(twice) == (Override("A", "1"),)


def test_overrides_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError) as caught:
        check_consistent([Override("task.a", "1"), Override("B", "1"), Override("task.a", "2")])
    assert str(caught.value) == (
        "--fdl.task.a=1 and --fdl.task.a=2 contradict each other; keep one of them."
    )
    with pytest.raises(UsageError) as caught:
        check_consistent([Override("task.shape.0", "1"), Override("task.shape", "[2]")])
    assert str(caught.value) == (
        "--fdl.task.shape=[2] sets the whole of what --fdl.task.shape.0=1 sets a part of;"
        " keep one of them."
    )


def test_fields_are_read_by_their_annotations():
    annotations = {"LAYERS": "int", "NAME": "str", "ANY": None}
    overrides = [Override("LAYERS", "3"), Override("NAME", "3"), Override("task.x", "1")]
    assert parse_fields("Small", annotations, overrides) == {"LAYERS": 3, "NAME": "3"}


def test_all_wrong_fields_are_told_at_once():
    overrides = [
        Override("NUM_LAYRES", "3"),
        Override("num_layers", "3"),
        Override("NUM_LAYERS", "x"),
        Override("task", "1"),
    ]
    with pytest.raises(FieldError) as caught:
        parse_fields("Small", {"NUM_LAYERS": "int", "DIMS": "int"}, overrides)
    assert str(caught.value).splitlines() == [
        "Small has no field 'NUM_LAYRES'; did you mean 'NUM_LAYERS'? Its fields: NUM_LAYERS, DIMS.",
        "Small has no field 'num_layers'; did you mean 'NUM_LAYERS'? Its fields: NUM_LAYERS, DIMS.",
        "Small.NUM_LAYERS: expected int, got 'x'",
        "--fdl.task=1 names no field; say which, such as --fdl.task.NAME=…",
    ]


def test_of_many_fields_a_dozen_is_shown():
    many = {f"FIELD_{i}": "int" for i in range(20)}
    with pytest.raises(FieldError) as caught:
        parse_fields("Small", many, [Override("XXXXXXX", "3")])
    assert str(caught.value) == (
        "Small has no field 'XXXXXXX'. Its fields: "
        + ", ".join(f"FIELD_{i}" for i in range(12))
        + ", … (8 more)."
    )


@pytest.mark.parametrize(
    "text",
    ["-" * 100_000 + "1", "[" + "-" * 3_000 + "1]", "a" + ".b" * 100_000, "1" + "+1j" * 50_000],
    ids=lambda text: text[:6],
)
def test_deeply_nested_literal_is_refused(text):
    with pytest.raises(MismatchError, match="deep"):
        parse_value(text)


@pytest.mark.parametrize("text", ["9**9**9", "2**10"])
def test_arithmetic_is_not_computed(text):
    assert parse_value(text) == text
