"""Makes what `--list` tells of experiments besides their names; see `configuration.catalogue`.

A package that offers experiments keeps its catalogue true by a test like this:

    lines = {name: catalogue_line(cls) for name, cls in experiments.items()}
    assert catalogue_file_text(lines) == (package_folder / FILE_NAME).read_text()
"""

from __future__ import annotations

import math
from typing import Any

import jax

from layerkit.base_layer import PARAMS
from layerkit.config import target_of
from layerkit_runner.config.catalogue import CatalogueLine
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.resolve import resolve
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner


def catalogue_line(cls: type[BaseExperiment]) -> CatalogueLine:
    """What `--list` tells of an experiment, from shapes alone.

    One with a field that has no value, such as the folder of a model, is another model with each
    value: then the number of weights is None, and the rest is told by the fields that have one.

    Raises:
      UsageError: the experiment refuses its own fields.
    """
    if fields_without_value(cls):
        # Made by a call, it would ask for the values.
        experiment = cls.__new__(cls)
        mesh = mesh_summary(experiment.partitioner())
        return CatalogueLine(None, mesh, experiment.data_summary())
    experiment = cls()
    resolved = resolve(experiment)
    return CatalogueLine(
        num_params=num_params(resolved.task),
        mesh=mesh_summary(resolved.partitioner),
        data=experiment.data_summary(),
    )


def fields_without_value(cls: type[BaseExperiment]) -> list[str]:
    """The fields that whoever runs the experiment has to give."""
    return [name for name in experiment_fields(cls) if not hasattr(cls, name)]


def num_params(task: Any) -> int:
    """Scalars of the weights of a task, given its config; nothing is computed."""
    model = task.Instantiate().model
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes[PARAMS]))


def mesh_summary(partitioner: Any) -> str:
    """The mesh of a partitioner, given its config, in words; axes of one device are left out."""
    kind = target_of(partitioner)
    if issubclass(kind, PmapPartitioner):
        return "pmap"
    if not issubclass(kind, SpmdPartitioner):
        return kind.__name__
    ici, dcn = partitioner.ici_mesh_shape, partitioner.dcn_mesh_shape
    if ici is None:
        return "data, all devices"
    names = partitioner.mesh_axis_names
    within = [f"{name} {size}" for name, size in zip(names, ici, strict=True) if size > 1]
    across = [f"{name} {size}" for name, size in zip(names, dcn or (), strict=False) if size > 1]
    text = " × ".join(within) or "one device"
    return f"{text}, {' × '.join(across)} across" if across else text
