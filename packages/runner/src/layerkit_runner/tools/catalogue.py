"""Write `catalogue.json`, the index of a package's experiments; see `config.registry`.

    python -m layerkit_runner.tools.catalogue PACKAGE

A package keeps it up to date by a test that compares `catalogue_lines(PACKAGE)` with the file.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from layerkit.base.base_layer import PARAMS
from layerkit.config import target_of
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.registry import (
    CATALOGUE_FILE,
    CatalogueLine,
    entry_of,
    experiment_classes,
)
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.start_report import num_params


def main(arguments: Sequence[str]) -> None:
    """Write the catalogue of the package that the command line names."""
    [package] = arguments
    path = Path(str(importlib.import_module(package).__file__)).parent / CATALOGUE_FILE
    path.write_text(catalogue_file_text(catalogue_lines(package)), encoding="utf-8")
    print(f"wrote {path}")


def catalogue_file_text(lines: Mapping[str, CatalogueLine]) -> str:
    """Return the content of the file, one experiment per line."""
    rows = [
        f"  {json.dumps(name)}: {json.dumps(dataclasses.asdict(line), ensure_ascii=False)}"
        for name, line in sorted(lines.items())
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def catalogue_lines(package: str) -> dict[str, CatalogueLine]:
    """Return the lines of the catalogue of a package, by the names of its experiments."""
    return {
        dotted.removeprefix(f"{package}."): catalogue_line(cls, dotted, package)
        for dotted, cls in experiment_classes(package).items()
    }


def catalogue_line(cls: type[BaseExperiment], dotted: str, package: str) -> CatalogueLine:
    """Return the line of an experiment in `--list`, computed from shapes alone.

    The number of weights is None if a field without a value, such as the folder of a model,
    determines the model.
    """
    line = entry_of(cls, dotted, [package]).line
    if fields_without_value(cls):
        # A call would require the values.
        experiment = cls.__new__(cls)
        mesh = mesh_summary(experiment.partitioner())
        return dataclasses.replace(line, mesh=mesh, data=experiment.data_summary())
    experiment = cls()
    resolved = resolve(experiment)
    model = resolved.task.Instantiate().model
    return dataclasses.replace(
        line,
        num_params=num_params(jax.eval_shape(lambda: model.init(jax.random.key(0)))[PARAMS]),
        mesh=mesh_summary(resolved.partitioner),
        data=experiment.data_summary(),
    )


def fields_without_value(cls: type[BaseExperiment]) -> list[str]:
    """Return the names of the fields that have no default."""
    return [name for name in experiment_fields(cls) if not hasattr(cls, name)]


def mesh_summary(partitioner: Any) -> str:
    """Return a description of the mesh of a partitioner, without axes of one device."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
