"""Counts of the training steps that were not valid, and when they end a run or take it back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from layerkit_runner.step.train_hparams import TrainHParams

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
      train: Limits, and the learner that chooses the action for such a step.
      in_all: Number of all such steps, including those before the run was resumed.
      problem: Reason why the run has to end; None while it may continue.
      has_taken_any: True if any step was valid.
      rollback: Rollback that a step asks for, with its number `last_step`; None for none.
      rollbacks: Rollbacks of the run: `step` of the restored checkpoint, and `last_step`, up to
        which the data after `step` were left out.
    """

    train: TrainHParams
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
        action = self.train.learner.action(is_finite=is_finite, is_spike=is_spike)
        max_rollbacks, rule = self.train.max_rollbacks, "the action of task.train.learner is 'stop'"
        if self.problem is None and action == "rollback":
            if max_rollbacks is None or len(self.rollbacks) < max_rollbacks:
                self.rollback = {"last_step": step, "loss": loss, "grad_norm": grad_norm}
            rule = f"task.train.max_rollbacks={max_rollbacks} is reached"
        if self.problem is None and self.rollback is None and action in ("stop", "rollback"):
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
        limit = self.train.max_consecutive_skipped_steps
        if limit is not None and not self.has_taken_any:
            limit = min(limit, _LIMIT_BEFORE_FIRST_VALID, self.train.num_train_steps)
        no_valid = f"; no step was valid yet, which lowers the limit to {limit}"
        num_steps = step if is_over else self.train.num_train_steps
        fraction = self.train.max_skipped_steps_fraction
        if self.problem is not None:
            return
        if limit is not None and self.in_a_row >= limit:
            many = self.in_a_row != 1
            count = f"{self.in_a_row} steps in a row were" if many else "1 step was"
            rule = f"max_consecutive_skipped_steps={self.train.max_consecutive_skipped_steps}"
            rule += "" if self.has_taken_any else no_valid
        elif (
            fraction is not None
            and self.train.learner.skips_steps
            and (self.has_taken_any or is_over)
            and self.in_all > fraction * num_steps
        ):
            count = f"{self.in_all} of {step} steps were"
            rule = f"max_skipped_steps_fraction={fraction} of {num_steps} steps"
        else:
            return
        self.problem = (
            f"training stopped after step {step}: {count} not valid (task.train.{rule}).{last}"
            f" {_CAUSES} --mode=inspect --inspect=batches shows the batches;"
            " metrics.jsonl has the values of each skipped step."
        )

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
