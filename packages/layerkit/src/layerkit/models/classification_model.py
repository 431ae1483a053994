"""ClassificationModel: any network that gives a vector per example, and a softmax over classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import sub_config_field
from layerkit.layers.embeddings import FullSoftmax
from layerkit.layers.losses import weighted_mean
from layerkit.models.example_weights import example_weights
from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap


class ClassificationModel(BaseModel):
    """One label per example.

    A batch has the inputs `[batch, …]` and int32 labels `[batch]` under the names below. Where
    examples do not count alike it has `weights` float32 `[batch]`, and where some only fill it up
    `eval_sample_weights`, 0 for those.

    Attributes:
      network_tpl: Inputs to features `[batch, dims]`; axes between are averaged.
      softmax_tpl: Features to classes.
      input_field: Name of the inputs in the batch.
      label_field: Name of the labels in the batch.
      top_k: Besides `accuracy`, `top_<k>_accuracy` counts labels among the k likeliest classes;
        None leaves it out.

    Raises:
      ValueError: a top_k that is not between 2 and the number of classes.
    """

    reported_metric: ClassVar[str | None] = "xent"
    metric_units: ClassVar[Mapping[str, str]] = {"xent": "nats per example"}

    network_tpl: Any = sub_config_field(None)
    softmax_tpl: Any = sub_config_field(
        FullSoftmax.HParams, activation_axes=("batch", "act_vocab"), use_bias=True
    )
    input_field: str = "inputs"
    label_field: str = "labels"
    top_k: int | None = None

    def setup(self) -> None:
        self.create_child("network", self.network_tpl)
        self.create_child("softmax", self.softmax_tpl)
        if self.top_k is not None and not 2 <= self.top_k <= self.softmax.num_classes:
            raise ValueError(
                f"{self.path_name}: top_k={self.top_k}, expected 2 to"
                f" num_classes={self.softmax.num_classes}, or None"
            )

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Losses of the labels and the logits.

        Args:
          batch: Inputs `[batch, …]`, labels int32 `[batch]` and the optional weights `[batch]`.

        Returns:
          What the softmax reports (see `FullSoftmax.fprop`, without the length), and `logits`
          float32 `[batch, classes]`.
        """
        features = self.network(_field(batch, self.input_field, "input_field"))
        if features.ndim > 2:
            features = jnp.mean(features, axis=tuple(range(1, features.ndim - 1)))
        labels = _field(batch, self.label_field, "label_field")
        outputs = self.softmax(features, labels=labels, weights=example_weights(batch, len(labels)))
        outputs.logits = self.softmax.logits(features)
        return outputs

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics `loss`, `xent` (nats), `accuracy`, `top_<k>_accuracy`; classes `[batch]`."""
        labels = _field(batch, self.label_field, "label_field")
        weights, total = example_weights(batch, len(labels)), predictions.total_weight
        accuracy = weighted_mean(predictions.correct.astype(jnp.float32), weights)
        metrics = {
            "loss": WeightedScalar.of(predictions.loss, total),
            "xent": WeightedScalar.of(predictions.xent, total),
            "accuracy": WeightedScalar.of(accuracy, total),
        }
        if self.top_k is not None:
            _, likeliest = jax.lax.top_k(predictions.logits, self.top_k)
            found = jnp.any(likeliest == labels[:, None], axis=-1).astype(jnp.float32)
            name = f"top_{self.top_k}_accuracy"
            metrics[name] = WeightedScalar.of(weighted_mean(found, weights), total)
        return metrics, NestedMap(
            classes=jnp.argmax(predictions.logits, axis=-1),
            per_example_xent=predictions.per_token_xent,
            scores=-predictions.per_token_xent,
        )


def _field(batch: NestedMap, name: str, field: str) -> jax.Array:
    if name not in batch:
        raise ValueError(f"{field}={name!r} is not in the batch{near_names(name, batch)}")
    value: jax.Array = batch[name]
    return value
