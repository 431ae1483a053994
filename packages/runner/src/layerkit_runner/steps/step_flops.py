"""The model FLOPs of a training step, by which throughput and plans are judged."""

from __future__ import annotations

from typing import Any

import jax

from layerkit_runner.configuration.resolve import ResolvedExperiment
from layerkit_runner.steps.flops import training_flops
from layerkit_runner.steps.step_context import GLOBAL_BATCH


def model_flops_per_step(resolved: ResolvedExperiment, batch: Any, rows: int) -> float:
    """Model FLOPs of one global step: `rows` times those of one row.

    Args:
      resolved: The experiment.
      batch: Any batch of it, for the shape of a row.
      rows: Of the global batch.
    """
    one_row = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), batch
    )
    task = resolved.task.Instantiate()  # not bound to a mesh, which could not split one row
    state = jax.eval_shape(lambda: task.init_state(jax.random.key(0)))
    return rows * training_flops(
        lambda state, batch: task.eval_step(state, batch, GLOBAL_BATCH), state, one_row
    )
