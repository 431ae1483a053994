"""Descriptions of a batch on the devices, from a batch on the host."""

from __future__ import annotations

from typing import Any

import jax


def batch_spec(
    leaf: Any, *, rows: int, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that an array of a batch has on the devices.

    Args:
      leaf: Array `[host_rows, …]` of NumPy or JAX, or its description.
      rows: Number of rows on the devices.
      sharding: Sharding of the array; None for no sharding.
    """
    # JAX stores 64-bit values of the host in 32 bits, unless `jax_enable_x64` is set.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), dtype, sharding=sharding)
