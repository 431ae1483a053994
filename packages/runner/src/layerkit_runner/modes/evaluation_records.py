"""What an evaluation beside a training job found, kept so that nothing is evaluated twice.

    DIR/eval/heldout/step_00000400.json
        {"step": 400, "metrics": {"loss": 1.83, …}, "made_from": {"checkpoint": …, …}}

A step number does not say which weights those were, nor on which data: a record counts only for the
checkpoint, model, data and weights (averaged or not) that it was made from. A record is there in
whole or not at all, so an evaluation that was killed is done anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.trainer import BaseProgram
from layerkit_runner.trainer.provenance import describe_settings, differences

# Counted up when metrics change their meaning, so that older records do not count.
_FORMAT = 1
# What names a program or says when it runs while training.
_PLACE_FIELDS = ("name", "interval_steps")
_PLAIN = (bool, int, float, str, type(None))


def record_path(program: BaseProgram, step: int) -> epath.Path | None:
    """Where it is kept what a program found after `step` steps; None if it keeps nothing."""
    if program.folder is None:
        return None
    return program.folder / program.name / f"step_{step:08d}.json"


def program_settings(program: BaseProgram) -> dict[str, Any]:
    """What decides the metrics of an evaluation besides the checkpoint, as JSON values.

    To be asked before the program runs: an input may read on from where it ended.
    """
    fields = {
        name: value
        for name, value in vars(program).items()
        if isinstance(value, _PLAIN) and not name.startswith("_") and name not in _PLACE_FIELDS
    }
    return {
        "program": {"class": type(program).__qualname__, **fields},
        "averaged weights": program.task.train.eval_use_ema_states,
        **describe_settings(program.task, program.dataset),
        "record format": _FORMAT,
    }


def write_record(
    path: epath.Path, step: int, metrics: Mapping[str, float], made_from: Mapping[str, Any]
) -> None:
    """Keeps the metrics of a finished evaluation."""
    # By way of `encode`, since JSON has no NaN.
    record = {"step": step, "metrics": json.loads(encode(metrics)), "made_from": made_from}
    atomic_write(path, json.dumps(record, indent=1) + "\n")


def read_record(path: epath.Path, made_from: dict[str, Any]) -> dict[str, float] | None:
    """The metrics that stand there, if they were made from the same; else None."""
    try:
        record = json.loads(path.read_text())
        if differences(record["made_from"], made_from):
            return None
        return {name: float(value) for name, value in record["metrics"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
