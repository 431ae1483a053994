"""Study files: content, errors, and the values that are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerkit.errors import MISSING, UserError
from layerkit.field_types import parse_value
from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep.study_file import (
    Choices,
    Method,
    Range,
    StudyFile,
    check_fields,
    override_text,
    parse_space,
    read_study_file,
)

SPACE = {"RATE": {"low": 0.1, "high": 1.0}}
FIELDS = {"RATE": "float", "LAYERS": "int", "NORM": "str", "MESH": "list[int]"}


def read(tmp_path: Path, **document: Any) -> StudyFile:
    path = tmp_path / "study.json"
    path.write_text(json.dumps({"metric": "heldout/loss", "space": SPACE, **document}))
    return read_study_file(str(path))


def test_toml_and_json_have_the_same_keys(tmp_path: Path):
    toml = tmp_path / "study.toml"
    toml.write_text(
        """
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
    )
    file = read_study_file(str(toml))
    assert file == StudyFile(
        path=str(toml),
        space={
            "RATE": Range(1e-4, 1.0, log=True),
            "LAYERS": Range(2, 8, step=2),
            "MESH": Choices(("[1, 4]", "[2, 2]")),
            "task.train.learner.ema_decay": Choices((0.9, 0.99)),
        },
        metric="held out/score/accuracy",
        direction="maximize",
        num_trials=7,
        sampler=Method("tpe", {"seed": 4}),
        pruner=Method("median"),
    )
    assert read_study_file(str(toml), num_trials=3).num_trials == 3
    as_json = read(
        tmp_path,
        metric=file.metric,
        direction="maximize",
        num_trials=7,
        sampler={"name": "tpe", "seed": 4},
        pruner="median",
        space={
            "RATE": {"low": 1e-4, "high": 1, "log": True},
            "LAYERS": {"low": 2, "high": 8, "step": 2},
            "MESH": {"choices": [[1, 4], [2, 2]]},
            "task.train.learner.ema_decay": {"choices": [0.9, 0.99]},
        },
    )
    assert as_json.space == file.space and as_json.sampler == file.sampler


def test_grid_has_a_trial_for_each_combination(tmp_path: Path):
    space = {"A": {"choices": ["x", "y"]}, "B": {"low": 0.0, "high": 0.3, "step": 0.1}}
    space["C"] = {"low": 1, "high": 3}
    assert read(tmp_path, sampler="grid", space=space).num_trials == 2 * 4 * 3
    assert read(tmp_path, sampler="grid", space=space, num_trials=99).num_trials == 24
    assert read(tmp_path, sampler="grid", space=space, num_trials=5).num_trials == 5


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
        ({"sampler": {"name": "tpe", "multivariate": 1}}, "sampler.multivariate", 1),
        ({"sampler": "grid"}, "space.RATE", MISSING),
        ({"pruner": {"name": "median", "warmup_steps": 3}}, "pruner median", "warmup_steps"),
        ({"pruner": {"name": "none", "x": 1}}, "pruner none", "x"),
        ({"pruner": {"name": "median", "n_min_trials": 0}}, "pruner.n_min_trials", 0),
        ({"pruner": "hyperband"}, "pruner.min_resource", MISSING),
        ({"pruner": {"name": "percentile", "percentile": 200}}, "pruner.percentile", 200.0),
        (
            {"pruner": {"name": "hyperband", "min_resource": 9, "max_resource": 3}},
            "pruner.min_resource",
            9,
        ),
        ({"space": {}}, "space", {}),
        ({"space": [1]}, "space", [1]),
        ({"space": {"A": 3}}, "space.A", 3),
        ({"space": {"A": {"low": 1}}}, "space.A", {"low": 1}),
        ({"space": {"A": {"low": 1, "hihg": 2}}}, "space.A", "hihg"),
        ({"space": {"A": {"choices": [1, 2], "low": 1}}}, "space.A", {"choices": [1, 2], "low": 1}),
        ({"space": {"A": {"choices": []}}}, "space.A.choices", []),
        ({"space": {"A": {"choices": [1, 1.0]}}}, "space.A.choices", [1, 1.0]),
        (range_of(low=5), "space.A.low", 5),
        (range_of(low="1"), "space.A.low", "1"),
        (range_of(high=float("inf")), "space.A.high", float("inf")),
        (range_of(log=1), "space.A.log", 1),
        (range_of(low=0, log=True), "space.A.low", 0),
        (range_of(log=True, step=3), "space.A.step", 3),
        (range_of(step=2), "space.A.step", 2),
    ],
)
def test_wrong_key_or_value_is_an_error(raises, tmp_path: Path, document, field, value):
    with raises(UserError, owner=f"--study={tmp_path / 'study.json'}", field=field, value=value):
        read(tmp_path, **document)


@pytest.mark.parametrize("name", ["stduy.toml", "study.yaml", "study.toml", "list.json"])
def test_missing_or_malformed_file_is_an_error(raises, tmp_path: Path, name: str):
    (tmp_path / "study.toml").write_text("metric = ")
    (tmp_path / "list.json").write_text("[]")
    with raises(UserError, owner=f"--study={tmp_path / name}"):
        read_study_file(str(tmp_path / name))


@pytest.mark.parametrize(
    ("space", "field", "value"),
    [
        ({"RATTE": SPACE["RATE"]}, None, "RATTE"),
        ({"LAYERS": {"low": 1.0, "high": 2.0}}, "LAYERS", 1.0),
        ({"LAYERS": {"choices": [1, "two"]}}, "LAYERS", "two"),
        ({"MESH": {"choices": [[1], [1, "a"]]}}, "MESH", [1, "a"]),
        ({"task.a": SPACE["RATE"], "task.a.b": SPACE["RATE"]}, "space.task.a", MISSING),
        ({"taks.train.x": SPACE["RATE"]}, None, "taks"),
        ({"NORM": {"choices": ["a"]}}, "space.NORM", MISSING),
        ({"task.train": {"choices": [None]}}, "space.task.train", MISSING),
    ],
)
def test_space_that_the_experiment_or_a_flag_contradicts_is_an_error(
    raises, tmp_path: Path, space, field, value
):
    fixed = [Override("NORM", "rms"), Override("task.train.num_train_steps", "3")]
    with raises(UsageError, field=field, value=value):
        check_fields(read(tmp_path, space=space), "Toy", fixed, FIELDS)


def test_space_with_valid_fields_is_accepted(tmp_path: Path):
    space = {
        "RATE": {"low": 1, "high": 2},
        "LAYERS": {"low": 1, "high": 2},
        "MESH": {"choices": [[1, 2], []]},
        "task.train.x": {"low": 1, "high": 2},
    }
    check_fields(read(tmp_path, space=space), "Toy", [Override("NORM", "rms")], FIELDS)
    # Fields that are known only after an import are not checked yet.
    check_fields(read(tmp_path, space={"X": SPACE["RATE"]}), "Toy", [], None)


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
def test_drawn_values_are_in_the_space(parameter: Any, kind: type, valid: list[Any] | None):
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


def test_log_range_draws_logarithms_uniformly():
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
def test_override_text_of_a_value_is_parsed_to_the_value(value: Any, annotation: str):
    assert parse_value(override_text(value), annotation) == value


def test_override_text_of_a_list_is_parsed_to_the_list():
    space = parse_space({"MESH": {"choices": [[1, 4, 1], [2, 2, 1]]}})
    texts = [override_text(value) for value in space["MESH"].samples()]
    assert [parse_value(text, "list[int]") for text in texts] == [[1, 4, 1], [2, 2, 1]]
