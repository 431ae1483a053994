"""Overrides from the command line: their paths, conflicts and values."""

from __future__ import annotations

from layerkit_runner.config.requests import (
    Override,
    merge_overrides,
    parse_fields,
    parse_override,
)
from layerkit_runner.errors import UsageError


def test_override_path_is_names_and_indices_joined_by_dots(raises):
    assert parse_override("datasets.0.batch_size", "3").parts == ("datasets", "0", "batch_size")
    for path in ("datasets[0].batch_size", "", "task..model", "0.x", "task.model.", "task/model"):
        with raises(UsageError, field=f"--fdl.{path}"):
            parse_override(path, "3")
    with raises(UsageError, owner="--fdl.taks.model", value="taks"):
        parse_override("taks.model", "3")


def test_overrides_are_kept_once_and_those_of_a_part_follow_the_whole(raises):
    part, whole = Override("task.shape.0", "1"), Override("task.shape", "[2]")
    assert merge_overrides([part, whole, part]) == (whole, part)
    other = Override("task.shape", "[3]")
    with raises(UsageError, field=f"{whole} and {other}"):
        merge_overrides([whole, part, other])


def test_fields_are_read_by_their_annotations():
    annotations = {"LAYERS": "int", "NAME": "str", "ANY": None}
    overrides = [Override("LAYERS", "3"), Override("NAME", "3"), Override("task.x", "1")]
    assert parse_fields("Small", annotations, overrides) == {"LAYERS": 3, "NAME": "3"}


def test_a_whole_root_is_no_value(raises):
    with raises(UsageError, field="--fdl.task", value="3"):
        parse_fields("Small", {"LAYERS": "int"}, [Override("task", "3")])
