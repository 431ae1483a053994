"""DpoModel: a language model trained on preferences between two answers, without a reward model.

Let r(answer) be log p(answer) under the trained model (the policy) minus log p(answer) under a
fixed reference model, and h = r(chosen) − r(rejected). The losses are

    sigmoid   −(1 − ε)·log σ(β·h) − ε·log σ(−β·h)     DPO (Rafailov et al., 2023, arXiv:2305.18290);
                                                      ε > 0 gives conservative DPO
    hinge     max(0, 1 − β·h)                         SLiC (Zhao et al., 2023, arXiv:2305.10425)
    ipo       (h − 1/(2β))²                           IPO (Azar et al., 2023, arXiv:2310.12036);
                                                      here log p is a mean over tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, instance_field, sub_config_field
from layerkit.config.checks import check_positive, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.decoder import Decoder
from layerkit.decoding.loop import SampleDecoder, SampledRows
from layerkit.models.language_model import prompts_of_batch
from layerkit.models.transformer_lm import TransformerLm
from layerkit.models.weighted_metrics import example_weights, row_scores
from layerkit.ops.losses import weighted_mean

_SIDES = ("chosen", "rejected")
_REFERENCE_KEYS = tuple(f"{side}_reference_log_probs" for side in _SIDES)


def _sigmoid(h: jax.Array, beta: float, smoothing: float) -> jax.Array:
    preferred, other = jax.nn.log_sigmoid(beta * h), jax.nn.log_sigmoid(-beta * h)
    return -(1.0 - smoothing) * preferred - smoothing * other


_LOSSES: dict[str, Callable[[jax.Array, float, float], jax.Array]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda h, beta, smoothing: jax.nn.relu(1.0 - beta * h),
    "ipo": lambda h, beta, smoothing: jnp.square(h - 1.0 / (2.0 * beta)),
}


class DpoModel(BaseModel):
    """A language model trained by direct preference optimization.

    For training and evaluation, a batch has the entries `chosen` and `rejected`. Each has `ids`
    int32, `labels` int32 and `weights` float32, all `[batch, length]`, with prompt and answer in
    one row. These `weights` are 0 on the prompt and on padding. Each may also have `segment_ids`
    and `segment_pos`, which mask padding. The batch itself may have `weights` float32 `[batch]`,
    the weights of the pairs, and `eval_sample_weights` float32 `[batch]`, which is 0 for rows of
    padding. `reference="batch"` requires `chosen_reference_log_probs` and
    `rejected_reference_log_probs` float32 `[batch]`, sums over the tokens with weights, as `scores`
    returns; with `loss="ipo"`, means over these tokens. For decoding, a batch has `ids` and
    `prompt_lengths`, as for `LanguageModel`.

    Attributes:
      lm_tpl: Trained network, the policy.
      reference: Source of the log-probabilities of the reference model. `frozen` keeps a second
        network, `reference_lm`, which starts with the initial weights of `lm`, random or loaded.
        The learner must freeze it. `batch` reads precomputed values from the batch. `none` uses 0.
      loss: `sigmoid`, `hinge` or `ipo`.
      beta: Strength β of the penalty on deviations from the reference; a positive number.
      label_smoothing: ε, the assumed fraction of pairs whose preference is wrong, in [0, 0.5). Only
        `sigmoid` supports values above 0.
      decoder: Decoder of the policy, a `SampleDecoder` or `BeamSearch`.

    Raises:
      ConfigError: `reference` or `loss` is unknown, `beta` is not positive, or `label_smoothing` is
        out of range or not supported by the loss.
    """

    reported_metric: ClassVar[str | None] = "reward_accuracy"

    lm_tpl: Config[BaseLayer] = sub_config_field(TransformerLm.HParams)
    reference: Literal["frozen", "batch", "none"] = "frozen"
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    decoder: Annotated[Any, Decoder] = instance_field(SampleDecoder.HParams)

    def setup(self) -> None:
        """Check the fields and create the networks."""
        self._check_fields()
        policy = cast(Any, self.lm_tpl.clone())
        if getattr(policy, "mtp_tpl", None) is not None:
            policy.mtp_tpl.loss_weight = 0.0  # It would make rejected answers more probable.
        self.create_child("lm", policy)
        if self.reference == "frozen":
            self.create_child("reference_lm", self.lm_tpl, train=False)

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        """Regular expression of the paths of `reference_lm`; empty if there is no such network."""
        return ("reference_lm/.*",) if self.reference == "frozen" else ()

    @property
    def initial_copies(self) -> Mapping[str, str]:
        """Map of the copy `reference_lm` to its original `lm`; empty without a `reference_lm`."""
        return {"reference_lm": "lm"} if self.reference == "frozen" else {}

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute log-probabilities of the answers under the policy and the reference.

        Args:
          batch: `chosen` and `rejected` with rows `[batch, length]`; see the class.

        Returns:
          A NestedMap of `policy` and `reference`, each float32 `[2, batch]` (chosen, rejected).

        Raises:
          MissingKeyError: The batch lacks a key that the loss needs.
        """
        pairs = jax.tree.map(
            lambda chosen, rejected: jnp.concatenate([chosen, rejected]),
            *(_answer(batch, side) for side in _SIDES),
        )
        policy = self._log_probs(self.lm, pairs)
        if self.reference == "frozen":
            # The network is unbound so that its auxiliary losses and summaries are not collected.
            reference_lm, variables = self.reference_lm.unbind()
            reference = self._log_probs(partial(reference_lm.apply, variables), pairs)
        elif self.reference == "batch":
            reference = jnp.stack([batch[name] for name in _REFERENCE_KEYS])
        else:
            reference = jnp.zeros_like(policy)
        return NestedMap(policy=policy, reference=jax.lax.stop_gradient(reference))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics over pairs, and the rewards β·r of both answers of each pair.

        `reward_accuracy` is the share of pairs whose chosen answer has the higher reward.
        `reward_margin` is the mean of the chosen answer's reward minus that of the rejected one.
        The second result has `chosen_rewards` and `rejected_rewards`, both float32 `[batch]`.
        """
        rewards = self.beta * (predictions.policy - predictions.reference)
        margin = rewards[0] - rewards[1]
        losses = _LOSSES[self.loss](margin / self.beta, self.beta, self.label_smoothing)
        weights = example_weights(batch, len(margin))
        means = {
            "loss": losses,
            "reward_accuracy": (margin > 0).astype(jnp.float32),
            "reward_margin": margin,
            "chosen_reward": rewards[0],
            "rejected_reward": rewards[1],
        }
        total = jnp.sum(weights)
        metrics = {
            name: WeightedScalar.of(weighted_mean(values, weights), total)
            for name, values in means.items()
        }
        return metrics, NestedMap(chosen_rewards=rewards[0], rejected_rewards=rewards[1])

    def decode(self, batch: NestedMap) -> NestedMap:
        """Continue prompts with the policy; see `LanguageModel.decode`."""
        return prompts_of_batch(self, self.lm, batch).decode()

    def start_decoding(self, batch: NestedMap) -> SampledRows:
        """Return the rows of a batch of prompts; see `LanguageModel.start_decoding`."""
        return prompts_of_batch(self, self.lm, batch).start()

    def _log_probs(self, lm: Any, pairs: NestedMap) -> jax.Array:
        outputs = lm(**pairs)
        weights = pairs.weights.astype(jnp.float32)
        log_probs = row_scores(outputs.per_token_xent, weights)
        if self.loss == "ipo":
            log_probs /= jnp.maximum(jnp.sum(weights, axis=-1), 1.0)
        return log_probs.reshape(2, -1)

    def _check_fields(self) -> None:
        check_positive(self, beta=self.beta)
        smoothing, expected = self.label_smoothing, "a number in [0, 0.5), and 0 for other losses"
        is_valid = 0.0 <= smoothing < 0.5 if self.loss == "sigmoid" else smoothing == 0
        require(is_valid, self, "label_smoothing", smoothing, expected)


def _answer(batch: NestedMap, side: str) -> NestedMap:
    rows = batch[side]
    names = ("ids", "labels", "weights", "segment_ids", "segment_pos")
    return NestedMap({name: rows[name] for name in names if name in rows})
