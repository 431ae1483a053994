"""BaseAttention: what self-attention and cross-attention share.

Projections into heads, norms of queries and keys, the scale, attention itself, and the projection
out. Where keys and values come from, and where positions enter, is told by the layers built on it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_positive, check_sizes
from layerkit.config import sub_config_field
from layerkit.field_checks import Conditions
from layerkit.layers.attention.backends import check_backend_name
from layerkit.layers.attention.context_parallel import check_context_parallel
from layerkit.layers.attention.dot_product import dot_product_attention
from layerkit.layers.attention.projections import HeadProjection, OutputProjection
from layerkit.layers.masks import AttentionMask
from layerkit.layers.stochastic import Dropout
from layerkit.near_names import near_names
from layerkit.weights import WeightHParams, WeightInit

# Brings the learned scale of a coordinate to 1 where p = 0, as softplus(0) = ln 2.
_INVERSE_SOFTPLUS_OF_0 = 1.442695041

_KV_WEIGHT = ("embed", "kv_heads", "head_dim")
_KV_ACTIVATION = ("batch", "length", "act_kv_heads", "head_dim")

# What a norm of queries and keys takes its statistics over.
QK_NORM_EXTENTS = ("head", "projection")


class BaseAttention(BaseLayer):
    """Heads that read: the fields and the steps common to attention of every kind.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Query heads.
      num_kv_heads: Key and value heads, a divisor of num_heads; None for as many, 1 for
        multi-query attention (Shazeer, 2019). A single one is replicated over the mesh axes that
        split heads; other numbers have to be divisible by them, or `ShardingRules.replace` has to
        make the rules of `kv_heads` and `act_kv_heads` None.
      dim_per_head: None for input_dims / num_heads.
      use_bias: Adds a bias in the projections.
      use_output_bias: Adds one in the projection out; None for as use_bias says (Qwen 2 has biases
        on the way in alone).
      qk_norm_tpl: Normalises queries and keys (Henry et al., 2020, arXiv:2010.04245); None for no
        norm.
      qk_norm_over: `head`, every head by itself (Qwen 3, Gemma 3), or `projection`, all heads of a
        token together (OLMo 2).
      per_dim_scale: Learns a scale for each coordinate of a head, 1.442695041·softplus(p), times
        the scale of the logits; p starts at 0, which gives attention without it.
      logit_scale: Of the products of queries and keys; None for 1/√dim_per_head. 1.0 in T5.
      logit_cap: Squeezes logits into ±logit_cap by tanh (Gemma 2); None leaves them alone.
      use_sinks: Learns a logit per head that takes probability and gives nothing (gpt-oss), so
        that a head may attend to nothing; starts at 0.
      dropout_rate: Of the attention probabilities, in training.
      zero_fully_masked_rows: A query that may attend nothing reads exactly 0 instead of a mean;
        with sinks it does so anyway.
      backend: Name of the implementation of `fprop`; see `layerkit.layers.attention.backends`.
        Cached steps always run on `xla`.
      context_parallel: How whole rows that are split over devices are attended, `all_gather` or
        `ring`; see `layerkit.layers.attention.context_parallel`.
      query_tpl, key_tpl, value_tpl: Projections into heads.
      output_tpl: Projection out of heads.

    Raises:
      ValueError: sizes that do not divide, numbers out of range, unknown names.
    """

    used_only_if: ClassVar[Conditions] = {"qk_norm_over": "qk_norm_tpl"}

    input_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    use_bias: bool = False
    use_output_bias: bool | None = None
    qk_norm_tpl: Any = sub_config_field(None)
    qk_norm_over: str = "head"
    per_dim_scale: bool = False
    logit_scale: float | None = None
    logit_cap: float | None = None
    use_sinks: bool = False
    dropout_rate: float = 0.0
    zero_fully_masked_rows: bool = False
    backend: str = "auto"
    context_parallel: str = "all_gather"
    query_tpl: Any = sub_config_field(HeadProjection.HParams)
    key_tpl: Any = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    value_tpl: Any = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    output_tpl: Any = sub_config_field(OutputProjection.HParams)

    # Called by the setup of a layer built on this one.

    @nn.nowrap
    def _create_query_key_value(self, memory_dims: int) -> None:
        """Children `query`, `key` and `value`; the last two read `[…, memory_dims]`."""
        kv_heads, head_dim = self._head_sizes()
        shared = {"head_dim": head_dim, "use_bias": self.use_bias}
        self.create_child(
            "query",
            self.query_tpl,
            input_dims=self.input_dims,
            num_heads=self.num_heads,
            **shared,
        )
        for name, template in (("key", self.key_tpl), ("value", self.value_tpl)):
            self.create_child(name, template, input_dims=memory_dims, num_heads=kv_heads, **shared)

    @nn.nowrap
    def _create_what_attends(self) -> None:
        """Norms, scale, sinks, dropout and the projection out."""
        kv_heads, head_dim = self._head_sizes()
        with_bias = self.use_bias if self.use_output_bias is None else self.use_output_bias
        self.create_child(
            "output",
            self.output_tpl,
            num_heads=self.num_heads,
            head_dim=head_dim,
            output_dims=self.input_dims,
            use_bias=with_bias,
        )
        if self.qk_norm_tpl is not None:
            whole = self.qk_norm_over == "projection"
            for name, heads in (("query_norm", self.num_heads), ("key_norm", kv_heads)):
                dims = heads * head_dim if whole else head_dim
                self.create_child(name, self.qk_norm_tpl, dims=dims)
        zeros = WeightInit.Constant(0.0)
        if self.per_dim_scale:
            self.create_variable("scale", WeightHParams((head_dim,), ("head_dim",), init=zeros))
        if self.use_sinks:
            self.create_variable("sinks", WeightHParams((self.num_heads,), ("heads",), init=zeros))
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    # Called while running.

    @nn.nowrap
    def _normalize(self, norm: BaseLayer, heads: jax.Array) -> jax.Array:
        """`[batch, length, heads, head_dim]` → the same, normed over what `qk_norm_over` says."""
        if self.qk_norm_over == "head":
            normed: jax.Array = norm(heads)
            return normed
        merged = heads.reshape(*heads.shape[:2], -1)
        whole: jax.Array = norm(merged)
        return whole.reshape(heads.shape)

    @nn.nowrap
    def _attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask,
        bias: jax.Array | None,
        *,
        cached: bool,
    ) -> jax.Array:
        """Heads of queries `[batch, queries, …]` and of keys → `[batch, queries, input_dims]`."""
        if self.per_dim_scale:
            scale = jax.nn.softplus(self.theta.scale.astype(jnp.float32))
            query = self.cast(query * (_INVERSE_SOFTPLUS_OF_0 * scale))
        read = attend(
            self,
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            sinks=self.theta.sinks if self.use_sinks else None,
            head_dim=query.shape[-1],
            cached=cached,
        )
        out: jax.Array = self.output(
            self.constrain(read, "batch", "length", "act_heads", "head_dim")
        )
        return out

    # Sizes and refusals.

    @nn.nowrap
    def _head_sizes(self) -> tuple[int, int]:
        """(num_kv_heads, dim_per_head), after refusing what does not fit together."""
        check_sizes(self, input_dims=self.input_dims, num_heads=self.num_heads)
        head_dim, kv_heads = self.dim_per_head, self.num_kv_heads
        if head_dim is None:
            if self.input_dims % self.num_heads:
                near = _nearest_divisor(self.input_dims, self.num_heads)
                raise ValueError(
                    f"{self.path_name}: num_heads={self.num_heads} does not divide"
                    f" input_dims={self.input_dims}; set dim_per_head, or num_heads={near}"
                )
            head_dim = self.input_dims // self.num_heads
        if kv_heads is None:
            kv_heads = self.num_heads
        check_sizes(self, dim_per_head=head_dim, num_kv_heads=kv_heads)
        if self.num_heads % kv_heads:
            near = _nearest_divisor(self.num_heads, kv_heads)
            raise ValueError(
                f"{self.path_name}: num_kv_heads={kv_heads} does not divide"
                f" num_heads={self.num_heads}; the nearest that does is {near}"
            )
        return kv_heads, head_dim

    @nn.nowrap
    def _check_options(self) -> None:
        check_attention_options(self)
        if self.qk_norm_over not in QK_NORM_EXTENTS:
            raise ValueError(
                f"{self.path_name}: qk_norm_over={self.qk_norm_over!r} is not an extent"
                f"{near_names(str(self.qk_norm_over), QK_NORM_EXTENTS)}"
                f" Extents: {', '.join(QK_NORM_EXTENTS)}."
            )


def check_attention_options(layer: Any) -> None:
    """Refuses options of `attend` that are out of range, or names that do not exist."""
    check_positive(layer, logit_cap=layer.logit_cap, logit_scale=layer.logit_scale)
    check_backend_name(layer.backend, owner=layer.path_name)
    check_context_parallel(layer.context_parallel, owner=layer.path_name)


def check_window(layer: BaseLayer, window: int | None) -> None:
    """Refuses a window in which a query would not even see itself."""
    if window is not None and window < 1:
        raise ValueError(
            f"{layer.path_name}: window={window} must be at least 1, a query's own position, or"
            " None for no window"
        )


def attend(
    layer: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask,
    bias: jax.Array | None,
    sinks: jax.Array | None = None,
    head_dim: int,
    cached: bool,
) -> jax.Array:
    """`dot_product_attention` with the options that layers of every kind have.

    Args:
      layer: With the fields `logit_scale`, `logit_cap`, `dropout_rate`, `zero_fully_masked_rows`,
        `backend` and `context_parallel`, and a child `dropout`.
      query: `[batch, queries, heads, dims]`.
      key: `[batch, keys, kv_heads, dims]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key.
      bias: float32 `[batch or 1, heads or 1, queries, keys]`, added to the logits.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing.
      head_dim: Size of a head, which tells the scale where `logit_scale` does not.
      cached: Whether the keys are those of a cache. Then the compiler splits the work: a step has
        few queries, and a kernel for whole rows, which it cannot split, would gain nothing.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.
    """
    scale = layer.logit_scale
    if cached:
        where: dict[str, Any] = {"backend": "xla"}
    else:
        where = {
            "backend": layer.backend,
            "sharding": layer.inherited("sharding"),
            "context_parallel": layer.context_parallel,
        }
    return dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        bias=bias,
        sinks=sinks,
        logit_cap=layer.logit_cap,
        dropout=layer.dropout if layer.dropout_rate and layer.is_training else None,
        zero_fully_masked_rows=layer.zero_fully_masked_rows,
        **where,
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))
