"""The interface of models that a task trains, evaluates and decodes with.

A model turns a batch into predictions, and predictions into weighted metrics, one of which is the
loss. Models that define `decode` also continue prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from layerkit.base.base_layer import PARAMS, BaseLayer
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError

NATS_PER_TOKEN = "nats per token"
"""Unit of a mean cross-entropy over tokens.

Reports replace "token" by the data set's word, such as "byte", and print bits as well.
"""


class WeightedScalar(struct.PyTreeNode):
    """A weighted mean and the sum of its weights.

    The mean over several batches or devices is Σ value·weight / Σ weight, not a mean of means.

    Attributes:
      value: The mean. Finite, such as 0, if the weight is 0, since gradients would be NaN
        otherwise.
      weight: Sum of the weights, such as the number of tokens or examples.
    """

    value: jax.Array
    weight: jax.Array

    @classmethod
    def of(cls, value: Any, weight: Any) -> WeightedScalar:
        """Return a metric that holds both numbers as float32 scalars."""
        for name, number in (("value", value), ("weight", weight)):
            shape = list(jnp.shape(number))
            require(not shape, "WeightedScalar", f"shape of {name}", shape, "a scalar")
        return cls(jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32))


Metrics = dict[str, WeightedScalar]


class BaseModel(BaseLayer):
    """Base class of models.

    `fprop(batch)` is `compute_loss(compute_predictions(batch), batch)`.

    A custom training loop differentiates `model.clone(train=True)` and adds the leaves of the
    collection `aux_loss` to the loss. With `train=None` the model evaluates: dropout is off, even
    if gradients are taken. `apply` warns if `aux_loss` is mutable while `train` is None.
    """

    reported_metric: ClassVar[str | None] = None
    """Metric by which models are compared. None stands for the training loss, which may include
    label smoothing and auxiliary losses."""

    metric_units: ClassVar[Mapping[str, str]] = {}
    """Units of metrics by name, such as `NATS_PER_TOKEN`; metrics without a unit are left out."""

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """Regular expressions that match the paths of weights that are never trained.

        The weights of a reference model are an example.
        """
        return ()

    @property
    def initial_copies(self) -> Mapping[str, str]:
        """Children that are initialized with the weights of another child, as `{copy: original}`.

        `init` copies the weights. A restore from a checkpoint without the copy fills it from the
        original.
        """
        return {}

    @nn.nowrap
    def original_of(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the path of the weight that initializes a weight, according to `initial_copies`.

        Args:
          path: Path of the weight, such as `("reference_lm", "softmax", "w")`.

        Returns:
          Path of the original, or None for a weight that is not a copy.
        """
        original = self.initial_copies.get(path[0])
        return None if original is None else (original, *path[1:])

    def init_boxed(self, *args: Any, **kwargs: Any) -> Any:
        """Initialize as `BaseLayer.init_boxed` does, then copy the weights of `initial_copies`."""
        variables = super().init_boxed(*args, **kwargs)
        params = variables[PARAMS]
        copies = {copy: params[original] for copy, original in self.initial_copies.items()}
        return {**variables, PARAMS: {**params, **copies}}

    def compute_predictions(self, batch: NestedMap) -> Any:
        """Run the network on a batch whose entries all have the batch axis first."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define compute_predictions")

    def compute_loss(self, predictions: Any, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute metrics over the batch, and outputs per example `[batch, …]`.

        One metric is named `loss`. The task adds the auxiliary losses of the layers to it. Rows of
        padding, which fill up the last batch of an evaluation, must have weight 0, as
        `layerkit.models.weighted_metrics.example_weights` gives them:

            weights = example_weights(batch, len(errors))
            mean = weighted_mean(errors, weights)  # from layerkit.ops.losses.softmax
            metrics = {"loss": WeightedScalar.of(mean, weights.sum())}

        The output `scores` float32 `[batch]`, if present, holds the log-probability of each
        example's labels in nats. Data sets that define metrics over their examples read it.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define compute_loss")

    def fprop(self, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute metrics and outputs per example `[batch, …]` of a batch."""
        result = self.compute_loss(self.compute_predictions(batch), batch)
        match result:
            case (Mapping() as metrics, Mapping()):
                # The runner has other kinds of metrics, each with its own rule of aggregation.
                wrong = {k: v for k, v in metrics.items() if not isinstance(v, struct.PyTreeNode)}
                if not wrong:
                    return result
        raise ConfigError(
            owner=f"{type(self).__qualname__}.compute_loss",
            field="result",
            value=jax.tree.map(_type_text, result),
            expected="(metrics, outputs): dicts of WeightedScalar and of arrays [batch, …]",
        )

    @property
    def can_decode(self) -> bool:
        """True if the model defines `decode`."""
        return type(self).decode is not BaseModel.decode

    def decode(self, batch: NestedMap) -> NestedMap:
        """Compute the outputs of inference per example, such as the ids of a continuation.

        Raises:
          NotImplementedError: The model does not decode.
        """
        raise NotImplementedError(f"{type(self).__qualname__} cannot decode")

    @nn.nowrap
    def process_decode_out(
        self, input_obj: Any, decode_out: NestedMap
    ) -> tuple[Mapping[str, Any], Sequence[tuple[str, Any]], Mapping[str, Any]] | None:
        """Return metrics and records of a decoded batch; None, the default, for the usual records.

        The function runs on the host, on NumPy arrays of all rows of the global batch. It has to
        leave out rows of padding, whose `eval_sample_weights` are 0.

        Args:
          input_obj: Input of the batch, such as for `input_obj.ids_to_strings`.
          decode_out: Output of `decode` `[batch, …]`, with `provenance`, `prompt_lengths` and
            `eval_sample_weights` of the batch if it has them.

        Returns:
          (scalars by name, each a pair of value and weight; a pair (key, value) for each record;
          metrics by name with the methods `merge` and `compute`, such as those of clu).
        """
        return None


def _type_text(value: Any) -> str:
    """Return dtype and shape of an array, such as `float32[8,1]`, or the name of another type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__qualname__
