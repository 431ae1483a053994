"""The result of a sweep: a table and `sweep.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.text import aligned
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

    `state` is complete, pruned, unfinished or failed; `value` the metric of the last evaluation;
    `seconds` None until the trial ends; `reason` the cause of a failure.
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

    def result_of(trial: FrozenTrial) -> TrialResult:
        reported = trial.intermediate_values
        value = trial.value if trial.state == TrialState.COMPLETE else None
        return TrialResult(
            number=trial.number,
            state=_STATES[trial.state],
            value=reported[max(reported)] if reported and value is None else value,
            parameters=trial.params,
            step=trial.user_attrs.get("step", max(reported, default=0)),
            seconds=None if trial.duration is None else round(trial.duration.total_seconds(), 1),
            folder=f"{folder.given.rstrip('/')}/trials/{trial.number:04d}",
            reason=trial.user_attrs.get("reason", ""),
        )

    return sorted(map(result_of, trials), key=order)


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
    failed = [result for result in found if result.state == "failed"]
    return [
        *aligned([head, *rows], right={*range(1, len(head) - 3), len(head) - 2}),
        *(f"failed: trial {result.number:04d}: {result.reason}" for result in failed),
    ]


def shown(value: Value) -> str:
    """Return the text of a value in the table: a float has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
