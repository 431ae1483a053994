"""Model FLOPs and temporary memory of a training step, for throughput and plans."""

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

# Fields of layers with values that recompute nothing in the backward pass and use no fused
# attention, which cannot be traced without its device.
_PLAIN = {"remat": "none", "chunk_size": None, "backend": "xla"}
# Compared by name, so that a run without pipelines does not import the module.
_PIPELINE = "layerkit.layers.pipelined_transformer.PipelinedTransformer"


def model_flops_per_step(task_config: Config, batch: Any, rows: int) -> float:
    """Return the model FLOPs of one global step, `rows` times those of one row.

    If all weights are trained, these are three times those of the forward pass. With frozen
    weights, the products in the program of the gradient are counted.

    Args:
      task_config: Config of the task.
      batch: Any batch of the task, for the shape of a row.
      rows: Number of rows of the global batch.
    """
    one_row = jax.tree.map(lambda leaf: batch_spec(leaf, rows=1), batch)
    # The task is not bound to a mesh, because neither a mesh nor a pipeline can split one row.
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
    """Return the config with stacks in place of pipelines, which also compute in their bubbles."""
    task = copy_config(task)
    for config in list(walk_configs(task)):
        for name, value in assigned_fields(config).items():
            if is_config(value) and _full_name(target_of(value)) == _PIPELINE:
                setattr(config, name, _repeated(value))
    return task


def _computed_plainly(task: Config) -> Config:
    """Return the config without recomputation and fused attention; see `_PLAIN`."""
    unused = unused_templates(task)  # Setting a field of an unused template is an error.
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
    """Return the bytes of gradients, activations and workspace on a device at the peak of a step.

    The TPU compiler counts temporaries that do not exist at the same time: 31 GB of them and 6 GB
    of arguments in a step that needs 33 GB. So the temporaries are its peak less all other memory.
    Other compilers allocate temporaries for the whole step.

    Args:
      stats: Value of `memory_analysis()` of a compiled function.
      platform: Platform that the function was compiled for, such as "tpu".
    """
    others = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if platform != "tpu" or stats.peak_memory_in_bytes < others:  # Some runtimes report no peak.
        return int(stats.temp_size_in_bytes)
    return int(stats.peak_memory_in_bytes - others)
