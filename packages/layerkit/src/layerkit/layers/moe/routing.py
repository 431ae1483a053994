"""Which experts each token goes to, and with what weight.

A router scores every expert for every token and keeps the best few (Shazeer et al., 2017,
arXiv:1701.06538). The routers of published models are settings of the one below:

- Switch (arXiv:2101.03961): `num_experts_per_token=1, renormalize=False, jitter=0.01`;
- GShard, Mixtral and gpt-oss: the defaults, as a softmax over the chosen logits is the softmax over
  all of them, renormalised;
- Qwen 2 MoE and OLMoE: `renormalize=False`;
- DeepSeek V3 (arXiv:2412.19437): `score="sigmoid", use_score_bias=True, num_expert_groups=8,
  num_chosen_groups=4, weight_scale=2.5`.

All of it is computed in float32, whatever the compute dtype: a choice hangs on small differences.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from layerkit.base_layer import BaseLayer
from layerkit.checks import (
    check_last_axis,
    check_non_negative,
    check_rates,
    check_sizes,
)
from layerkit.field_checks import Conditions
from layerkit.near_names import near_names
from layerkit.weights import WeightHParams, WeightInit

_SCORES = ("softmax", "sigmoid")


@struct.dataclass
class Routing:
    """Where tokens go; the leading axes `...` are those of the tokens.

    Attributes:
      experts: int32 `[..., choices]`, the chosen experts, best first; `num_experts` on padding,
        which goes nowhere.
      weights: float32 `[..., choices]`, what each chosen expert's output counts for.
      logits: float32 `[..., num_experts]`, without noise.
      probs: float32 `[..., num_experts]`, the scores of all experts with the sum 1.
      is_token: bool `[...]`, False on padding; None if everything is a token.
    """

    experts: jax.Array
    weights: jax.Array
    logits: jax.Array
    probs: jax.Array
    is_token: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        """How many experts there are to choose from: a static number, not an array `[]`."""
        return self.logits.shape[-1]


class TopKRouter(BaseLayer):
    """Scores x·w and keeps the best: `[..., input_dims]` → `Routing`.

    Attributes:
      fprop_dtype: Of the weights as they are multiplied; float32 whatever the layers above compute
        in, unless set here.
      input_dims: Size of the model dimension.
      num_experts: How many there are.
      num_experts_per_token: How many of them each token goes to.
      score: `softmax` over the experts, or the `sigmoid` of each logit on its own.
      renormalize: Divides the chosen scores by their sum.
      weight_scale: Multiplies the weights after that (DeepSeek's routed scaling factor).
      use_score_bias: Adds a bias `score_bias` `[num_experts]` to the scores when choosing, and only
        then; it is no weight of the optimizer's (auxiliary-loss-free balancing; Wang et al., 2024,
        arXiv:2408.15664).
      score_bias_rate: In training the bias of each expert moves up by this if its load was below
        the mean, and down if above.
      num_expert_groups: Experts lie in this many groups of neighbours; see `num_chosen_groups`.
      num_chosen_groups: A token chooses within this many groups, those with the greatest sums of
        their two best scores (DeepSeek V3); None for all of them.
      use_noise: In training adds normal noise to the logits, with a learned standard deviation
        softplus(x·noise_w) (noisy top-k gating; Shazeer et al., 2017).
      jitter: In training multiplies the inputs by uniform noise in 1 ± jitter (Fedus et al., 2021:
        Switch).
      weight_init: How `w` starts; None inherits `params_init`.
    """

    used_only_if: ClassVar[Conditions] = {"score_bias_rate": "use_score_bias"}

    fprop_dtype: Any = jnp.float32
    input_dims: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 2
    score: str = "softmax"
    renormalize: bool = True
    weight_scale: float = 1.0
    use_score_bias: bool = False
    score_bias_rate: float = 0.0
    num_expert_groups: int = 1
    num_chosen_groups: int | None = None
    use_noise: bool = False
    jitter: float = 0.0
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        check_sizes(self, input_dims=self.input_dims, num_experts=self.num_experts)
        self._check_choices()
        self._check_groups()
        shape, axes = (self.input_dims, self.num_experts), ("embed", None)
        self.create_variable("w", WeightHParams(shape, axes, init=self.weight_init))
        zeros = WeightInit.Constant(0.0)
        if self.use_noise:
            self.create_variable("noise_w", WeightHParams(shape, axes, init=zeros))
        if self.use_score_bias:
            bias = WeightHParams((self.num_experts,), (None,), init=zeros, dtype=jnp.float32)
            self.create_variable("score_bias", bias, trainable=False)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> Routing:
        """Routes `[..., input_dims]`.

        Args:
          x: Activations of the tokens.
          is_token: bool `[...]`; False where there is padding, which is neither routed nor counted.

        Raises:
          ValueError: inputs of another size, or training without a random key where there is noise.
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        x = x.astype(jnp.float32)
        if self.jitter > 0.0 and self.is_training:
            low, high = 1.0 - self.jitter, 1.0 + self.jitter
            x = x * jax.random.uniform(self.next_prng_key(), x.shape, jnp.float32, low, high)
        logits = _float32_product(x, self.theta.w)
        scores = self._scores(self._noisy(logits, x))
        experts = self._choose(scores)
        weights = jnp.einsum("...ke,...e->...k", jax.nn.one_hot(experts, self.num_experts), scores)
        if self.renormalize:
            weights = _with_sum_one(weights)
        if is_token is not None:
            experts = jnp.where(is_token[..., None], experts, self.num_experts)
            weights = jnp.where(is_token[..., None], weights, 0.0)
        self._move_score_bias(experts)
        weights = weights * self.weight_scale
        return Routing(experts, weights, logits, _with_sum_one(scores), is_token)

    @nn.nowrap
    def _noisy(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        if not (self.use_noise and self.is_training):
            return logits
        stddev = jax.nn.softplus(_float32_product(x, self.theta.noise_w))
        return logits + stddev * jax.random.normal(self.next_prng_key(), logits.shape, jnp.float32)

    @nn.nowrap
    def _scores(self, logits: jax.Array) -> jax.Array:
        return jax.nn.softmax(logits) if self.score == "softmax" else jax.nn.sigmoid(logits)

    @nn.nowrap
    def _choose(self, scores: jax.Array) -> jax.Array:
        """The best experts int32 `[..., choices]` by scores `[..., num_experts]`, best first."""
        scores = jax.lax.stop_gradient(scores)
        if self.use_score_bias:
            scores = scores + self.get_var("score_bias")
        if self.num_chosen_groups is not None:
            scores = _within_best_groups(scores, self.num_expert_groups, self.num_chosen_groups)
        return _top_k(scores, self.num_experts_per_token)[1]

    @nn.nowrap
    def _move_score_bias(self, experts: jax.Array) -> None:
        if not (self.use_score_bias and self.score_bias_rate and self.is_training):
            return
        load = jnp.sum(jax.nn.one_hot(experts, self.num_experts), axis=range(experts.ndim))
        step = self.score_bias_rate * jnp.sign(jnp.mean(load) - load)
        self.update_var("score_bias", self.get_var("score_bias") + step)

    @nn.nowrap
    def _check_choices(self) -> None:
        where = self.path_name
        if self.score not in _SCORES:
            raise ValueError(
                f"{where}: score={self.score!r}{near_names(str(self.score), _SCORES)}"
                f" Scores: {', '.join(_SCORES)}."
            )
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"{where}: num_experts_per_token={self.num_experts_per_token}, expected 1 to"
                f" num_experts={self.num_experts}"
            )
        check_rates(self, jitter=self.jitter)
        check_non_negative(self, score_bias_rate=self.score_bias_rate)

    @nn.nowrap
    def _check_groups(self) -> None:
        where, groups = self.path_name, self.num_expert_groups
        chosen = self.num_chosen_groups
        if groups < 1 or self.num_experts % groups:
            raise ValueError(
                f"{where}: num_expert_groups={groups} does not divide num_experts="
                f"{self.num_experts}"
            )
        if (chosen is None) != (groups == 1):
            raise ValueError(
                f"{where}: num_expert_groups={groups} and num_chosen_groups={chosen};"
                " set both, or neither"
            )
        if chosen is None:
            return
        if not 1 <= chosen <= groups:
            raise ValueError(
                f"{where}: num_chosen_groups={chosen}, expected 1 to num_expert_groups={groups}"
            )
        if chosen * (self.num_experts // groups) < self.num_experts_per_token:
            raise ValueError(
                f"{where}: {chosen} of {groups} groups hold"
                f" {chosen * (self.num_experts // groups)} experts, fewer than"
                f" num_experts_per_token={self.num_experts_per_token}"
            )


def _float32_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """`[..., in]` · `[in, out]`, of which accelerators would round the factors to fewer bits."""
    return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)


def _with_sum_one(scores: jax.Array) -> jax.Array:
    """Scores `[..., experts]` by their sum; zeros stay zeros, as sigmoids far below 0 are."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def _within_best_groups(scores: jax.Array, num_groups: int, num_chosen: int) -> jax.Array:
    """Scores `[..., num_experts]` with -inf outside the `num_chosen` best of `num_groups`."""
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    best_two = _top_k(grouped, min(2, grouped.shape[-1]))[0]
    best_groups = _top_k(jnp.sum(best_two, axis=-1), num_chosen)[1]
    is_chosen = jnp.any(jax.nn.one_hot(best_groups, num_groups, dtype=bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """(values, int32 indices) of the k greatest along the last axis, the greatest first.

    XLA's own top-k gathers the scores of all devices on each; these maxima stay where they are.
    """
    values, indices = [], []
    for _ in range(k):
        index = jnp.argmax(scores, axis=-1)
        is_taken = jax.nn.one_hot(index, scores.shape[-1], dtype=bool)
        values.append(jnp.max(scores, axis=-1))
        indices.append(index)
        scores = jnp.where(is_taken, -jnp.inf, scores)
    return jnp.stack(values, axis=-1), jnp.stack(indices, axis=-1).astype(jnp.int32)
