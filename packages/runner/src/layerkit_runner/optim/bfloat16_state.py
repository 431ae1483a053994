"""Storage of an optimizer's state in bfloat16, which halves its memory.

The increments of a second moment are often smaller than half of the distance between two bfloat16
numbers, so that rounding to the nearest would stop the average. Stochastic rounding goes up or down
with probabilities that keep the expected value (Gupta et al., 2015, arXiv:1502.02551).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from layerkit.checks import require
from layerkit_runner.optim.optimizer_calls import is_schedule_free

_DROPPED_BITS = 0xFFFF


class Bfloat16State(NamedTuple):
    """The state of `bfloat16_state`; random numbers follow from `num_updates`, an int32 scalar."""

    num_updates: jax.Array
    inner: Any


def bfloat16_state(
    learning_rate: optax.ScalarOrSchedule, *, optimizer: Callable[..., optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that computes in float32 and stores its state in bfloat16.

    Float32 arrays of at least one axis are stored in bfloat16; scalars and other dtypes stay. The
    same step draws the same random numbers, on any mesh and after a restart.

    Args:
      learning_rate: Rate, or a schedule of the step.
      optimizer: A function of `learning_rate`, such as `Partial(optax.adamw, b2=0.95)`.

    Raises:
      ConfigError: The optimizer is schedule-free, so that its state holds weights.
    """
    inner = optax.with_extra_args_support(optimizer(learning_rate=learning_rate))

    def init(params: Any) -> Bfloat16State:
        state = inner.init(params)
        kind, expected = type(state).__name__, "an optimizer whose state holds no weights"
        require(not is_schedule_free(state), "bfloat16_state", "optimizer", kind, expected)
        stored = jax.tree.map(lambda x: x.astype(_stored_dtype(x)), state)
        return Bfloat16State(jnp.zeros((), jnp.int32), stored)

    def update(
        grads: Any, state: Bfloat16State, params: Any, **extra: Any
    ) -> tuple[Any, Bfloat16State]:
        shapes = jax.eval_shape(inner.init, params)
        whole = jax.tree.map(lambda x, shape: x.astype(shape.dtype), state.inner, shapes)
        updates, new = inner.update(grads, whole, params, **extra)
        leaves, structure = jax.tree.flatten(new)
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(0), state.num_updates), len(leaves)
        )
        stored = [
            round_stochastically(x, key) if _stored_dtype(x) != x.dtype else x
            for x, key in zip(leaves, keys, strict=True)
        ]
        new_state = Bfloat16State(state.num_updates + 1, jax.tree.unflatten(structure, stored))
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _stored_dtype(x: jax.Array) -> Any:
    return jnp.bfloat16 if x.dtype == jnp.float32 and x.ndim else x.dtype


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 `[...]` in bfloat16, rounded up or down so that the expected value is `x`."""
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & ~jnp.uint32(_DROPPED_BITS), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
