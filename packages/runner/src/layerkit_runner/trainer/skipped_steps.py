"""SkippedSteps: counts the training steps that were not valid, and says when a run has to end.

Each step computes on the device whether it is valid (`learning/is_valid_step`). The host reads that
flag of every step when it reports the step, so no step goes unnoticed and none has to wait.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

SKIPPED_STEPS = "skipped_steps"
"""Metadata key of the counts in a checkpoint."""

# A run that has never taken a step has its first weights, and only the batch differs between steps.
_MOST_BEFORE_FIRST_TAKEN = 10
# Each of the first steps of a row is reported on the screen, then every tenth.
_REPORTED_ONE_BY_ONE = 10
_CAUSES = (
    "Usual causes: ids or labels outside the vocabulary, broken input data, a learning rate that is"
    " too high, a warmup that is too short."
)


@dataclasses.dataclass
class SkippedSteps:
    """Counts of the training steps that were not valid.

    Attributes:
      max_in_a_row: How many such steps in a row end the run; None for no limit.
      num_train_steps: The step at which training ends.
      are_applied: Whether such steps are applied, because the learner does not skip steps.
      in_a_row: How many of the newest steps were not valid.
      in_all: How many of all steps were not valid, those before a resumption included.
      problem: Why the run has to end; None while it may continue.
      has_taken_any: Whether any step was valid.
    """

    max_in_a_row: int | None = None
    num_train_steps: int | None = None
    are_applied: bool = False
    in_a_row: int = 0
    in_all: int = 0
    problem: str | None = None
    has_taken_any: bool = False

    def add_valid(self) -> None:
        """Count a step that was valid."""
        self.in_a_row = 0
        self.has_taken_any = True

    def add(self, step: int, *, loss_name: str, loss: float, grad_norm: float) -> str | None:
        """Count a step that was not valid.

        Args:
          step: The number of the step, from 1.
          loss_name: The name of the loss metric.
          loss: Its value at this step.
          grad_norm: The norm of the gradient, before clipping.

        Returns:
          A line for the screen; None for most steps of a long row.
        """
        self.in_a_row += 1
        self.in_all += 1
        found = f"{loss_name}={loss}, gradient norm={grad_norm}"
        self.check_limit(step, found=f" The last one has {found}.")
        if self.in_a_row > _REPORTED_ONE_BY_ONE and self.in_a_row % 10:
            return None
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        expected = (
            "a norm within task.train.learner.skip_step_gradient_norm_value"
            if is_finite
            else "finite values"
        )
        outcome = (
            "was applied, because task.train.learner.skip_nonfinite_gradients=False"
            if self.are_applied
            else "was skipped, weights and optimizer state stay as they were"
        )
        causes = f" {_CAUSES}" if self.in_a_row == 1 and not is_finite else ""
        return (
            f"WARNING: step {step}: {found}. Expected {expected}. The step {outcome}"
            f" ({self.in_a_row} in a row, {self.in_all} in all).{causes}"
        )

    def check_limit(self, step: int, *, found: str = "") -> None:
        """Set `problem` if the newest steps in a row that were not valid reach the limit.

        Args:
          step: Number of completed steps.
          found: Sentence about the last of these steps, for the message.
        """
        self.has_taken_any |= step > self.in_all
        limit = self._limit()
        if limit is not None and self.in_a_row >= limit and self.problem is None:
            self.problem = self._problem(step, found)

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {"in_a_row": self.in_a_row, "in_all": self.in_all}

    def restore(self, record: Mapping[str, Any] | None) -> None:
        """Continue from the counts that `record` returned; None where none were recorded."""
        if record is not None:
            self.in_a_row, self.in_all = record["in_a_row"], record["in_all"]

    def _limit(self) -> int | None:
        if self.max_in_a_row is None or self.has_taken_any:
            return self.max_in_a_row
        limits = (self.max_in_a_row, _MOST_BEFORE_FIRST_TAKEN, self.num_train_steps)
        return min(limit for limit in limits if limit is not None)

    def _problem(self, step: int, found: str) -> str:
        never = (
            ""
            if self.has_taken_any
            else f"; no step was valid since training began, and then the limit is {self._limit()}"
        )
        return (
            f"training stopped after step {step}: {self.in_a_row} steps in a row were not valid"
            f" (task.train.max_consecutive_skipped_steps={self.max_in_a_row}{never}).{found}"
            f" {_CAUSES} --mode=inspect --inspect=batches shows what the inputs feed;"
            " metrics.jsonl has the values of each skipped step."
        )
