"""Writes a checkpoint of Paxml as one of this project, for an experiment.

The experiment names the weights and the state of the optimizer. All is read onto one device of this
machine, whose memory has to hold the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from etils import epath

from layerkit.config import build
from layerkit_runner.checkpointing import CheckpointManager, StateFormat, folders
from layerkit_runner.config.overrides import Override
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.resolve import resolve_entry
from layerkit_runner.init_from import InitFrom, Source, plan_first_state
from layerkit_runner.partitioning import SpmdPartitioner


def convert_pax(
    source: str,
    destination: epath.Path,
    *,
    experiment: str,
    overrides: Sequence[Override],
    step: int | None,
    state_format: StateFormat,
) -> epath.Path:
    """Write weights, state of Adam and step of a checkpoint of Paxml; return the new folder."""
    resolved = resolve_entry(find_experiment(experiment), overrides)
    task = build(resolved.task)
    settings = InitFrom(
        sources=[
            Source(folder=source, step=step, opt_state_rules=[(r".*", r"\g<0>")], load_step=True)
        ],
        label=f"convert {source}",
    )
    # Every axis has size 1, whichever mesh the experiment trains on.
    partitioner = SpmdPartitioner()
    if isinstance(build(resolved.partitioner), SpmdPartitioner):
        names = resolved.partitioner.mesh_axis_names
        sizes = [1] * len(names)
        partitioner = build(resolved.partitioner, ici_mesh_shape=sizes, dcn_mesh_shape=None)
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    plan = plan_first_state(partitioner, task, weights=settings)
    first = plan()
    folder = folders.step_folder(destination, first.step)
    if first.step in folders.committed_steps(destination):
        raise FileExistsError(f"{folder} already exists; nothing was changed")
    with CheckpointManager(destination, state_format=state_format) as checkpoints:
        state = partitioner.stored_state(task, first.state)
        checkpoints.save(first.step, state, input_states={}, metadata={}, force=True)
    return folder
