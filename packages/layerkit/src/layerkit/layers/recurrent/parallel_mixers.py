"""ParallelMixers: attention and a recurrent mixer that read the same vectors (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, fields_of, sub_config_field
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.recurrent.linear_attention import Mamba2


class ParallelMixers(BaseLayer):
    """The sum of attention and a recurrent mixer: `[batch, length, input_dims]` → the same shape.

        output_multiplier · attention(input_multiplier · x) + the same of the recurrent mixer

    It is the `attention_tpl` of a Transformer layer of Falcon-H1 (Zuo et al., 2025,
    arXiv:2507.22448).

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of query heads of the attention.
      num_kv_heads: Number of key and value heads of the attention; None for that of query heads.
      dim_per_head: Size of a head of the attention; None for input_dims / num_heads.
      attention_tpl: Self-attention.
      recurrent_tpl: Recurrent mixer, a `TokenMixer`.
      attention_input_multiplier: Factor of the input of the attention.
      attention_output_multiplier: Factor of the output of the attention.
      recurrent_input_multiplier: Factor of the input of the recurrent mixer.
      recurrent_output_multiplier: Factor of the output of the recurrent mixer.
    """

    input_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    attention_tpl: Config[BaseLayer] = sub_config_field(MultiHeadAttention.HParams)
    recurrent_tpl: Config[BaseLayer] = sub_config_field(Mamba2.HParams)
    attention_input_multiplier: float = 1.0
    attention_output_multiplier: float = 1.0
    recurrent_input_multiplier: float = 1.0
    recurrent_output_multiplier: float = 1.0

    def setup(self) -> None:
        """Create the two mixers."""
        sizes = {name: getattr(self, name) for name in ("input_dims", "num_heads")}
        sizes |= {"num_kv_heads": self.num_kv_heads, "dim_per_head": self.dim_per_head}
        self.create_child("attention", self.attention_tpl, **fields_of(self.attention_tpl, **sizes))
        self.create_child("recurrent", self.recurrent_tpl, input_dims=self.input_dims)

    def fprop(self, x: jax.Array, **inputs: Any) -> jax.Array:
        """Mix whole rows `[batch, length, input_dims]`; see `MultiHeadAttention.fprop`."""
        return self._add(x, self.attention, self.recurrent, inputs)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create the caches of both mixers."""
        self.attention.init_cache(batch_size, max_length)
        self.recurrent.init_cache(batch_size, max_length)

    def extend_step(self, x: jax.Array, **inputs: Any) -> jax.Array:
        """Mix the next tokens `[batch, t, input_dims]`; see `MultiHeadAttention.extend_step`."""
        return self._add(x, self.attention.extend_step, self.recurrent.extend_step, inputs)

    def _add(
        self,
        x: jax.Array,
        attend: Callable[..., jax.Array],
        recur: Callable[..., jax.Array],
        inputs: dict[str, Any],
    ) -> jax.Array:
        """Return the sum of the outputs of both mixers, `[batch, t, input_dims]`."""
        x = self.cast(x)
        attended = attend(x * self.attention_input_multiplier, **inputs)
        recurrent = recur(x * self.recurrent_input_multiplier, **inputs)
        return (
            attended * self.attention_output_multiplier
            + recurrent * self.recurrent_output_multiplier
        )
