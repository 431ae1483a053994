"""Sweeps: study files, the trials that Optuna suggests, and complete sweeps by the command line."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.errors import UserError
from layerkit_runner import cli
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.job_folder import try_lock

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

from layerkit_runner.tools import sweep  # noqa: E402
from layerkit_runner.tools.sweep import StudyFile, read_study_file  # noqa: E402

HERE = Path(__file__).parent
EXP = "slope_experiment.Slope"
TIMEOUT = 300.0
SPACE = {
    "RATE": {"low": 1e-4, "high": 1.0, "log": True},
    "LAYERS": {"low": 1, "high": 9},
    "KIND": {"choices": ["a", "b", None]},
}
TOML = """
metric = "held out/score/accuracy"
direction = "maximize"
num_trials = 7
sampler = {seed = 4}
pruner = "median"

[space]
RATE = {low = 1e-4, high = 1, log = true}
LAYERS = {low = 2, high = 8, step = 2}
MESH = {choices = [[1, 4], [2, 2]]}
"task.train.learner.ema_decay" = {choices = [0.9, 0.99]}
"""
# Runs that take some seconds after they have saved at step 4.
SLOW = ("--fdl.MAX_STEPS=12", "--fdl.SECONDS_PER_ROW=0.5", "--fdl.FIRST_SLOW_ROW=8")


@pytest.fixture
def study_file(tmp_path: Path) -> Callable[..., StudyFile]:
    """Return a function that writes and reads a study file, by default of the field RATE."""

    def make(**document: Any) -> StudyFile:
        path = tmp_path / "study.json"
        space = {"RATE": {"low": 0.1, "high": 1.0}}
        path.write_text(json.dumps({"metric": "heldout/loss", "space": space, **document}))
        return read_study_file(str(path))

    return make


def test_study_file_has_the_distributions_of_optuna(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(TOML)
    file = read_study_file(str(path))
    assert file.space == {
        "RATE": FloatDistribution(1e-4, 1.0, log=True),
        "LAYERS": IntDistribution(2, 8, step=2),
        "MESH": CategoricalDistribution(("[1, 4]", "[2, 2]")),
        "task.train.learner.ema_decay": CategoricalDistribution((0.9, 0.99)),
    }
    read = file.metric, file.direction, file.num_trials
    assert read == ("held out/score/accuracy", "maximize", 7)
    assert read_study_file(str(path), num_trials=3).num_trials == 3


@pytest.mark.parametrize(
    ("document", "field", "value"),
    [
        ({"metrc": 1}, None, "metrc"),
        ({"sampler": "tbe"}, "sampler", "tbe"),
        ({"sampler": "grid"}, "sampler", "grid"),
        ({"pruner": "mode"}, "pruner", "mode"),
        ({"trials": [{"A": 1}]}, "space, trials", ["metric", "space", "trials"]),
        ({"space": {}}, "space, trials", ["metric", "space"]),
        ({"space": {"A": {"low": 1}}}, "space.A", {"low": 1}),
        ({"space": {"A": {"low": 5, "high": 4}}}, "space.A", {"low": 5, "high": 4}),
        ({"num_trials": "3"}, "num_trials", "3"),
        ({"num_trials": 0}, "num_trials", 0),
        ({"num_trials": 2.5}, "num_trials", 2.5),
        ({"metric": 3}, "metric", 3),
        ({"direction": "max"}, "direction", "max"),
        ({"space": {}, "trials": [{"A": 1}], "num_trials": 1}, "num_trials", 1),
        ({"space": {}, "trials": [{"A": 1}], "sampler": "grid"}, "sampler", {"name": "grid"}),
    ],
)
def test_wrong_key_or_value_is_an_error(raises, study_file, tmp_path, document, field, value):
    with raises(UserError, owner=f"--study={tmp_path / 'study.json'}", field=field, value=value):
        study_file(**document)


@pytest.mark.parametrize("name", ["missing.toml", "malformed.toml", "options.json"])
def test_file_that_cannot_be_read_is_an_error(tmp_path, name):
    (tmp_path / "malformed.toml").write_text("metric = ")
    document = {"metric": "a/b", "space": SPACE, "sampler": {"name": "tpe", "seeds": 1}}
    (tmp_path / "options.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=name):
        read_study_file(str(tmp_path / name))


def opened(file: StudyFile, folder: Path, *, storage: str | None = "journal") -> sweep.Sweep:
    folder.mkdir(exist_ok=True)
    storage = str(folder / "journal.log") if storage == "journal" else storage
    record = file.record() | {"experiment": "a.B"}
    return sweep.Sweep(file, folder, sweep.open_study(file, folder, storage, record), [])


def run_all(study: sweep.Sweep, *, at_most: int = 99) -> list[dict[str, Any]]:
    """Claim and end trials whose value is RATE · LAYERS; return their values."""
    values = []
    while len(values) < at_most and (claimed := study._ask()) is not None:
        trial, held = claimed
        values.append(dict(trial.params))
        loss = trial.params["RATE"] * trial.params["LAYERS"]
        study.study.tell(trial.number, loss)
        held.close()
    return values


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_resumed_study_draws_the_values_of_an_uninterrupted_one(study_file, tmp_path, sampler):
    options = {"name": sampler, "seed": 3}
    if sampler == "tpe":
        options["n_startup_trials"] = 2
    file = study_file(space=SPACE, sampler=options, num_trials=6)
    whole = run_all(opened(file, tmp_path / "whole"))
    parts = [run_all(opened(file, tmp_path / "parts"), at_most=2) for _ in range(3)]
    assert list(itertools.chain(*parts)) == whole
    assert len({values["RATE"] for values in whole}) == 6
    other = study_file(space=SPACE, sampler={**options, "seed": 4}, num_trials=6)
    assert run_all(opened(other, tmp_path / "other"))[0] != whole[0]


def test_processes_claim_different_trials_and_those_that_lost_their_process(study_file, tmp_path):
    file = study_file(space=SPACE, sampler="random", num_trials=3)
    first, second = (opened(file, tmp_path / "study", storage=None) for _ in range(2))
    assert (tmp_path / "study" / "study.db").exists()
    (one, held), (two, other), (three, last) = (s._ask() for s in (first, second, first))  # type: ignore[misc]
    assert [trial.number for trial in (one, two, three)] == [0, 1, 2]
    assert len({trial.params["RATE"] for trial in (one, two, three)}) == 3
    assert second._ask() is None
    held.close()  # as the operating system does for a process that is killed
    again, held = second._ask()  # type: ignore[misc]
    assert (again.number, again.params) == (one.number, one.params)
    for file_lock in (held, other, last):
        file_lock.close()


def test_trial_that_ends_after_a_save_on_demand_is_resumed(study_file, tmp_path, monkeypatch):
    study = opened(study_file(num_trials=1), tmp_path / "study")
    ends = iter(["stopped by a signal", "finished"])

    def end_at_once(*_: Any, stdout: Any, **__: Any) -> Any:
        end = {"event": "end", "time": 2.0, "reason": next(ends)}
        lines = [{"step": 4, "time": 1.0, "dataset": "heldout", "loss": 0.5}, end]
        log = Path(stdout.name).with_name("metrics.jsonl")
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", end_at_once)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert study.run() == 0 and next(ends, None) is None
    (trial,) = study.study.get_trials()
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 0.5)


def test_trial_whose_process_was_killed_while_it_drew_values_is_replaced(study_file, tmp_path):
    study = opened(study_file(space=SPACE, num_trials=2), tmp_path / "study")
    study.study.ask()  # then its process is killed
    assert len(run_all(study)) == 2
    states = [trial.state for trial in study.study.get_trials()]
    assert states == [TrialState.RUNNING, TrialState.COMPLETE, TrialState.COMPLETE]


def test_study_is_a_file_of_its_folder_whatever_the_name(study_file, tmp_path):
    folder = tmp_path / "a?b %20"
    folder.mkdir()
    sweep.open_study(study_file(), folder, None, {"metric": "heldout/loss"})
    assert [path.name for path in folder.iterdir()] == ["study.db"]


def test_grid_runs_every_combination_once(study_file, tmp_path):
    space = {"RATE": {"choices": [0.1, 0.2]}, "LAYERS": {"choices": [1, 2, 3]}}
    file = study_file(space=space, sampler="grid", num_trials=99)
    parts = [run_all(opened(file, tmp_path / "study"), at_most=4) for _ in range(2)]
    values = sorted((v["RATE"], v["LAYERS"]) for v in itertools.chain(*parts))
    assert values == [*itertools.product([0.1, 0.2], [1, 2, 3])]


def test_listed_trials_run_in_order_and_no_others(study_file, tmp_path, raises):
    trials = [
        {"KIND": "a b", "RATE": 0.5},
        {"KIND": "c=d", "task.train.random_seed": 3},
        {"RATE": 1},
    ]
    claimed = []
    # Resumed after one trial, and with one more trial after all others.
    for listed, at_most in ((trials[:2], 1), (trials[:2], 99), (trials, 99)):
        file = study_file(space={}, trials=listed)
        study = opened(file, tmp_path / "study")
        while len(claimed) < at_most and (one := study._ask()) is not None:
            trial, held = one
            claimed.append([str(override) for override in file.overrides(trial.params)])
            study.study.tell(trial.number, 0.0)
            held.close()
    assert claimed == [
        ["--fdl.KIND=a b", "--fdl.RATE=0.5"],
        ["--fdl.KIND=c=d", "--fdl.task.train.random_seed=3"],
        ["--fdl.RATE=1"],
    ]
    for changed in ([{"RATE": 2}, *trials[1:]], trials[:2]):
        file = study_file(space={}, trials=changed)
        with raises(UsageError, field="trials", value=file.record()["trials"]):
            opened(file, tmp_path / "study")
    path = str(tmp_path / "study.json")
    study_file(space={}, trials=trials)
    assert read_study_file(path, num_trials=2).num_trials == 2
    with raises(UsageError, field="--num_trials", value=4):
        read_study_file(path, num_trials=4)


@pytest.mark.parametrize(
    "pruner",
    [
        "none",
        {"name": "median", "n_startup_trials": 1},
        {"name": "percentile", "percentile": 25, "n_startup_trials": 0},
        {"name": "successive_halving", "min_resource": 10, "reduction_factor": 2},
        {"name": "hyperband", "min_resource": 10, "max_resource": 40, "reduction_factor": 2},
    ],
)
def test_pruner_does_not_prune_the_best_trial(study_file, tmp_path, pruner):
    study = opened(study_file(space=SPACE, pruner=pruner, num_trials=8), tmp_path / "study")
    pruned = set()
    while (claimed := study._ask()) is not None:
        trial, held = claimed
        for step in (10, 20, 40):
            trial.report(trial.number, step)
            if trial.should_prune():
                pruned.add(trial.number)
                break
        state = TrialState.PRUNED if trial.number in pruned else TrialState.COMPLETE
        value = None if trial.number in pruned else trial.number
        study.study.tell(trial.number, value, state=state)
        held.close()
    assert 0 not in pruned
    assert bool(pruned) == (pruner != "none")


def test_process_with_a_shorter_list_leaves_the_other_trials(study_file, tmp_path, capsys):
    short, long = (study_file(space={}, trials=[{"RATE": 1}] * n) for n in (1, 2))
    studies = [opened(short, tmp_path / "study"), opened(long, tmp_path / "study")]
    for _ in range(2):
        trial, held = studies[1]._ask()
        held.close()  # The trial has lost its process.
        if trial.number == 0:
            studies[1].study.tell(trial.number, 0.5)
    assert studies[0]._ask() is None
    studies[0]._report()
    assert "RATE=1" in capsys.readouterr().out
    trial, held = studies[1]._ask()
    held.close()
    assert trial.number == 1


def test_resumed_study_has_the_direction_and_the_trials_of_its_folder(study_file, tmp_path, raises):
    file = study_file()
    opened(file, tmp_path / "study")._ask()[1].close()
    with raises(UsageError, field="direction", value="maximize"):
        opened(study_file(direction="maximize"), tmp_path / "study")
    with raises(UsageError, field="trials", value=["0000"]):
        opened(file, tmp_path / "study", storage=None)


def test_storage_that_cannot_be_opened_is_an_error(raises, study_file, tmp_path):
    with raises(UsageError, owner="nosuch://x"):
        opened(study_file(space=SPACE), tmp_path / "study", storage="nosuch://x")


def rates(*values: float) -> dict[str, Any]:
    """Return the search space of these rates."""
    return {"RATE": {"choices": [*values]}}


def final_loss(rate: float, steps: int = 6) -> float:
    """Return ½·(w − 3)² after `steps` steps of gradient descent from w = 0."""
    return 4.5 * (1 - rate) ** (2 * steps)


class Command:
    """A command `runner --study=…` in one folder, with a cache of compiled programs."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.sweep = folder / "sweep"
        self._cache = cache
        self._processes: list[subprocess.Popen[str]] = []

    def words(self, *more: str, **document: Any) -> list[str]:
        """Return the words of the command for a study file with the given keys."""
        path = self.folder / "study.json"
        path.write_text(json.dumps({"metric": "heldout/loss", "sampler": "grid", **document}))
        folders = [f"--job_log_dir={self.sweep}", f"--jax_compilation_cache={self._cache}"]
        return [f"--exp={EXP}", f"--study={path}", *folders, *more]

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "layerkit_runner.cli", *words]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, cwd=HERE, **pipes)
        self._processes.append(process)
        return process

    def run(self, words: list[str], *, code: int = 0) -> str:
        process = self.start(words)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code, output
        return output

    def end(self) -> None:
        """Kill the processes that are still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def trial(self, number: int) -> Path:
        return self.sweep / "trials" / f"{number:04d}"

    def study(self, storage: str | None = None) -> Any:
        """Return the study as a user of Optuna loads it."""
        if storage is None:
            return optuna.load_study(study_name="sweep", storage=f"sqlite:///{self.sweep}/study.db")
        backend = optuna.storages.journal.JournalFileBackend(storage)
        journal = optuna.storages.JournalStorage(backend)
        return optuna.load_study(study_name=str(self.sweep), storage=journal)


@pytest.fixture
def command(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    one_device = "--xla_force_host_platform_device_count=1"  # the last of equal flags counts
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {one_device}")
    # Without matplotlib no trial draws its loss curve, which takes longer than to train.
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    command = Command(tmp_path, tmp_path_factory.getbasetemp() / "compiled")
    yield command
    command.end()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("more", "document", "text"),
    [
        ([], {"metrics": 1}, "'metrics'"),
        (["--num_trials=0"], {}, "--num_trials='0'"),
        (["--mode=eval"], {}, "--study"),
        ([], {"metric": "held_out/loss"}, "Did you mean 'heldout/loss'?"),
        ([], {"space": {"RATTE": {"low": 0.1, "high": 1.0}}}, "Did you mean 'RATE'?"),
        ([], {"space": {"WIDTH": {"low": 1.0, "high": 2.0}}}, "WIDTH"),
        ([], {"space": {"task.train.num_train_steps": {"low": 1.0, "high": 2.0}}}, "1.0"),
        (["--fdl.RATE=0.3"], {}, "--fdl.RATE=0.3 and --fdl.RATE=0.1"),
    ],
)
def test_wrong_file_flag_or_field_is_an_error_before_anything_is_written(
    command, monkeypatch, capsys, more, document, text
):
    monkeypatch.chdir(HERE)
    assert (
        cli.main(command.words(*more, **{"sampler": "tpe", "space": rates(0.1), **document})) == 2
    )
    error = capsys.readouterr().err
    assert text in error and error.startswith("runner: ")
    assert not command.sweep.exists()


def test_missing_optuna_is_an_error_with_the_command_to_install_it(command, monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    monkeypatch.setitem(sys.modules, "optuna", None)  # importing it is an error
    assert cli.main(command.words(space=rates(0.1))) == 2
    assert "pip install 'optuna" in capsys.readouterr().err


def test_sweep_runs_trials_and_prints_the_results(command, monkeypatch, capsys):
    fixed = ("--fdl.MAX_STEPS=4", "--fdl.CRASH_FROM=0.9", "--noenable_checkpoint_saving")
    # Trials have processes of their own; the handlers of the sweep would outlive this test.
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    words = command.words(*fixed, space=rates(0.5, 0.9))
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    good, bad = sorted(command.study().trials, key=lambda trial: trial.params["RATE"])
    # The failure is reported and did not stop the other trial.
    assert bad.state == TrialState.FAIL
    assert bad.user_attrs["reason"] == "exit code 1: RuntimeError: the data are gone"
    assert bad.user_attrs["reason"] in printed
    assert (good.state, good.params) == (TrialState.COMPLETE, {"RATE": 0.5})
    assert good.value == pytest.approx(final_loss(0.5, 4), rel=1e-4)
    assert read_metrics(command.trial(good.number)).evals["heldout"][-1]["loss"] == good.value
    assert not (command.trial(good.number) / "checkpoints").exists()
    # The same command prints the results again; others in the same folder are an error.
    assert cli.main(words) == 0
    assert capsys.readouterr().out in printed
    for flag, start in {"--fdl.MAX_STEPS=5": 1, "--restore_checkpoint_dir=x": 0}.items():
        assert cli.main(command.words(flag, *fixed[start:], space=rates(0.5, 0.9))) == 2
        assert ("--fdl.MAX_STEPS=4", "None, with")[1 - start] in capsys.readouterr().err


@pytest.mark.slow
def test_pruned_trial_saves_and_exits(command):
    fields = ("--fdl.MAX_STEPS=40", "--fdl.SECONDS_PER_ROW=0.3", "--fdl.FIRST_SLOW_ROW=8")
    # With this seed the grid begins with the better trial.
    methods = {"pruner": {"name": "median", "n_startup_trials": 1}}
    methods["sampler"] = {"name": "grid", "seed": 1}
    command.run(command.words(*fields, space=rates(0.5, 0.01), **methods))
    states = {trial.params["RATE"]: trial.state for trial in command.study().trials}
    assert states == {0.5: TrialState.COMPLETE, 0.01: TrialState.PRUNED}
    output = (command.trial(1) / "output.txt").read_text()
    assert "SIGTERM" in output and "saved at step" in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_sweep_resumes(command, number):
    words = command.words(*SLOW, space=rates(0.25))
    process = command.start(words)
    evaluated = command.trial(0) / "metrics.jsonl"
    wait_for(process, lambda: evaluated.exists() and "heldout" in evaluated.read_text())
    process.send_signal(number)
    printed, _ = process.communicate(timeout=TIMEOUT)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert printed.splitlines()[-1] == "the same command resumes this sweep"
        assert "saved at step" in (command.trial(0) / "output.txt").read_text()
    # A trial whose sweep was killed runs on and keeps its lock.
    while (held := try_lock(command.trial(0) / "trial.lock")) is None:
        time.sleep(0.1)
    held.close()
    command.run(words)
    (trial,) = command.study().trials
    assert trial.value == pytest.approx(final_loss(0.25, 12), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["database", "journal"])
def test_two_commands_share_the_trials_of_a_sweep(command, storage):
    path = None if storage == "database" else str(command.folder / "study.log")
    more = [] if path is None else [f"--study_storage={path}"]
    words = command.words("--fdl.SECONDS_PER_ROW=0.5", *more, space=rates(0.1, 0.2, 0.3, 0.4))
    processes = [command.start(words) for _ in range(2)]
    printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    trials = command.study(path).trials
    assert sorted(trial.params["RATE"] for trial in trials) == [0.1, 0.2, 0.3, 0.4]
    for trial in trials:
        assert trial.value == pytest.approx(final_loss(trial.params["RATE"]), rel=1e-4)
        label = f"trial {trial.number:04d}: complete"
        assert sum(text.count(label) for text in printed) == 1


@pytest.mark.slow
def test_diverging_trial_fails_and_three_failures_in_a_row_end_the_sweep(command):
    command.run(command.words(space=rates(1e30, 1e31, 1e32, 1e33)), code=1)
    assert [trial.state for trial in command.study().trials] == 3 * [TrialState.FAIL]


@pytest.mark.slow
def test_unknown_metric_ends_the_sweep_and_its_trial_can_be_resumed(command):
    printed = command.run(command.words(metric="heldout/los", space=rates(0.1)), code=2)
    assert "metric='heldout/los'" in printed and "'heldout/loss'" in printed
    command.run(command.words(space=rates(0.1)))
    (trial,) = command.study().trials
    assert trial.value == pytest.approx(final_loss(0.1), rel=1e-4)
