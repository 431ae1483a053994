"""Decoding of prompts with a TransformerLm, for the models that contain one.

Continuations may be followed by suffixes that are scored, such as answers after a reasoning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config.checks import check_integer_arrays, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cache_rows import pad_columns, row_parts
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


def continue_prompts(
    model: Any, lm: TransformerLm, batch: NestedMap, *, is_prefix_lm: bool = False
) -> NestedMap:
    """Return the outputs of `extend_prompts` for the prompts of a batch.

    The arguments are those of `prompts_of_batch`. With `suffixes` `[batch, num_suffixes,
    suffix_length]`, the outputs have their scores; see `score_suffixes`.

    Raises:
      ConfigError: The decoder draws but has no random key, rows are packed, there is padding
        without `prompt_lengths`, or the model has fewer positions than tokens.
    """
    prompts = prompts_of_batch(model, lm, batch, is_prefix_lm=is_prefix_lm)
    outputs = prompts.decode()
    if "suffixes" in batch:
        prefix_lengths = prompts.prompts.lengths if is_prefix_lm else None
        score_suffixes(model, lm, batch, outputs, prefix_lengths=prefix_lengths)
    return outputs


def score_suffixes(
    model: Any,
    lm: TransformerLm,
    batch: NestedMap,
    outputs: NestedMap,
    *,
    prefix_lengths: jax.Array | None = None,
) -> None:
    """Add the scores of a batch's suffixes to the outputs of decoding.

    A suffix follows the last token of a continuation, the end token included. Its scores are those
    of one pass over the whole row, which decoding with the cache would give as well.

    Args:
      model: Model that decodes, for error messages and its mesh.
      lm: Network of the model.
      batch: `suffixes` int32 `[batch, num_suffixes, suffix_length]` and optionally
        `suffix_lengths` int32 `[batch, num_suffixes]`; None for suffixes without padding.
      outputs: Outputs of `extend_prompts`, to which this function adds `suffix_log_probs` float32
        `[batch, num_suffixes, suffix_length]`, 0 after a suffix, and their sums `suffix_scores`
        `[batch, num_suffixes]`. The entry `candidates`, if there is one, gets both with an axis of
        candidates after `batch`. Rows of padding have zeros.
      prefix_lengths: Number of leading tokens of each row with bidirectional attention, int32
        `[batch]`; None for a causal model.

    Raises:
      ConfigError: The suffixes have the wrong shape or dtype.
    """
    suffixes, rows = batch.suffixes, len(outputs.ids)
    shape = list(suffixes.shape)
    expected = f"[batch={rows}, num_suffixes, suffix_length]"
    is_valid = suffixes.ndim == 3 and len(suffixes) == rows
    require(is_valid, model, "shape of suffixes", shape, expected)
    check_integer_arrays(model, suffixes=suffixes)
    lengths = batch.get("suffix_lengths")
    if lengths is None:
        lengths = jnp.full(shape[:2], shape[2], jnp.int32)
    is_suffix = jnp.arange(shape[2]) < lengths[..., None]
    is_row = outputs.prompt_lengths > 0

    def log_probs_after(ids: jax.Array, starts: jax.Array) -> jax.Array:
        """Score the suffixes after continuations `[batch, max_length]` of lengths `[batch]`."""

        def by_suffix(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, shape[1], axis=0)

        flat_ids = by_suffix(jnp.pad(ids, ((0, 0), (0, shape[2]))))
        flat_suffixes, flat_starts = suffixes.reshape(-1, shape[2]), by_suffix(starts)
        flat_ids = jax.vmap(
            lambda row, suffix, start: jax.lax.dynamic_update_slice(row, suffix, (start,))
        )(flat_ids, flat_suffixes.astype(flat_ids.dtype), flat_starts)
        flat_ids = pad_columns(flat_ids, row_parts(model))
        columns = jnp.arange(flat_ids.shape[1])
        is_token = columns < (flat_starts + lengths.reshape(-1))[:, None]
        options = {}
        if prefix_lengths is not None:
            options["in_prefix"] = columns < by_suffix(prefix_lengths)[:, None]
        hidden = lm.hidden(
            jnp.where(is_token, flat_ids, 0), segment_ids=is_token.astype(jnp.int32), **options
        )
        # Each suffix token is predicted one column before its own.
        before = jnp.maximum(flat_starts[:, None] - 1 + jnp.arange(shape[2]), 0)
        logits = lm.softmax.logits(jnp.take_along_axis(hidden, before[..., None], axis=1))
        of_tokens = jnp.take_along_axis(
            jax.nn.log_softmax(logits), flat_suffixes[..., None], axis=-1
        )
        log_probs_of_suffixes = of_tokens[..., 0].reshape(shape)
        return jnp.where(is_suffix & is_row[:, None, None], log_probs_of_suffixes, 0.0)

    def add(entry: NestedMap, log_probs: jax.Array) -> None:
        entry.suffix_log_probs = log_probs
        entry.suffix_scores = jnp.sum(log_probs, axis=-1)

    if "candidates" not in outputs:
        add(outputs, log_probs_after(outputs.ids, outputs.lengths))
        return
    many = outputs.candidates
    log_probs = [
        log_probs_after(many.ids[:, n], many.lengths[:, n]) for n in range(many.ids.shape[1])
    ]
    add(many, jnp.stack(log_probs, axis=1))
    add(outputs, log_probs[0])
