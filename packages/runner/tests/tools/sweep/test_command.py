"""Checks of the command of a sweep before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerkit.errors import MISSING, UserError
from layerkit_runner import cli
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.overrides import Override
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions

pytest.importorskip("optuna")

from layerkit_runner.tools.sweep.command import (
    check_same_sweep,
    description,
    fit_space,
    trial_words,
)
from layerkit_runner.tools.sweep.study_file import end_values
from layerkit_runner.tools.sweep.trials import SweepFolder

HERE = Path(__file__).parent
SPACE = {"RATE": {"low": 0.1, "high": 1.0}}


def words(folder: Path, *more: str, **document: Any) -> list[str]:
    path = folder / "study.json"
    path.write_text(json.dumps({"metric": "heldout/loss", "space": SPACE, **document}))
    exp = ["--exp=slope_experiment.Slope", f"--study={path}"]
    return [*exp, f"--job_log_dir={folder / 'sweep'}", *more]


@pytest.mark.parametrize(
    ("more", "document", "text"),
    [
        ([], {"metrics": 1}, "'metrics'"),
        (["--num_trials=0"], {}, "--num_trials='0'"),
        (["--mode=eval"], {}, "--study"),
        (["--noeval_on_test"], {}, "--noeval_on_test"),
        (["--num_processes=2"], {}, "--num_processes"),
        (["--process_id=0"], {}, "--process_id"),
    ],
)
def test_wrong_file_or_flag_is_reported_before_jax_is_imported(tmp_path, more, document, text):
    (tmp_path / "no_jax").mkdir()
    (tmp_path / "no_jax" / "jax.py").write_text("raise SystemExit('jax was imported')")
    path = os.pathsep.join([str(tmp_path / "no_jax"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", *words(tmp_path, *more, **document)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert text in done.stderr and done.stderr.startswith("runner: ")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("space", "field", "value"),
    [
        ({"RATTE": SPACE["RATE"]}, None, "RATTE"),
        ({"WIDTH": {"low": 1.0, "high": 2.0}}, "WIDTH", 1.0),
        ({"WIDTH": {"choices": [1, "two"]}}, "WIDTH", "two"),
        ({"task.a": SPACE["RATE"], "task.a.b": SPACE["RATE"]}, "space.task.a", MISSING),
        ({"taks.train.x": SPACE["RATE"]}, None, "taks"),
        ({"KIND": {"choices": ["a"]}}, "space.KIND", MISSING),
        ({"task.train": {"choices": [None]}}, "space.task.train", MISSING),
    ],
)
def test_space_that_the_experiment_or_a_flag_contradicts_is_an_error(
    raises, study_file, monkeypatch, space, field, value
):
    monkeypatch.syspath_prepend(str(HERE))
    cls = load_experiment(find_experiment("slope_experiment.Slope"))
    fixed = [Override("KIND", "plain"), Override("task.train.num_train_steps", "3")]
    base = resolve(cls(), fixed[1:])
    with raises(UserError, field=field, value=value):
        fit_space(study_file(space=space), fixed, lambda o: resolve(cls(), o[1:]), base)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"metric": "held_out/loss"}, "Did you mean 'heldout/loss'?"),
        (
            {"space": {"task.train.num_train_steps": {"low": 1.0, "high": 2.0}}},
            "--fdl.task.train.num_train_steps=1.0. Expected int",
        ),
    ],
)
def test_space_or_metric_that_the_experiment_lacks_is_an_error(
    tmp_path, monkeypatch, capsys, document, text
):
    monkeypatch.chdir(HERE)
    assert cli.main(words(tmp_path, **document)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"runner: --study={tmp_path / 'study.json'}: ")
    assert text in error
    assert not (tmp_path / "sweep").exists()


def test_missing_optuna_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    monkeypatch.setitem(sys.modules, "optuna", None)  # importing it is an error
    assert cli.main(words(tmp_path)) == 2
    assert "pip install 'optuna" in capsys.readouterr().err


def test_arguments_of_a_trial_are_those_of_the_sweep_with_its_values():
    more = ("--hung_step_timeout_secs=off", "--noenable_checkpoint_saving", "--init_from=w")
    own = ("--num_trials=3", "--study_storage=s", "--num_processes=1")
    flags = parse_flags(["--exp=E", "--study=f", "--job_log_dir=d", "--fdl.KIND=a b", *more, *own])
    trial = parse_flags(trial_words(flags, "a.E", {"RATE": "0.5"}, "d/trials/0000"))
    assert trial.exp == "a.E"
    assert trial.overrides == (Override("KIND", "a b"), Override("RATE", "0.5"))
    assert trial.options == RunOptions(
        job_log_dir="d/trials/0000",
        hung_step_timeout_secs=None,
        enable_checkpoint_saving=False,
        init_from="w",
        num_processes=1,
    )


def test_integers_become_floats_for_fields_that_hold_floats(study_file, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    cls = load_experiment(find_experiment("slope_experiment.Slope"))
    kinds = {
        "RATE": float,
        "WIDTH": int,
        "task.train.learner.learning_rate": float,
        "task.train.num_train_steps": int,
        "task.train.save_keep_interval_hours": float,
    }
    file = study_file(space={path: {"low": 1, "high": 2} for path in kinds})
    base = resolve(cls())
    space = fit_space(file, [], lambda overrides: resolve(cls(), overrides), base)
    found = {path: type(value) for path in kinds for value in end_values(space[path])[:1]}
    assert found == kinds


def test_folder_of_another_sweep_is_an_error(raises, study_file, tmp_path):
    space = {"A": {"low": 1, "high": 2}, "B": {"choices": ["x"]}}
    folder = SweepFolder(str(tmp_path / "sweep"))

    def described(**document: object) -> dict[str, object]:
        return description(
            study_file(**{"space": space, **document}),
            experiment="a.B",
            fixed=[Override("C", "3")],
            storage="postgresql://me:secret@host/db",
        )

    check_same_sweep(folder, described())
    with folder.locked():
        folder.write_record(described())
    assert "secret" not in (folder.path / "study.json").read_text()
    # The method and the number of trials may change.
    check_same_sweep(folder, described(num_trials=3, sampler="random", pruner="median"))
    other = described(space={"A": {"low": 1, "high": 3}}, direction="maximize")
    with raises(UsageError, field="--job_log_dir", value=folder.given):
        check_same_sweep(folder, {k: v for k, v in other.items() if k != "overrides.C"})
