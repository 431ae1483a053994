"""TransformerXLAttention: self-attention whose logits depend on content and distance together."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.base_attention import HeadProjection
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.positions import PositionalEmbedding
from layerkit.ops.attention.distance_bias import align_distances
from layerkit.ops.attention.dot_product import (
    AttentionOptions,
    describe_call,
    dot_product_attention,
)
from layerkit.ops.attention.local_blocks import attend_by_local_blocks, find_local_block


class TransformerXLAttention(MultiHeadAttention):
    """Self-attention with the logits (q + u)·k + (q + v)·r of query q and key k.

    r is the projection of a sinusoidal embedding of the distance of the query from the key, and u
    and v are weights `[num_heads, dim_per_head]`, which start at 0. Source: Dai et al., 2019
    (arXiv:1901.02860), section 3.3. The other fields are those of `MultiHeadAttention`.

    Attributes:
      position_tpl: Embedding of distances.
      position_projection_tpl: Projection of the embeddings into heads.
    """

    used_only_if: ClassVar[Conditions] = {"qk_clip": "never"}

    position_tpl: Config[BaseLayer] = sub_config_field(PositionalEmbedding.HParams)
    position_projection_tpl: Config[BaseLayer] = sub_config_field(
        HeadProjection.HParams, activation_axes=(None, None, "act_heads", "head_dim")
    )

    def setup(self) -> None:
        """Create weights and children."""
        super().setup()
        head_dim = self._head_sizes()[1]
        self.create_child("position", self.position_tpl, dims=self.input_dims)
        sizes = {"num_heads": self.num_heads, "head_dim": head_dim}
        template = self.position_projection_tpl
        self.create_child("position_projection", template, input_dims=self.input_dims, **sizes)
        zeros, axes = WeightInit.Constant(0.0), ("heads", "head_dim")
        for name in ("u", "v"):
            shape = (self.num_heads, head_dim)
            self.create_variable(name, WeightHParams(shape, axes, init=zeros))

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
    ) -> jax.Array:
        """Return what each query reads, `[batch, queries, heads, value_dim]`; see the base class.

        The positions of queries, and those of keys, are consecutive and the same in all rows.
        """
        size = find_local_block(describe_call(query, key, value, options))
        if size is not None and options.backend in ("auto", "xla"):
            attend = self._attend_to_all
            return attend_by_local_blocks(query, key, value, options, attend=attend, size=size)
        return self._attend_to_all(query, key, value, options)

    def _attend_to_all(
        self, query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
    ) -> jax.Array:
        num_queries, num_keys = query.shape[1], key.shape[1]
        mask = options.mask
        assert mask is not None
        # With `look_ahead`, the first query, at the start of a chunk, has the position of its end.
        first = mask.query_positions[0, 0] - (self.look_ahead or 1) + 1
        last = first + num_queries - 1 - mask.key_positions[0, 0]
        distances = last - jnp.arange(num_queries + num_keys - 1)
        embedded = self.position_projection(self.position(distances[None]))[0]
        by_distance = jnp.einsum("bqhd,lhd->bhql", query + self.theta.v, embedded)
        bias = options.scale * align_distances(by_distance.astype(jnp.float32))
        if options.dense_bias is not None:
            bias = bias + options.dense_bias
        options = dataclasses.replace(options, bias=bias)
        return dot_product_attention(query + self.theta.u, key, value, options)
