"""Lines of a catalogue: weights, mesh and data of experiments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.registry import CatalogueLine
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.tools.catalogue import catalogue_line, fields_without_value, mesh_summary


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
    with pytest.raises(FileNotFoundError, match="here"):
        catalogue_line(OfThisFolder, "acme.OfThisFolder", "acme")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "data, all devices"),
        ({"ici_mesh_shape": [1, 64, 1], "dcn_mesh_shape": [2, 1, 1]}, "fsdp 64, data 2 across"),
        ({"ici_mesh_shape": [1, 16, 2]}, "fsdp 16 × tensor 2"),
        ({"ici_mesh_shape": [1, 1, 1], "dcn_mesh_shape": [1, 1, 1]}, "one device"),
        ({"ici_mesh_shape": [4, 2], "mesh_axis_names": ["stage", "data"]}, "stage 4 × data 2"),
    ],
)
def test_mesh_is_summarized_in_words(fields: dict[str, Any], text: str):
    assert mesh_summary(SpmdPartitioner.HParams.config(**fields)) == text


def test_mesh_summary_of_other_partitioners():
    class Own(SpmdPartitioner):
        """A custom partitioner."""

    assert mesh_summary(Own.HParams.config(ici_mesh_shape=[2, 1, 1])) == "data 2"
    assert mesh_summary(PmapPartitioner.HParams.config()) == "pmap"
