"""Partitioners: how state and steps are spread over devices."""

from layerkit_runner.partitioning.mesh import make_mesh
from layerkit_runner.partitioning.partitioner import Partitioner, PmapPartitioner, SpmdPartitioner

__all__ = ["Partitioner", "PmapPartitioner", "SpmdPartitioner", "make_mesh"]
