"""What a sweep found: a table, `sweep.json`, and the command that trains the best for longer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.tools.sweep.folder import SweepFolder
from layerkit_runner.tools.sweep.search_space import Value
from layerkit_runner.tools.sweep.study_file import StudyFile

# In the order of the table. A trial that is unfinished runs, here or elsewhere, or was stopped.
_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "unfinished",
    TrialState.WAITING: "unfinished",
    TrialState.FAIL: "failed",
}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """A trial as a row of the table.

    Attributes:
      number: Which, from 0.
      state: One of complete, pruned, unfinished, failed.
      value: The metric at the last evaluation; None if there was none.
      parameters: What it took, by the path of each field.
      step: Training steps.
      seconds: From its start to its end; None while it has none.
      folder: Its job folder, as the sweep's was given.
      reason: Why it was pruned or failed.
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
    """The trials, the best first: complete ones by their values, then the others."""
    sign = 1 if file.direction == "minimize" else -1
    states = list(dict.fromkeys(_STATES.values()))

    def order(result: TrialResult) -> tuple[int, bool, float, int]:
        value = 0.0 if result.value is None else sign * result.value
        return states.index(result.state), result.value is None, value, result.number

    return sorted((_result(trial, folder) for trial in trials), key=order)


def _result(trial: FrozenTrial, folder: SweepFolder) -> TrialResult:
    reported = trial.intermediate_values
    value = reported[max(reported)] if reported else None
    return TrialResult(
        number=trial.number,
        state=_STATES[trial.state],
        value=trial.value if trial.state == TrialState.COMPLETE else value,
        parameters=trial.params,
        step=trial.user_attrs.get("step", max(reported, default=0)),
        seconds=None if trial.duration is None else round(trial.duration.total_seconds(), 1),
        folder=folder.shown(trial.number),
        reason=trial.user_attrs.get("reason", ""),
    )


def best_of(found: Sequence[TrialResult]) -> TrialResult | None:
    """The best of the complete ones; None if there is none."""
    return found[0] if found and found[0].state == "complete" else None


def write_results(
    found: Sequence[TrialResult], file: StudyFile, folder: SweepFolder, *, experiment: str
) -> None:
    """Writes `sweep.json`, which holds what the table shows, the best first."""
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
    """The lines of the table, the best first."""
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
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    left = {0, len(head) - 3, len(head) - 1}  # words; the others are numbers
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    failed = [result for result in found if result.state == "failed"]
    lines += [f"failed: trial {result.number:04d}: {result.reason}" for result in failed]
    return lines


def shown(value: Value) -> str:
    """A value in a table: a float in four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
