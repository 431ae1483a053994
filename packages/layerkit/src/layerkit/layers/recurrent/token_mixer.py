"""TokenMixer: a causal layer with a state, in the place of the attention of a Transformer layer.

`Transformer.attention_tpl` may be any mixer, and patterns of layers with attention and with mixers
are hybrids, such as Qwen3-Next: `StackedTransformer.block_tpls`. A mixer carries a state of fixed
size along each row. A subclass defines `initial_state` and `mix`; whole rows, cached steps, prompts
of unequal lengths and beams follow from these two.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_sizes, require
from layerkit.layers.attention.cache import Axes, check_time_step, read_cache, write_cache
from layerkit.layers.attention.cached_states import count_kept, init_num_prompt
from layerkit.ops.attention.masks import AttentionMask, first_tokens

State = dict[str, jax.Array]
"""Arrays `[batch, …]` that a mixer carries from token to token, by name."""


class TokenMixer(BaseLayer):
    """Base class of mixers of tokens: `[batch, length, input_dims]` → the same shape.

    Attributes:
      state_axes: Logical axes of each array of the state, by name.
      input_dims: Size of the model dimension.
    """

    state_axes: ClassVar[dict[str, Axes]] = {}

    input_dims: int = 0

    @property
    def is_causal(self) -> bool:
        """True if no output depends on later tokens, as in a decoder."""
        return True

    def initial_state(self, batch_size: int) -> State:
        """Return the state `[batch, …]` before the first token of a document."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define initial_state")

    def mix(
        self, x: jax.Array, state: State, *, segments: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Continue rows by some tokens.

        Args:
          x: `[batch, t, input_dims]`.
          state: State before these tokens, which belongs to the document of the first token.
          segments: Number of each token's document, int32 `[batch, t]`; 0 is padding, which leaves
            the state as it is. A token of another document than the last token before it starts
            with the initial state. None for one document without padding.

        Returns:
          (outputs `[batch, t, input_dims]`, state after these tokens).
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define mix")

    def fprop(self, x: jax.Array, *, mask: AttentionMask, **attention: Any) -> jax.Array:
        """Mix the tokens of whole rows.

        Args:
          x: `[batch, length, input_dims]`.
          mask: Causal mask, whose segments are the documents of packed rows.
          **attention: Further arguments of attention, such as positions, which have no effect here.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.

        Raises:
          ConfigError: The mask and the layer differ in whether tokens read later ones.
        """
        del attention
        is_causal = mask.causal and not mask.reads_ahead
        expected = "a causal mask without a prefix" if self.is_causal else "a bidirectional mask"
        require(is_causal == self.is_causal, self, "mask", f"causal={mask.causal}", expected)
        return self.mix(x, self.initial_state(x.shape[0]), segments=mask.query_segments)[0]

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create the state of rows before their first token, which does not grow with them."""
        check_sizes(self, batch_size=batch_size, max_length=max_length)
        require(self.is_causal, self, "is_causal", self.is_causal, "True for cached steps")
        for name, value in self.initial_state(batch_size).items():
            write_cache(self, name, value, self.state_axes[name])
        init_num_prompt(self)

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        query_ends: jax.Array | None = None,
        **attention: Any,
    ) -> jax.Array:
        """Mix the next tokens of cached rows.

        A step at time step 0 begins with the initial state. The first step adds the first tokens of
        all rows alone to the state, as `set_num_prompt` determines; its outputs of further tokens
        are those of padding.

        Args:
          x: `[batch, t, input_dims]`.
          time_step: int32 scalar, number of tokens before these.
          query_ends: None, since a mixer reads no later token.
          **attention: Further arguments of attention, which have no effect here.

        Returns:
          `[batch, t, input_dims]` in the compute dtype.

        Raises:
          ConfigError: The cache is missing, or there are `query_ends` or a time step for each row.
        """
        del attention
        check_time_step(self, time_step)
        expected = "None, since a recurrent layer reads no later token"
        require(query_ends is None, self, "query_ends", "an array", expected)
        batch, num_tokens = x.shape[:2]
        segments = None
        if num_tokens > 1:
            kept = count_kept(self, num_tokens, time_step=time_step)
            kept = jnp.broadcast_to(kept, (batch,))
            segments = first_tokens(kept, num_tokens).astype(jnp.int32)
        state = {
            name: jnp.where(time_step == 0, start, read_cache(self, name))
            for name, start in self.initial_state(batch).items()
        }
        outputs, state = self.mix(x, state, segments=segments)
        for name, value in state.items():
            write_cache(self, name, value, self.state_axes[name])
        return outputs
