"""How the work is spread over devices."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner


class Spmd:
    """One program over a mesh of data × fsdp × tensor."""

    ICI_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] within a slice; None puts all devices on data."""
    DCN_MESH_SHAPE: list[int] | None = None
    """[data, fsdp, tensor] across slices; None for one slice."""

    def partitioner(self) -> Config:
        """The config of the partitioner."""
        return SpmdPartitioner.HParams.config(
            ici_mesh_shape=self.ICI_MESH_SHAPE, dcn_mesh_shape=self.DCN_MESH_SHAPE
        )


class Pmap:
    """The whole state on every device, the batch split over all of them."""

    def partitioner(self) -> Config:
        """The config of the partitioner."""
        return PmapPartitioner.HParams.config()
