"""The policy that decides when a checkpoint is written and which checkpoints are kept.

The best checkpoints are chosen by evaluations, which `evaluations.json` holds beside the steps:
{"version": 1, "evaluations": {"400": {"heldout/loss": 2.5, …}, …}}. An evaluation may follow the
save of its step, whose files never change.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence

from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.files.atomic_write import atomic_write, read_regular

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
