"""The folders of checkpoint steps: their names, their JSON documents, and which of them are kept.

Orbax makes and commits the folders. Listing them here needs no Orbax. A step is committed by a
rename where that is atomic, and by a last file on Google's object store, which has no rename.

metadata/metadata.json                    layout version, state format, process count, retention
                                          policy (`keep`), and what the caller of `save` passed
input_states/process_00000_of_00001.json  input name to input state, one file for each process

`CheckpointPolicy` decides when a checkpoint is written and which ones are kept. The best are chosen
by evaluations, which `evaluations.json` holds beside the steps:
{"version": 1, "evaluations": {"400": {"heldout/loss": 2.5, …}, …}}. An evaluation may follow the
save of its step, whose files never change.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing.errors import (
    DamagedCheckpointError,
    LayoutVersionError,
    ProcessCountError,
    later_version,
    naming_damage,
)
from layerkit_runner.files.atomic_write import atomic_write, is_remote, read_regular

STEP_PREFIX = "checkpoint"
STEP_DIGITS = 8
# Name of the folder of checkpoints in a job folder.
JOB_SUBFOLDER = "checkpoints"
RECORD_FILE = "last_checkpoint.json"
COMMIT_FILE = "commit_success.txt"
_ASIDE_PREFIX = "damaged_"
_TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")
_UNFINISHED_NAME = re.compile(_STEP_NAME.pattern + re.escape(_TEMPORARY_SUFFIX) + ".*")
# Increased when the files of a step, the names in them or the metadata change their meaning.
LAYOUT_VERSION = 1
_METADATA_FILE = "metadata/metadata.json"
_INPUT_STATES = re.compile(r"process_(\d{5})_of_(\d{5})\.json")
_INPUT_STATES_NAME = "process_{:05d}_of_{:05d}.json"


def step_folder(directory: epath.Path, step: int) -> epath.Path:
    """Return the folder of a step: `checkpoint_00000042` for step 42."""
    return directory / f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_in_name(path: epath.Path) -> int | None:
    """Return the step in the name of a step folder, finished or not; None for other folders."""
    match = _STEP_NAME.fullmatch(path.name) or _UNFINISHED_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def record_file(directory: epath.Path) -> epath.Path | None:
    """Return the file of a job folder that records the newest committed step of `directory`.

    Return None for a folder of checkpoints that is not in a job folder.
    """
    return directory.parent / RECORD_FILE if directory.name == JOB_SUBFOLDER else None


def recorded_step(directory: epath.Path) -> int | str | None:
    """Return the newest committed step that the job folder records, or "unknown" or None.

    "unknown" means a record that cannot be read, and None that there is no record.
    """
    path = record_file(directory)
    if path is None or not is_there(path):
        return None
    try:
        step = json.loads(read_regular(path))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
    return step if isinstance(step, int) else "unknown"


def is_there(path: epath.Path) -> bool:
    """Return whether a path exists. A dangling link counts as existing."""
    return path.exists() or (not is_remote(path) and os.path.lexists(path))


def committed_steps(directory: epath.Path) -> list[int]:
    """Return the committed steps in ascending order; empty if the folder does not exist."""
    return sorted(
        int(match[1])
        for path in _children(directory)
        if (match := _STEP_NAME.fullmatch(path.name)) and _is_committed(path)
    )


def unfinished(directory: epath.Path) -> list[epath.Path]:
    """Return the folders of unfinished saves, by name."""
    return sorted(
        path
        for path in _children(directory)
        if _UNFINISHED_NAME.fullmatch(path.name)
        or (_STEP_NAME.fullmatch(path.name) and not _is_committed(path))
    )


def unfinished_or_damaged(directory: epath.Path) -> list[epath.Path]:
    """Return the folders of unfinished saves and of damaged steps that were moved aside."""
    aside = [path for path in _children(directory) if path.name.startswith(_ASIDE_PREFIX)]
    return sorted([*unfinished(directory), *aside])


def new_unfinished(directory: epath.Path, step: int) -> epath.Path:
    """Create an empty folder in which a step is written before `commit`."""
    path = step_folder(directory, step)
    if not _is_without_rename(path):
        path = path.parent / f"{path.name}{_TEMPORARY_SUFFIX}"
    if path.exists():
        path.rmtree()
    path.mkdir(parents=True)
    return path


def commit(unfinished_path: epath.Path, final: epath.Path) -> None:
    """Commit a step that was written to a folder of `new_unfinished`."""
    (unfinished_path / COMMIT_FILE).write_text("Copied or converted completely.")
    if unfinished_path != final:
        unfinished_path.rename(final)


def move_aside(path: epath.Path) -> epath.Path:
    """Rename the folder of a damaged step to an unused name and return the new path."""
    aside = path.parent / f"{_ASIDE_PREFIX}{path.name}"
    number = 1
    while is_there(aside):
        number += 1
        aside = path.parent / f"{_ASIDE_PREFIX}{path.name}_{number}"
    return path.rename(aside)


def _children(directory: epath.Path) -> list[epath.Path]:
    return list(directory.iterdir()) if directory.exists() else []


def _is_committed(path: epath.Path) -> bool:
    return not _is_without_rename(path) or (path / COMMIT_FILE).exists()


def _is_without_rename(path: epath.Path) -> bool:
    return str(path).startswith("gs://")


def make_metadata(
    user: Mapping[str, Any], *, state_format: str, process_count: int, policy: CheckpointPolicy
) -> dict[str, Any]:
    """Return the metadata of a step that is going to be written."""
    keep = dataclasses.asdict(policy) | {"keep_steps": list(policy.keep_steps)}
    if policy.keep_interval is not None:
        keep["keep_interval"] = policy.keep_interval.total_seconds()
    return {
        "layout_version": LAYOUT_VERSION,
        "state_format": state_format,
        "process_count": process_count,
        "keep": keep,
        "user": json.loads(json.dumps(dict(user))),  # a copy
    }


def read_metadata(step_directory: epath.Path) -> dict[str, Any]:
    """Return the metadata of a committed step.

    Raises:
      LayoutVersionError: A later version of this package wrote the step.
      DamagedCheckpointError: The file cannot be read, or lacks a value.
    """
    path = step_directory / _METADATA_FILE
    with naming_damage(path):
        about: dict[str, Any] = json.loads(read_regular(path))
        is_later = int(about["layout_version"]) > LAYOUT_VERSION
        about["user"] = dict(about["user"])
    if is_later:
        version = about["layout_version"]
        raise later_version(
            LayoutVersionError, step_directory, "layout_version", version, LAYOUT_VERSION
        )
    return about


def write_metadata(step_directory: epath.Path, about: Mapping[str, Any]) -> None:
    """Replace the metadata of a step that is not committed yet."""
    (step_directory / _METADATA_FILE).write_text(json.dumps(about))


def policy_of(about: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Return the retention policy in a step's metadata; None if there is none."""
    fields = about.get("keep")
    if fields is None:
        return None
    known = {field.name for field in dataclasses.fields(CheckpointPolicy)}
    values = {name: value for name, value in fields.items() if name in known}
    if values.get("keep_interval") is not None:
        values["keep_interval"] = datetime.timedelta(seconds=values["keep_interval"])
    return CheckpointPolicy(**values)


def write_input_states(directory: epath.Path, text: str) -> None:
    """Write this process's file; `text` is a JSON object, input name to state."""
    name = _INPUT_STATES_NAME.format(jax.process_index(), jax.process_count())
    (directory / name).write_text(text)


def read_input_states(directory: epath.Path) -> dict[str, Any]:
    """Return this process's input states by input name.

    If the number of processes has changed, these are the states of process 0.

    Raises:
      ProcessCountError: The number has changed and a state lacks `"scope": "global"`.
      DamagedCheckpointError: The folder has no file of input states, or it cannot be read.
    """
    matches = [_INPUT_STATES.fullmatch(path.name) for path in directory.iterdir()]
    counts = [int(match[2]) for match in matches if match]
    if not counts:
        raise DamagedCheckpointError("no input states", owner=str(directory))
    count = counts[0]
    is_same = count == jax.process_count()
    index = jax.process_index() if is_same else 0
    path = directory / _INPUT_STATES_NAME.format(index, count)
    with naming_damage(path):
        states: dict[str, Any] = json.loads(read_regular(path))
        bound = [
            name
            for name, state in states.items()
            if not (isinstance(state, Mapping) and state.get("scope") == "global")
        ]
    if bound and not is_same:
        raise ProcessCountError(
            f"the checkpoint holds input states of single processes ({', '.join(bound)})",
            field="number of processes",
            value=jax.process_count(),
            expected=f"{count}, or inputs whose state has the scope 'global'",
        )
    return states


EVALUATIONS_FILE = "evaluations.json"
_EVALUATIONS_VERSION = 1

Evaluations = dict[int, dict[str, float]]
"""Metrics by step; each maps `DATASET/METRIC` to a value."""


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """An existing checkpoint, with metrics of evaluations by `DATASET/METRIC`."""

    step: int
    time: datetime.datetime
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """Rules for saving and keeping checkpoints: the fields `save_…` of `TrainHParams`.

    A checkpoint is kept if any rule keeps it. None turns a rule off, but `max_to_keep=None` keeps
    all. A checkpoint is due at each multiple of the intervals, so a resumed run saves at the same
    steps. `best_mode` is `min` if a lower `best_metric` is better, and `max` if a higher one is. Of
    equal values, the newer one is better.
    """

    save_interval_steps: int = 5000
    max_to_keep: int | None = 10
    keep_interval: datetime.timedelta | None = datetime.timedelta(hours=12)
    save_step_zero: bool = False
    keep_interval_steps: int | None = None
    keep_steps: Sequence[int] = ()
    best_metric: str | None = None
    best_mode: str = "min"
    best_to_keep: int = 1

    def should_save(self, step: int, *, last_saved: int | None) -> bool:
        """Return whether a checkpoint is due at `step` if the newest one has step `last_saved`."""
        if last_saved is not None and step <= last_saved:
            return False
        if step in self.keep_steps:
            return True
        if step == 0:
            return self.save_step_zero
        return step % self.save_interval_steps == 0 or self._is_kept_multiple(step)

    def steps_to_keep(self, saved: Sequence[SavedStep]) -> frozenset[int]:
        """Return the steps to keep, given the existing checkpoints in any order."""
        return frozenset(step for step, reasons in self.reasons_to_keep(saved).items() if reasons)

    def reasons_to_keep(self, saved: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
        """Return the names of the rules that keep each checkpoint, by step in rising order."""
        in_order = sorted(saved, key=lambda checkpoint: checkpoint.step)
        newest = in_order if self.max_to_keep is None else in_order[-self.max_to_keep :]
        per_interval = self._one_per_interval(in_order)
        best = self._best(in_order)
        reasons = {}
        for step in (checkpoint.step for checkpoint in in_order):
            named = {
                "newest": step >= newest[0].step,
                f"best {self.best_metric}": step in best,
                f"one per {self.keep_interval}": step in per_interval,
                f"every {self.keep_interval_steps} steps": self._is_kept_multiple(step),
                "named step": step in self.keep_steps,
            }
            reasons[step] = tuple(name for name, holds in named.items() if holds)
        return reasons

    def _is_kept_multiple(self, step: int) -> bool:
        return self.keep_interval_steps is not None and step % self.keep_interval_steps == 0

    def _one_per_interval(self, in_order: Sequence[SavedStep]) -> set[int]:
        # The oldest checkpoint is kept, because the first duration is counted from it. If it were
        # deleted, the count would start again from a newer one.
        kept: list[SavedStep] = []
        if self.keep_interval is not None:
            for checkpoint in in_order:
                if not kept or checkpoint.time - kept[-1].time >= self.keep_interval:
                    kept.append(checkpoint)
        return {checkpoint.step for checkpoint in kept}

    def _best(self, in_order: Sequence[SavedStep]) -> set[int]:
        if self.best_metric is None:
            return set()
        sign = {"min": 1, "max": -1}[self.best_mode]
        ranked = sorted(
            (sign * checkpoint.metrics[self.best_metric], -checkpoint.step)
            for checkpoint in in_order
            if not math.isnan(checkpoint.metrics.get(self.best_metric, math.nan))
        )
        return {-negative_step for _, negative_step in ranked[: self.best_to_keep]}


def read_evaluations(directory: epath.Path) -> Evaluations:
    """Return the recorded evaluations of a folder of checkpoints; empty if there are none."""
    path = directory / EVALUATIONS_FILE
    if not path.exists():
        return {}
    try:
        document = json.loads(read_regular(path))
        if document["version"] > _EVALUATIONS_VERSION:
            raise ValueError(f"version={document['version']}")
        return {
            int(step): {name: float(value) for name, value in metrics.items()}
            for step, metrics in document["evaluations"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the recorded evaluations ({error})",
            owner=str(path),
            expected=f"JSON of version {_EVALUATIONS_VERSION} or earlier",
            hint="Delete the file to continue without the record of the best checkpoints.",
        ) from error


def write_evaluations(
    directory: epath.Path, evaluations: Mapping[int, Mapping[str, float]]
) -> None:
    """Replace the recorded evaluations by an atomic write; leave out NaN."""
    numbers = {
        str(step): {name: value for name, value in metrics.items() if not math.isnan(value)}
        for step, metrics in sorted(evaluations.items())
    }
    document = {"version": _EVALUATIONS_VERSION, "evaluations": numbers}
    atomic_write(directory / EVALUATIONS_FILE, json.dumps(document, indent=1) + "\n")
