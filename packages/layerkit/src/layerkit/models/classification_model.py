"""ClassificationModel: a network that gives a vector per example, and a softmax over classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.embeddings import ClassSoftmax, FullSoftmax
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.losses.softmax import weighted_mean


class ClassificationModel(BaseModel):
    """A model that predicts one label per example.

    A batch has the inputs `[batch, …]` and int32 labels `[batch]` under the names of `input_field`
    and `label_field`. Soft labels are probabilities, float32 `[batch, classes]`, as of mixup; the
    metrics that compare classes then take the most likely one. Optional entries are `weights`
    float32 `[batch]` of the examples and `eval_sample_weights` float32 `[batch]`, which is 0 for
    rows of padding.

    Attributes:
      network_tpl: Network from inputs to features `[batch, dims]`. Axes between batch and features
        are averaged.
      softmax_tpl: Softmax from features to classes.
      input_field: Name of the inputs in the batch.
      label_field: Name of the labels in the batch.
      top_k: Number of classes k of the metric `top_<k>_accuracy`, the share of labels among the k
        most likely classes. None leaves the metric out.

    Raises:
      ConfigError: `top_k` is not between 2 and the number of classes.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": "nats per example"}

    network_tpl: Config[BaseLayer] | None = sub_config_field(None)
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(
        FullSoftmax.HParams, activation_axes=("batch", "act_vocab"), use_bias=True
    )
    input_field: str = "inputs"
    label_field: str = "labels"
    top_k: int | None = None

    def setup(self) -> None:
        """Create the network and the softmax."""
        self.create_child("network", self.network_tpl)
        self.create_child("softmax", self.softmax_tpl)
        num_classes = self.softmax.num_classes
        is_valid = self.top_k is None or 2 <= self.top_k <= num_classes
        require(is_valid, self, "top_k", self.top_k, f"2 to num_classes={num_classes}, or None")

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute the losses of the labels and the logits.

        Args:
          batch: Inputs `[batch, …]`, labels int32 `[batch]` or float32 `[batch, classes]`, and the
            optional weights `[batch]`.

        Returns:
          Outputs of the softmax (see `FullSoftmax.fprop`, without the length axis), and `logits`
          float32 `[batch, classes]`.
        """
        features = self.network(batch[self.input_field])
        if features.ndim > 2:
            features = jnp.mean(features, axis=tuple(range(1, features.ndim - 1)))
        labels = batch[self.label_field]
        target = "labels" if labels.ndim == 1 else "class_probabilities"
        weights = example_weights(batch, len(labels))
        outputs = self.softmax(features, weights=weights, **{target: labels})
        outputs.logits = self.softmax.logits(features)
        return outputs

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss`, `xent` (nats), `accuracy`, `top_<k>_accuracy`, and classes `[batch]`."""
        labels = batch[self.label_field]
        weights, total = example_weights(batch, len(labels)), predictions.total_weight
        accuracy = weighted_mean(predictions.correct.astype(jnp.float32), weights)
        metrics = {
            "loss": WeightedScalar.of(predictions.loss, total),
            "xent": WeightedScalar.of(predictions.xent, total),
            "accuracy": WeightedScalar.of(accuracy, total),
        }
        if self.top_k is not None:
            labels = labels if labels.ndim == 1 else jnp.argmax(labels, axis=-1)
            _, likeliest = jax.lax.top_k(predictions.logits, self.top_k)
            is_hit = jnp.any(likeliest == labels[:, None], axis=-1).astype(jnp.float32)
            name = f"top_{self.top_k}_accuracy"
            metrics[name] = WeightedScalar.of(weighted_mean(is_hit, weights), total)
        return metrics, NestedMap(
            classes=jnp.argmax(predictions.logits, axis=-1),
            per_example_xent=predictions.per_token_xent,
            scores=-predictions.per_token_xent,
        )
