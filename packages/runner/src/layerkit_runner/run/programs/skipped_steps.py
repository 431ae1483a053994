"""Counts of the training steps that were not valid, and the limits at which they end a run.

Each step computes on the device whether it was valid, and the host reads this flag when it reports
the step.
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
      num_train_steps: Number of steps of the run.
      max_fraction: Largest fraction of such steps in a complete run; None for no limit.
      are_applied: True if such steps are applied, because the learner does not skip steps.
      in_all: Number of all such steps, including those before the run was resumed.
      problem: Reason why the run has to end; None while it may continue.
      has_taken_any: True if any step was valid.
    """

    max_in_a_row: int | None = None
    num_train_steps: int | None = None
    max_fraction: float | None = None
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
        """Count a step that was not valid; return a line for the screen, if one is due."""
        self.in_a_row += 1
        self.in_all += 1
        values = f"{loss_name}={loss}, gradient norm={grad_norm}"
        self.apply_limits(step, last=f" The last one has {values}.")
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
            f"WARNING: step {step}: {values}. Expected {expected}. The step {outcome}"
            f" ({self.in_a_row} in a row, {self.in_all} in all).{causes}"
        )

    def apply_limits(self, step: int, *, is_over: bool = False, last: str = "") -> None:
        """Set `problem` if too many steps were not valid, in a row or of all steps of the run.

        `is_over` is True if the run ends with `step` steps, which may be before its last step.
        """
        self.has_taken_any |= step > self.in_all
        limit = self.max_in_a_row
        if limit is not None and not self.has_taken_any:
            limit = min(limit, _LIMIT_BEFORE_FIRST_VALID, self.num_train_steps or limit)
        no_valid = f"; no step was valid yet, which lowers the limit to {limit}"
        num_steps = step if is_over else self.num_train_steps
        if self.problem is not None:
            return
        if limit is not None and self.in_a_row >= limit:
            many = self.in_a_row != 1
            count = f"{self.in_a_row} steps in a row were" if many else "1 step was"
            rule = f"max_consecutive_skipped_steps={self.max_in_a_row}"
            rule += "" if self.has_taken_any else no_valid
        elif self._exceeds_fraction(num_steps, is_over=is_over):
            count = f"{self.in_all} of {step} steps were"
            rule = f"max_skipped_steps_fraction={self.max_fraction} of {num_steps} steps"
        else:
            return
        self.problem = (
            f"training stopped after step {step}: {count} not valid (task.train.{rule}).{last}"
            f" {_CAUSES} --mode=inspect --inspect=batches shows the batches;"
            " metrics.jsonl has the values of each skipped step."
        )

    def _exceeds_fraction(self, num_steps: int | None, *, is_over: bool) -> bool:
        if num_steps is None or self.max_fraction is None or self.are_applied:
            return False
        has_begun = self.has_taken_any or is_over
        return has_begun and self.in_all > self.max_fraction * num_steps

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {"in_a_row": self.in_a_row, "in_all": self.in_all}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the counts that `record` returned."""
        self.in_a_row, self.in_all = int(record["in_a_row"]), int(record["in_all"])
