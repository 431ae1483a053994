"""The metric by which reports compare models, with its name and unit."""

from __future__ import annotations

import dataclasses
import math

from layerkit.base_model import NATS_PER_TOKEN
from layerkit_runner.training.task import SingleTask


@dataclasses.dataclass(frozen=True)
class ReportedMetric:
    """The metric that the reports of a task show.

    Attributes:
      name: Name of the metric.
      unit: Unit of its values, such as `nats per byte`; None for a metric without one.
      is_cross_entropy: Whether it is a cross-entropy over tokens, so that bits are reported too and
        the baselines of the data set compare with it.
    """

    name: str
    unit: str | None = None
    is_cross_entropy: bool = False

    @classmethod
    def of(cls, task: SingleTask, *, token_unit: str = "token") -> ReportedMetric:
        """Return the metric that the model chooses, else the loss of the task.

        Args:
          task: The task.
          token_unit: The data set's word for a token, such as `byte`.
        """
        name = task.model.reported_metric or task.loss_name
        unit = task.model.metric_units.get(name)
        if unit == NATS_PER_TOKEN:
            return cls(name, f"nats per {token_unit}", is_cross_entropy=True)
        return cls(name, unit)

    @property
    def axis_label(self) -> str:
        """The label of an axis of its values, such as `xent (nats per byte)`."""
        return self.name if self.unit is None else f"{self.name} ({self.unit})"

    def value_text(self, value: float) -> str:
        """Return a value with its unit, such as `1.534 nats per byte = 2.213 bits per byte`."""
        text = f"{value:.4f}" if self.unit is None else f"{value:.4f} {self.unit}"
        if self.is_cross_entropy:
            assert self.unit is not None
            text += f" = {value / math.log(2):.4f} {self.unit.replace('nats', 'bits')}"
        return text

    def line(self, dataset: str, value: float) -> str:
        """Return the line of one data set, such as `heldout: reward_accuracy 0.8125`."""
        return f"{dataset}: {self.name} {self.value_text(value)}"
