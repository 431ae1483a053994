"""Sequence parallelism: norms and residuals are split by position over the mesh axis `tensor`.

Source: Korthikanti et al., 2022, arXiv:2205.05198. Products with weights need whole rows, of which
each device computes some heads or hidden units. The all-reduce of their outputs becomes a
reduce-scatter, and an all-gather precedes the next products. Together they send as much.

The rule of `residual_length` selects it: `DEFAULT_RULES.replace(residual_length=("context",
"tensor"))`. By default it equals the rule of `length`, and these functions do nothing.
"""

from __future__ import annotations

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import BoundSharding

_RESIDUAL = ("batch", "residual_length", "act_embed")
_WHOLE = ("batch", "length", "act_embed")


def is_sequence_parallel(sharding: BoundSharding | None) -> bool:
    """Return whether a mesh splits the positions of residuals further than those of products."""
    if sharding is None:
        return False
    return sharding.num_shards("residual_length") > sharding.num_shards("length")


def gather_positions(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """Return a residual or normalized `x` `[batch, length, dims]` in the layout of products.

    Args:
      layer: Layer that reads `x`; its bound sharding is read.
      x: Activations in any layout.
    """
    if not is_sequence_parallel(layer.inherited("sharding")):
        return x
    # The first constraint is that of the gradient, too: norms before `x` stay split in the backward
    # pass.
    return layer.constrain(layer.constrain(x, *_RESIDUAL), *_WHOLE)


def split_positions(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """Return the output `x` `[batch, length, dims]` of a branch in the layout of residuals.

    Args:
      layer: Layer that adds `x` to a residual; its bound sharding is read.
      x: Activations in any layout.
    """
    if not is_sequence_parallel(layer.inherited("sharding")):
        return x
    return layer.constrain(x, *_RESIDUAL)
