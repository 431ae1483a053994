"""SkippedSteps: counts of the training steps that were not valid, and the limit that ends a run.

Each step computes on the device whether it is valid (`learning/is_valid_step`). The host reads that
flag when it reports the step, so counting delays no step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

SKIPPED_STEPS = "skipped_steps"
"""Metadata key of the counts in a checkpoint."""

# Limit before the first valid step: with unchanged weights, only the batches differ.
_LIMIT_BEFORE_FIRST_VALID = 10
# The first steps of a row are all reported on the screen, then every tenth.
_FIRST_REPORTS = 10
_CAUSES = (
    "Usual causes: ids or labels outside the vocabulary, broken input data, a learning rate that is"
    " too high, a warmup that is too short."
)


@dataclasses.dataclass
class SkippedSteps:
    """Counts of the training steps that were not valid.

    Attributes:
      max_in_a_row: Number of such steps in a row that ends the run; None for no limit.
      num_train_steps: Step at which training ends.
      are_applied: True if such steps are applied, because the learner does not skip steps.
      in_a_row: Number of the newest steps in a row that were not valid.
      in_all: Number of all steps that were not valid, including those before the run was resumed.
      problem: Reason why the run has to end; None while it may continue.
      has_taken_any: True if any step was valid.
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
          step: Number of the step, from 1.
          loss_name: Name of the loss metric.
          loss: Loss of this step.
          grad_norm: Norm of the gradient, before clipping.

        Returns:
          A line for the screen; None for most steps of a long row.
        """
        self.in_a_row += 1
        self.in_all += 1
        found = f"{loss_name}={loss}, gradient norm={grad_norm}"
        self.check_limit(step, found=f" The last one has {found}.")
        if self.in_a_row > _FIRST_REPORTS and self.in_a_row % 10:
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
            else "was skipped; weights and optimizer state are unchanged"
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
        limit = self.max_in_a_row
        if limit is not None and not self.has_taken_any:
            limit = min(limit, _LIMIT_BEFORE_FIRST_VALID, self.num_train_steps or limit)
        if limit is None or self.in_a_row < limit or self.problem is not None:
            return
        no_valid = f"; no step was valid yet, which lowers the limit to {limit}"
        self.problem = (
            f"training stopped after step {step}: {self.in_a_row} steps in a row were not valid"
            f" (task.train.max_consecutive_skipped_steps={self.max_in_a_row}"
            f"{'' if self.has_taken_any else no_valid}).{found} {_CAUSES}"
            " --mode=inspect --inspect=batches shows the batches;"
            " metrics.jsonl has the values of each skipped step."
        )

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {"in_a_row": self.in_a_row, "in_all": self.in_all}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the counts that `record` returned."""
        self.in_a_row, self.in_all = record["in_a_row"], record["in_all"]
