"""Decoding of prompts with a TransformerLm, for the models that contain one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cached_network import CachedPrompts, cache_prompts
from layerkit.models.transformer_lm import TransformerLm


def prompts_of_batch(
    model: Any, lm: TransformerLm, batch: NestedMap, *, is_prefix_lm: bool = False
) -> CachedPrompts:
    """Return the prompts of a batch, with an empty cache.

    Args:
      model: Model with a field `decoder`.
      lm: Network that continues the prompts, a child of the model.
      batch: `ids` `[batch, prompt]`, `prompt_lengths` `[batch]` if prompts do not fill their rows,
        and optionally `max_steps`, `temperature`, `top_k`, `top_p` and
        `row_ids` `[batch]`; see `Prompts` and `RowOptions`.
      is_prefix_lm: True if each position of a prompt attends to the whole prompt.

    Raises:
      ConfigError: Rows are packed, or there is padding without `prompt_lengths`.
    """
    for name in ("segment_ids", "segment_pos"):
        require(name not in batch, model, name, "packed rows", "a batch with a prompt per row")
    lengths = batch.get("prompt_lengths")
    if lengths is None:
        expected = "the length of each prompt, since the batch has paddings"
        require("paddings" not in batch, model, "prompt_lengths", None, expected)
        rows, width = batch.ids.shape
        lengths = jnp.full((rows,), width, jnp.int32)

    def init_cache(lm: TransformerLm, ids: jax.Array, max_length: int) -> None:
        lm.init_cache(ids.shape[0], max_length)

    return cache_prompts(
        model,
        lm,
        batch,
        init_cache=init_cache,
        inputs=batch.ids,
        prompts=(batch.ids, lengths),
        prefix_lengths=lengths if is_prefix_lm else None,
    )
