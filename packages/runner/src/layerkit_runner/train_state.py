"""TrainState: everything that a step changes, and that a checkpoint must hold."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct


class TrainState(struct.PyTreeNode):
    """The state of one training run.

    Random keys are not part of it: they are folded from the experiment's seed and `step`, so a
    resumed run draws what it would have drawn.

    Attributes:
      step: int32 scalar, the number of completed steps.
      params: Trainable weights, nested dicts by layer path.
      non_trainable: Other variables of the model, such as moving statistics.
      opt_state: State of the optimizer.
    """

    step: jax.Array
    params: Any
    non_trainable: Any
    opt_state: Any
