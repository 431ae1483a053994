"""Claims and outcomes of trials in Optuna's storages, without training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from layerkit_runner.errors import UsageError  # noqa: E402
from layerkit_runner.tools.sweep.study_file import StudyFile  # noqa: E402
from layerkit_runner.tools.sweep.sweep import ClaimedTrial, Outcome, Study  # noqa: E402
from layerkit_runner.tools.sweep.trials import SweepFolder  # noqa: E402

SPACE = {
    "RATE": {"low": 1e-4, "high": 1.0, "log": True},
    "LAYERS": {"low": 1, "high": 9},
    "KIND": {"choices": ["a", "b", None]},
}


def opened(file: StudyFile, folder: Path, *, storage: str | None = "journal") -> Study:
    if storage == "journal":
        folder.mkdir(exist_ok=True)
        storage = str(folder / "journal.log")
    return Study(file, SweepFolder(str(folder)), name="toy", storage=storage)


def loss(own: ClaimedTrial) -> float:
    return float(own.trial.params["RATE"] * own.trial.params["LAYERS"])


def end(study: Study, own: ClaimedTrial, state: str = "complete", value: float = 0.0) -> None:
    study.end(own, Outcome(state, value, step=10))  # type: ignore[arg-type]


def run_all(study: Study, *, at_most: int = 99) -> list[dict[str, Any]]:
    values = []
    while len(values) < at_most and (own := study.claim()) is not None:
        values.append(dict(own.trial.params))
        end(study, own, value=loss(own))
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


def test_two_processes_claim_different_trials(study_file, tmp_path):
    file = study_file(space=SPACE, sampler="random", num_trials=3)
    first, second = (opened(file, tmp_path / "study", storage=None) for _ in range(2))
    assert (tmp_path / "study" / "study.db").exists()
    taken = [study.claim() for study in (first, second, first)]
    assert [own.trial.number for own in taken if own] == [0, 1, 2]
    assert len({own.trial.params["RATE"] for own in taken if own}) == 3
    assert second.claim() is None
    for study, own in zip((first, second, first), taken, strict=True):
        assert own is not None
        end(study, own, value=1.0)
    assert first.claim() is None
    first.close()
    second.close()


def test_trial_that_lost_its_process_is_resumed_with_its_values(study_file, tmp_path):
    file = study_file(space=SPACE, num_trials=2)
    first, second = (opened(file, tmp_path / "study") for _ in range(2))
    own = first.claim()
    assert own is not None and not own.is_resumed
    assert own.report(10, 0.5)
    own.lock.close()  # as the operating system does for a process that is killed
    again = second.claim()
    assert again is not None and again.is_resumed
    assert (again.trial.number, again.trial.params) == (own.trial.number, own.trial.params)
    # A step is not reported twice.
    assert not again.report(10, 0.5) and again.report(20, 0.25)
    end(second, again, value=0.25)
    (trial,) = second.trials()
    assert (trial.value, trial.intermediate_values) == (0.25, {10: 0.5, 20: 0.25})


def test_trial_that_was_killed_while_it_drew_values_is_replaced(study_file, tmp_path):
    study = opened(study_file(space=SPACE, num_trials=2), tmp_path / "study")
    study.optuna.ask()  # then its process is killed
    assert len(run_all(study)) == 2
    assert [trial.state.name for trial in study.trials()] == ["FAIL", "COMPLETE", "COMPLETE"]


def test_grid_runs_every_combination_once(study_file, tmp_path):
    space = {"A": {"choices": [0.1, "x"]}, "B": {"low": 1, "high": 3}}
    file = study_file(space=space, sampler="grid")
    found = []
    for study in itertools.cycle([opened(file, tmp_path / "study") for _ in range(2)]):
        own = study.claim()
        if own is None:
            break
        found.append((own.trial.params["A"], own.trial.params["B"]))
        end(study, own, "failed")
    assert sorted(found, key=str) == sorted(itertools.product([0.1, "x"], [1, 2, 3]), key=str)


def test_median_pruner_prunes_the_worse_trial_after_the_warmup(study_file, tmp_path):
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 20}
    study = opened(study_file(space=SPACE, pruner=pruner), tmp_path / "study")
    good, bad = study.claim(), study.claim()
    assert good is not None and bad is not None
    for step in (10, 20, 30):
        good.report(step, 1.0)
    assert not good.trial.should_prune()
    end(study, good, value=1.0)
    bad.report(10, 2.0)
    assert not bad.trial.should_prune()  # within the warmup steps
    bad.report(20, 2.0)
    assert bad.trial.should_prune()
    end(study, bad, "pruned")
    assert [trial.state.name for trial in study.trials()] == ["COMPLETE", "PRUNED"]


@pytest.mark.parametrize(
    "pruner",
    [
        "none",
        {"name": "percentile", "percentile": 25, "n_startup_trials": 0},
        {"name": "successive_halving", "min_resource": 10, "reduction_factor": 2},
        {"name": "hyperband", "min_resource": 10, "max_resource": 40, "reduction_factor": 2},
    ],
)
def test_pruner_does_not_prune_the_best_trial(study_file, tmp_path, pruner):
    study = opened(study_file(space=SPACE, pruner=pruner, num_trials=8), tmp_path / "study")
    pruned = set()
    while (own := study.claim()) is not None:
        for step in (10, 20, 40):
            own.report(step, own.trial.number)
            if own.trial.should_prune():
                pruned.add(own.trial.number)
                break
        state = "pruned" if own.trial.number in pruned else "complete"
        end(study, own, state, own.trial.number)
    assert 0 not in pruned
    assert bool(pruned) == (pruner != "none")


def test_storage_that_cannot_be_opened_is_an_error(raises, study_file, tmp_path):
    file = study_file(space=SPACE)
    with raises(UsageError, owner="--study_storage=nosuch://x"):
        opened(file, tmp_path / "study", storage="nosuch://x")
