"""The result of a sweep: table and record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import (  # noqa: E402
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState  # noqa: E402

from layerkit_runner.tools.sweep.report import results, table, write_results  # noqa: E402
from layerkit_runner.tools.sweep.study_file import StudyFile  # noqa: E402
from layerkit_runner.tools.sweep.trials import SweepFolder  # noqa: E402

pytestmark = pytest.mark.usefixtures("matplotlib")

SPACE = {
    "RATE": {"low": 1e-4, "high": 1.0, "log": True},
    "LAYERS": {"low": 1, "high": 9},
    "KIND": {"choices": ["a", "b"]},
}
TABLE = """
trial  heldout/loss     RATE  LAYERS  KIND  state       steps  folder
0001              1    0.022       9     b  complete       40  out/trials/0001
0000              2  0.01568       8     a  complete       40  out/trials/0000
0002              3      0.5       3     a  pruned         12  out/trials/0002
0004              –      0.1       7     b  unfinished      0  out/trials/0004
0003              –   0.0003       2     b  failed          0  out/trials/0003
failed: trial 0003: no memory
"""


@pytest.fixture
def sweep(
    study_file: Callable[..., StudyFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[StudyFile, SweepFolder, optuna.Study]:
    """Return a sweep with two complete trials, and a pruned, a failed and a running one."""
    monkeypatch.chdir(tmp_path)
    folder = SweepFolder("out")
    folder.path.mkdir()
    study = optuna.create_study()
    for state, value, rate, layers, kind, facts in [
        ("COMPLETE", 2.0, 0.0156812, 8, "a", {"step": 40, "reason": ""}),
        ("COMPLETE", 1.0, 0.022, 9, "b", {"step": 40, "reason": ""}),
        ("PRUNED", 3.0, 0.5, 3, "a", {"step": 12}),
        ("FAIL", None, 0.0003, 2, "b", {"step": 0, "reason": "no memory"}),
        ("RUNNING", None, 0.1, 7, "b", {}),
    ]:
        trial = optuna.trial.create_trial(
            state=TrialState[state],
            value=value if state == "COMPLETE" else None,
            params={"RATE": rate, "LAYERS": layers, "KIND": kind},
            distributions={
                "RATE": FloatDistribution(1e-4, 1.0, log=True),
                "LAYERS": IntDistribution(1, 9),
                "KIND": CategoricalDistribution(["a", "b"]),
            },
            intermediate_values={} if value is None else {10: value},
            user_attrs=facts,
        )
        study.add_trial(trial)
    return study_file(space=SPACE, num_trials=5), folder, study


def test_table_and_record_list_the_trials_from_best_to_worst(sweep):
    file, folder, study = sweep
    trials = study.trials
    found = results(trials, file, folder)
    shown = "\n".join(table(found, file))
    values = {own.number: own.params for own in trials}
    assert [result.parameters for result in found] == [values[i] for i in (1, 0, 2, 4, 3)]
    assert shown == TABLE.strip("\n")
    write_results(found, file, folder, experiment="a.B")
    record = json.loads((folder.path / "sweep.json").read_text())
    assert (record["best"], record["num_trials"], record["metric"]) == (1, 5, "heldout/loss")
    assert [trial["value"] for trial in record["trials"]] == [1.0, 2.0, 3.0, None, None]
    assert record["trials"][0]["parameters"] == values[1]
    assert record["trials"][-1]["reason"] == "no memory"


def test_best_trial_has_the_largest_value_if_the_direction_is_maximize(sweep, study_file):
    _, folder, study = sweep
    file = study_file(space=SPACE, direction="maximize")
    assert [r.number for r in results(study.trials, file, folder)] == [0, 1, 2, 4, 3]
