"""Overrides from the command line: their paths, conflicts and values."""

from __future__ import annotations

from layerkit_runner.config.overrides import (
    Override,
    check_consistent,
    parse_fields,
    parse_override,
)
from layerkit_runner.errors import FieldError, UsageError


def test_override_path_is_names_and_indices_joined_by_dots(raises):
    assert parse_override("datasets.0.batch_size", "3").parts == ("datasets", "0", "batch_size")
    for path in ("datasets[0].batch_size", "", "task..model", "0.x", "task.model.", "task/model"):
        with raises(UsageError, field=f"--fdl.{path}"):
            parse_override(path, "3")
    with raises(UsageError, owner="--fdl.taks.model", value="taks"):
        parse_override("taks.model", "3")


def test_repeated_override_is_kept_once():
    twice = [Override("A", "1"), Override("A", "1")]
    assert check_consistent(twice) == (Override("A", "1"),)


def test_override_of_a_part_follows_that_of_the_whole():
    part, whole = Override("task.shape.0", "1"), Override("task.shape", "[2]")
    assert check_consistent([part, whole]) == (whole, part)


def test_contradictory_overrides_raise(raises):
    first, second = Override("task.a", "1"), Override("task.a", "2")
    with raises(UsageError, field=f"{first} and {second}"):
        check_consistent([first, Override("B", "1"), second])


def test_fields_are_read_by_their_annotations():
    annotations = {"LAYERS": "int", "NAME": "str", "ANY": None}
    overrides = [Override("LAYERS", "3"), Override("NAME", "3"), Override("task.x", "1")]
    assert parse_fields("Small", annotations, overrides) == {"LAYERS": 3, "NAME": "3"}


def test_wrong_fields_are_all_reported(raises):
    wrong = [
        Override("NUM_LAYRES", "3"),
        Override("num_layers", "3"),
        Override("NUM_LAYERS", "x"),
        Override("task", "1"),
    ]
    with raises(FieldError) as caught:
        parse_fields("Small", {"NUM_LAYERS": "int", "DIMS": "int"}, wrong)
    assert len(str(caught.value).splitlines()) == len(wrong)
    with raises(FieldError, owner="Small", value="NUM_LAYRES", choices=("NUM_LAYERS", "DIMS")):
        parse_fields("Small", {"NUM_LAYERS": "int", "DIMS": "int"}, wrong[:1])
