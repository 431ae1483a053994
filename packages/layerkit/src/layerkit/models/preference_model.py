"""Language models trained on preferences, by the losses of `layerkit.ops.losses.preference`.

`PreferenceModel` on pairs and `KtoModel` on judgements train a policy near a fixed reference.
`RewardModel` gives an answer a number, for other trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.base.weights import WeightInit
from layerkit.config import Config, sub_config_field, walk_configs
from layerkit.config.checks import check_positive, require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit.layers.quantization.lora import is_lora, zero_adapters
from layerkit.layers.transformer.transformer import drop_none
from layerkit.models.language_model import DecodedLm
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import example_weights, row_scores
from layerkit.ops.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_divergence,
    kto_loss,
    odds_ratio_loss,
    simpo_loss,
)
from layerkit.ops.losses.softmax import weighted_mean

# Entries of rows that a network reads.
_ENTRIES = ("ids", "labels", "weights", "segment_ids", "segment_pos", "images")
# Losses of mean log-probabilities per token.
_PER_TOKEN = ("ipo", "orpo", "simpo")


class PolicyModel(DecodedLm):
    """Base class of models that train a language model, the policy, near a fixed reference.

    Rows have the arrays of `LanguageModel` `[batch, length]`, with prompt and answer in one row and
    `weights` of 0 on the prompt and on padding. They may have `images`.

    Attributes:
      reference: Source of the log-probabilities of the reference model. `frozen` keeps a second
        network, `reference_lm`, a copy of the initial `lm`, which is not trained. `base`
        is the policy without its LoRA adapters, for learners that train these alone. `batch` reads
        precomputed values from the batch. `none` uses 0.
      beta: Strength β of the penalty on deviations from the reference; a positive number.

    Raises:
      ConfigError: `reference` is `base` without adapters, or `beta` is not positive.
    """

    reference: Literal["frozen", "base", "batch", "none"] = "frozen"
    beta: float = 0.1

    def setup(self) -> None:
        """Check the fields and create the networks."""
        check_positive(self, beta=self.beta)
        policy = cast(Any, self.lm_tpl.clone())
        if getattr(policy, "mtp_tpl", None) is not None:
            policy.mtp_tpl.loss_weight = 0.0  # It would make rejected answers more probable.
        self.create_child("lm", policy)
        if self.reference == "frozen":
            self.create_child("reference_lm", self.lm_tpl, train=False)
        has_adapters = self.reference != "base" or any(map(is_lora, walk_configs(self.lm_tpl)))
        expected = "another one, since lm_tpl has no LoRA adapters"
        require(has_adapters, self, "reference", self.reference, expected)

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """Regular expression of the paths of `reference_lm`; empty if there is no such network."""
        return ("reference_lm/.*",) if self.reference == "frozen" else ()

    @property
    def initial_copies(self) -> Mapping[str, str]:
        """Map of the copy `reference_lm` to its original `lm`; empty without a `reference_lm`."""
        return {"reference_lm": "lm"} if self.reference == "frozen" else {}

    def _reference_log_probs(self, rows: NestedMap) -> jax.Array:
        """Return log p of the answers under the reference, float32 `[rows]`, without gradient."""
        if self.reference == "none":
            return jnp.zeros(len(rows.ids), jnp.float32)
        if self.reference == "frozen":
            return _log_probs(_constant(self.reference_lm), rows)
        base = _constant(self.lm)
        return _log_probs(partial(base.func, *map(zero_adapters, base.args)), rows)


class PreferenceModel(PolicyModel):
    """A language model trained on pairs of answers, of which one is preferred.

    A batch has the rows `chosen` and `rejected`; see `PolicyModel`. It may have the weights of
    `example_weights`. `reference="batch"` requires `chosen_reference_log_probs` and
    `rejected_reference_log_probs` float32 `[batch]`, sums over the tokens with weights.

    Attributes:
      loss: `sigmoid` (DPO), `hinge` (SLiC), `ipo`, `simpo` or `orpo`. The last two have no
        reference. The last three read means over tokens instead of sums. `orpo` adds the mean
        cross-entropy of the tokens of the chosen answers. For exact means over microbatches, the
        `loss_weights` of the task are then 1 for `odds_ratio` and for `xent`.
      label_smoothing: ε, the assumed fraction of pairs whose preference is wrong, in [0, 0.5). Only
        `sigmoid` supports values above 0.
      gamma: Least difference of the rewards to aim for. Only `simpo` supports another than 0.

    Raises:
      ConfigError: `loss` has no reference but the model has, or does not support `label_smoothing`
        or `gamma`.
    """

    reported_metric: ClassVar[str | None] = "reward_accuracy"

    loss: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"] = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.0

    def setup(self) -> None:
        """Check the fields and create the networks."""
        super().setup()
        loss, smoothing = self.loss, self.label_smoothing
        is_valid = 0.0 <= smoothing < 0.5 if loss == "sigmoid" else smoothing == 0
        expected = "a number in [0, 0.5), and 0 for other losses than sigmoid"
        require(is_valid, self, "label_smoothing", smoothing, expected)
        is_valid = loss == "simpo" or self.gamma == 0
        require(is_valid, self, "gamma", self.gamma, f"0 for the loss {loss}")
        is_valid = self.reference == "none" or loss not in ("simpo", "orpo")
        require(is_valid, self, "reference", self.reference, f"none for the loss {loss}")

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute log-probabilities of the answers, `policy` and `reference`, and `num_tokens`.

        All are float32 `[2, batch]` (chosen, rejected), and `num_tokens` are sums of the weights.

        Raises:
          MissingKeyError: The batch lacks a key that the loss needs.
        """
        pairs = _join_sides(batch)
        if self.reference == "batch":
            names = ("chosen_reference_log_probs", "rejected_reference_log_probs")
            reference = jnp.concatenate([batch[name] for name in names])
        else:
            reference = self._reference_log_probs(pairs)
        sides = NestedMap(
            policy=_log_probs(self.lm, pairs),
            reference=reference,
            num_tokens=jnp.sum(pairs.weights.astype(jnp.float32), axis=-1),
        )
        return jax.tree.map(lambda x: x.reshape(2, -1), sides)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics over pairs, and the rewards β·r of both answers of each pair.

        `reward_accuracy` is the share of pairs whose chosen answer has the higher reward.
        `reward_margin` is the mean of the chosen answer's reward minus that of the rejected one.
        The second result has `chosen_rewards` and `rejected_rewards`, both float32 `[batch]`.
        """
        log_ratios = predictions.policy - predictions.reference
        if self.loss in _PER_TOKEN:
            log_ratios /= jnp.maximum(predictions.num_tokens, 1.0)
        (chosen, rejected), beta = log_ratios, self.beta
        weights = example_weights(batch, len(chosen))
        rewards = beta * chosen, beta * rejected
        metrics, outputs = _pair_results(*rewards, weights)
        if self.loss == "orpo":
            num_tokens = weights * predictions.num_tokens[0]
            # The mean is over all tokens, so long answers count more than short ones.
            xent = WeightedScalar.of(weighted_mean(-chosen, num_tokens), jnp.sum(num_tokens))
            odds = _mean(odds_ratio_loss(chosen, rejected, beta=beta), weights)
            loss = WeightedScalar.of(odds.value + xent.value, odds.weight)
            return {"loss": loss, "odds_ratio": odds, "xent": xent, **metrics}, outputs
        losses: dict[str, Any] = {
            "sigmoid": partial(dpo_loss, label_smoothing=self.label_smoothing),
            "hinge": hinge_loss,
            "ipo": ipo_loss,
            "simpo": partial(simpo_loss, gamma=self.gamma),
        }
        loss = _mean(losses[self.loss](chosen - rejected, beta=beta), weights)
        return {"loss": loss, **metrics}, outputs


class KtoModel(PolicyModel):
    """A language model trained on single judgements of answers, desirable or not, by KTO.

    A batch has the rows `answer` (see `PolicyModel`) and `is_desirable` `[batch]`, which is 0 for
    undesirable answers. It may have the weights of `example_weights`. The divergence from the
    reference is estimated from each prompt of the batch, or microbatch, with the answer of the row
    before it.

    Attributes:
      desirable_weight: Weight of desirable answers. KTO advises to make desirable_weight ×
        (number of desirable answers) 1 to 4/3 of the same product for undesirable ones.
      undesirable_weight: Weight of undesirable answers.
    """

    reported_metric: ClassVar[str | None] = "reward_margin"

    # Mismatched answers depend on the batch, so the reference cannot be stored.
    reference: Literal["frozen", "base", "none"] = "frozen"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute log ratios of the answers and of mismatched ones, each float32 `[batch]`."""
        rows, size = batch.answer, len(batch.answer.ids)
        expected = "at least 2, also in a microbatch, to mismatch answers"
        require(size > 1 or not self.is_training, self, "rows of a batch", size, expected)
        mismatched = mismatch_answers(rows)
        constant = _log_probs(_constant(self.lm), mismatched)
        return NestedMap(
            log_ratios=_log_probs(self.lm, rows) - self._reference_log_probs(rows),
            mismatched=constant - self._reference_log_probs(mismatched),
        )

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics over judgements, and `rewards` β·r, float32 `[batch]`.

        `divergence` is the estimate of KL(policy ‖ reference). `reward_margin` is the mean reward
        of desirable answers minus that of others.
        """
        log_ratios, is_desirable = predictions.log_ratios, batch.is_desirable.astype(bool)
        weights = example_weights(batch, len(log_ratios))
        neighbors = weights * jnp.roll(weights, 1)
        divergence = kto_divergence(predictions.mismatched, neighbors)
        factors = jnp.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        losses = factors * kto_loss(log_ratios, is_desirable, divergence, beta=self.beta)
        rewards = self.beta * log_ratios
        desirable, other = (_mean(rewards, weights * one) for one in (is_desirable, ~is_desirable))
        margin = desirable.value - other.value
        metrics = {
            "loss": _mean(losses, weights),
            "divergence": WeightedScalar.of(divergence, jnp.sum(neighbors)),
            "desirable_reward": desirable,
            "undesirable_reward": other,
            "reward_margin": WeightedScalar.of(margin, jnp.minimum(desirable.weight, other.weight)),
        }
        return metrics, NestedMap(rewards=rewards)


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
        pairs = _join_sides(batch)
        positions = jnp.arange(1, pairs.ids.shape[1] + 1)
        last = jnp.max(jnp.where(pairs.segment_ids > 0, positions, 0), axis=1)
        # No position sees the padding behind it.
        hidden = self.lm.hidden(pairs.ids, **drop_none(images=pairs.get("images")))
        last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        return NestedMap(rewards=self.score(last_hidden).reshape(2, -1))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics and outputs of `PreferenceModel.compute_loss`."""
        chosen, rejected = predictions.rewards
        weights = example_weights(batch, len(chosen))
        losses = bradley_terry_loss(chosen, rejected, centering=self.centering)
        metrics, outputs = _pair_results(chosen, rejected, weights)
        return {"loss": _mean(losses, weights), **metrics}, outputs


def mismatch_answers(rows: NestedMap) -> NestedMap:
    """Return rows with the prompt of each row and the answer of the row before it, cut at the end.

    `rows` have `ids`, `labels` and `weights` `[batch, length]`, as the new rows. An answer begins
    at the first label with a weight. The answer of the last row follows the first prompt. Images
    are those of the prompts.
    """
    positions = jnp.arange(rows.ids.shape[1])
    starts = jnp.argmax(rows.weights > 0, axis=1, keepdims=True)
    shift = jnp.roll(starts, 1, axis=0) - starts
    # Positions behind the end of the other row have no weight.
    source = jnp.clip(positions + shift, 0, len(positions) - 1)
    is_inside = (positions >= starts) & (positions + shift < len(positions))

    def take(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.roll(x, 1, axis=0), source, axis=1)

    labels = jnp.where(positions < starts, rows.labels, take(rows.labels))
    weights = jnp.where(is_inside, take(rows.weights), 0)
    ids = jnp.concatenate([rows.ids[:, :1], labels[:, :-1]], axis=1)
    images = drop_none(images=rows.get("images"))
    return NestedMap(ids=ids, labels=labels, weights=weights, **images)


def _join_sides(batch: NestedMap) -> NestedMap:
    """Return the rows `[2·batch, length]` of the chosen answers, then those of the rejected."""
    return jax.tree.map(lambda *both: jnp.concatenate(both), batch.chosen, batch.rejected)


def _constant(lm: Any) -> Any:
    """Return a network without dropout, gradients, auxiliary losses and summaries."""
    lm, variables = lm.unbind()
    return partial(lm.clone(train=False).apply, jax.lax.stop_gradient(variables))


def _log_probs(lm: Any, rows: NestedMap) -> jax.Array:
    """Return the log-probability of the answer of each row, float32 `[rows]`."""
    entries = {name: rows[name] for name in _ENTRIES if name in rows}
    return row_scores(lm(**entries).per_token_xent, rows.weights)


def _mean(values: jax.Array, weights: jax.Array) -> WeightedScalar:
    return WeightedScalar.of(weighted_mean(values, weights), jnp.sum(weights))


def _pair_results(
    chosen: jax.Array, rejected: jax.Array, weights: jax.Array
) -> tuple[Metrics, NestedMap]:
    """Return metrics and outputs of the rewards float32 `[batch]` of both answers of pairs."""
    metrics = {
        "reward_accuracy": (chosen > rejected).astype(jnp.float32),
        "reward_margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    outputs = NestedMap(chosen_rewards=chosen, rejected_rewards=rejected)
    return {name: _mean(values, weights) for name, values in metrics.items()}, outputs
