"""TrainState: everything that a step changes, and that a checkpoint must hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import struct


class TrainState(struct.PyTreeNode):
    """The state of one training run.

    Random keys are not part of it: they are folded from the experiment's seed and `step`, so a
    resumed run draws what it would have drawn.

    Attributes:
      step: int32 scalar, the number of completed steps.
      params: Weights, trained and frozen, nested dicts by layer path.
      non_trainable: Other variables of the model, such as moving statistics.
      opt_state: State of the optimizer.
      overwrite_with_gradient: Variables of the model whose gradient is their next value, such as
        the scales of fp8 products.
    """

    step: jax.Array
    params: Any
    non_trainable: Any
    opt_state: Any
    overwrite_with_gradient: Any = dataclasses.field(default_factory=dict)
