"""ContrastiveModel: two towers that map images and texts to comparable vectors (CLIP, SigLIP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit.layers.vision.contrastive import ContrastiveLoss
from layerkit.layers.vision.vision_transformer import VisionTransformer
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.attention.masks import segments_from_paddings
from layerkit.ops.losses.softmax import weighted_mean


class ContrastiveModel(BaseModel):
    """A model that is trained to recognize which text belongs to which image.

    A batch has `images` `[batch, height, width, channels]` and `ids` int32 `[batch, length]`, and
    may have `paddings` `[batch, length]` (1 is padding, which nothing attends to), `weights` and
    `eval_sample_weights` `[batch]`. The metric `accuracy` is the share of images whose text is the
    most similar one of the batch.

    Attributes:
      vision_tpl: Network from images to features `[batch, dims]`.
      text_tpl: Network of the texts, causal or not, of which the hidden states are read.
      text_end_id: Id of the token whose hidden state is that of the text, at its first position
        (CLIP); None for the last token, or the last position without `paddings` (SigLIP).
      embed_dims: Size of the vectors that are compared.
      image_projection_tpl: Map of the features of images to `embed_dims`; None for none.
      text_projection_tpl: Map of the features of texts to `embed_dims`; None for none.
      loss_tpl: Loss with the temperature.
    """

    reported_metric: ClassVar[str | None] = "loss"
    metric_units: ClassVar[Mapping[str, str]] = {"loss": "nats per example"}

    vision_tpl: Config[VisionTransformer] = sub_config_field(VisionTransformer.HParams)
    text_tpl: Config[TransformerLm] = sub_config_field(TransformerLm.HParams)
    text_end_id: int | None = None
    embed_dims: int = 0
    image_projection_tpl: Config[BaseLayer] | None = sub_config_field(Linear.HParams)
    text_projection_tpl: Config[BaseLayer] | None = sub_config_field(Linear.HParams)
    loss_tpl: Config[ContrastiveLoss] = sub_config_field(ContrastiveLoss.HParams)

    def setup(self) -> None:
        """Create the towers, the projections and the loss."""
        self.create_child("vision", self.vision_tpl)
        self.create_child("text", self.text_tpl)
        for name, tower in (("image", self.vision), ("text", self.text)):
            projection = getattr(self, f"{name}_projection_tpl")
            if projection is not None:
                sizes = {"input_dims": tower.model_dims, "output_dims": self.embed_dims}
                self.create_child(f"{name}_projection", projection, **sizes)
        self.create_child("loss", self.loss_tpl, fprop_dtype=jnp.float32)

    def embed_images(self, images: jax.Array) -> jax.Array:
        """Map images `[batch, height, width, channels]` to vectors `[batch, embed_dims]`."""
        return self._project("image", self.vision(images))

    def embed_texts(self, ids: jax.Array, *, paddings: jax.Array | None = None) -> jax.Array:
        """Map token ids and paddings, both `[batch, length]`, to vectors `[batch, embed_dims]`."""
        segments = None if paddings is None else segments_from_paddings(paddings)
        hidden = self.text.hidden(ids, segment_ids=segments, segments_are_runs=False)
        if self.text_end_id is not None:
            place = jnp.argmax(ids == self.text_end_id, axis=1)
        elif segments is not None:
            place = jnp.max(jnp.arange(ids.shape[1]) * segments, axis=1)
        else:
            place = jnp.full(len(ids), -1)
        return self._project("text", hidden[jnp.arange(len(ids)), place])

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute `images` and `texts` `[batch, embed_dims]`, and the outputs of the loss."""
        images = self.embed_images(batch.images)
        texts = self.embed_texts(batch.ids, paddings=batch.get("paddings"))
        weights = example_weights(batch, len(images))
        return NestedMap(self.loss(images, texts, weights=weights), images=images, texts=texts)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss` (nats) and `accuracy`, and the vectors and losses of each pair."""
        weights = example_weights(batch, len(predictions.images))
        values = {"loss": predictions.per_example_loss, "accuracy": predictions.correct}
        means = {name: weighted_mean(x.astype(jnp.float32), weights) for name, x in values.items()}
        total = weights.sum()
        return {name: WeightedScalar.of(x, total) for name, x in means.items()}, predictions

    def _project(self, name: str, features: jax.Array) -> Any:
        if getattr(self, f"{name}_projection_tpl") is None:
            return features
        return getattr(self, f"{name}_projection")(features)
