"""Says once, and so that it is seen, that a run has stopped to learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from layerkit_runner.observers.base import Observer


class FiniteLoss(Observer):
    """Reports the first loss that is NaN or infinite; the run goes on.

    Args:
      loss_name: The scalar to watch.
      report: Takes the message.
    """

    def __init__(self, loss_name: str, *, report: Callable[[str], None]) -> None:
        self._loss_name = loss_name
        self._report = report
        self._has_reported = False

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        loss = scalars.get(self._loss_name, 0.0)
        if math.isfinite(loss) or self._has_reported:
            return
        self._has_reported = True
        self._report(
            f"WARNING: {self._loss_name} is {loss} at step {step}; this run will hardly recover."
            " Usual causes: ids outside of the vocabulary, a learning rate that is too high, a"
            " warmup that is too short. Ctrl-C stops it."
        )
