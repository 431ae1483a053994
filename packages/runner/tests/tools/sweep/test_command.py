"""A sweep that is refused: what is told before JAX, and before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner import cli
from layerkit_runner.config.flags import RunOptions, parse_flags
from layerkit_runner.config.overrides import Override
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep.command import (
    check_same_sweep,
    description,
    fitted_space,
    trial_words,
)
from layerkit_runner.tools.sweep.study_file import StudyFile, read_study_file
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
        ([], {"metrics": 1}, "there is no 'metrics'; did you mean 'metric'?"),
        (["--num_trials=0"], {}, "--num_trials='0'"),
        (["--mode=eval"], {}, "not a flag of --mode=eval: --study"),
        (["--noeval_on_test"], {}, "--noeval_on_test does not go with --study: evaluations tell"),
        (["--num_processes=2"], {}, "--num_processes does not go with --study, whose trials are"),
        (["--process_id=0"], {}, "--process_id does not go with --study: each trial is a job"),
    ],
)
def test_refused_before_jax_is_imported(
    tmp_path: Path, more: list[str], document: dict[str, Any], text: str
):
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
    ("document", "text"),
    [
        (
            {"space": {"RATTE": SPACE["RATE"]}},
            "'RATTE'",
        ),
        (
            {"space": {"WIDTH": {"low": 1.5, "high": 2}}},
            "Slope: WIDTH=1.5. Expected int",
        ),
        (
            {"metric": "held_out/loss"},
            "metric='held_out/loss' names no held-out data set; did you mean 'heldout'? It is"
            " written DATASET/METRIC, and the data sets of slope_experiment.Slope are heldout.",
        ),
        (
            {"space": {"task.train.num_steps": {"low": 1, "high": 2}}},
            "space.task.train.num_steps: --fdl.task.train.num_steps: ",
        ),
        (
            {"space": {"task.train.num_train_steps": {"low": 1.0, "high": 2.0}}},
            "--fdl.task.train.num_train_steps=1.0. Expected int",
        ),
    ],
)
def test_refused_once_the_experiment_is_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    document: dict[str, Any],
    text: str,
):
    pytest.importorskip("optuna")
    monkeypatch.chdir(HERE)
    assert cli.main(words(tmp_path, **document)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"runner: --study={tmp_path / 'study.json'}: ")
    assert text in error
    assert not (tmp_path / "sweep").exists()


def test_field_that_is_searched_and_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(HERE)
    assert cli.main(words(tmp_path, "--fdl.RATE=0.5")) == 2
    text = "space.RATE is searched, and --fdl.RATE=0.5 sets it; keep one."
    assert text in capsys.readouterr().err


def test_without_optuna_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(HERE)
    monkeypatch.setitem(sys.modules, "optuna", None)  # which is how Python notes its absence
    assert cli.main(words(tmp_path)) == 2
    message = "runner: --study needs optuna: pip install 'layerkit-runner[sweeps]'\n"
    assert capsys.readouterr().err == message


def test_a_trial_hears_what_the_sweep_was_told():
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


def test_whole_numbers_are_floats_where_the_field_holds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    cls = load_experiment(find_experiment("slope_experiment.Slope"))
    kinds = {
        "RATE": float,
        "WIDTH": int,
        "task.train.learner.learning_rate": float,
        "task.train.num_train_steps": int,
        "task.train.save_keep_interval_hours": float,
    }
    words(tmp_path, space={path: {"low": 1, "high": 2} for path in kinds})
    file = read_study_file(str(tmp_path / "study.json"))
    base = resolve(cls())
    space = fitted_space(file, [], lambda overrides: resolve(cls(), overrides), base)
    found = {path: type(value) for path in kinds for value in space[path].samples()[:1]}
    assert found == kinds


def test_a_folder_holds_one_sweep(study_file: Callable[..., StudyFile], tmp_path: Path):
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
    with folder.deciding():
        folder.record(described())
    assert "secret" not in (folder.path / "study.json").read_text()
    # How it is searched may change, and how long.
    check_same_sweep(folder, described(num_trials=3, sampler="random", pruner="median"))
    other = described(space={"A": {"low": 1, "high": 3}}, direction="maximize")
    with pytest.raises(UsageError) as caught:
        check_same_sweep(folder, {**other, "overrides": {}})
    assert str(caught.value) == (
        f"--job_log_dir={folder.given} holds another sweep; give each a folder of its own."
        '\n  direction: "minimize" there, "maximize" here'
        '\n  overrides.C: "3" there, none here'
        '\n  space.A: {"low": 1, "high": 2, "log": false, "step": null} there, '
        '{"low": 1, "high": 3, "log": false, "step": null} here'
        '\n  space.B: {"choices": ["x"]} there, none here'
    )
