"""Rows that a mesh splits: what lengths must be for it, and how they become that.

Where the rule of `length` names mesh axes, each device holds a part of a row, and all parts are
equal. Prompts and caches have the lengths that people ask for, so decoding fills them up: what
stands behind a prompt is not read, and slots that are never written are never seen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.layers.attention.context_parallel import num_length_parts


def row_parts(model: BaseLayer) -> int:
    """Over how many devices the mesh of a model splits a row; 1 without a mesh."""
    sharding = model.inherited("sharding")
    return 1 if sharding is None else num_length_parts(sharding)


def round_up(length: int, parts: int) -> int:
    """The smallest multiple of `parts` that is not below `length`."""
    return -(-length // parts) * parts


def pad_columns(x: jax.Array, parts: int) -> jax.Array:
    """`[rows, length]` with zeros behind each row, to a multiple of `parts`."""
    return jnp.pad(x, ((0, 0), (0, round_up(x.shape[1], parts) - x.shape[1])))
