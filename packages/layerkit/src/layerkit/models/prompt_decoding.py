"""Decoding of prompts with a TransformerLm, for the models that contain one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cached_network import decode_with_cache
from layerkit.errors import ConfigError
from layerkit.models.suffix_scoring import score_suffixes
from layerkit.models.transformer_lm import TransformerLm


def continue_prompts(
    model: Any, lm: TransformerLm, batch: NestedMap, *, is_prefix_lm: bool = False
) -> NestedMap:
    """Continue the prompts of a batch.

    Args:
      model: Model with a field `decoder`.
      lm: Network that continues the prompts, a child of the model.
      batch: `ids` `[batch, prompt]`, `prompt_lengths` `[batch]` if prompts do not fill their rows,
        and optionally `max_steps`, `temperature`, `top_k`, `top_p` and
        `row_ids` `[batch]`; see `extend_prompts` and `RowOptions`. With `suffixes` `[batch,
        num_suffixes, suffix_length]`, the outputs have their scores; see `score_suffixes`.
      is_prefix_lm: True if each position of a prompt attends to the whole prompt.

    Returns:
      Outputs of `layerkit.decoding.extend_prompts`: `ids`, `lengths`, `log_probs`, `scores`,
      `prompt_lengths` and, if the decoder returns several continuations, `candidates`.

    Raises:
      ConfigError: The decoder draws but has no random key, rows are packed, there is padding
        without `prompt_lengths`, or the model has fewer positions than tokens.
    """
    for name in ("segment_ids", "segment_pos"):
        if name in batch:
            raise ConfigError(
                "packed rows cannot be decoded",
                field=name,
                expected="a batch with one prompt per row and prompt_lengths",
            )
    lengths = batch.get("prompt_lengths")
    if lengths is None:
        if "paddings" in batch:
            raise ConfigError(
                field="prompt_lengths",
                value=None,
                expected="the length of each prompt, since the batch has paddings",
            )
        rows, width = batch.ids.shape
        lengths = jnp.full((rows,), width, jnp.int32)

    def init_cache(lm: TransformerLm, ids: jax.Array, max_length: int) -> None:
        lm.init_cache(ids.shape[0], max_length)

    prefix_lengths = lengths if is_prefix_lm else None
    outputs = decode_with_cache(
        model,
        lm,
        batch,
        init_cache=init_cache,
        inputs=batch.ids,
        prompts=batch.ids,
        prompt_lengths=lengths,
        prefix_lengths=prefix_lengths,
    )
    if "suffixes" in batch:
        score_suffixes(model, lm, batch, outputs, prefix_lengths=prefix_lengths)
    return outputs
