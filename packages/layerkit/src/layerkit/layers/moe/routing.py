"""Routing of tokens to experts.

A router scores every expert for every token and chooses the best few (Shazeer et al., 2017,
arXiv:1701.06538). The routers of published models are configurations of `TopKRouter`, of which
docs/mixture_of_experts.md has a table. In `ExpertChoiceRouter` experts choose tokens instead.

Routing is computed in float32 for every compute dtype, since choices depend on small differences.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from layerkit.base.base_layer import BaseLayer
from layerkit.base.step_reports import sow_total
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import (
    check_divisible,
    check_last_axis,
    check_non_negative,
    check_positive,
    check_rates,
    check_sizes,
    require,
)
from layerkit.config.hparams import Conditions
from layerkit.ops.remat import save_inputs
from layerkit.ops.soft_cap import soft_cap


@dataclasses.dataclass(frozen=True)
class _SignStep:
    """A step of biases `[..., experts]` by ±rate, toward the mean of the load of that shape."""

    rate: float

    def __call__(self, bias: jax.Array, load: jax.Array) -> jax.Array:
        return bias + self.rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


@struct.dataclass
class Routing:
    """The chosen experts of tokens; the leading axes `...` are those of the tokens.

    Attributes:
      experts: Chosen experts, best first, int32 `[..., choices]`; `num_experts` for padding, which
        has no expert.
      weights: Weight of the output of each chosen expert, float32 `[..., choices]`.
      logits: Logits without noise, float32 `[..., num_experts]`.
      probs: Scores of all experts, normalized to the sum 1, float32 `[..., num_experts]`.
      is_token: bool `[...]`, False for padding; None if there is no padding.
    """

    experts: jax.Array
    weights: jax.Array
    logits: jax.Array
    probs: jax.Array
    is_token: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        """Static number of experts."""
        return self.logits.shape[-1]


@struct.dataclass
class ExpertRouting:
    """The tokens that experts chose, each within one group of tokens.

    Attributes:
      tokens: Index of each chosen token in its group, best first, int32 `[groups, experts,
        capacity]`; the size of a group for a slot without a token.
      weights: Weight of the output for each chosen token, float32 `[groups, experts, capacity]`.
      logits: Logits without noise, float32 `[groups, tokens, experts]`.
      is_token: bool `[groups, tokens]`, False for padding; None if there is no padding.
    """

    tokens: jax.Array
    weights: jax.Array
    logits: jax.Array
    is_token: jax.Array | None = None


class BaseRouter(BaseLayer):
    """The base class of routers, with logits x·w in float32.

    Attributes:
      fprop_dtype: Dtype of the weights in the product; float32 by default, independent of the
        compute dtype of the layers above.
      input_dims: Size of the model dimension.
      num_experts: Number of experts.
      jitter: Half-width of the uniform noise 1 ± jitter that multiplies the inputs in training
        (Fedus et al., 2021: Switch).
      logit_cap: Bound of the logits, applied as cap·tanh(logits/cap); None for no bound.
      weight_init: Initializer of `w`; None inherits `params_init`.
      use_bias: Adds a trained bias `b` `[num_experts]` to the logits (gpt-oss).
    """

    fprop_dtype: Any = jnp.float32
    input_dims: int = 0
    num_experts: int = 0
    jitter: float = 0.0
    logit_cap: float | None = None
    weight_init: WeightInit | None = None
    use_bias: bool = False

    def setup(self) -> None:
        """Check the fields and create the weights of the logits."""
        check_sizes(self, input_dims=self.input_dims, num_experts=self.num_experts)
        check_rates(self, jitter=self.jitter)
        check_positive(self, logit_cap=self.logit_cap)
        shape = (self.input_dims, self.num_experts)
        weight = WeightHParams(shape, ("embed", None), init=self.weight_init, decays=True)
        self.create_variable("w", weight)
        if self.use_bias:
            zeros = WeightInit.Constant(0.0)
            self.create_variable("b", WeightHParams((self.num_experts,), (None,), init=zeros))

    @nn.nowrap
    def inputs_and_logits(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return float32 inputs `[..., input_dims]`, with jitter, and logits `[..., experts]`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        if self.jitter > 0.0 and self.is_training:
            low, high = 1.0 - self.jitter, 1.0 + self.jitter
            noise = jax.random.uniform(self.next_prng_key(), x.shape, jnp.float32, low, high)
            x = x.astype(jnp.float32) * noise
        # Otherwise the backward pass would keep a float32 copy of x.
        logits = save_inputs(_float32_product)(x, self.theta.w)
        if self.use_bias:
            logits = logits + self.theta.b
        return x.astype(jnp.float32), soft_cap(logits, self.logit_cap)


class ExpertChoiceRouter(BaseRouter):
    """A router in which each expert chooses the tokens that it processes.

    An expert chooses the tokens of a group to which the softmax over experts gives it the largest
    probabilities, as many as it has slots. All experts have the same load, and a token has between
    no and all experts (Zhou et al., 2022, arXiv:2202.09368).

    A choice depends on all tokens of the group, also on later ones. A causal model that is trained
    so uses information that it lacks when it decodes; `MoeFeedForward` does not decode with it.
    """

    def fprop(
        self, x: jax.Array, *, capacity: int, is_token: jax.Array | None = None
    ) -> ExpertRouting:
        """Choose the tokens of experts.

        Args:
          x: Groups of tokens, `[groups, tokens, input_dims]`.
          capacity: Number of tokens that an expert chooses in a group.
          is_token: bool `[groups, tokens]`, False for padding, which is chosen last and has no
            slot.
        """
        _, logits = self.inputs_and_logits(x)
        probs = jax.nn.softmax(logits).swapaxes(1, 2)
        scores = probs if is_token is None else jnp.where(is_token[:, None], probs, -1.0)
        # XLA partitions a sort along the groups, but gathers the operand of its top-k.
        order = jnp.argsort(jax.lax.stop_gradient(scores), axis=-1, descending=True)
        tokens = order[..., :capacity].astype(jnp.int32)
        weights = jnp.take_along_axis(probs, tokens, axis=-1)
        if is_token is not None:
            has_token = jnp.take_along_axis(is_token[:, None], tokens, axis=-1)
            tokens = jnp.where(has_token, tokens, x.shape[1])
            weights = jnp.where(has_token, weights, 0.0)
        return ExpertRouting(tokens, weights, logits, is_token)


class TopKRouter(BaseRouter):
    """A router that chooses the experts with the best scores of x·w for each token.

    Attributes:
      num_experts_per_token: Number of experts that each token chooses.
      score: `softmax` over the experts, or the `sigmoid` of each logit.
      renormalize: Divides the chosen scores by their sum.
      weight_scale: Factor of the weights (DeepSeek's routed scaling factor).
      use_score_bias: Adds a bias `score_bias` `[num_experts]` to the scores for the choice only.
        The optimizer does not train it (auxiliary-loss-free balancing; Wang et al., 2024,
        arXiv:2408.15664).
      score_bias_rate: Step of the bias at an update: the bias of an expert rises by it if its load
        in the whole batch was below the mean, and falls by it if its load was above.
      num_expert_groups: Number of groups of consecutive experts; see `num_chosen_groups`.
      num_chosen_groups: Number of groups within which a token chooses, those with the largest sums
        of their best scores; None for all.
      num_group_scores: Number of best scores of a group whose sum ranks it: 2 in DeepSeek V3, 1 in
        DeepSeek V2.
      use_noise: Adds normal noise to the logits in training, with a learned standard deviation
        softplus(x·noise_w) (noisy top-k gating; Shazeer et al., 2017).
    """

    used_only_if: ClassVar[Conditions] = {
        "score_bias_rate": "use_score_bias",
        "num_group_scores": "num_chosen_groups",
    }

    num_experts_per_token: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    weight_scale: float = 1.0
    use_score_bias: bool = False
    score_bias_rate: float = 0.0
    num_expert_groups: int = 1
    num_chosen_groups: int | None = None
    num_group_scores: int = 2
    use_noise: bool = False

    def setup(self) -> None:
        """Check the fields and create the weights."""
        super().setup()
        self._check_choices()
        self._check_groups()
        shape, axes = (self.input_dims, self.num_experts), ("embed", None)
        zeros = WeightInit.Constant(0.0)
        if self.use_noise:
            noise = WeightHParams(shape, axes, init=zeros, decays=True)
            self.create_variable("noise_w", noise)
        if self.use_score_bias:
            bias = WeightHParams((self.num_experts,), (None,), init=zeros, dtype=jnp.float32)
            self.create_variable("score_bias", bias, trainable=False)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> Routing:
        """Choose the experts of tokens.

        Args:
          x: Activations `[..., input_dims]`.
          is_token: bool `[...]`, False for padding, which is neither routed nor counted.
        """
        x, logits = self.inputs_and_logits(x)
        noisy = self._add_noise(logits, x)
        scores = self._scores(noisy)
        # Scores of large logits may round to equal numbers.
        by_scores = self.use_score_bias or self.num_chosen_groups is not None
        experts = self._choose(scores if by_scores else noisy)
        weights = jnp.einsum(
            "...ke,...e->...k",
            jax.nn.one_hot(experts, self.num_experts),
            scores,
            precision=jax.lax.Precision.HIGHEST,
        )
        if self.renormalize:
            weights = _normalize_sum(weights)
        if is_token is not None:
            experts = jnp.where(is_token[..., None], experts, self.num_experts)
            weights = jnp.where(is_token[..., None], weights, 0.0)
        self._update_score_bias(experts)
        weights = weights * self.weight_scale
        return Routing(experts, weights, logits, _normalize_sum(scores), is_token)

    def _add_noise(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        if not (self.use_noise and self.is_training):
            return logits
        stddev = jax.nn.softplus(_float32_product(x, self.theta.noise_w))
        return logits + stddev * jax.random.normal(self.next_prng_key(), logits.shape, jnp.float32)

    def _scores(self, logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits) if self.score == "softmax" else jax.nn.sigmoid(logits)

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Return the experts with the best scores, best first, int32 `[..., choices]`."""
        scores = jax.lax.stop_gradient(scores)
        if self.use_score_bias:
            scores = scores + self.get_var("score_bias")
        if self.num_chosen_groups is not None:
            groups = self.num_expert_groups, self.num_chosen_groups
            scores = _mask_other_groups(scores, *groups, num_scores=self.num_group_scores)
        return _top_k(scores, self.num_experts_per_token)[1]

    def _update_score_bias(self, experts: jax.Array) -> None:
        if not (self.use_score_bias and self.score_bias_rate and self.is_training):
            return
        load = jnp.sum(jax.nn.one_hot(experts, self.num_experts), axis=range(experts.ndim))
        sow_total(self, "score_bias", load, _SignStep(self.score_bias_rate))

    def _check_choices(self) -> None:
        chosen, expected = self.num_experts_per_token, f"1 to num_experts={self.num_experts}"
        require(1 <= chosen <= self.num_experts, self, "num_experts_per_token", chosen, expected)
        check_non_negative(self, score_bias_rate=self.score_bias_rate)

    def _check_groups(self) -> None:
        groups, chosen = self.num_expert_groups, self.num_chosen_groups
        check_sizes(self, num_expert_groups=groups, num_group_scores=self.num_group_scores)
        check_divisible(self, by=("num_expert_groups", groups), num_experts=self.num_experts)
        # Fewer groups have fewer experts than a token chooses.
        fewest = max(1, -(-self.num_experts_per_token * groups // self.num_experts))
        is_valid = groups == 1 if chosen is None else fewest <= chosen <= groups
        expected = f"{fewest} to num_expert_groups={groups}; None for a single group"
        require(is_valid, self, "num_chosen_groups", chosen, expected)


def _float32_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply `[..., in]` by `[in, out]` without rounding the factors on accelerators."""
    return jnp.matmul(x.astype(jnp.float32), w, precision=jax.lax.Precision.HIGHEST)


def _normalize_sum(scores: jax.Array) -> jax.Array:
    """Divide scores `[..., experts]` by their sum. Rows of zeros, as of small sigmoids, stay 0."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def _mask_other_groups(
    scores: jax.Array, num_groups: int, num_chosen: int, *, num_scores: int
) -> jax.Array:
    """Set scores `[..., num_experts]` to -inf outside the `num_chosen` best of `num_groups`."""
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    best = _top_k(grouped, min(num_scores, grouped.shape[-1]))[0]
    best_groups = _top_k(jnp.sum(best, axis=-1), num_chosen)[1]
    is_chosen = jnp.any(jax.nn.one_hot(best_groups, num_groups, dtype=bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return (values, int32 indices) of the k largest scores of the last axis, largest first.

    XLA's top-k gathers the scores of all devices; repeated maxima do not move them.
    """
    values, indices = [], []
    for _ in range(k):
        index = jnp.argmax(scores, axis=-1)
        is_taken = jax.nn.one_hot(index, scores.shape[-1], dtype=bool)
        values.append(jnp.max(scores, axis=-1))
        indices.append(index)
        scores = jnp.where(is_taken, -jnp.inf, scores)
    return jnp.stack(values, axis=-1), jnp.stack(indices, axis=-1).astype(jnp.int32)
