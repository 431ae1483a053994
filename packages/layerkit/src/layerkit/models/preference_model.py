"""DpoModel: a language model trained on which of two answers people prefer, without a reward model.

With r = log p(answer) under the model minus log p(answer) under a reference that does not change,
and h = r(chosen) − r(rejected), the losses are

    sigmoid   −(1 − ε)·log σ(β·h) − ε·log σ(−β·h)     DPO (Rafailov et al., 2023, arXiv:2305.18290);
                                                      ε > 0 is its conservative form
    hinge     max(0, 1 − β·h)                         SLiC (Zhao et al., 2023, arXiv:2305.10425)
    ipo       (h − 1/(2β))²                           IPO (Azar et al., 2023, arXiv:2310.12036); its
                                                      log p is the mean over the answer's tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import instance_field, sub_config_field
from layerkit.decoding.loop import SampleDecoder
from layerkit.layers.losses import weighted_mean
from layerkit.models.example_weights import example_weights
from layerkit.models.prompt_decoding import continue_prompts
from layerkit.models.token_metrics import row_scores
from layerkit.models.transformer_lm import TransformerLm
from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap

_SIDES = ("chosen", "rejected")
_REFERENCE_KEYS = tuple(f"{side}_reference_log_probs" for side in _SIDES)
REFERENCES = ("frozen", "batch", "none")


def _sigmoid(h: jax.Array, beta: float, smoothing: float) -> jax.Array:
    preferred, other = jax.nn.log_sigmoid(beta * h), jax.nn.log_sigmoid(-beta * h)
    return -(1.0 - smoothing) * preferred - smoothing * other


def _hinge(h: jax.Array, beta: float, smoothing: float) -> jax.Array:
    return jax.nn.relu(1.0 - beta * h)


def _ipo(h: jax.Array, beta: float, smoothing: float) -> jax.Array:
    return jnp.square(h - 1.0 / (2.0 * beta))


_LOSSES: dict[str, Callable[[jax.Array, float, float], jax.Array]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
}


class DpoModel(BaseModel):
    """Direct preference optimisation of a language model.

    A batch has `chosen` and `rejected`, each with `ids`, `labels` int32 and `weights` float32
    `[batch, length]` (0 on the prompt and on padding), prompts and answers in one row, and, where
    padding must not be read, `segment_ids` and `segment_pos`. Optional are `weights` float32
    `[batch]` of the pairs, `eval_sample_weights`, 0 for those that only fill up the batch, and, for
    `reference="batch"`, `chosen_reference_log_probs` and `rejected_reference_log_probs` float32
    `[batch]`. For decoding a batch has `ids` and `prompt_lengths`, as for `LanguageModel`.

    Attributes:
      lm_tpl: The network that is trained.
      reference: Where log p of the reference comes from: `frozen` keeps a second network,
        `reference_lm`, which starts as a copy of `lm` (drawn or loaded) and which the learner has
        to freeze; `batch` takes numbers computed beforehand; `none` counts it as 0.
      loss: `sigmoid`, `hinge` or `ipo`.
      beta: How far the model may go from the reference: the smaller, the farther.
      label_smoothing: ε, the part of the preferences believed to be wrong; of `sigmoid` alone.
      decoder: How the policy's continuations are chosen: `SampleDecoder` or `BeamSearch`.

    Raises:
      ValueError: an unknown reference or loss, a beta that is not positive, or a label smoothing
        out of range or for a loss without it.
    """

    reported_metric: ClassVar[str | None] = "reward_accuracy"

    lm_tpl: Any = sub_config_field(TransformerLm.HParams)
    reference: str = "frozen"
    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    decoder: Any = instance_field(SampleDecoder.HParams)

    def setup(self) -> None:
        self._check_fields()
        self.create_child("lm", self.lm_tpl)
        if self.reference == "frozen":
            self.create_child("reference_lm", self.lm_tpl, train=False)

    @property
    @nn.nowrap
    def frozen_weights(self) -> tuple[str, ...]:
        return ("reference_lm/.*",) if self.reference == "frozen" else ()

    @property
    @nn.nowrap
    def initial_copies(self) -> Mapping[str, str]:
        return {"reference_lm": "lm"} if self.reference == "frozen" else {}

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Log-probabilities of the answers under the model and under the reference.

        Args:
          batch: `chosen` and `rejected`, of rows `[batch, length]`; see the class.

        Returns:
          A NestedMap of `policy` and `reference`, each float32 `[2, batch]`: chosen, rejected.

        Raises:
          ValueError: the batch lacks a key that the loss needs.
        """
        needed = [f"{side}.{name}" for side in _SIDES for name in ("ids", "labels", "weights")]
        if self.reference == "batch":
            needed += _REFERENCE_KEYS
        self.check_batch(batch, *needed)
        pairs = jax.tree.map(
            lambda chosen, rejected: jnp.concatenate([chosen, rejected]),
            *(_answer(batch, side) for side in _SIDES),
        )
        policy = self._log_probs(self.lm, pairs)
        if self.reference == "frozen":
            # On its own: auxiliary losses and summaries of the reference are nobody's.
            reference_lm, variables = self.reference_lm.unbind()
            reference = self._log_probs(partial(reference_lm.apply, variables), pairs)
        elif self.reference == "batch":
            reference = jnp.stack([batch[name] for name in _REFERENCE_KEYS])
        else:
            reference = jnp.zeros_like(policy)
        return NestedMap(policy=policy, reference=jax.lax.stop_gradient(reference))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Metrics over pairs, and rewards per pair `[batch]`.

        `reward_accuracy` is how often the chosen answer has the higher reward β·r, and
        `reward_margin` by how much on average.
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
        return continue_prompts(self, self.lm, batch)

    def _log_probs(self, lm: Any, pairs: NestedMap) -> jax.Array:
        outputs = lm(**pairs)
        weights = pairs.weights.astype(jnp.float32)
        log_probs = row_scores(outputs.per_token_xent, weights)
        if self.loss == "ipo":
            log_probs /= jnp.maximum(jnp.sum(weights, axis=-1), 1.0)
        return log_probs.reshape(2, -1)

    def _check_fields(self) -> None:
        for field, names in (("reference", REFERENCES), ("loss", _LOSSES)):
            value = getattr(self, field)
            if value not in names:
                raise ValueError(
                    f"{self.path_name}: {field}={value!r}{near_names(str(value), names)} It is one"
                    f" of {', '.join(names)}."
                )
        if self.beta <= 0:
            raise ValueError(f"{self.path_name}: beta={self.beta} must be positive")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"{self.path_name}: label_smoothing={self.label_smoothing}, expected 0 <= ε < 0.5"
            )
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"{self.path_name}: label_smoothing={self.label_smoothing} is of loss='sigmoid'"
                f" alone, not of {self.loss!r}"
            )


def _answer(batch: NestedMap, side: str) -> NestedMap:
    rows = batch[side]
    names = ("ids", "labels", "weights", "segment_ids", "segment_pos")
    return NestedMap({name: rows[name] for name in names if name in rows})
