"""When a checkpoint is written and which checkpoints stay: values in, values out.

Nothing here reads a clock or a disk, so every rule can be tested as a table. The one caller is
`CheckpointManager`, which supplies the steps that exist and the times at which they were saved.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A checkpoint that exists.

    Attributes:
      step: the training step that it holds.
      time: when it was saved; all times handed to one call are comparable (all UTC).
    """

    step: int
    time: datetime.datetime


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """How often to save and what to keep.

    Attributes:
      save_interval_steps: a checkpoint is due at every multiple of this step count. Multiples
        rather than distances, so that a resumed run saves at the steps of a run never stopped.
      max_to_keep: the newest checkpoints that stay; None keeps all.
      keep_interval: besides those, one checkpoint per this duration stays for good; None keeps
        none besides.
      save_step_zero: whether step 0 is due. Off, because the initial state follows from the seed:
        storing it buys nothing and delays the first step.

    Raises:
      ValueError: if a number is out of range.
    """

    save_interval_steps: int = 5000
    max_to_keep: int | None = 10
    keep_interval: datetime.timedelta | None = datetime.timedelta(hours=12)
    save_step_zero: bool = False

    def __post_init__(self) -> None:
        if self.save_interval_steps < 1:
            raise ValueError(
                f"CheckpointPolicy.save_interval_steps is {self.save_interval_steps}; expected at "
                "least 1. To write no checkpoints at all, make no CheckpointManager."
            )
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ValueError(
                f"CheckpointPolicy.max_to_keep is {self.max_to_keep}; expected at least 1, or "
                "None to keep every checkpoint."
            )
        if self.keep_interval is not None and self.keep_interval <= datetime.timedelta(0):
            raise ValueError(
                f"CheckpointPolicy.keep_interval is {self.keep_interval}; expected a positive "
                "duration, or None to keep no checkpoint for its age."
            )

    def should_save(self, step: int, *, last_saved: int | None) -> bool:
        """Says whether a checkpoint is due at `step`.

        Args:
          step: the current training step.
          last_saved: the newest step that is saved or being saved; None if there is none.
        """
        if last_saved is not None and step <= last_saved:
            return False
        if step == 0:
            return self.save_step_zero
        return step % self.save_interval_steps == 0

    def steps_to_keep(self, saved: Sequence[SavedStep]) -> frozenset[int]:
        """Returns the steps that stay; the others may be deleted.

        The oldest checkpoint anchors `keep_interval` and so stays while one is set: without an
        anchor on disk, every restart would begin the duration anew.

        Args:
          saved: the checkpoints that exist, in any order.
        """
        in_order = sorted(saved, key=lambda checkpoint: checkpoint.step)
        newest = in_order if self.max_to_keep is None else in_order[-self.max_to_keep :]
        keep = {checkpoint.step for checkpoint in newest}
        if self.keep_interval is not None:
            last_kept: SavedStep | None = None
            for checkpoint in in_order:
                if last_kept is None or checkpoint.time - last_kept.time >= self.keep_interval:
                    keep.add(checkpoint.step)
                    last_kept = checkpoint
        return frozenset(keep)
