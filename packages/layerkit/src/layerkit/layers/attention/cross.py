"""Cross-attention of a sequence to a memory, such as the outputs of an encoder.

Keys and values are projections of the memory, which does not grow while a sequence is decoded:
`init_cache` projects it once, and `extend_step` projects queries only. Positions have an effect
through a bias only.
"""

from __future__ import annotations

import jax

from layerkit.layers.attention.base_attention import BaseAttention
from layerkit.layers.attention.cache import read_cache, write_cache
from layerkit.layers.basic.dots import merge_tokens
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.remat import name_activation


class CrossAttention(BaseAttention):
    """Attention with queries of `x` and keys and values of a memory (Vaswani et al., 2017).

    The other fields are those of `BaseAttention`.

    Attributes:
      memory_dims: Size of the memory's model dimension; None for input_dims.

    Raises:
      ConfigError: A size is not divisible, a number is out of range, or a name is unknown.
    """

    memory_dims: int | None = None

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        self._check_options()
        memory_dims = self.input_dims if self.memory_dims is None else self.memory_dims
        self._create_query_key_value(memory_dims)
        self._create_attention_parts()

    def fprop(
        self,
        x: jax.Array,
        *,
        memory: jax.Array,
        mask: AttentionMask,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Compute attention of the tokens of `x` to the memory.

        Args:
          x: `[batch, length, input_dims]`.
          memory: `[batch, memory_length, memory_dims]`.
          mask: Mask of the (token, memory) pairs that may attend, such as
            `AttentionMask.cross_mask`, which masks the padding of the memory.
          bias: float32 `[batch or 1, heads or 1, length, memory_length]`, added to the logits.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.

        Raises:
          ConfigError: Shapes are incompatible.
          UnsupportedBackendError: The backend does not support this attention.
        """
        key, value = self._project_memory(memory)
        return self._read(self._project(x), key, value, mask, bias, cached=False)

    def init_cache(self, memory: jax.Array) -> None:
        """Store `key` and `value` `[batch, memory_length, kv_heads, head_dim]` of the memory.

        They are in the collection `CACHE`, in the compute dtype.

        Args:
          memory: `[batch, memory_length, memory_dims]`.

        Raises:
          ConfigError: Shapes are incompatible, or the collection is not mutable.
        """
        key, value = self._project_memory(memory)
        write_cache(self, "key", self.cast(key), self.key.activation_axes)
        write_cache(self, "value", self.cast(value), self.value.activation_axes)

    def extend_step(
        self, x: jax.Array, *, mask: AttentionMask, bias: jax.Array | None = None
    ) -> jax.Array:
        """Compute attention of the next tokens to the memory that `init_cache` has projected.

        Args:
          x: `[batch, t, input_dims]`.
          mask: Mask of the (token, memory) pairs that may attend, `[batch, t, memory_length]`.
          bias: float32 `[batch or 1, heads or 1, t, memory_length]`, added to the logits.

        Returns:
          `[batch, t, input_dims]` in the compute dtype.

        Raises:
          ConfigError: The cache is missing, or shapes are incompatible with it.
        """
        key, value = (read_cache(self, n, made_by="init_cache(memory)") for n in ("key", "value"))
        return self._read(self._project(x), key, value, mask, bias, cached=True)

    def _project(self, x: jax.Array) -> jax.Array:
        query = self.query(merge_tokens(self, self.cast(x)), leading=x.shape[:-1])
        if self.qk_norm_tpl is not None:
            query = self._normalize(self.query_norm, query)
        return name_activation(query, "query")

    def _project_memory(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, leading = merge_tokens(self, self.cast(memory)), memory.shape[:-1]
        key, value = self.key(tokens, leading=leading), self.value(tokens, leading=leading)
        if self.qk_norm_tpl is not None:
            key = self._normalize(self.key_norm, key)
        return name_activation(key, "key"), name_activation(value, "value")
