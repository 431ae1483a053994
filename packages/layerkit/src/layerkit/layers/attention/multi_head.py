"""Multi-head self-attention over whole rows, or of the next tokens with a cache.

The order of operations, with at most one of the norms, is:

    project → convolve → norm → rotate → norm → scale → logits → bias → cap → mask → softmax →
    values → gate → project

`fprop` processes whole rows. `extend_step` processes the newest tokens of a row and keeps the
rotated keys and the values of all tokens in a cache. They differ only in the source of keys, values
and mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, fields_of, sub_config_field
from layerkit.config.checks import check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.base_attention import BaseAttention
from layerkit.layers.attention.cache import (
    Axes,
    check_time_step,
    extend_cache,
    extend_rounded_cache,
    mask_of_step,
    read_prompt_cache,
    write_cache,
    write_rounded_cache,
)
from layerkit.layers.attention.cached_states import convolve_heads, extend_last, init_num_prompt
from layerkit.layers.attention.combined_projection import CombinedProjection
from layerkit.layers.basic.dots import merge_tokens
from layerkit.layers.basic.normalizations import BaseNormalization
from layerkit.layers.basic.positions import first_axis
from layerkit.ops.attention.distance_bias import LogitBias
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.remat import name_activation

KeysValues = dict[int | None, tuple[jax.Array, ...]]
"""Keys and values `[batch, length, num_kv_heads, dim_per_head]` by the number of their layer."""

# Logical axes of the last tokens `[batch, width - 1, heads, head_dim]` that convolutions read.
_LAST_AXES: dict[str, Axes] = {
    "query": ("batch", None, "act_heads", "head_dim"),
    "key": ("batch", None, "act_kv_heads", "head_dim"),
    "value": ("batch", None, "act_kv_heads", "head_dim"),
}


class MultiHeadAttention(BaseAttention):
    """Self-attention with several heads (Vaswani et al., 2017), or groups of them that share keys.

    The other fields are those of `BaseAttention`.

    Attributes:
      rotary_tpl: Rotation of queries and keys by their positions; None for no rotation.
      qk_norm_before_rotary: True to apply `qk_norm_tpl` before the rotation (Qwen 3, Gemma 3,
        OLMo 2), False to apply it after the rotation (Praxis).
      qkv_conv_tpl: Causal depth-wise convolutions of queries, keys and values after their
        projections (Primer; So et al., 2021, arXiv:2109.08668), such as `CausalConvolution` of
        width 3; None for none. Cached steps keep the last width - 1 tokens.
      value_norm_tpl: Norm of the values of each head (Gemma 4); None for no norm.
      output_gate_tpl: Projection of the inputs to gates, such as `HeadProjection`, whose sigmoid
        multiplies what each head reads (Qiu et al., 2025, arXiv:2505.06708; Qwen3-Next); None for
        no gate.
      values_are_keys: True for values that are the keys before `qk_norm_tpl` and the rotation, so
        that there is no child `value` (Gemma 4).
      window: Number of positions that a query sees: itself, those before it and, unless the mask
        is causal, as many after it; None for all that the mask allows. A stack alternates layers
        with different windows by its pattern.
      chunk: Number of positions of a chunk, within which queries see keys; None for no chunks. A
        segment of a packed row starts at position 0 of its first chunk (Llama 4).
      look_ahead: Number of positions of a chunk, up to whose end queries see keys under a causal
        mask. `window` then counts from this end. A cached step has whole chunks, except for the
        last. None for queries that see no later key.
      query_growth: Growth g of the factor 1 + g·ln(1 + ⌊(position + 1)/query_growth_step⌋) of
        queries, which keeps attention over many keys sharp (Nakanishi, 2025, arXiv:2501.19399;
        Llama 4); 0 for no factor.
      query_growth_step: Number of positions of equal factor.
      relative_bias_tpl: Bias of this layer that depends on the distance of query and key, such as
        `RelativeBias` or `Alibi`; None for no bias, or for one that the stack passes in.
      combined_qkv: Computes queries, keys and values by one product and one weight, child `qkv`,
        instead of the children `query`, `key` and `value`. It is split over devices by key heads.
      qkv_tpl: The combined projection.
      kv_layer: Number of the layer of the stack, from 1 at the input, whose keys and values this
        layer reads instead of its own, so that it has no children `key` and `value` and no cache
        (Gemma 4). That layer is one of the stack's `first_tpls`. None for its own.
      cache_format: `int8` to store the keys and values of cached steps in integers; None for the
        compute dtype.
      has_rolling_cache: True to cache the keys and values of the last window - 1 tokens alone, so
        that memory and time of a step do not grow with the row, whose length has no limit. False
        to cache all tokens.

    Raises:
      ConfigError: A size is not divisible, a number is out of range, or a name is unknown.
    """

    used_only_if: ClassVar[Conditions] = {
        "qk_clip": ("not qk_norm_tpl", "use_key_bias", "not qkv_conv_tpl"),
        "qk_norm_before_rotary": ("qk_norm_tpl", "rotary_tpl"),
        "qkv_conv_tpl": ("not kv_layer", "not values_are_keys"),
        "query_tpl": "not combined_qkv",
        "key_tpl": ("not combined_qkv", "not kv_layer"),
        "use_key_bias": ("use_bias", "not combined_qkv", "not kv_layer"),
        "value_tpl": ("not combined_qkv", "not values_are_keys", "not kv_layer"),
        "values_are_keys": ("not combined_qkv", "not kv_layer"),
        "value_norm_tpl": "not kv_layer",
        "combined_qkv": "not kv_layer",
        "cache_format": "not kv_layer",
        "has_rolling_cache": ("window", "not cache_format", "not kv_layer"),
        "qkv_tpl": "combined_qkv",
        "query_growth_step": "query_growth",
    }

    rotary_tpl: Config[BaseLayer] | None = sub_config_field(None)
    qk_norm_before_rotary: bool = False
    qkv_conv_tpl: Config[BaseLayer] | None = sub_config_field(None)
    value_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    output_gate_tpl: Config[BaseLayer] | None = sub_config_field(None)
    values_are_keys: bool = False
    window: int | None = None
    chunk: int | None = None
    look_ahead: int | None = None
    query_growth: float = 0.0
    query_growth_step: int = 8192
    relative_bias_tpl: Config[BaseLayer] | None = sub_config_field(None)
    combined_qkv: bool = False
    qkv_tpl: Config[BaseLayer] = sub_config_field(CombinedProjection.HParams)
    kv_layer: int | None = None
    cache_format: Literal["int8"] | None = None
    has_rolling_cache: bool = False

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        kv_heads, head_dim = self._head_sizes()
        self._check_options()
        has_key = self.kv_layer is None
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
            names = ("key",) if self.values_are_keys else ("key", "value")
            projections = names if has_key else ()
            self._create_query_key_value(self.input_dims, projections=projections)
        self._create_attention_parts(has_key=has_key)
        if (conv := self.qkv_conv_tpl) is not None:
            axes = tuple("kv_heads" if axis == "heads" else axis for axis in conv.weight_axes)
            self.create_child("query_conv", conv, num_heads=self.num_heads, head_dim=head_dim)
            for name in ("key_conv", "value_conv"):
                template = conv.clone(weight_axes=axes)
                self.create_child(name, template, num_heads=kv_heads, head_dim=head_dim)
        if self.value_norm_tpl is not None:
            sizes = fields_of(self.value_norm_tpl, dims=head_dim, num_heads=kv_heads)
            self.create_child("value_norm", self.value_norm_tpl, **sizes)
        if self.output_gate_tpl is not None:
            sizes = {"input_dims": self.input_dims, "num_heads": self.num_heads}
            sizes |= {"head_dim": head_dim, "use_bias": self.use_bias}
            self.create_child("gate", self.output_gate_tpl, **sizes)
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
        bias: LogitBias | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Compute attention within whole rows.

        Args:
          x: `[batch, length, input_dims]`.
          mask: Mask of the pairs of positions that may attend. Its positions define the distances
            of a relative bias.
          positions: int32 `[batch, length]` or `[batch, length, axes]`, for the rotation.
          bias: float32 `[batch or 1, heads or 1, length, length]`, or a bias by distance, added to
            the logits.
          kv: Keys and values `[batch, length, num_kv_heads, dim_per_head]` of other layers by
            `kv_layer`. A layer that has its own adds them under None.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.

        Raises:
          ConfigError: Shapes are incompatible, or `kv` lacks the layer `kv_layer`.
          UnsupportedBackendError: The backend does not support this attention.
        """
        query, *heads = self._project(x, positions, segments=mask.query_segments)
        key, value = self._heads_to_read(heads, kv)
        if self.relative_bias_tpl is not None:
            from layerkit.layers.attention.biases import add_bias_of_rows

            bias = add_bias_of_rows(self.relative_bias, bias, mask)
        token_positions = first_axis(positions)
        mask = mask.within(self.window).split_chunks(self.chunk, token_positions)
        mask = mask.look_ahead(self.look_ahead, token_positions)
        options: dict[str, Any] = {"gate": self._gate(x), "are_keys_shared": kv is not None}
        return self._read(query, key, value, mask, bias, cached=False, **options)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create an empty cache: `key` and `value` `[batch, kv_heads, max_length, head_dim]`.

        They are in the collection `CACHE`, in the compute dtype, or with scales `key_scale` and
        `value_scale` under a `cache_format`. A rolling cache has window - 1 slots. Convolutions
        have `NAME_last` `[batch, width - 1, heads, head_dim]` of queries, keys and values.

        Raises:
          ConfigError: A size is below one, or the collection is not mutable.
        """
        check_sizes(self, batch_size=batch_size, max_length=max_length)
        if self.kv_layer is not None:
            return
        kv_heads, head_dim = self._head_sizes()
        num_slots = self.window - 1 if self.has_rolling_cache and self.window else max_length
        shape = (batch_size, kv_heads, num_slots, head_dim)
        if self.has_rolling_cache or self.qkv_conv_tpl is not None:
            init_num_prompt(self)
        for name, axes in _LAST_AXES.items() if self.qkv_conv_tpl is not None else ():
            conv = getattr(self, f"{name}_conv")
            last = jnp.zeros((batch_size, conv.width - 1, conv.num_heads, head_dim))
            write_cache(self, f"{name}_last", self.cast(last), axes)
        for name, axes in self._cache_axes().items():
            if self.cache_format is None:
                write_cache(self, name, jnp.zeros(shape, self.compute_dtype), axes)
            else:
                write_rounded_cache(self, name, shape, axes)

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        query_ends: jax.Array | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Compute attention of the next tokens to all tokens before them and themselves.

        Token i of `x` is written to slot time_step + i of the cache and sees the slots up to its
        own. Later slots are masked and may hold any finite numbers: prompts of unequal length can
        be written in one step, and their padding overwritten one token at a time.

        Args:
          x: `[batch, t, input_dims]`, of a prompt or of one new token per row.
          time_step: int32 scalar, the number of tokens in the cache.
          positions: int32 `[batch, t]` or `[batch, t, axes]`, for the rotation.
          bias: float32 `[batch or 1, heads or 1, t, max_length]`, added to the logits.
          query_ends: int32 `[batch, t]`, the last slot that each token sees, in a prefix or an
            image. The first step must contain it. None for its own.
          kv: Cached keys and values of other layers; see `fprop`.

        Returns:
          `[batch, t, input_dims]` in the compute dtype; NaN if time_step + t exceeds the length of
          the cache, since the time step is known at run time only. A rolling cache has no limit
          but the slots of `bias`.

        Raises:
          ConfigError: The cache is missing, has wrong sizes or is not mutable, or there is a
            time step for each row, or `query_ends` with a rolling cache.
        """
        check_time_step(self, time_step)
        expected = "None for cached steps at positions of several axes"
        require(self.chunk is None or positions.ndim == 2, self, "chunk", self.chunk, expected)
        query, *new = self._project(x, positions, time_step=time_step)
        arrays = [
            self._extend_cache(name, jnp.swapaxes(heads, 1, 2), axes, time_step)
            for (name, axes), heads in zip(self._cache_axes().items(), new, strict=True)
        ]
        arrays += read_prompt_cache(self, *self._cache_axes())
        cached = (jnp.swapaxes(heads, 1, 2) for heads in arrays)
        # Other layers do not know which tokens a rolling cache holds.
        keys, values, *prompts = self._heads_to_read(cached, None if self.has_rolling_cache else kv)
        (batch, num_tokens), num_keys = x.shape[:2], keys.shape[1]
        lengths = [num_keys, *(one.shape[1] for one in prompts[:1])]
        max_length: int | None = lengths[-1]
        ahead, expected = self.look_ahead, "None with lazy_prefix_broadcast=True"
        require(ahead is None or not prompts, self, "look_ahead", ahead, expected)
        if self.has_rolling_cache:
            expected = "None with has_rolling_cache=True"
            require(query_ends is None, self, "query_ends", "an array", expected)
            mask = AttentionMask.streaming_mask(batch, num_tokens, num_keys, time_step=time_step)
            max_length = None if bias is None else bias.shape[3]
            if bias is not None:
                bias = jnp.pad(bias, [(0, 0)] * 3 + [(num_keys - num_tokens, 0)])
                bias = jax.lax.dynamic_slice_in_dim(bias, time_step, num_keys, axis=3)
        else:
            at: dict[str, Any] = {"time_step": time_step, "query_ends": query_ends}
            mask, bias = mask_of_step(batch, num_tokens, *lengths, bias=bias, **at)
        if self.relative_bias_tpl is not None:
            relative = self.relative_bias(mask.query_positions[:1], mask.key_positions[:1])
            bias = relative if bias is None else relative + bias
        mask = mask.within(self.window).split_chunks(self.chunk).look_ahead(self.look_ahead)
        more: dict[str, Any] = {"gate": self._gate(x), "prompts": prompts}
        outputs = self._read(query, keys, values, mask, bias, cached=True, **more)
        if max_length is None:
            return outputs
        return jnp.where(time_step + num_tokens <= max_length, outputs, jnp.nan)

    def prompt_arrays(self) -> tuple[str, ...]:
        """Return the names of the cached keys and values, unless there are none of all tokens.

        Raises:
          ConfigError: The layer has a `cache_format`.
        """
        expected = "None with lazy_prefix_broadcast=True"
        require(self.cache_format is None, self, "cache_format", self.cache_format, expected)
        return () if self.has_rolling_cache else tuple(self._cache_axes())

    def _extend_cache(
        self, name: str, heads: jax.Array, axes: Axes, time_step: jax.Array
    ) -> jax.Array:
        """Cache the next keys or values `[batch, heads, t, head_dim]`; return those to read."""
        if self.has_rolling_cache:
            return extend_last(self, name, heads, axes, time_step=time_step, axis=2)
        extend = extend_cache if self.cache_format is None else extend_rounded_cache
        return extend(self, name, heads, axes, time_step=time_step, slot_axis=2)

    def _gate(self, x: jax.Array) -> jax.Array | None:
        """Return the gate `[batch, length, num_heads, dim_per_head]`; None without a gate."""
        return None if self.output_gate_tpl is None else self.gate(self.cast(x))

    def _heads_to_read(
        self, heads: Iterable[jax.Array], kv: KeysValues | None
    ) -> tuple[jax.Array, ...]:
        """Return the keys and values to read: `heads`, or those of `kv_layer`."""
        if self.kv_layer is None:
            pair = tuple(heads)
            if kv is not None:
                kv[None] = pair
            return pair
        kv = kv or {}
        require(self.kv_layer in kv, self, "kv_layer", self.kv_layer, f"one of {list(kv)}")
        pair = kv[self.kv_layer]
        sizes, expected = pair[0].shape[2:], self._head_sizes()
        require(sizes == expected, self, "kv_layer", sizes, f"{expected}, the sizes of heads")
        return pair

    def _project(
        self,
        x: jax.Array,
        positions: jax.Array,
        *,
        segments: jax.Array | None = None,
        time_step: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Return rotated queries and keys, and values, `[batch, length, heads, head_dim]`.

        With `kv_layer` there are queries alone. Convolutions read whole rows with documents
        `segments` `[batch, length]`, or a step at `time_step`.
        """
        tokens, leading = merge_tokens(self, self.cast(x)), x.shape[:-1]
        if self.combined_qkv:
            *heads, value = self.qkv(tokens, leading=leading)
        else:
            children = (self.query,) if self.kv_layer else (self.query, self.key)
            heads = [project(tokens, leading=leading) for project in children]
            if self.kv_layer is None:
                value = heads[1] if self.values_are_keys else self.value(tokens, leading=leading)
        if self.qkv_conv_tpl is not None:
            convolve = functools.partial(
                convolve_heads, self, segments=segments, time_step=time_step
            )
            *heads, value = map(convolve, _LAST_AXES, (*heads, value), _LAST_AXES.values())
        if self.value_norm_tpl is not None:
            value = self.value_norm(value)
        has_norm, norm_first = self.qk_norm_tpl is not None, self.qk_norm_before_rotary
        if has_norm and norm_first:
            heads = self._normalize_all(heads)
        if self.rotary_tpl is not None:
            heads = [self.rotary(one, positions) for one in heads]
        if has_norm and not norm_first:
            heads = self._normalize_all(heads)
        if self.query_growth:
            steps = (first_axis(positions) + 1) // self.query_growth_step
            factor = 1.0 + self.query_growth * jnp.log1p(steps.astype(jnp.float32))
            heads[0] = self.cast(heads[0] * factor[..., None, None])
        if self.kv_layer is None:
            heads.append(value)
        names = ("query", "key", "value")
        return tuple(name_activation(one, name) for one, name in zip(heads, names, strict=False))

    def _normalize_all(self, heads: list[jax.Array]) -> list[jax.Array]:
        norms = (getattr(self, name) for name in ("query_norm", "key_norm")[: len(heads)])
        return [self._normalize(norm, one) for norm, one in zip(norms, heads, strict=True)]

    def _clip_rule(self) -> dict[str, Any]:
        kv_heads = self._head_sizes()[0]
        return {
            "owns_keys": kv_heads == self.num_heads and not self.values_are_keys,
            "combined_heads": kv_heads if self.combined_qkv else None,
        }

    def _cache_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Return the logical axes of each cached array, whose heads come before the slots."""
        if self.kv_layer is not None:
            return {}
        key = self.qkv if self.combined_qkv else self.key
        value = key if self.combined_qkv or self.values_are_keys else self.value
        of_layers = {"key": key.activation_axes, "value": value.activation_axes}
        return {
            name: (batch, heads, None if self.has_rolling_cache else length, head_dim)
            for name, (batch, length, heads, head_dim) in of_layers.items()
        }

    def _check_options(self) -> None:
        super()._check_options()
        check_sizes(self, window=self.window, chunk=self.chunk, look_ahead=self.look_ahead)
        window, ahead = self.window, self.look_ahead
        expected = f"at least look_ahead={ahead}, so that a query sees itself"
        require(window is None or window >= (ahead or 1), self, "window", window, expected)
        check_sizes(self, kv_layer=self.kv_layer, query_growth_step=self.query_growth_step)
