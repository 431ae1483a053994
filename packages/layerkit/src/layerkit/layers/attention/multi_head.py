"""MultiHeadAttention: projections, positions, scale, attention, projection; whole rows or cached.

One order for both ways of running it:

    project → rotate → scale → logits → cap → mask → softmax → values → project

`fprop` sees whole rows. `extend_step` sees only the newest tokens of a row, and keeps the rotated
keys and the values of all tokens in a cache. They differ in where keys, values and mask come from,
and share everything else.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.base_layer import CACHE, BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.attention.backends import check_backend_name
from layerkit.layers.attention.dot_product import dot_product_attention
from layerkit.layers.attention.projections import HeadProjection, OutputProjection
from layerkit.layers.masks import AttentionMask
from layerkit.layers.products import merge_tokens
from layerkit.layers.sizes import check_sizes
from layerkit.layers.stochastic import Dropout
from layerkit.weights import WeightHParams, WeightInit

# Brings the learned scale of a coordinate to 1 where p = 0, as softplus(0) = ln 2.
_INVERSE_SOFTPLUS_OF_0 = 1.442695041

_KV_WEIGHT = ("embed", "kv_heads", "head_dim")
_KV_ACTIVATION = ("batch", "length", "act_kv_heads", "head_dim")


class MultiHeadAttention(BaseLayer):
    """Self-attention with several heads (Vaswani et al., 2017), or groups of them that share keys.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Query heads.
      num_kv_heads: Key and value heads, a divisor of num_heads; None for as many, 1 for
        multi-query attention (Shazeer, 2019).
      dim_per_head: None for input_dims / num_heads.
      use_bias: Adds a bias in all four projections.
      rotary_tpl: Turns queries and keys by their positions; None where these are told otherwise.
      per_dim_scale: Learns a scale for each coordinate of a head, 1.442695041·softplus(p)/√d, where
        d is dim_per_head and p starts at 0, which gives the scale 1/√d of attention without it.
      logit_cap: Squeezes logits into ±logit_cap by tanh (Gemma 2); None leaves them alone.
      dropout_rate: Of the attention probabilities, in training.
      zero_fully_masked_rows: A query that may attend nothing reads exactly 0 instead of a mean.
      backend: Name of the implementation of `fprop`: `auto`, `xla`, or `cudnn`, for which causal
        means the order of the row. Cached steps always run on `auto`.
      query_tpl, key_tpl, value_tpl: Projections into heads.
      output_tpl: Projection out of heads.

    Raises:
      ValueError: sizes that do not divide, a logit cap that is not positive, an unknown backend.
    """

    input_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    use_bias: bool = False
    rotary_tpl: Any = sub_config_field(None)
    per_dim_scale: bool = False
    logit_cap: float | None = None
    dropout_rate: float = 0.0
    zero_fully_masked_rows: bool = False
    backend: str = "auto"
    query_tpl: Any = sub_config_field(HeadProjection.HParams)
    key_tpl: Any = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    value_tpl: Any = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    output_tpl: Any = sub_config_field(OutputProjection.HParams)

    def setup(self) -> None:
        kv_heads, head_dim = self._check_fields()
        shared = {"head_dim": head_dim, "use_bias": self.use_bias}
        into_heads = {"input_dims": self.input_dims, **shared}
        self.create_child("query", self.query_tpl, num_heads=self.num_heads, **into_heads)
        self.create_child("key", self.key_tpl, num_heads=kv_heads, **into_heads)
        self.create_child("value", self.value_tpl, num_heads=kv_heads, **into_heads)
        self.create_child(
            "output",
            self.output_tpl,
            num_heads=self.num_heads,
            output_dims=self.input_dims,
            **shared,
        )
        if self.rotary_tpl is not None:
            self.create_child("rotary", self.rotary_tpl, dims=head_dim)
        if self.per_dim_scale:
            zeros = WeightInit.Constant(0.0)
            self.create_variable("scale", WeightHParams((head_dim,), ("head_dim",), init=zeros))
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, x: jax.Array, *, mask: AttentionMask, positions: jax.Array) -> jax.Array:
        """Attention within whole rows.

        Args:
          x: `[batch, length, input_dims]`.
          mask: Which position may attend which.
          positions: int32 `[batch, length]`, for the rotation.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.

        Raises:
          ValueError: shapes that do not fit.
          BackendRefusal: the backend cannot do this.
        """
        query, key, value = self._project(x, positions)
        return self._attend(query, key, value, mask, backend=self.backend)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Creates an empty cache: `key` and `value` `[batch, max_length, kv_heads, head_dim]`.

        They lie in the collection `CACHE`, in the compute dtype.

        Raises:
          ValueError: sizes below one, or a caller who did not make the collection mutable.
        """
        check_sizes(self, batch_size=batch_size, max_length=max_length)
        shape = (batch_size, max_length, self.key.num_heads, self.key.head_dim)
        for name in ("key", "value"):
            self._write_cache(name, jnp.zeros(shape, self.compute_dtype))

    def extend_step(self, x: jax.Array, *, time_step: jax.Array, positions: jax.Array) -> jax.Array:
        """Attention of the next tokens to everything before them and themselves.

        Token i of `x` takes slot time_step + i of the cache and sees the slots up to its own. Later
        slots are hidden, so any finite numbers may lie there: rows of unequal prompts can be filled
        in one go, and the surplus be overwritten one token at a time.

        Args:
          x: `[batch, t, input_dims]`, of a prompt or of one new token per row.
          time_step: int32 scalar, how many tokens the cache holds.
          positions: int32 `[batch, t]`, for the rotation.

        Returns:
          `[batch, t, input_dims]` in the compute dtype; NaN when time_step + t is more than the
          cache holds, which only the running program knows.

        Raises:
          ValueError: no cache, one for other sizes, a time step per row, or a caller who did not
            make the collection mutable.
        """
        if jnp.ndim(time_step) != 0:
            raise ValueError(
                f"{self.path_name}: time_step has the shape {jnp.shape(time_step)}, expected a"
                " scalar that all rows share"
            )
        query, key, value = self._project(x, positions)
        keys = self._extend_cache("key", key, time_step)
        values = self._extend_cache("value", value, time_step)
        (batch, num_tokens), max_length = x.shape[:2], keys.shape[1]
        mask = AttentionMask.decoding_mask(batch, num_tokens, max_length, time_step=time_step)
        outputs = self._attend(query, keys, values, mask, backend="auto")
        return jnp.where(time_step + num_tokens <= max_length, outputs, jnp.nan)

    @nn.nowrap
    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens, leading = merge_tokens(self, self.cast(x)), x.shape[:-1]
        query, key, value = (
            project(tokens, leading=leading) for project in (self.query, self.key, self.value)
        )
        if self.rotary_tpl is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return query, key, value

    @nn.nowrap
    def _attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask,
        *,
        backend: str,
    ) -> jax.Array:
        if self.per_dim_scale:
            scale = jax.nn.softplus(self.theta.scale.astype(jnp.float32))
            query = self.cast(query * (_INVERSE_SOFTPLUS_OF_0 * scale))
        read = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=1.0 / math.sqrt(query.shape[-1]),
            zero_fully_masked_rows=self.zero_fully_masked_rows,
            **self._options(backend),
        )
        return self.output(self.constrain(read, "batch", "length", "act_heads", "head_dim"))

    @nn.nowrap
    def _options(self, backend: str) -> dict[str, Any]:
        """What decides the backend, apart from shapes and mask."""
        sharding = self.inherited("sharding")
        has_mesh = sharding is not None and sharding.mesh is not None
        return {
            "logit_cap": self.logit_cap,
            "dropout": self.dropout if self.is_training and self.dropout_rate else None,
            "backend": backend,
            # The mesh may be of machines that are only planned for.
            "platform": sharding.mesh.devices.flat[0].platform if has_mesh else None,
        }

    @nn.nowrap
    def _extend_cache(self, name: str, new: jax.Array, time_step: jax.Array) -> jax.Array:
        """Writes `new` `[batch, t, …]` at `time_step` and returns the whole cache."""
        if not self.has_variable(CACHE, name):
            raise ValueError(
                f"{self.path_name}: extend_step without a cache; run init_cache(batch_size,"
                f" max_length) with mutable=['{CACHE}'] and apply with what it returns"
            )
        cache: jax.Array = self.get_variable(CACHE, name)
        num_rows, max_length = cache.shape[:2]
        if new.shape[0] != num_rows or new.shape[1] > max_length:
            raise ValueError(
                f"{self.path_name}: the cache is for batch_size={num_rows} and"
                f" max_length={max_length}, but extend_step was given {new.shape[0]} rows of"
                f" {new.shape[1]} tokens"
            )
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, time_step, axis=1)
        return self._write_cache(name, cache)

    @nn.nowrap
    def _write_cache(self, name: str, value: jax.Array) -> jax.Array:
        if not self.is_mutable_collection(CACHE):
            raise ValueError(
                f"{self.path_name}: the cache would be lost; apply with mutable=['{CACHE}', …]"
            )
        value = self.constrain(value, *getattr(self, name).activation_axes)
        self.put_variable(CACHE, name, value)
        return value

    @nn.nowrap
    def _check_fields(self) -> tuple[int, int]:
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
        if self.logit_cap is not None and self.logit_cap <= 0:
            raise ValueError(
                f"{self.path_name}: logit_cap={self.logit_cap} must be positive, or None for no cap"
            )
        check_backend_name(self.backend, owner=self.path_name)
        return kv_heads, head_dim


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))
