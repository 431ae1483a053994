"""Study files: content, errors, and the values that are drawn."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest

from layerkit.config.field_types import parse_value
from layerkit.errors import MISSING, UserError

pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from layerkit_runner.tools.sweep.study_file import (
    StudyFile,
    as_floats,
    grid,
    override_text,
    read_study_file,
)

TOML = """
metric = "held out/score/accuracy"
direction = "maximize"
num_trials = 7
sampler = {name = "tpe", seed = 4}
pruner = "median"

[space]
RATE = {low = 1e-4, high = 1, log = true}
LAYERS = {low = 2, high = 8, step = 2}
MESH = {choices = [[1, 4], [2, 2]]}
task.train.learner.ema_decay = {choices = [0.9, 0.99]}
"""


def test_toml_and_json_have_the_same_keys(study_file, tmp_path):
    toml = tmp_path / "study.toml"
    toml.write_text(TOML)
    file = read_study_file(str(toml))
    assert file == StudyFile(
        path=str(toml),
        space={
            "RATE": FloatDistribution(1e-4, 1.0, log=True),
            "LAYERS": IntDistribution(2, 8, step=2),
            "MESH": CategoricalDistribution(("[1, 4]", "[2, 2]")),
            "task.train.learner.ema_decay": CategoricalDistribution((0.9, 0.99)),
        },
        metric="held out/score/accuracy",
        direction="maximize",
        num_trials=7,
        sampler=("tpe", {"seed": 4}),
        pruner=("median", {}),
    )
    assert read_study_file(str(toml), num_trials=3).num_trials == 3
    as_json = study_file(**tomllib.loads(TOML))
    assert dataclasses.replace(as_json, path=file.path) == file


def test_grid_has_a_trial_for_each_combination(study_file):
    space = {"A": {"choices": ["x", "y"]}, "B": {"low": 0.0, "high": 0.3, "step": 0.1}}
    space["C"] = {"low": 1, "high": 3}
    assert study_file(sampler="grid", space=space).num_trials == 2 * 4 * 3
    assert study_file(sampler="grid", space=space, num_trials=99).num_trials == 24
    assert study_file(sampler="grid", space=space, num_trials=5).num_trials == 5


def range_of(**given: Any) -> dict[str, Any]:
    return {"space": {"A": {"low": 1, "high": 4, **given}}}


@pytest.mark.parametrize(
    ("document", "field", "value"),
    [
        ({"metrc": 1}, "", "metrc"),
        ({"metric": "loss"}, "metric", "loss"),
        ({"direction": "minimise"}, "direction", "minimise"),
        ({"num_trials": 0}, "num_trials", 0),
        ({"num_trials": True}, "num_trials", True),
        ({"sampler": "tbe"}, "sampler", "tbe"),
        ({"sampler": {"seed": 1}}, "sampler", {"seed": 1}),
        ({"sampler": {"name": "tpe", "seed": 1.5}}, "sampler.seed", 1.5),
        ({"sampler": {"name": "tpe", "seeds": 1}}, "sampler", {"name": "tpe", "seeds": 1}),
        ({"sampler": "grid"}, "space.RATE", MISSING),
        ({"pruner": {"name": "none", "x": 1}}, "pruner", {"name": "none", "x": 1}),
        ({"pruner": "percentile"}, "pruner", "percentile"),
        (
            {"pruner": {"name": "median", "n_min_trials": 0}},
            "pruner",
            {"name": "median", "n_min_trials": 0},
        ),
        ({"space": {}}, "space", {}),
        ({"space": [1]}, "space", [1]),
        ({"space": {"A": 3}}, "space.A", 3),
        ({"space": {"A": {"low": 1}}}, "space.A", {"low": 1}),
        ({"space": {"A": {"low": 1, "hihg": 2}}}, "space.A", "hihg"),
        ({"space": {"A": {"choices": [1, 2], "low": 1}}}, "space.A", {"choices": [1, 2], "low": 1}),
        ({"space": {"A": {"choices": []}}}, "space.A", {"choices": []}),
        ({"space": {"A": {"choices": [1, 1.0]}}}, "space.A", [1, 1.0]),
        (range_of(low=5), "space.A", range_of(low=5)["space"]["A"]),
        (range_of(low="1"), "space.A", range_of(low="1")["space"]["A"]),
        (range_of(high=float("inf")), "space.A", {"low": 1, "high": float("inf")}),
        (range_of(low=0, log=True), "space.A", range_of(low=0, log=True)["space"]["A"]),
        (range_of(log=True, step=3), "space.A", range_of(log=True, step=3)["space"]["A"]),
        (range_of(step=2), "space.A", range_of(step=2)["space"]["A"]),
    ],
)
def test_wrong_key_or_value_is_an_error(raises, study_file, tmp_path, document, field, value):
    with raises(UserError, owner=f"--study={tmp_path / 'study.json'}", field=field, value=value):
        study_file(**document)


@pytest.mark.parametrize("name", ["stduy.toml", "study.yaml", "study.toml", "list.json"])
def test_missing_or_malformed_file_is_an_error(raises, tmp_path, name):
    (tmp_path / "study.toml").write_text("metric = ")
    (tmp_path / "list.json").write_text("[]")
    with raises(UserError, owner=f"--study={tmp_path / name}"):
        read_study_file(str(tmp_path / name))


def test_grid_lists_every_value():
    space = {
        "A": IntDistribution(2, 8, step=3),
        "B": FloatDistribution(0.5, 1.5, step=0.5),
        "C": CategoricalDistribution((None, "x")),
    }
    assert grid(space) == {"A": [2, 5, 8], "B": [0.5, 1.0, 1.5], "C": [None, "x"]}


def test_range_of_integers_becomes_one_of_floats():
    assert as_floats(IntDistribution(1, 3)) == FloatDistribution(1, 3)
    assert as_floats(IntDistribution(1, 9, step=2)) == FloatDistribution(1, 9, step=2)
    assert as_floats(IntDistribution(1, 9, log=True)) == FloatDistribution(1, 9, log=True)


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
        ("inf", "str"),
        ([1.0, float("inf"), float("-inf")], "list[float]"),
        ({"inf": float("inf")}, "dict[str, float]"),
    ],
)
def test_override_text_of_a_value_is_parsed_to_the_value(value, annotation):
    assert parse_value(override_text(value), annotation) == value
