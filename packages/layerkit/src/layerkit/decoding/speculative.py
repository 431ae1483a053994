"""Greedy decoding with drafts of multi-token prediction (DeepSeek-AI, 2024, arXiv:2412.19437).

Each step of the network runs on the last token and on a draft of the next one. If the network
chooses the draft itself, its second output is valid, and the step gives two tokens. All rows share
one column, so that a step gives two tokens only if the drafts of all open rows are right.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.config.checks import require
from layerkit.decoding.decoder import ExtendFn
from layerkit.decoding.loop import SampleDecoder, SampledRows, choose_column


class SpeculativeDecoder(SampleDecoder):
    """A greedy decoder with the outputs of a `SampleDecoder`, in fewer steps of the network.

    The network is a `TransformerLm` with `mtp_tpl`, whose first module drafts the tokens. The
    fields are those of `SampleDecoder`.

    Raises:
      ConfigError: The temperature is not 0.
    """

    drafts: ClassVar[bool] = True

    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        owner, expected = type(self).__qualname__, "0, since drafts are verified greedily"
        require(not self.needs_key, owner, "temperature", self.temperature, expected)

    def advance(self, extend: ExtendFn, rows: SampledRows) -> SampledRows:
        """Run the model once; return the rows with tokens in their next column, or next two."""
        column = rows.column
        last = jax.lax.dynamic_slice_in_dim(rows.ids, column - 1, 1, axis=1)
        # There is no hidden state from which to draft a second token; a wrong draft is only slow.
        cache, drafted = extend(rows.cache, last, jnp.maximum(column - 2, 0), "draft_step")
        draft = jnp.argmax(drafted, axis=-1).astype(jnp.int32)
        in_prompt = column < rows.prompt_lengths
        draft = jnp.where(in_prompt, rows.ids[:, column], draft[:, 0])
        both = jnp.concatenate([last, draft[:, None]], axis=1)
        cache, logits = extend(cache, both, column - 1)
        one = choose_column(self, rows.replace(cache=cache), logits[:, 0])
        two = choose_column(self, one, logits[:, 1])
        is_right = jnp.all(one.ended | (one.ids[:, column] == draft))
        # The cache is the same in both, and need not be copied.
        return jax.tree.map(lambda x, y: x if x is y else jnp.where(is_right, x, y), two, one)
