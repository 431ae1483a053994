"""Lines of a catalogue: weights, mesh and data of experiments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from layerkit.config import Config
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.registry import CatalogueLine
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.tools.catalogue import catalogue_line, fields_without_value


def test_line_has_weights_mesh_data_and_summary(tiny: SimpleNamespace):
    class Wide(BaseExperiment):
        """A regression."""

        DIMS: int = 5

        def task(self) -> Config:
            return tiny.task_config(dims=self.DIMS)

        def datasets(self) -> list[Config]:
            return [tiny.Points.HParams.config(is_training=True, batch_size=1)]

    assert fields_without_value(Wide) == []
    line = catalogue_line(Wide, "acme.lm.Wide", "acme")
    assert line == CatalogueLine(
        5, "data, all devices", "Points", f"The same as {__name__}.{Wide.__qualname__}."
    )
    line = catalogue_line(Wide, f"{__name__}.{Wide.__qualname__}", "acme")
    assert line.summary == "A regression."


def test_number_of_weights_is_none_if_a_field_without_value_determines_the_model():
    class Tuned(BaseExperiment):
        """A model in a folder."""

        FOLDER: str
        SHARDS: int = 4

        def task(self) -> Config:
            raise FileNotFoundError(self.FOLDER)

        def partitioner(self) -> Config:
            return SpmdPartitioner.HParams.config(ici_mesh_shape=[1, self.SHARDS, 1])

        def data_summary(self) -> str:
            return "custom text"

    class OfThisFolder(Tuned):
        """The same with a folder, which must exist."""

        FOLDER = "here"

    assert fields_without_value(Tuned) == ["FOLDER"]
    line = catalogue_line(Tuned, "acme.Tuned", "acme")
    assert (line.num_params, line.mesh, line.data) == (None, "fsdp 4", "custom text")
    with pytest.raises(UsageError, match="FileNotFoundError: here"):
        catalogue_line(OfThisFolder, "acme.OfThisFolder", "acme")
