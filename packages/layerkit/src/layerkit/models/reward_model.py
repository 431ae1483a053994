"""RewardModel: a language model with a head that gives an answer a number, for other trainers."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics
from layerkit.base.weights import WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit.models.preference_model import join_sides, mean_metric, reward_metrics
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.preference_losses import bradley_terry_loss


class RewardModel(BaseModel):
    """A language model with a scalar head `score`, trained on pairs of answers.

    A batch is that of `PreferenceModel`, with one text in each row and with `segment_ids`. The
    reward of an answer is read at its last token, which `ids` hold in the position behind the last
    label, as `lm_features` makes them. `export_model` writes it as a sequence classifier.

    Attributes:
      lm_tpl: Causal network whose hidden states the head reads.
      centering: Weight of the squared sum of both rewards; 0 leaves their level free.
    """

    reported_metric: ClassVar[str | None] = "reward_accuracy"

    lm_tpl: Config[BaseLayer] = sub_config_field(TransformerLm.HParams)
    centering: float = 0.0

    def setup(self) -> None:
        """Create the network and the head."""
        self.create_child("lm", self.lm_tpl)
        sizes = {"input_dims": self.lm.model_dims, "output_dims": 1}
        axes, init = ("embed", None), WeightInit.Gaussian(0.02)
        # In bfloat16 many rewards would be equal.
        head = Linear.HParams.config(weight_axes=axes, weight_init=init, fprop_dtype=jnp.float32)
        self.create_child("score", head, **sizes)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute `rewards` float32 `[2, batch]` of the chosen and the rejected answers."""
        pairs = join_sides(batch)
        positions = jnp.arange(1, pairs.ids.shape[1] + 1)
        last = jnp.max(jnp.where(pairs.segment_ids > 0, positions, 0), axis=1)
        # No position sees the padding behind it.
        hidden = self.lm.hidden(pairs.ids)
        last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        return NestedMap(rewards=self.score(last_hidden).reshape(2, -1))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics and outputs of `PreferenceModel.compute_loss`."""
        chosen, rejected = predictions.rewards
        weights = example_weights(batch, len(chosen))
        losses = bradley_terry_loss(chosen, rejected, centering=self.centering)
        metrics = {"loss": mean_metric(losses, weights)}
        metrics |= reward_metrics(chosen, rejected, weights)
        return metrics, NestedMap(chosen_rewards=chosen, rejected_rewards=rejected)
