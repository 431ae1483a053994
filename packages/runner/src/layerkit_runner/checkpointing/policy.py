"""Decides when a checkpoint is written and which checkpoints stay: values in, values out."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence

LOWER_IS_BETTER, HIGHER_IS_BETTER = "min", "max"


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that exists.

    Attributes:
      step: The training step that it holds.
      time: When it was saved; all times handed to one call are comparable (all UTC).
      metrics: Recorded evaluation of this step, by `data set/metric`; may be empty.
    """

    step: int
    time: datetime.datetime
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """Rules that say how often to save and what to keep; one rule suffices to keep a checkpoint.

    Attributes:
      save_interval_steps: A checkpoint is due at every multiple of this step count. Multiples
        rather than distances, so that a resumed run saves at the steps of a run never stopped.
      max_to_keep: How many of the newest checkpoints stay; None keeps all.
      keep_interval: One checkpoint per this duration stays for good; None: no such rule.
      save_step_zero: Whether step 0 is due. The initial state follows from the seed.
      keep_interval_steps: Checkpoints of the multiples of this step count are due and stay for
        good; None: no such rule.
      keep_steps: Checkpoints of these steps are due and stay for good.
      best_metric: Metric of an evaluation, such as `heldout/loss`, whose best checkpoints stay
        until better ones come; None: no such rule.
      best_mode: `min` if a lower value of that metric is better, `max` if a higher one is.
      best_to_keep: How many of the best stay. Of equal ones, the newer is the better.

    Raises:
      ValueError: A number is out of range.
    """

    save_interval_steps: int = 5000
    max_to_keep: int | None = 10
    keep_interval: datetime.timedelta | None = datetime.timedelta(hours=12)
    save_step_zero: bool = False
    keep_interval_steps: int | None = None
    keep_steps: Sequence[int] = ()
    best_metric: str | None = None
    best_mode: str = LOWER_IS_BETTER
    best_to_keep: int = 1

    def __post_init__(self) -> None:
        def require(field: str, expected: str, *, is_valid: bool) -> None:
            if not is_valid:
                value = getattr(self, field)
                shown = tuple(value) if field == "keep_steps" else value
                shown = repr(value) if isinstance(value, str) else shown
                raise ValueError(f"CheckpointPolicy.{field} is {shown}; expected {expected}.")

        require(
            "save_interval_steps",
            "at least 1. To write no checkpoints at all, make no CheckpointManager",
            is_valid=self.save_interval_steps >= 1,
        )
        require(
            "max_to_keep",
            "at least 1, or None to keep every checkpoint",
            is_valid=self.max_to_keep is None or self.max_to_keep >= 1,
        )
        require(
            "keep_interval",
            "a positive duration, or None to keep no checkpoint for its age",
            is_valid=self.keep_interval is None or self.keep_interval > datetime.timedelta(0),
        )
        require(
            "keep_interval_steps",
            "at least 1, or None to keep no multiples for good",
            is_valid=self.keep_interval_steps is None or self.keep_interval_steps >= 1,
        )
        is_valid = all(step >= 0 for step in self.keep_steps)
        require("keep_steps", "no negative step", is_valid=is_valid)
        is_valid = self.best_mode in (LOWER_IS_BETTER, HIGHER_IS_BETTER)
        require("best_mode", "'min' or 'max'", is_valid=is_valid)
        require(
            "best_to_keep",
            "at least 1. To keep none for being best, leave best_metric None",
            is_valid=self.best_to_keep >= 1,
        )

    def should_save(self, step: int, *, last_saved: int | None) -> bool:
        """Return whether a checkpoint is due at `step`, the newest one being of `last_saved`."""
        if last_saved is not None and step <= last_saved:
            return False
        if step in self.keep_steps:
            return True
        if step == 0:
            return self.save_step_zero
        return step % self.save_interval_steps == 0 or self._is_kept_multiple(step)

    def steps_to_keep(self, saved: Sequence[SavedStep]) -> frozenset[int]:
        """Return the steps that stay of the checkpoints that exist, in any order."""
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
        # The oldest checkpoint stays as the anchor of the interval: without an anchor on disk,
        # every restart would begin the duration anew.
        kept: list[SavedStep] = []
        if self.keep_interval is not None:
            for checkpoint in in_order:
                if not kept or checkpoint.time - kept[-1].time >= self.keep_interval:
                    kept.append(checkpoint)
        return {checkpoint.step for checkpoint in kept}

    def _best(self, in_order: Sequence[SavedStep]) -> set[int]:
        if self.best_metric is None:
            return set()
        sign = 1 if self.best_mode == LOWER_IS_BETTER else -1
        ranked = sorted(
            (sign * checkpoint.metrics[self.best_metric], -checkpoint.step)
            for checkpoint in in_order
            if not math.isnan(checkpoint.metrics.get(self.best_metric, math.nan))
        )
        return {-negative_step for _, negative_step in ranked[: self.best_to_keep]}
