"""Overrides from the command line: their paths, conflicts and values."""

from __future__ import annotations

import pytest

from layerkit_runner.config.overrides import (
    Override,
    check_consistent,
    parse_fields,
    parse_override,
)
from layerkit_runner.errors import FieldError, UsageError


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
        "Small: NUM_LAYERS='x'. Expected int.",
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
