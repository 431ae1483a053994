"""Padding of rows whose length axis is split over a mesh.

If the rule of `length` or `residual_length` names mesh axes, each device holds an equal part of a
row. Prompts and caches may have any length, so decoding pads them. Tokens after a prompt are not
read, and queries do not attend to unwritten cache slots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer


def row_parts(model: BaseLayer) -> int:
    """Return the number of devices over which a model's mesh splits a row; 1 without a mesh."""
    sharding = model.inherited("sharding")
    if sharding is None:
        return 1
    return max(map(sharding.num_shards, ("length", "residual_length")))


def round_up(length: int, parts: int) -> int:
    """Return the smallest multiple of `parts` that is not below `length`."""
    return -(-length // parts) * parts


def pad_columns(x: jax.Array, parts: int) -> jax.Array:
    """Pad `x` `[rows, length]` with zeros to a length that is a multiple of `parts`."""
    return jnp.pad(x, ((0, 0), (0, round_up(x.shape[1], parts) - x.shape[1])))
