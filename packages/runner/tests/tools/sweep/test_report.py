"""What is shown of a sweep: the table as a whole screen, and what the picture holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import (  # noqa: E402
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState  # noqa: E402

from layerkit_inputs.extras import MissingExtraError  # noqa: E402
from layerkit_runner.tools.sweep.folder import SweepFolder  # noqa: E402
from layerkit_runner.tools.sweep.picture import draw_sweep, sweep_figure  # noqa: E402
from layerkit_runner.tools.sweep.report import results, table, write_results  # noqa: E402
from layerkit_runner.tools.sweep.study_file import StudyFile  # noqa: E402

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
) -> tuple[StudyFile, SweepFolder, list[FrozenTrial]]:
    """Two trials that ended, one pruned, one failed, one under way."""
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
    return study_file(space=SPACE, num_trials=5), folder, study.trials


def test_the_table_and_the_record(sweep: tuple[StudyFile, SweepFolder, list[FrozenTrial]]):
    file, folder, trials = sweep
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


def test_the_best_is_the_largest_where_that_is_asked_for(
    sweep: tuple[StudyFile, SweepFolder, list[FrozenTrial]], study_file: Callable[..., StudyFile]
):
    _, folder, trials = sweep
    file = study_file(space=SPACE, direction="maximize")
    assert [r.number for r in results(trials, file, folder)] == [0, 1, 2, 4, 3]


def test_the_picture(sweep: tuple[StudyFile, SweepFolder, list[FrozenTrial]]):
    file, folder, trials = sweep
    found = results(trials, file, folder)
    figure = sweep_figure(found, file)
    order, rate, layers, kind = (axes for axes in figure.axes if axes.get_visible())
    complete, pruned = (points.get_offsets().tolist() for points in order.collections)
    assert (complete, pruned) == ([[1, 1.0], [0, 2.0]], [[2, 3.0]])
    (line,) = order.lines
    assert line.get_xydata().tolist() == [[0, 2.0], [1, 1.0], [2, 1.0]]
    assert rate.get_xscale() == "log" and layers.get_xscale() == "linear"
    assert rate.get_xlim()[0] < 1e-4 and rate.get_xlim()[1] > 1
    drawn = [points.get_offsets().tolist() for points in kind.collections]
    places = {"a": 0, "b": 1}
    best = [places[found[0].parameters["KIND"]], 1.0]  # type: ignore[index]
    assert drawn[0][0] == best and drawn[-1] == [best]
    assert draw_sweep(found, file, folder) == "out/sweep.png"
    assert (folder.path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no trial has a value of heldout/loss"):
        sweep_figure(found[3:], file)


def test_picture_without_matplotlib_is_an_error_that_names_the_extra(
    sweep: tuple[StudyFile, SweepFolder, list[FrozenTrial]], monkeypatch: pytest.MonkeyPatch
):
    file, folder, trials = sweep
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it is an error
    with pytest.raises(MissingExtraError, match=r"pip install 'layerkit-runner\[plots\]'"):
        draw_sweep(results(trials, file, folder), file, folder)
