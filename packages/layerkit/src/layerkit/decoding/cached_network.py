"""Decoding with a network that keeps a cache: what the models around such networks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from layerkit.base_layer import CACHE, BaseLayer
from layerkit.decoding.cache_rows import row_axes
from layerkit.decoding.loop import extend_prompts
from layerkit.decoding.split_rows import round_up, row_parts
from layerkit.nested_map import NestedMap


def decode_with_cache(
    model: Any,
    network: BaseLayer,
    batch: NestedMap,
    *,
    init_cache: Callable[[Any, Any, int], None],
    inputs: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    prefix_lengths: jax.Array | None = None,
) -> NestedMap:
    """Continues prompts by the decoder of a model, step by step with the cache of its network.

    Args:
      model: With a field `decoder`.
      network: A child of it, with `extend_step(ids, time_step=…)`.
      batch: May have `max_steps` and `row_ids` `[batch]`; see `extend_prompts`.
      init_cache: `(network, inputs, max_length)` creates the empty caches of some rows.
      inputs: What they are made from: a tree of arrays `[batch, …]`.
      prompts: int32 `[batch, width]`, left-aligned.
      prompt_lengths: int32 `[batch]`.
      prefix_lengths: int32 `[batch]`, how much of its prompt each row reads both ways; None for a
        network that reads from left to right alone.

    Returns:
      What `extend_prompts` does.

    Raises:
      ValueError: no random key where the decoder draws, or fewer positions than tokens.
    """
    # As functions of variables, which a loop can call.
    bare, variables = network.unbind()
    decoder, parts = model.decoder, row_parts(model)
    max_length = round_up(prompts.shape[1] + decoder.max_decode_steps, parts)

    # Prefixes lie beside the caches, since decoders repeat and reorder the rows of both.
    def make_cache(given_rows: Any) -> Any:
        inputs, prefix_lengths = given_rows
        _, state = bare.apply(variables, inputs, max_length, method=init_cache, mutable=[CACHE])
        return state[CACHE], prefix_lengths

    def extend(rows: Any, ids: jax.Array, time_step: jax.Array) -> tuple[Any, jax.Array]:
        cache, prefix_lengths = rows
        logits, state = bare.apply(
            {**variables, CACHE: cache},
            ids,
            time_step=time_step,
            method="extend_step",
            mutable=[CACHE],
            **({} if prefix_lengths is None else {"prefix_lengths": prefix_lengths}),
        )
        return (state[CACHE], prefix_lengths), logits

    return extend_prompts(
        decoder,
        extend,
        make_cache((inputs, prefix_lengths)),
        prompts=prompts,
        prompt_lengths=prompt_lengths,
        key=model.next_prng_key() if decoder.needs_key else None,
        cache_axes=row_axes(make_cache, (inputs, prefix_lengths)),
        row_ids=batch.get("row_ids"),
        max_steps=batch.get("max_steps"),
        row_parts=parts,
    )
