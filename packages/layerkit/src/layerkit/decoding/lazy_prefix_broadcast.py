"""Lazy prefix broadcast: continuations of a prompt read its keys and values from one copy.

This is the method of Praxis' `DotProductAttentionWithLPB`. The cache of the prompts moves to the
collection `PROMPT_CACHE`, with a row for each prompt. The rows of continuations, which decoders
repeat and reorder, have slots for their last tokens alone, as many as a row may get. The token at
position p is in slot p modulo their number. So all rows write to the same slot, though prompts of
unequal lengths are continued from the end of the shortest one; and until a row ends, its slots hold
all tokens after its prompt. At first they hold the tokens before the first step.

States of a fixed size, such as those of recurrent mixers and rolling caches, are copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import BaseLayer, visit_layers
from layerkit.config.checks import require
from layerkit.decoding.cache_rows import SHARED, CacheRows
from layerkit.decoding.decoder import ExtendFn
from layerkit.layers.attention.base_attention import AttentionLayer


def share_prompts(
    network: BaseLayer,
    extend: ExtendFn,
    cache_axes: CacheRows,
    *,
    first_step: jax.Array,
    num_slots: int,
) -> tuple[ExtendFn, CacheRows]:
    """Return a function of steps after whose first call continuations share their prompts.

    Args:
      network: Unbound network with the cache.
      extend: Its function of steps, whose cache is a `CacheRows`.
      cache_axes: Row axis of each array of the cache.
      first_step: Time step of the second call, int32 scalar. The first call has the prompts.
      num_slots: Largest number of tokens of a continuation.

    Returns:
      (function of steps, row axes of the cache that it returns).

    Raises:
      ConfigError: Attention has a `cache_format` or, in a step, overrides `attend`; or no layer
        caches tokens.
    """
    cached = flatten_dict(cache_axes.cache)
    paths: list[tuple[str, ...]] = []

    def visit(layer: BaseLayer) -> None:
        names = layer.prompt_arrays() if isinstance(layer, AttentionLayer) else ()
        paths.extend(path for name in names if (path := (*layer.path, name)) in cached)

    visit_layers(network, visit)
    expected = "attention that caches all tokens, with lazy_prefix_broadcast=True"
    require(bool(paths), network, "cache", ["/".join(path) for path in cached], expected)
    # Position of the token in each slot before the first step; there is none below 0.
    positions = first_step - 1 - (first_step - 1 - jnp.arange(num_slots)) % num_slots

    def share(rows: CacheRows) -> CacheRows:
        cache = flatten_dict(rows.cache)
        prompts = {path: cache[path] for path in paths}
        last = {path: jnp.take(x, positions, axis=-2, mode="clip") for path, x in prompts.items()}
        return rows._replace(cache=unflatten_dict(cache | last), prompts=unflatten_dict(prompts))

    def extend_shared(
        rows: CacheRows, ids: jax.Array, time_step: jax.Array
    ) -> tuple[CacheRows, jax.Array]:
        is_first = not rows.prompts
        rows, logits = extend(rows, ids, time_step)
        return share(rows) if is_first else rows, logits

    shared = unflatten_dict(dict.fromkeys(paths, SHARED))
    return extend_shared, cache_axes._replace(prompts=shared)
