"""TrainState, the state that a step changes and a checkpoint holds, and shapes of batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import struct

from layerkit_runner.optim.optimizer_calls import is_schedule_free

# Fields of a state that evaluation and decoding do not need; see `TrainState.for_inference`.
TRAINING_ONLY = ("opt_state",)
OPTIMIZER_FIELDS = ("opt_state", "ema")
"""Fields of a state that only the update reads, of all that a training step computes."""


class TrainState(struct.PyTreeNode):
    """The state of one training run.

    Random keys are not part of it. They are folded from the experiment's seed and `step`, so a
    resumed run draws the same numbers as an uninterrupted one.

    Attributes:
      step: Number of completed steps, int32 scalar.
      overwrite_with_gradient: Variables of the model whose gradient is their next value, such as
        the scales of fp8 products.
      ema: Exponential moving averages of the trained weights, in float32; empty if the learner
        keeps none.
    """

    step: jax.Array
    params: Any
    non_trainable: Any
    opt_state: Any
    overwrite_with_gradient: Any = dataclasses.field(default_factory=dict)
    ema: Any = dataclasses.field(default_factory=dict)

    def for_inference(self) -> TrainState:
        """Return the state without `TRAINING_ONLY`, unless evaluation needs it."""
        if is_schedule_free(self.opt_state):
            return self
        return self.replace(**dict.fromkeys(TRAINING_ONLY, ()))


def batch_spec(
    leaf: Any, *, rows: int, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype on the devices of an array `[host_rows, …]` of a batch."""
    # JAX stores 64-bit values of the host in 32 bits, unless `jax_enable_x64` is set.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), dtype, sharding=sharding)
