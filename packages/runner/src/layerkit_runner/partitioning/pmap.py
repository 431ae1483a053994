"""PmapPartitioner: the whole state on every device, the rows of a batch split over one axis.

`jax.pmap` is in maintenance mode and is itself jit + shard_map, so this is `jit(shard_map(step))`
over one `batch` axis. A step sees its own rows only and adds over the devices through its
StepContext.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from layerkit.sharding import DEFAULT_RULES, BoundSharding, ShardingRules
from layerkit_runner.partitioning.mesh import make_mesh
from layerkit_runner.partitioning.partitioner import ROWS, Partitioner
from layerkit_runner.training.metrics import StepContext

BATCH_AXIS = "batch"


class PmapPartitioner(Partitioner):
    """Data parallelism with replicated state over all devices.

    Attributes:
      rules: Names that weights and activations may use; nothing is split by them here.
    """

    rules: ShardingRules = DEFAULT_RULES

    def _make_mesh(self, devices: Any) -> Mesh:
        return make_mesh([BATCH_AXIS], devices=devices)

    def model_sharding(self) -> BoundSharding:
        return BoundSharding(None, self.rules)

    def batch_axes(self) -> tuple[str, ...]:
        return (BATCH_AXIS,)

    def _weight_spec(self, path: str, axes: Any, shape: tuple[int, ...]) -> PartitionSpec:
        self.model_sharding().spec(axes, shape=shape, owner=path)  # unknown names are refused
        return PartitionSpec()

    def _spread(
        self, step: Callable[..., Any], *, output: str | tuple[str, ...]
    ) -> Callable[..., Any]:
        context = StepContext(
            batch_sum=functools.partial(jax.lax.psum, axis_name=BATCH_AXIS),
            batch_max=functools.partial(jax.lax.pmax, axis_name=BATCH_AXIS),
            fold_shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXIS)),
            num_shards=self.num_batch_shards(),
        )
        outputs = jax.tree.map(
            lambda kind: PartitionSpec(BATCH_AXIS) if kind == ROWS else PartitionSpec(), output
        )
        # Gradients are taken of each device's share and added by the step itself. With
        # check_vma=True, JAX would add them while differentiating, and the step once more.
        return jax.shard_map(
            lambda state, batch: step(state, batch, context),
            mesh=self.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(BATCH_AXIS)),
            out_specs=(PartitionSpec(), outputs),
            check_vma=False,
        )

    def describe(self) -> str:
        return f"pmap over {self.mesh.size} device(s), state replicated"
