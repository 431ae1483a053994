"""Sums and casts that round to the dtype of a weight, to the nearest number or stochastically."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_update(
    weight: jax.Array, update: jax.Array, *, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (weight + update in the dtype of the weight, change of the weight in float32).

    The sum is computed in float32. Its bfloat16 value is rounded stochastically with a `key`, and
    to the nearest number without. Both arrays are `[...]`.
    """
    wide = jnp.promote_types(jnp.result_type(weight, update), jnp.float32)
    old = weight.astype(wide)
    total = old + update.astype(wide)
    if key is not None and weight.dtype == jnp.bfloat16:
        new = round_stochastically(total, key)
    elif jnp.finfo(weight.dtype).bits < jnp.finfo(wide).bits:
        # Unlike this, XLA may leave out a cast to a narrower dtype and back.
        number = jnp.finfo(weight.dtype)
        new = jax.lax.reduce_precision(total, number.nexp, number.nmant).astype(weight.dtype)
    else:
        new = total
    return new, new.astype(wide) - old


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 `[...]` in bfloat16, rounded up or down so that the expected value is `x`.

    Updates of weights and increments of a second moment are often smaller than half of the distance
    between two bfloat16 numbers, so that rounding to the nearest would lose them. Stochastic
    rounding is by Gupta et al., 2015, arXiv:1502.02551.
    """
    dropped_bits = 0xFFFF
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & ~jnp.uint32(dropped_bits), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
