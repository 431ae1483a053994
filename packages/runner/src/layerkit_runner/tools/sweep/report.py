"""The result of a sweep: a table, `sweep.json` and `sweep.png`."""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.text import aligned
from layerkit_runner.observers.loss_curve import require_matplotlib
from layerkit_runner.tools.sweep.study_file import StudyFile, Value
from layerkit_runner.tools.sweep.trials import SweepFolder

# In the order of the table. An unfinished trial is running in some process, or was stopped.
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "unfinished",
    TrialState.WAITING: "unfinished",
    TrialState.FAIL: "failed",
}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The row of a trial in the table.

    Attributes:
      number: Number of the trial.
      state: complete, pruned, unfinished or failed.
      value: Metric of the last evaluation; None without one.
      parameters: Values by the path of each field.
      step: Last training step.
      seconds: Duration; None until the trial ends.
      folder: Job folder of the trial.
      reason: Cause of a failure, else empty.
    """

    number: int
    state: str
    value: float | None
    parameters: Mapping[str, Value]
    step: int
    seconds: float | None
    folder: str
    reason: str = ""


def results(
    trials: Sequence[FrozenTrial], file: StudyFile, folder: SweepFolder
) -> list[TrialResult]:
    """Return the trials from best to worst: complete ones by value, then the others."""
    sign = 1 if file.direction == "minimize" else -1
    states = list(dict.fromkeys(_STATES.values()))

    def order(result: TrialResult) -> tuple[int, bool, float, int]:
        value = 0.0 if result.value is None else sign * result.value
        return states.index(result.state), result.value is None, value, result.number

    found = []
    for trial in trials:
        reported = trial.intermediate_values
        value = trial.value if trial.state == TrialState.COMPLETE else None
        result = TrialResult(
            number=trial.number,
            state=_STATES[trial.state],
            value=reported[max(reported)] if reported and value is None else value,
            parameters=trial.params,
            step=trial.user_attrs.get("step", max(reported, default=0)),
            seconds=None if trial.duration is None else round(trial.duration.total_seconds(), 1),
            folder=folder.shown(f"trials/{trial.number:04d}"),
            reason=trial.user_attrs.get("reason", ""),
        )
        found.append(result)
    return sorted(found, key=order)


def best_of(found: Sequence[TrialResult]) -> TrialResult | None:
    """Return the best complete trial, or None if there is none."""
    return found[0] if found and found[0].state == "complete" else None


def write_results(
    found: Sequence[TrialResult], file: StudyFile, folder: SweepFolder, *, experiment: str
) -> None:
    """Write `sweep.json`, which holds the content of the table."""
    best = best_of(found)
    document: dict[str, Any] = {
        "experiment": experiment,
        "metric": file.metric,
        "direction": file.direction,
        "num_trials": file.num_trials,
        "best": None if best is None else best.number,
        "trials": [dataclasses.asdict(result) for result in found],
    }
    atomic_write(folder.path / "sweep.json", json.dumps(document, indent=2) + "\n")


def table(found: Sequence[TrialResult], file: StudyFile) -> list[str]:
    """Return the lines of the table, from the best trial to the worst."""
    head = ["trial", file.metric, *file.space, "state", "steps", "folder"]
    rows = [
        [
            f"{result.number:04d}",
            "–" if result.value is None else f"{result.value:.5g}",
            *(
                shown(result.parameters[path]) if path in result.parameters else "–"
                for path in file.space
            ),
            result.state,
            f"{result.step}",
            result.folder,
        ]
        for result in found
    ]
    count = len(head)
    failed = [result for result in found if result.state == "failed"]
    return [
        *aligned([head, *rows], right={*range(1, count - 3), count - 2}),  # columns of numbers
        *(f"failed: trial {result.number:04d}: {result.reason}" for result in failed),
    ]


def shown(value: Value) -> str:
    """Return the text of a value in the table: a float has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(study: optuna.Study, file: StudyFile, folder: SweepFolder) -> str:
    """Draw `sweep.png`, the metric against each field; return a line that names it.

    If no trial is complete or matplotlib is not installed, the line gives the reason instead.
    """
    if not any(trial.state == TrialState.COMPLETE for trial in study.trials):
        return f"no picture: no trial is complete and has a value of {file.metric}"
    try:
        require_matplotlib()
    except MissingExtraError as error:
        return f"no picture: {error}"
    import matplotlib as mpl

    mpl.use("agg")  # needs no display
    from matplotlib import pyplot
    from optuna.visualization.matplotlib import plot_slice

    png = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        # If all trials have the same value of a field, the length of its axis is 0.
        warnings.simplefilter("ignore")
        plot_slice(study, params=list(file.space), target_name=file.metric)
        figure = pyplot.gcf()
        figure.suptitle(f"{file.metric}, {file.direction}d over {len(study.trials)} trials")
        figure.savefig(png, format="png", bbox_inches="tight")
        pyplot.close(figure)
    atomic_write(folder.path / "sweep.png", png.getvalue())
    return f"picture: {folder.shown('sweep.png')}"
