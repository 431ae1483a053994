"""Counts of the training steps that were not valid, and when they end a run or take it back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from layerkit_runner.optim.learner import Learner

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
      learner: Learner, which chooses the action for such a step; None skips it.
      max_rollbacks: Number of rollbacks of the run, the next of which ends it; None for no limit.
      in_all: Number of all such steps, including those before the run was resumed.
      problem: Reason why the run has to end; None while it may continue.
      has_taken_any: True if any step was valid.
      rollback: Rollback that a step asks for, with its number `last_step`; None for none.
      rollbacks: Rollbacks of the run: `step` of the restored checkpoint, and `last_step`, up to
        which the data after `step` were left out.
    """

    max_in_a_row: int | None = None
    num_train_steps: int | None = None
    max_fraction: float | None = None
    learner: Learner | None = None
    max_rollbacks: int | None = None
    in_a_row: int = 0
    in_all: int = 0
    problem: str | None = None
    has_taken_any: bool = False
    rollback: dict[str, Any] | None = None
    rollbacks: list[dict[str, int]] = dataclasses.field(default_factory=list)

    def add_valid(self) -> None:
        """Count a step that was valid."""
        self.in_a_row = 0
        self.has_taken_any = True

    def add(
        self, step: int, *, loss_name: str, loss: float, grad_norm: float, is_spike: bool = False
    ) -> str | None:
        """Count a step that was not valid; return a line for the screen, if one is due.

        The action of the learner for it may set `problem` or `rollback`.
        """
        self.in_a_row += 1
        self.in_all += 1
        values = f"{loss_name}={loss}, gradient norm={grad_norm}"
        self.apply_limits(step, last=f" The last one has {values}.")
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        action: str | None = "skip"
        if self.learner is not None:
            action = self.learner.action(is_finite=is_finite, is_spike=is_spike)
        may_roll_back = len(self.rollbacks) < (self.max_rollbacks or math.inf)
        if self.problem is None and action == "rollback" and may_roll_back:
            self.rollback = {"last_step": step, "loss": loss, "grad_norm": grad_norm}
        elif self.problem is None and action in ("stop", "rollback"):
            rule = f"task.train.max_rollbacks={self.max_rollbacks} is reached"
            rule = "the action of task.train.learner is 'stop'" if action == "stop" else rule
            self.problem = f"training stopped after step {step}: it has {values}, and {rule}."
        if self.in_a_row > _FIRST_REPORTS and self.in_a_row % 10:
            return None
        expected = "finite values"
        if is_spike:
            expected = "values within task.train.learner.spike_deviations of the last steps"
        elif is_finite:
            expected = "a norm within task.train.learner.skip_step_gradient_norm_value"
        outcome = (
            "was applied, because task.train.learner.on_nonfinite=None"
            if action is None
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
        is_applied = self.learner is not None and not self.learner.skips_steps
        if num_steps is None or self.max_fraction is None or is_applied:
            return False
        has_begun = self.has_taken_any or is_over
        return has_begun and self.in_all > self.max_fraction * num_steps

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        rollbacks = {"rollbacks": self.rollbacks} if self.rollbacks else {}
        return {"in_a_row": self.in_a_row, "in_all": self.in_all, **rollbacks}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore the counts that `record` returned."""
        self.in_a_row, self.in_all = int(record["in_a_row"]), int(record["in_all"])
        self.rollbacks = list(record.get("rollbacks", ()))

    def go_back(self, step: int, record: Mapping[str, Any] | None) -> None:
        """Restore the counts of the checkpoint of `step`, and record the rollback to it."""
        assert self.rollback is not None
        so_far = [*self.rollbacks, {"step": step, "last_step": self.rollback["last_step"]}]
        self.restore({"in_a_row": 0, "in_all": 0, **(record or {}), "rollbacks": so_far})
        self.rollback = None
