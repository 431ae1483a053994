"""Decoding with a TransformerLm: the code that models around such a network share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.decoding.cached_network import decode_with_cache
from layerkit.models.transformer_lm import TransformerLm
from layerkit.nested_map import NestedMap


def continue_prompts(
    model: Any, lm: TransformerLm, batch: NestedMap, *, reads_prompts_both_ways: bool = False
) -> NestedMap:
    """Continue the prompts of a batch.

    Args:
      model: Model with a field `decoder`.
      lm: Network that continues the prompts, a child of the model.
      batch: `ids` `[batch, prompt]` and, where prompts do not fill their rows, `prompt_lengths`
        `[batch]`. It may have `max_steps` and `row_ids` `[batch]` too; see `extend_prompts`.
      reads_prompts_both_ways: Whether each position of a prompt reads the whole prompt.

    Returns:
      What `layerkit.decoding.extend_prompts` returns: `ids`, `lengths`, `log_probs`, `scores`,
      `prompt_lengths` and, if several continuations are requested, `candidates`.

    Raises:
      ValueError: no random key although the decoder draws, packed rows, padding without
        `prompt_lengths`, or fewer positions than tokens.
    """
    for name in ("segment_ids", "segment_pos"):
        if name in batch:
            raise ValueError(
                f"{name}: packed rows cannot be decoded; a batch of prompts has one a row, and"
                " prompt_lengths"
            )
    lengths = batch.get("prompt_lengths")
    if lengths is None:
        if "paddings" in batch:
            raise ValueError("paddings without prompt_lengths, which say where prompts end")
        rows, width = batch.ids.shape
        lengths = jnp.full((rows,), width, jnp.int32)

    def init_cache(lm: TransformerLm, ids: jax.Array, max_length: int) -> None:
        lm.init_cache(ids.shape[0], max_length)

    return decode_with_cache(
        model,
        lm,
        batch,
        init_cache=init_cache,
        inputs=batch.ids,
        prompts=batch.ids,
        prompt_lengths=lengths,
        prefix_lengths=lengths if reads_prompts_both_ways else None,
    )
