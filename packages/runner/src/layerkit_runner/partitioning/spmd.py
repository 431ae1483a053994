"""SpmdPartitioner: one program for all devices, laid out by named shardings (Pax's pjit)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from layerkit.sharding import DEFAULT_RULES, BoundSharding, ShardingRules
from layerkit_runner.partitioning.mesh import make_mesh
from layerkit_runner.partitioning.partitioner import Partitioner
from layerkit_runner.training.metrics import GLOBAL_BATCH


class SpmdPartitioner(Partitioner):
    """Splits weights and activations over a named mesh; the compiler adds the communication.

    Attributes:
      mesh_axis_names: Names of the mesh axes.
      ici_mesh_shape: Size of each axis within a slice; None puts all devices on the first axis.
      dcn_mesh_shape: Size of each axis across slices; None for one slice.
      rules: Which mesh axes each logical axis name is split over.
    """

    mesh_axis_names: Sequence[str] = ("data", "fsdp", "tensor")
    ici_mesh_shape: Sequence[int] | None = None
    dcn_mesh_shape: Sequence[int] | None = None
    rules: ShardingRules = DEFAULT_RULES

    def _make_mesh(self, devices: Any) -> Mesh:
        return make_mesh(
            self.mesh_axis_names,
            ici_mesh_shape=self.ici_mesh_shape,
            dcn_mesh_shape=self.dcn_mesh_shape,
            devices=devices,
        )

    def model_sharding(self) -> BoundSharding:
        return BoundSharding(self.mesh, self.rules)

    def batch_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.rules.mesh_axes("batch") if axis in self.mesh.shape)

    def _weight_spec(self, path: str, axes: Any, shape: tuple[int, ...]) -> PartitionSpec:
        return self.model_sharding().spec(axes, shape=shape, owner=path, allow_uneven=True)

    def _spread(
        self, step: Callable[..., Any], *, output: str | tuple[str, ...]
    ) -> Callable[..., Any]:
        del output  # Every result is global here; jit's out_shardings say where it goes.
        context = dataclasses.replace(GLOBAL_BATCH, row_shards=self.num_batch_shards())
        return lambda state, batch: step(state, batch, context)

    def describe(self) -> str:
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return f"SPMD over {self.mesh.size} device(s): {sizes}"
