"""What a catalogue tells of an experiment: its weights, its mesh and its data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.config import Config
from layerkit_runner.config.catalogue import CatalogueLine
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.tools.catalogue import catalogue_line, fields_without_value, mesh_summary


def test_an_experiment(tiny: SimpleNamespace):
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


def test_an_experiment_whose_model_only_a_folder_of_the_users_tells():
    class Tuned(BaseExperiment):
        """A model of somebody's own."""

        FOLDER: str
        SHARDS: int = 4

        def task(self) -> Config:
            raise FileNotFoundError(self.FOLDER)

        def partitioner(self) -> Config:
            return SpmdPartitioner.HParams.config(ici_mesh_shape=[1, self.SHARDS, 1])

        def data_summary(self) -> str:
            return "your own text"

    class OfThisFolder(Tuned):
        """The same, and its folder is known; so it must be there."""

        FOLDER = "here"

    assert fields_without_value(Tuned) == ["FOLDER"]
    line = catalogue_line(Tuned, "acme.Tuned", "acme")
    assert (line.num_params, line.mesh, line.data) == (None, "fsdp 4", "your own text")
    with pytest.raises(FileNotFoundError, match="here"):
        catalogue_line(OfThisFolder, "acme.OfThisFolder", "acme")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "data, all devices"),
        ({"ici_mesh_shape": [1, 64, 1], "dcn_mesh_shape": [2, 1, 1]}, "fsdp 64, data 2 across"),
        ({"ici_mesh_shape": [1, 16, 2]}, "fsdp 16 × tensor 2"),
        ({"ici_mesh_shape": [1, 1, 1], "dcn_mesh_shape": [1, 1, 1]}, "one device"),
        (
            {"ici_mesh_shape": [4, 2], "mesh_axis_names": ["stage", "data"]},
            "stage 4 × data 2",
        ),
    ],
)
def test_a_mesh_in_words(fields: dict[str, Any], text: str):
    assert mesh_summary(SpmdPartitioner.HParams.config(**fields)) == text


def test_other_partitioners():
    class Own(SpmdPartitioner):
        """Somebody's own."""

    assert mesh_summary(Own.HParams.config(ici_mesh_shape=[2, 1, 1])) == "data 2"
    assert mesh_summary(PmapPartitioner.HParams.config()) == "pmap"
