"""The model FLOPs of a training step, by which throughput and plans are judged."""

from __future__ import annotations

from typing import Any

import jax

from layerkit.config import (
    Config,
    assigned_fields,
    copy_config,
    field_names,
    is_config,
    target_of,
    walk_configs,
)
from layerkit.layers.products import unused_templates
from layerkit.layers.stacks import StackedTransformerRepeated
from layerkit_runner.training.flops import program_flops, training_flops
from layerkit_runner.training.metrics import GLOBAL_BATCH
from layerkit_runner.training.train_state import TrainState, batch_spec

# Fields by which layers recompute something in the backward pass, with the values that do not, and
# the backend of attention, since a fused kernel cannot be traced where its device is missing.
_PLAIN = {"remat": "none", "chunk_size": None, "backend": "xla"}
# Compared by its name, so that a run without pipelines does not import them.
_PIPELINE = "layerkit.layers.pipelined_transformer.PipelinedTransformer"


def model_flops_per_step(task_config: Config, batch: Any, rows: int) -> float:
    """Model FLOPs of one global step: `rows` times those of one row.

    Where all weights are trained, three times those of the forward pass. Frozen weights need no
    gradient of their own, so there the products of the gradient are counted as they are.

    Args:
      task_config: Config of the task.
      batch: Any batch of the task, for the shape of a row.
      rows: Of the global batch.
    """
    one_row = jax.tree.map(lambda leaf: batch_spec(leaf, rows=1), batch)
    # Not bound to a mesh, which could not split one row; nor can a pipeline.
    task = _computed_plainly(_without_pipelines(task_config)).Instantiate()
    state = jax.eval_shape(lambda: task.init_state(jax.random.key(0)))
    chosen = task.train.learner.trained_weights
    if chosen.select(state.params) is state.params:
        return rows * training_flops(
            lambda state, batch: task.eval_step(state, batch, GLOBAL_BATCH), state, one_row
        )

    def loss(trained: Any, state: TrainState, batch: Any) -> jax.Array:
        state = state.replace(params=chosen.merge(state.params, trained))
        return task.eval_step(state, batch, GLOBAL_BATCH)[task.loss_name].value

    gradient = jax.make_jaxpr(jax.grad(loss))(chosen.select(state.params), state, one_row)
    return rows * program_flops(gradient)


def _without_pipelines(task: Config) -> Config:
    """The same model with stacks in place of pipelines, which compute the same, and what they
    compute in their bubbles besides."""
    task = copy_config(task)
    for config in list(walk_configs(task)):
        for name, value in assigned_fields(config).items():
            if is_config(value) and _full_name(target_of(value)) == _PIPELINE:
                setattr(config, name, _repeated(value))
    return task


def _computed_plainly(task: Config) -> Config:
    """The same model, which keeps for the backward pass all that it needs there, and without fused
    attention, which refuses to be traced where its device is not and takes as many FLOPs."""
    unused = unused_templates(task)  # a stack refuses these where they are set
    for config in walk_configs(task):
        if id(config) in unused:
            continue
        for field, value in _PLAIN.items():
            if field in field_names(config):
                setattr(config, field, value)
    return task


def _repeated(pipelined: Any) -> Any:
    names = field_names(StackedTransformerRepeated)
    fields = {n: value for n, value in assigned_fields(pipelined).items() if n in names}
    return StackedTransformerRepeated.HParams.config(**fields)


def _full_name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def temporary_bytes(stats: Any, *, platform: str) -> int:
    """Bytes of gradients, activations and workspace on a device, at the moment of the peak.

    The compiler of TPUs counts temporaries that are never there together: 31 GB of them, beside 6
    GB of arguments, in a step that it fits into 33 GB. What counts is what its peak leaves them.
    Others allocate them for the whole step.

    Args:
      stats: What `memory_analysis()` of a compiled function returned.
      platform: Platform that the function was compiled for, such as "tpu".
    """
    others = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if platform != "tpu" or stats.peak_memory_in_bytes < others:  # some runtimes tell no peak
        return int(stats.temp_size_in_bytes)
    return int(stats.peak_memory_in_bytes - others)
