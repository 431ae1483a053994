"""BaseModel: what a task needs from a network.

A model turns a batch into predictions, predictions into weighted metrics of which one is the loss,
and, where it can, a prompt into a continuation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from layerkit.base_layer import PARAMS, BaseLayer
from layerkit.nested_map import NestedMap

NATS_PER_TOKEN = "nats per token"
"""Unit of a mean cross-entropy over tokens.

Reports replace "token" by the data set's word, such as "byte", and print bits as well.
"""


class WeightedScalar(struct.PyTreeNode):
    """A mean together with the weight behind it.

    Means over several batches or devices are Σ value·weight / Σ weight, never a mean of means.

    Attributes:
      value: The mean; finite, such as 0, where the weight is 0, or gradients would be NaN.
      weight: Sum of the weights it was taken over (the number of tokens or examples, say).
    """

    value: jax.Array
    weight: jax.Array

    @classmethod
    def of(cls, value: Any, weight: Any) -> WeightedScalar:
        """Both as float32 scalars."""
        return cls(jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32))


Metrics = dict[str, WeightedScalar]


class BaseModel(BaseLayer):
    """Base of every model.

    `fprop(batch)` is `compute_loss(compute_predictions(batch), batch)`.

    A custom training loop differentiates `model.clone(train=True)` and adds the leaves of the
    collection `aux_loss` to the loss. With `train=None` the model evaluates: dropout is off, and
    nothing can tell that gradients are taken. `apply` warns where `aux_loss` is mutable then.
    """

    reported_metric: ClassVar[str | None] = None
    """The metric by which people compare models; None for the one that is trained, which may hold
    more than that, such as label smoothing or auxiliary losses."""

    metric_units: ClassVar[Mapping[str, str]] = {}
    """Units of the metrics that have one, by the metric's name, such as `NATS_PER_TOKEN`."""

    @property
    @nn.nowrap
    def frozen_weights(self) -> tuple[str, ...]:
        """Regular expressions over paths of weights that must stay as they are, such as those of a
        reference; whoever trains the model refuses to change them."""
        return ()

    @property
    @nn.nowrap
    def initial_copies(self) -> Mapping[str, str]:
        """Children whose weights start equal to those of another child, as `{copy: original}`.

        `init` copies them. Whoever restores the original from a checkpoint that lacks the copy
        fills the copy from the original too.
        """
        return {}

    @nn.nowrap
    def original_of(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the weight of which a weight starts as a copy, by `initial_copies`.

        Args:
          path: Of the weight, such as `("reference_lm", "softmax", "w")`.

        Returns:
          Path of the original; None for a weight that is no copy.
        """
        original = self.initial_copies.get(path[0])
        return None if original is None else (original, *path[1:])

    @nn.nowrap
    def init_boxed(self, *args: Any, **kwargs: Any) -> Any:
        """Like `BaseLayer.init_boxed`, with `initial_copies` made."""
        variables = super().init_boxed(*args, **kwargs)
        params = variables[PARAMS]
        copies = {copy: params[original] for copy, original in self.initial_copies.items()}
        return {**variables, PARAMS: {**params, **copies}}

    def compute_predictions(self, batch: NestedMap) -> Any:
        """Runs the network on a batch (batch axis first in every entry)."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define compute_predictions")

    def compute_loss(self, predictions: Any, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics over the batch, and outputs per example `[batch, …]`.

        One of the metrics is named `loss`; auxiliary losses of the layers are added by the task.
        The model weights each metric by the rows that count. The last batch of an evaluation is
        filled up with rows of padding, which `layerkit.models.example_weights.example_weights`
        gives weight 0:

            weights = example_weights(batch, len(errors))
            mean = weighted_mean(errors, weights)  # of layerkit.layers.losses
            metrics = {"loss": WeightedScalar.of(mean, weights.sum())}

        Of the outputs, `scores` float32 `[batch]` are the log-probabilities of the examples' labels
        in nats; data sets that define metrics over their examples read them.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define compute_loss")

    def fprop(self, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        found = self.compute_loss(self.compute_predictions(batch), batch)
        _check_found(f"{type(self).__qualname__}.compute_loss", found)
        return found

    @property
    @nn.nowrap
    def can_decode(self) -> bool:
        """Whether the model defines `decode`."""
        return type(self).decode is not BaseModel.decode

    @nn.nowrap
    def check_batch(self, batch: Mapping[str, Any], *needed: str) -> None:
        """Raise if a batch lacks a key.

        Args:
          batch: Batch of the model.
          *needed: Keys that the model reads; `chosen.ids` is the key `ids` of the entry `chosen`.

        Raises:
          ValueError: naming the missing keys, the needed keys and the keys of the batch.
        """
        keys = _dotted_keys(batch)
        missing = [name for name in needed if name not in keys]
        if missing:
            raise ValueError(
                f"{self.path_name}: the batch lacks {', '.join(missing)}. Expected"
                f" {', '.join(needed)}. It has {', '.join(keys) or 'no keys'}. Add what is missing"
                " to the batches of the data set."
            )

    def decode(self, batch: NestedMap) -> NestedMap:
        """Outputs of inference per example, such as the ids of a continuation.

        Raises:
          NotImplementedError: the model has nothing to decode.
        """
        raise NotImplementedError(f"{type(self).__qualname__} cannot decode")


def _check_found(method: str, found: Any) -> None:
    """Raise an error unless `compute_loss` returned metrics with weights, and outputs by name."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(
            f"{method} returned {_type_text(found)}. Expected (metrics, outputs): a dict of"
            " WeightedScalar by name, and a NestedMap of arrays [batch, …]."
        )
    metrics, outputs = found
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"{method} returned metrics of type {_type_text(metrics)}. Expected a dict of"
            " WeightedScalar by name."
        )
    for name, metric in metrics.items():
        # Whoever evaluates may know other kinds than WeightedScalar, each with its own rule.
        if not isinstance(metric, struct.PyTreeNode):
            raise ValueError(
                f"{method} returned metrics[{name!r}] of type {_type_text(metric)}. Expected"
                " WeightedScalar.of(value, weight)."
            )
        if not isinstance(metric, WeightedScalar):
            continue
        for field, number in (("value", metric.value), ("weight", metric.weight)):
            if jnp.shape(number) != ():
                raise ValueError(
                    f"{method} returned metrics[{name!r}] with {field}={_type_text(number)}."
                    " Expected a scalar, such as the weighted mean of the examples."
                )
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"{method} returned outputs of type {_type_text(outputs)}. Expected a NestedMap of"
            " arrays [batch, …]; it may be empty."
        )


def _type_text(value: Any) -> str:
    """Return dtype and shape of an array, such as `float32[8,1]`, or the name of another type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__qualname__


def _dotted_keys(batch: Mapping[str, Any]) -> list[str]:
    """Return the keys of all leaves, such as `chosen.ids`, sorted."""
    return sorted(
        f"{name}.{rest}" if rest else name
        for name, value in batch.items()
        for rest in (_dotted_keys(value) if isinstance(value, Mapping) else [""])
    )
