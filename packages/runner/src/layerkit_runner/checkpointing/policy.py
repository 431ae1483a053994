"""When a checkpoint is written and which checkpoints stay: values in, values out.

Nothing here reads a clock or a disk, so every rule can be tested as a table. The callers are
`CheckpointManager`, which supplies the steps that exist, the times at which they were saved and
what evaluations said of them, and the tool that shows why a step is there.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence

LOWER_IS_BETTER, HIGHER_IS_BETTER = "min", "max"


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that exists.

    Attributes:
      step: the training step that it holds.
      time: when it was saved; all times handed to one call are comparable (all UTC).
      metrics: what evaluations at this step found, by `data set/metric`; empty if there was none.
    """

    step: int
    time: datetime.datetime
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """How often to save and what to keep.

    A checkpoint stays as long as one of the rules wants it.

    Attributes:
      save_interval_steps: a checkpoint is due at every multiple of this step count. Multiples
        rather than distances, so that a resumed run saves at the steps of a run never stopped.
      max_to_keep: the newest checkpoints that stay; None keeps all.
      keep_interval: besides those, one checkpoint per this duration stays for good; None keeps
        none besides.
      save_step_zero: whether step 0 is due. Off, because the initial state follows from the seed:
        storing it buys nothing and delays the first step.
      keep_interval_steps: checkpoints of the multiples of this step count are due and stay for
        good; None: none.
      keep_steps: checkpoints of these steps are due and stay for good.
      best_metric: by which metric, such as `heldout/loss`, the best checkpoints are told; they stay
        until better ones come. None: there are no best ones.
      best_mode: `min` if a lower value of that metric is better, `max` if a higher one is.
      best_to_keep: how many of the best stay. Of equal ones, the newer is the better.

    Raises:
      ValueError: if a number is out of range.
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
        for fault in self._faults():
            raise ValueError(f"CheckpointPolicy.{fault}")

    def _faults(self) -> Iterator[str]:
        if self.save_interval_steps < 1:
            yield (
                f"save_interval_steps is {self.save_interval_steps}; expected at least 1. To write "
                "no checkpoints at all, make no CheckpointManager."
            )
        if self.max_to_keep is not None and self.max_to_keep < 1:
            yield (
                f"max_to_keep is {self.max_to_keep}; expected at least 1, or None to keep every "
                "checkpoint."
            )
        if self.keep_interval is not None and self.keep_interval <= datetime.timedelta(0):
            yield (
                f"keep_interval is {self.keep_interval}; expected a positive duration, or None to "
                "keep no checkpoint for its age."
            )
        if self.keep_interval_steps is not None and self.keep_interval_steps < 1:
            yield (
                f"keep_interval_steps is {self.keep_interval_steps}; expected at least 1, or None "
                "to keep no multiples for good."
            )
        if any(step < 0 for step in self.keep_steps):
            yield f"keep_steps is {tuple(self.keep_steps)}; expected no negative step."
        if self.best_mode not in (LOWER_IS_BETTER, HIGHER_IS_BETTER):
            yield f"best_mode is {self.best_mode!r}; expected 'min' or 'max'."
        if self.best_to_keep < 1:
            yield (
                f"best_to_keep is {self.best_to_keep}; expected at least 1. To keep none for being "
                "best, leave best_metric None."
            )

    def should_save(self, step: int, *, last_saved: int | None) -> bool:
        """Says whether a checkpoint is due at `step`.

        Args:
          step: the current training step.
          last_saved: the newest step that is saved or being saved; None if there is none.
        """
        if last_saved is not None and step <= last_saved:
            return False
        if step in self.keep_steps:
            return True
        if step == 0:
            return self.save_step_zero
        return step % self.save_interval_steps == 0 or self._is_kept_multiple(step)

    def steps_to_keep(self, saved: Sequence[SavedStep]) -> frozenset[int]:
        """Returns the steps that stay; the others may be deleted.

        Args:
          saved: the checkpoints that exist, in any order.
        """
        return frozenset(step for step, reasons in self.reasons_to_keep(saved).items() if reasons)

    def reasons_to_keep(self, saved: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
        """Returns, for each step in rising order, the rules that want it, in words for people.

        Args:
          saved: the checkpoints that exist, in any order.
        """
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
        """The oldest checkpoint anchors the interval and so stays while one is set: without an
        anchor on disk, every restart would begin the duration anew."""
        kept: list[SavedStep] = []
        if self.keep_interval is not None:
            for checkpoint in in_order:
                if not kept or checkpoint.time - kept[-1].time >= self.keep_interval:
                    kept.append(checkpoint)
        return {checkpoint.step for checkpoint in kept}

    def _best(self, in_order: Sequence[SavedStep]) -> set[int]:
        """A value that is no number is no candidate, nor is a step that was not evaluated."""
        if self.best_metric is None:
            return set()
        sign = 1 if self.best_mode == LOWER_IS_BETTER else -1
        ranked = sorted(
            (sign * checkpoint.metrics[self.best_metric], -checkpoint.step)
            for checkpoint in in_order
            if not math.isnan(checkpoint.metrics.get(self.best_metric, math.nan))
        )
        return {-negative_step for _, negative_step in ranked[: self.best_to_keep]}
