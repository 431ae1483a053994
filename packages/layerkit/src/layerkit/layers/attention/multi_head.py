"""MultiHeadAttention: self-attention over whole rows, or of the next tokens with a cache.

One order for both ways of running it:

    project → norm → rotate → norm → scale → logits → bias → cap → mask → softmax → values → project

where there is at most one of the norms. `fprop` sees whole rows. `extend_step` sees only the newest
tokens of a row, and keeps the rotated keys and the values of all tokens in a cache. They differ in
where keys, values and mask come from, and share everything else.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from layerkit.checks import check_sizes
from layerkit.config import sub_config_field
from layerkit.field_checks import Conditions
from layerkit.layers.attention.base_attention import BaseAttention, check_window
from layerkit.layers.attention.biases import add_relative_bias
from layerkit.layers.attention.cache import check_time_step, extend_cache, write_cache
from layerkit.layers.attention.combined import CombinedProjection
from layerkit.layers.masks import AttentionMask
from layerkit.layers.products import merge_tokens
from layerkit.layers.remat import name_activation


class MultiHeadAttention(BaseAttention):
    """Self-attention with several heads (Vaswani et al., 2017), or groups of them that share keys.

    Attributes:
      rotary_tpl: Turns queries and keys by their positions; None where these are told otherwise.
      qk_norm_before_rotary: Where `qk_norm_tpl` acts: before the rotation (Qwen 3, Gemma 3, OLMo 2)
        or after it (Praxis).
      window: A query sees itself and the window - 1 positions before it, and as many after it if
        the mask is not causal; None for all that the mask allows. Layers that see near and far are
        a pattern of the stack.
      relative_bias_tpl: Adds a bias of this layer's own that depends on the distance of query and
        key, such as `RelativeBias` or `Alibi`; None for no bias, or one that a stack hands in.
      combined_qkv: Queries, keys and values come from one product and one weight, child `qkv`,
        instead of children `query`, `key` and `value`; split over devices by key heads.
      qkv_tpl: The combined projection.
      Others: see `BaseAttention`.

    Raises:
      ValueError: sizes that do not divide, numbers out of range, unknown names.
    """

    used_only_if: ClassVar[Conditions] = {
        "qk_norm_before_rotary": ("qk_norm_tpl", "rotary_tpl"),
        "query_tpl": "not combined_qkv",
        "key_tpl": "not combined_qkv",
        "value_tpl": "not combined_qkv",
        "qkv_tpl": "combined_qkv",
    }

    rotary_tpl: Any = sub_config_field(None)
    qk_norm_before_rotary: bool = False
    window: int | None = None
    relative_bias_tpl: Any = sub_config_field(None)
    combined_qkv: bool = False
    qkv_tpl: Any = sub_config_field(CombinedProjection.HParams)

    def setup(self) -> None:
        kv_heads, head_dim = self._head_sizes()
        self._check_options()
        if self.combined_qkv:
            self.create_child(
                "qkv",
                self.qkv_tpl,
                input_dims=self.input_dims,
                num_heads=self.num_heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                use_bias=self.use_bias,
            )
        else:
            self._create_query_key_value(self.input_dims)
        self._create_what_attends()
        if self.rotary_tpl is not None:
            self.create_child("rotary", self.rotary_tpl, dims=head_dim)
        if self.relative_bias_tpl is not None:
            self.create_child("relative_bias", self.relative_bias_tpl, num_heads=self.num_heads)

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Attention within whole rows.

        Args:
          x: `[batch, length, input_dims]`.
          mask: Which position may attend which; its positions tell the distances of a relative
            bias.
          positions: int32 `[batch, length]`, for the rotation.
          bias: float32 `[batch or 1, heads or 1, length, length]`, added to the logits.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.

        Raises:
          ValueError: shapes that do not fit.
          BackendRefusal: the backend cannot do this.
        """
        query, key, value = self._project(x, positions)
        bias = add_relative_bias(self, bias, *mask.distinct_positions())
        mask = mask.within(self.window)
        return self._attend(query, key, value, mask, bias, cached=False)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Creates an empty cache: `key` and `value` `[batch, max_length, kv_heads, head_dim]`.

        They lie in the collection `CACHE`, in the compute dtype.

        Raises:
          ValueError: sizes below one, or a caller who did not make the collection mutable.
        """
        check_sizes(self, batch_size=batch_size, max_length=max_length)
        shape = (batch_size, max_length, *self._head_sizes())
        for name, axes in self._cache_axes().items():
            write_cache(self, name, jnp.zeros(shape, self.compute_dtype), axes)

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        prefix_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of the next tokens to everything before them and themselves.

        Token i of `x` takes slot time_step + i of the cache and sees the slots up to its own. Later
        slots are hidden, so any finite numbers may lie there: rows of unequal prompts can be filled
        in one go, and the surplus be overwritten one token at a time.

        Args:
          x: `[batch, t, input_dims]`, of a prompt or of one new token per row.
          time_step: int32 scalar, how many tokens the cache holds.
          positions: int32 `[batch, t]`, for the rotation.
          bias: float32 `[batch or 1, heads or 1, t, max_length]`, added to the logits.
          prefix_lengths: int32 `[batch]`, how many tokens from the first on see one another, in a
            prefix language model; the first step must bring them all. None for none.

        Returns:
          `[batch, t, input_dims]` in the compute dtype; NaN when time_step + t is more than the
          cache holds, which only the running program knows.

        Raises:
          ValueError: no cache, one for other sizes, a time step per row, or a caller who did not
            make the collection mutable.
        """
        check_time_step(self, time_step)
        query, *new = self._project(x, positions)
        keys, values = (
            extend_cache(self, name, heads, axes, time_step=time_step)
            for (name, axes), heads in zip(self._cache_axes().items(), new, strict=True)
        )
        (batch, num_tokens), max_length = x.shape[:2], keys.shape[1]
        mask = AttentionMask.decoding_mask(
            batch, num_tokens, max_length, time_step=time_step, prefix_lengths=prefix_lengths
        )
        bias = add_relative_bias(self, bias, mask.query_positions[:1], mask.key_positions[:1])
        outputs = self._attend(query, keys, values, mask.within(self.window), bias, cached=True)
        return jnp.where(time_step + num_tokens <= max_length, outputs, jnp.nan)

    @nn.nowrap
    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values `[batch, length, heads or kv_heads, head_dim]`, turned."""
        tokens, leading = merge_tokens(self, self.cast(x)), x.shape[:-1]
        if self.combined_qkv:
            query, key, value = self.qkv(tokens, leading=leading)
        else:
            query, key, value = (
                project(tokens, leading=leading) for project in (self.query, self.key, self.value)
            )
        has_norm, norm_first = self.qk_norm_tpl is not None, self.qk_norm_before_rotary
        if has_norm and norm_first:
            query, key = self._normalize_both(query, key)
        if self.rotary_tpl is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if has_norm and not norm_first:
            query, key = self._normalize_both(query, key)
        return (
            name_activation(query, "query"),
            name_activation(key, "key"),
            name_activation(value, "value"),
        )

    @nn.nowrap
    def _normalize_both(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._normalize(self.query_norm, query), self._normalize(self.key_norm, key)

    @nn.nowrap
    def _cache_axes(self) -> dict[str, tuple[str | None, ...]]:
        if self.combined_qkv:
            axes = self.qkv.activation_axes
            return {"key": axes, "value": axes}
        return {"key": self.key.activation_axes, "value": self.value.activation_axes}

    @nn.nowrap
    def _check_options(self) -> None:
        super()._check_options()
        check_window(self, self.window)
