"""Multi-head latent attention: keys and values from one small latent per token.

DeepSeek-V2 (2024, arXiv:2405.04434). A token's hidden state is compressed to a latent, from which
the keys and values of all heads are expanded. Queries may have a latent as well. Keys cannot be
rotated before they are expanded, and the cache holds latents. Each key therefore has a separate
rotated part, which all heads share. Here x is the hidden state and h is a head:

    latent = norm(x·w_down)                  rotary_key = rotate(x·w_rotary)
    key_h  = [latent·w_key_h, rotary_key]    value_h    = latent·w_value_h
    query_h = [plain_h, rotate(rotary_h)]

The cache holds latent and rotary key, a few hundred numbers per token instead of two vectors per
head. `extend_step` does not expand the cached latents. Since query·(latent·w) = (query·wᵀ)·latent,
it multiplies the queries by w_keyᵀ and the attention outputs by w_value (it folds the weights). All
heads then attend to a single key per token, the latent concatenated with the rotary key.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_sizes
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.base_attention import (
    AttentionLayer,
    HeadProjection,
    OutputProjection,
)
from layerkit.layers.attention.cache import (
    check_time_step,
    extend_cache,
    mask_of_step,
    read_prompt_cache,
    write_cache,
)
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.linears import Bias, Linear
from layerkit.layers.basic.normalizations import BaseNormalization, RmsNorm
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.ops.attention.backends import BackendName
from layerkit.ops.attention.distance_bias import LogitBias
from layerkit.ops.attention.dot_product import AttentionOptions, ContextParallel
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.remat import name_activation

_LATENT_WEIGHT = ("embed", None)
_LATENT_AXES = ("batch", "length", None)
_CACHED = ("latent", "rotary_key")


class MultiHeadLatentAttention(AttentionLayer):
    """Multi-head latent attention: keys and values come from one small latent (DeepSeek-V2).

    The other fields are those of `MultiHeadAttention`.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of heads.
      latent_dims: Size of the latent of keys and values (`kv_lora_rank` in DeepSeek's code).
      query_latent_dims: Size of the latent of queries (`q_lora_rank`); None to project queries
        from the inputs (DeepSeek-V2-Lite).
      plain_dim_per_head: Number of coordinates of a query and a key that are not rotated
        (`qk_nope_head_dim`).
      rotary_dim_per_head: Number of coordinates that are rotated (`qk_rope_head_dim`).
      value_dim_per_head: Size of a value (`v_head_dim`).
      use_bias: True to add a bias to the projections to latents and to the output projection.
      rotary_tpl: Rotary embedding of queries and keys. By default it rotates pairs of neighboring
        coordinates, as in DeepSeek.
      norm_tpl: Norm of both latents.
      logit_scale: Factor of the products of queries and keys; None for
        1/√(plain_dim_per_head + rotary_dim_per_head). For DeepSeek models with YaRN, set that
        default multiplied by the square of `yarn_magnitude(factor, mscale_all_dim)`.
      down_tpl: Projections of the inputs to the latents and to the rotary key.
      up_tpl: Projections to heads, from latents or (queries without a latent) from the inputs.
      bias_tpl: Bias of the projections to latents.
      output_tpl: Projection of the heads to the output.

    Raises:
      ConfigError: A size is below one, a number is out of range, or the backend is unknown.
    """

    used_only_if: ClassVar[Conditions] = {"bias_tpl": "use_bias"}

    input_dims: int = 0
    num_heads: int = 0
    latent_dims: int = 0
    query_latent_dims: int | None = None
    plain_dim_per_head: int = 0
    rotary_dim_per_head: int = 0
    value_dim_per_head: int = 0
    use_bias: bool = False
    rotary_tpl: Config[BaseLayer] = sub_config_field(
        RotaryPositionalEmbedding.HParams, pairing="neighbors"
    )
    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)
    logit_scale: float | None = None
    logit_cap: float | None = None
    qk_clip: float | None = None
    window: int | None = None
    dropout_rate: float = 0.0
    zero_fully_masked_rows: bool = False
    backend: BackendName = "auto"
    context_parallel: ContextParallel = "all_gather"
    kernel_blocks: tuple[int, int] | None = None
    down_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams, weight_axes=_LATENT_WEIGHT)
    up_tpl: Config[BaseLayer] = sub_config_field(HeadProjection.HParams)
    bias_tpl: Config[BaseLayer] = sub_config_field(Bias.HParams)
    output_tpl: Config[BaseLayer] = sub_config_field(OutputProjection.HParams)

    def setup(self) -> None:
        """Check the fields and create the children."""
        self._check_fields()
        query_dims = self.input_dims
        if self.query_latent_dims is not None:
            query_dims = self.query_latent_dims
            self._create_down("query_down", query_dims)
            self.create_child("query_norm", self.norm_tpl, dims=query_dims)
        self._create_down("latent_down", self.latent_dims)
        self._create_down("rotary_key", self.rotary_dim_per_head)
        self.create_child("latent_norm", self.norm_tpl, dims=self.latent_dims)
        for name, dims, head_dim in (
            ("query", query_dims, self.plain_dim_per_head + self.rotary_dim_per_head),
            ("key", self.latent_dims, self.plain_dim_per_head),
            ("value", self.latent_dims, self.value_dim_per_head),
        ):
            sizes = {"input_dims": dims, "num_heads": self.num_heads, "head_dim": head_dim}
            self.create_child(name, self.up_tpl, **sizes)
        self.create_child(
            "output",
            self.output_tpl,
            num_heads=self.num_heads,
            head_dim=self.value_dim_per_head,
            output_dims=self.input_dims,
            use_bias=self.use_bias,
        )
        self.create_child("rotary", self.rotary_tpl, dims=self.rotary_dim_per_head)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: LogitBias | None = None,
    ) -> jax.Array:
        """Compute attention within rows `[batch, length, input_dims]`; see `MultiHeadAttention`."""
        query = jnp.concatenate(self._queries(x, positions), axis=-1)
        key, value = self._expand(*self._compress(x, positions))
        query, key, value = (
            name_activation(self.cast(heads), name)
            for heads, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        options = self._options_of_heads(mask, bias, cached=False)
        is_shared = (False,) * self.plain_dim_per_head + (True,) * self.rotary_dim_per_head
        rule = {"owns_keys": True, "has_bias": self.query.use_bias, "is_shared": is_shared}
        self._clip_logits(query, key, options, **rule)
        return self._project_out(self.attend(query, key, value, options))

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create an empty cache.

        The collection `CACHE` gets `latent` `[batch, max_length, latent_dims]` and `rotary_key`
        `[batch, max_length, rotary_dim_per_head]`, both in the compute dtype.

        Raises:
          ConfigError: A size is below one, or the collection is not mutable.
        """
        check_sizes(self, batch_size=batch_size, max_length=max_length)
        for name, dims in (("latent", self.latent_dims), ("rotary_key", self.rotary_dim_per_head)):
            empty = jnp.zeros((batch_size, max_length, dims), self.compute_dtype)
            write_cache(self, name, empty, _LATENT_AXES)

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        """Compute causal attention of the next tokens `[batch, t, input_dims]`.

        See `MultiHeadAttention.extend_step`. Weights cannot be folded if `up_tpl` has a bias or a
        `dot_tpl`, such as LoRA. Each step then expands the cached latents.
        """
        check_time_step(self, time_step)
        latent, rotary_key = (
            extend_cache(self, name, new, _LATENT_AXES, time_step=time_step)
            for name, new in zip(_CACHED, self._compress(x, positions), strict=True)
        )
        prompts = read_prompt_cache(self, *_CACHED)
        lengths = [x.shape[1], latent.shape[1], *(one.shape[1] for one in prompts[:1])]
        at: dict[str, Any] = {"time_step": time_step, "query_ends": query_ends}
        mask, bias = mask_of_step(x.shape[0], *lengths, bias=bias, **at)
        plain, rotated = self._queries(x, positions)
        is_folded = all(up.dot_tpl is None and not up.use_bias for up in (self.key, self.value))
        query = jnp.concatenate([self._fold_key(plain) if is_folded else plain, rotated], axis=-1)
        expand = _as_single_head if is_folded else self._expand
        key, value = expand(latent, rotary_key)
        shared = expand(*prompts) if prompts else ()
        options = self._options_of_heads(mask, bias, cached=True, prompts=shared)
        read = self.attend(query, key, value, options)
        read = self._fold_value(read) if is_folded else read
        return jnp.where(time_step + x.shape[1] <= lengths[-1], self._project_out(read), jnp.nan)

    def prompt_arrays(self) -> tuple[str, ...]:
        """Return the names of the cached latents and rotary keys."""
        return _CACHED

    def _options_of_heads(
        self, mask: AttentionMask, bias: LogitBias | None, **more: Any
    ) -> AttentionOptions:
        # The logit scale depends on the expanded head size, even if weights are folded.
        head_dim = self.plain_dim_per_head + self.rotary_dim_per_head
        return self._options(mask.within(self.window), bias, head_dim=head_dim, **more)

    def _queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return plain queries `[batch, length, heads, plain]`, rotated ones `[…, rotary]`."""
        x = self.cast(x)
        if self.query_latent_dims is not None:
            x = self.query_norm(self._project_down("query_down", x))
        plain, rotated = jnp.split(self.query(x), [self.plain_dim_per_head], axis=-1)
        return plain, self.rotary(rotated, positions)

    def _compress(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return latents `[batch, length, latent]` and rotary keys `[batch, length, rotary]`."""
        x = self.cast(x)
        latent = self.latent_norm(self._project_down("latent_down", x))
        rotary_key = self._project_down("rotary_key", x)[:, :, None]
        return latent, self.rotary(rotary_key, positions)[:, :, 0]

    def _expand(self, latent: jax.Array, rotary_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys `[batch, keys, heads, plain + rotary]` and values `[…, heads, value]`."""
        plain = self.key(latent)
        shared = rotary_key[:, :, None]
        shared = jnp.broadcast_to(shared, (*plain.shape[:-1], shared.shape[-1]))
        return jnp.concatenate([plain, shared], axis=-1), self.value(latent)

    def _fold_key(self, plain: jax.Array) -> jax.Array:
        """Multiply queries `[batch, t, heads, plain]` by w_keyᵀ, to `[…, latent]`."""
        folded = jnp.einsum("btnh,lnh->btnl", plain, self.key.theta.w)
        return self.constrain(folded, "batch", "length", "act_heads", None)

    def _fold_value(self, read: jax.Array) -> jax.Array:
        """Multiply outputs `[batch, t, heads, latent]` by w_value, to `[…, value]`."""
        return jnp.einsum("btnl,lnv->btnv", read, self.value.theta.w)

    def _project_out(self, read: jax.Array) -> jax.Array:
        read = self.constrain(read, "batch", "length", "act_heads", "head_dim")
        out: jax.Array = self.output(read)
        return out

    def _create_down(self, name: str, dims: int) -> None:
        self.create_child(name, self.down_tpl, input_dims=self.input_dims, output_dims=dims)
        if self.use_bias:
            self.create_child(f"{name}_bias", self.bias_tpl, dims=dims, axes=(None,))

    def _project_down(self, name: str, x: jax.Array) -> jax.Array:
        low: jax.Array = getattr(self, name)(x)
        return getattr(self, f"{name}_bias")(low) if self.use_bias else low

    def _check_fields(self) -> None:
        check_sizes(
            self,
            input_dims=self.input_dims,
            num_heads=self.num_heads,
            latent_dims=self.latent_dims,
            plain_dim_per_head=self.plain_dim_per_head,
            rotary_dim_per_head=self.rotary_dim_per_head,
            value_dim_per_head=self.value_dim_per_head,
            query_latent_dims=self.query_latent_dims,
            window=self.window,
        )
        self._check_options()


def _as_single_head(latent: jax.Array, rotary_key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the key and value `[batch, keys, 1, dims]` of all heads with folded weights."""
    key = jnp.concatenate([latent, rotary_key], axis=-1)
    return key[:, :, None], latent[:, :, None]
