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

    Returns:
      What `extend_prompts` does.

    Raises:
      ValueError: no random key where the decoder draws, or fewer positions than tokens.
    """
    # As functions of variables, which a loop can call.
    bare, variables = network.unbind()
    decoder, parts = model.decoder, row_parts(model)
    max_length = round_up(prompts.shape[1] + decoder.max_decode_steps, parts)

    def make_cache(inputs: Any) -> Any:
        _, state = bare.apply(variables, inputs, max_length, method=init_cache, mutable=[CACHE])
        return state[CACHE]

    def extend(cache: Any, ids: jax.Array, time_step: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = bare.apply(
            {**variables, CACHE: cache},
            ids,
            time_step=time_step,
            method="extend_step",
            mutable=[CACHE],
        )
        return state[CACHE], logits

    return extend_prompts(
        decoder,
        extend,
        make_cache(inputs),
        prompts=prompts,
        prompt_lengths=prompt_lengths,
        key=model.next_prng_key() if decoder.needs_key else None,
        cache_axes=row_axes(make_cache, inputs),
        row_ids=batch.get("row_ids"),
        max_steps=batch.get("max_steps"),
        row_parts=parts,
    )
