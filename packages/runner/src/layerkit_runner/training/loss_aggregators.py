"""Loss aggregators: which metrics of a model are summed to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerkit.checks import require
from layerkit.config import Configurable


class LossAggregator(Configurable):
    """One metric of the model as the loss.

    A subclass defines `terms` for another sum of metrics.

    Attributes:
      loss_key: Name of the metric.
    """

    loss_key: str = "loss"

    def terms(self) -> Mapping[str, float]:
        """Return the factors of the metrics whose sum is the loss, by name."""
        return {self.loss_key: 1.0}


class MultiLossAggregator(LossAggregator):
    """The sum of several metrics as the loss; each is a mean with its own weights.

    Attributes:
      loss_keys: Names of the metrics.

    Raises:
      ConfigError: `loss_keys` is empty or repeats a name.
    """

    loss_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the names."""
        is_valid = self.loss_keys and len({*self.loss_keys}) == len(self.loss_keys)
        expected = "one or more different names of metrics"
        require(is_valid, "task.loss_aggregator", "loss_keys", self.loss_keys, expected)

    def terms(self) -> Mapping[str, float]:
        """Return a factor of 1 for each metric."""
        return dict.fromkeys(self.loss_keys, 1.0)
