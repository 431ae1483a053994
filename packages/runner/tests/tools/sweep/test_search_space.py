"""Ranges and choices: what is drawn from them, and how it is written on a command line."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit_runner.config.field_types import parse_value
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep.search_space import Choices, Range, override_text, parse_space


@pytest.mark.parametrize(
    ("parameter", "kind", "valid"),
    [
        (Range(1, 4), int, [1, 2, 3, 4]),
        (Range(2, 8, step=3), int, [2, 5, 8]),
        (Range(0.5, 1.5, step=0.5), float, [0.5, 1.0, 1.5]),
        (Range(1, 3).as_floats(), float, None),
        (Range(0.25, 4.0, log=True), float, None),
        (Range(1, 64, log=True), int, None),
        (Choices((None, True, "a", "[1, 2]")), object, [None, True, "a", "[1, 2]"]),
    ],
)
def test_what_is_drawn_lies_in_the_space(parameter: Any, kind: type, valid: list[Any] | None):
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [parameter.suggest(study.ask(), "x") for _ in range(40)]
    assert all(isinstance(value, kind) for value in drawn)
    if valid is None:
        assert all(parameter.low <= value <= parameter.high for value in drawn)
    else:
        assert all(value in drawn for value in valid)
        assert all(value in valid for value in drawn)
        assert parameter.all_values() == valid


def test_powers_of_ten_are_alike_where_log_is_true():
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [Range(1e-4, 1.0, log=True).suggest(study.ask(), "x") for _ in range(200)]
    below = sum(value < 1e-2 for value in drawn)  # half of them, within 4 standard deviations
    assert abs(below - 100) < 4 * (200 * 0.25) ** 0.5


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (0.1 + 0.2, "float"),
        (1e-7, "float"),
        (3, "int"),
        (True, "bool"),
        (None, "int | None"),
        ("rms_norm", "str"),
        ("3", "str"),
    ],
)
def test_a_value_reaches_the_field_as_it_is(value: Any, annotation: str):
    assert parse_value(override_text(value), annotation) == value


def test_a_list_reaches_the_field_as_it_was_written():
    space = parse_space({"MESH": {"choices": [[1, 4, 1], [2, 2, 1]]}})
    texts = [override_text(value) for value in space["MESH"].samples()]
    assert [parse_value(text, "list[int]") for text in texts] == [[1, 4, 1], [2, 2, 1]]


def test_a_number_that_is_none():
    with pytest.raises(UsageError, match=r"^space\.A: high=inf must be finite\.$"):
        parse_space({"A": {"low": 1, "high": float("inf")}})
