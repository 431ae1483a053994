"""What a study file may say, and what each mistake in it hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def refusal(tmp_path: Path, **document: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, **document)
    text = str(caught.value)
    start = f"--study={tmp_path / 'study.json'}: "
    assert text.startswith(start)
    return text.removeprefix(start)


def test_toml_and_json_say_the_same(tmp_path: Path):
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


def test_a_grid_is_as_long_as_its_space(tmp_path: Path):
    space = {"A": {"choices": ["x", "y"]}, "B": {"low": 0.0, "high": 0.3, "step": 0.1}}
    space["C"] = {"low": 1, "high": 3}
    assert read(tmp_path, sampler="grid", space=space).num_trials == 2 * 4 * 3
    assert read(tmp_path, sampler="grid", space=space, num_trials=99).num_trials == 24
    assert read(tmp_path, sampler="grid", space=space, num_trials=5).num_trials == 5


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"metrc": 1}, "there is no 'metrc'; did you mean 'metric'? Keys: metric, space, "),
        ({"metric": "loss"}, "metric='loss' is written DATASET/METRIC, such as heldout/loss."),
        (
            {"direction": "minimise"},
            "direction='minimise' is minimize or maximize; did you mean 'minimize'?",
        ),
        ({"num_trials": 0}, "num_trials=0 is a whole number, at least 1."),
        ({"num_trials": True}, "num_trials=True is a whole number, at least 1."),
        ({"sampler": "tbe"}, "sampler='tbe' is not known; did you mean 'tpe'? There are tpe, "),
        ({"sampler": {"seed": 1}}, "sampler={'seed': 1}; expected a name, or {name = …, OPTION"),
        (
            {"pruner": {"name": "median", "warmup_steps": 3}},
            "pruner median has no option 'warmup_steps'; did you mean 'n_warmup_steps'? It has "
            "n_startup_trials, n_warmup_steps, n_min_trials.",
        ),
        ({"pruner": {"name": "none", "x": 1}}, "pruner none has no option 'x'."),
        (
            {"pruner": {"name": "median", "n_min_trials": 0}},
            "pruner median: n_min_trials=0 must be at least 1.",
        ),
        (
            {"sampler": {"name": "tpe", "seed": 1.5}},
            "sampler tpe: seed=1.5 is not a whole number.",
        ),
        ({"pruner": "hyperband"}, "pruner hyperband needs min_resource."),
        (
            {"pruner": {"name": "percentile", "percentile": 200}},
            "pruner percentile: percentile=200",
        ),
        (
            {"pruner": {"name": "hyperband", "min_resource": 9, "max_resource": 3}},
            "pruner hyperband: min_resource=9 is above max_resource=3.",
        ),
        ({"space": {}}, "space is empty; give a field, such as task.train"),
        ({"space": [1]}, "space is a table of fields, not [1]."),
        ({"space": {"A": 3}}, "space.A: expected {low, high} or {choices}, got 3."),
        ({"space": {"A": {"low": 1}}}, "space.A: has no high; expected low and high, or choices."),
        (
            {"space": {"A": {"low": 1, "hihg": 2}}},
            "space.A: there is no 'hihg'; did you mean 'high'? Keys: low, high, log, step, choices",
        ),
        ({"space": {"A": {"low": 2, "high": 1}}}, "space.A: low=2 must be less than high=1."),
        ({"space": {"A": {"low": "1", "high": 2}}}, "space.A: low is a number, not '1'."),
        (
            {"space": {"A": {"low": 0, "high": 1, "log": True}}},
            "space.A: low=0 must be above 0 where log is true.",
        ),
        (
            {"space": {"A": {"low": 1, "high": 5, "log": True, "step": 2}}},
            "space.A: a range has log or step, not both.",
        ),
        (
            {"space": {"A": {"low": 1, "high": 4, "step": 2}}},
            "space.A: step=2 must divide high - low = 3.",
        ),
        (
            {"space": {"A": {"choices": [1, 2], "low": 1}}},
            "space.A: has both choices and low; keep one of them.",
        ),
        ({"space": {"A": {"choices": []}}}, "space.A: choices is a list of values, not []."),
        ({"space": {"A": {"choices": [1, 1.0]}}}, "space.A: choices holds 1.0 twice."),
        ({"sampler": "grid"}, "space.RATE: a grid needs choices, or a range with a step."),
    ],
)
def test_what_a_mistake_hears(tmp_path: Path, document: dict[str, Any], text: str):
    assert refusal(tmp_path, **document).startswith(text)


def test_every_wrong_range_is_told_at_once(tmp_path: Path):
    space = {"A": {"low": 2, "high": 1}, "B": 1}
    assert refusal(tmp_path, space=space).count("\n") == 1


def test_what_a_file_that_is_none_hears(tmp_path: Path):
    (tmp_path / "study.toml").write_text("metric = ")
    (tmp_path / "list.json").write_text("[]")
    for name, text in [
        ("stduy.toml", "there is no such file; did you mean 'study.toml'?"),
        ("study.yaml", "a study file ends in .toml or .json."),
        ("study.toml", "is not TOML: "),
        ("list.json", "expected an object with metric, space, "),
    ]:
        with pytest.raises(UsageError) as caught:
            read_study_file(str(tmp_path / name))
        assert str(caught.value).startswith(f"--study={tmp_path / name}: {text}")


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ({"RATTE": SPACE["RATE"]}, "Toy: unknown field: 'RATTE'"),
        ({"LAYERS": {"low": 1.0, "high": 2.0}}, "Toy: LAYERS=1.0. Expected int"),
        ({"LAYERS": {"choices": [1, "two"]}}, "Toy: LAYERS='two'. Expected int"),
        ({"MESH": {"choices": [[1], [1, "a"]]}}, "Toy: MESH=[1, 'a']. Expected list[int]"),
        (
            {"task.a": SPACE["RATE"], "task.a.b": SPACE["RATE"]},
            "space.task.a.b is a part of space.task.a; keep one.",
        ),
        ({"taks.train.x": SPACE["RATE"]}, "--fdl.taks.train.x: unknown root: 'taks'"),
        ({"NORM": {"choices": ["a"]}}, "space.NORM is searched, and --fdl.NORM=rms sets it"),
    ],
)
def test_the_space_must_be_the_experiments(tmp_path: Path, space: dict[str, Any], text: str):
    file = read(tmp_path, space=space)
    fixed = [Override("NORM", "rms")]
    with pytest.raises(UsageError) as caught:
        check_fields(file, "Toy", fixed, FIELDS)
    assert text in str(caught.value)
    assert str(caught.value).count(text) == 1


def test_a_part_of_what_is_searched_cannot_be_set(tmp_path: Path):
    file = read(tmp_path, space={"task.train": {"choices": [None]}})
    with pytest.raises(UsageError, match=r"space\.task\.train is searched, and --fdl\.task\.train"):
        check_fields(file, "Toy", [Override("task.train.num_train_steps", "3")], FIELDS)


def test_a_space_that_fits(tmp_path: Path):
    space = {
        "RATE": {"low": 1, "high": 2},
        "LAYERS": {"low": 1, "high": 2},
        "MESH": {"choices": [[1, 2], []]},
        "task.train.x": {"low": 1, "high": 2},
    }
    check_fields(read(tmp_path, space=space), "Toy", [Override("NORM", "rms")], FIELDS)
    # Where only an import tells the fields, they are left for later.
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
