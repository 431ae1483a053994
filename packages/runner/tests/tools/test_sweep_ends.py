"""When a sweep ends: after all trials, or because the first three failed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

from optuna.trial import TrialState  # noqa: E402

from layerkit_runner.tools import sweep  # noqa: E402
from layerkit_runner.tools.sweep import StudyFile, read_study_file  # noqa: E402

SPACE = {"RATE": {"choices": [0.1, 0.2, 0.3, 0.4, 0.5]}, "LAYERS": {"choices": [1, 2, 3, 4, 5]}}


@pytest.mark.parametrize(
    ("in_file", "in_command", "number"),
    [(None, None, 25), (20, None, 20), (None, 3, 3), (20, 24, 24), (99, None, 25)],
)
def test_grid_has_every_combination_unless_a_number_is_set(
    tmp_path: Path, in_file: int | None, in_command: int | None, number: int
):
    document = {"metric": "heldout/loss", "sampler": "grid", "space": SPACE}
    if in_file is not None:
        document["num_trials"] = in_file
    path = tmp_path / "study.json"
    path.write_text(json.dumps(document))
    assert read_study_file(str(path), num_trials=in_command).num_trials == number


# The states of trials in the tests below; r is a running trial without an evaluation so far.
STATES = {
    "F": TrialState.FAIL,
    "C": TrialState.COMPLETE,
    "P": TrialState.PRUNED,
    "R": TrialState.RUNNING,
    "r": TrialState.RUNNING,
}


def opened(folder: Path, states: str, *, num_trials: int = 20) -> sweep.Sweep:
    """Return a sweep of failing commands whose study has trials with the given states."""
    axis = optuna.distributions.FloatDistribution(0.1, 1.0)
    file = StudyFile("heldout/loss", {"RATE": axis}, num_trials=num_trials)
    study = sweep.open_study(file, folder, str(folder / "study.log"), file.record())
    for letter in states:
        trial = optuna.trial.create_trial(
            state=STATES[letter],
            value=0.5 if letter == "C" else None,
            params={"RATE": 0.5},
            distributions=file.space,
            intermediate_values={4: 0.5} if letter in "CPR" else {},
        )
        study.add_trial(trial)
    return sweep.Sweep(file, folder, study, ["--exp=nosuch"])


@pytest.mark.parametrize(
    ("before", "states", "failed"),
    [
        ("", "FF", []),
        ("", "FFF", ["0000", "0001", "0002"]),
        ("", "FFFr", ["0000", "0001", "0002"]),
        ("", "rFFF", []),
        ("", "FFFR", []),
        ("", "FFFC", []),
        ("", "FFFP", []),
        ("C", "FFF", []),
        ("FFF", "FF", []),
        ("FFF", "FFFF", ["0003", "0004", "0005"]),
    ],
)
def test_sweep_ends_if_the_first_three_trials_fail_and_none_succeeds(
    tmp_path: Path, before: str, states: str, failed: list[str]
):
    study = opened(tmp_path, before + states)
    assert study._first_failures(range(len(before))) == failed


def test_first_three_failures_end_a_sweep_and_the_next_start_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    for first in (0, 3):  # each start runs three trials
        study = opened(tmp_path, "", num_trials=20)
        assert study.run() == 1
        assert [t.state for t in study.study.get_trials()] == (first + 3) * [TrialState.FAIL]
        names = ", ".join(f"{number:04d}" for number in range(first, first + 3))
        output = tmp_path / "trials" / f"{first:04d}" / "output.txt"
        end = f"the first three trials failed ({names}): see {output}"
        assert capsys.readouterr().out.splitlines()[-1] == end
        assert "nosuch" in output.read_text()


def test_failures_after_a_resume_do_not_end_a_sweep_with_a_completed_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    study = opened(tmp_path, "C", num_trials=5)
    assert study.run() == 0
    states = [trial.state for trial in study.study.get_trials()]
    assert states == [TrialState.COMPLETE, *4 * [TrialState.FAIL]]
