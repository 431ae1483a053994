"""What a mesh and a policy of rematerialisation would take, told without compiling.

The state is exact: shapes, and the rules that split them. What the backward pass keeps is taken
from the shapes of JAX's own residuals, split by guess; what the compiler needs besides is taken
from one plan that was compiled (`forecast`). So estimates say what to try first, and leave out what
cannot fit whatever the compiler does. What users are told is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from layerkit.sharding import BoundSharding, ShardingRules
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.partitioning.state_axes import axes_by_path, map_with_axes
from layerkit_runner.training.step_context import GLOBAL_BATCH
from layerkit_runner.training.task import SingleTask

# Dimensions of weights that layers split in their activations too.
_WIDE = ("mlp", "heads", "kv_heads", "vocab", "stage")
# Weights are gathered for the forward pass and again for the backward pass.
_GATHERS = 2
# Two branches of a layer add up what tensor-parallel devices computed, in both passes.
_SUMS_PER_LAYER = 4


@dataclasses.dataclass(frozen=True)
class StateArray:
    """An array of the training state.

    Attributes:
      is_weight: A trained or frozen weight.
      path: On the way to it, for messages.
      axes: The logical name of each dimension.
      shape: Of the whole array.
      itemsize: Bytes of an element.
    """

    is_weight: bool
    path: str
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that the forward pass keeps for the backward pass: its whole shape, and its size."""

    shape: tuple[int, ...]
    itemsize: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step may take of each device.

    Attributes:
      state_bytes: Of weights and optimizer; exact.
      gradient_bytes: As large as the weights.
      batch_bytes: Of a device's rows.
      kept_bytes: Of activations that wait for the backward pass.
      sent_bytes: To other devices, by mesh axis.
      transient_bytes: Of whatever else the compiler needs.
    """

    state_bytes: int
    gradient_bytes: int
    batch_bytes: int
    kept_bytes: int
    sent_bytes: dict[str, float]
    transient_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Of all."""
        state = self.state_bytes + self.gradient_bytes
        return state + self.batch_bytes + self.kept_bytes + self.transient_bytes


def state_arrays(task: SingleTask) -> list[StateArray]:
    """The arrays of a task's training state."""
    boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))
    found: list[StateArray] = []

    def note(path: str, axes: Any, leaf: Any) -> None:
        is_weight = path.startswith(".params")
        found.append(StateArray(is_weight, path, tuple(axes), leaf.shape, leaf.dtype.itemsize))

    map_with_axes(note, state, axes_by_path(boxed))
    return found


def kept_arrays(partitioner: Partitioner, task: SingleTask, batch: Any) -> list[Kept]:
    """What the forward pass keeps, besides the weights themselves.

    Args:
      partitioner: Started and bound to the task, so that layers choose what they would choose on
        its devices.
      task: With its policies of rematerialisation.
      batch: Shapes of the global batch.
    """
    state = partitioner.abstract_stored_state(task)

    def loss(params: Any, rest: Any, rows: Any) -> jax.Array:
        metrics = task.eval_step(rest.replace(params=params), rows, GLOBAL_BATCH, averaged=False)
        return metrics[task.loss_name].value.astype(jnp.float32)

    def residuals(params: Any, rest: Any, rows: Any) -> Any:
        return jax.vjp(lambda weights: loss(weights, rest, rows), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, state.params, state, batch))
    weights = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    arrays = [leaf for leaf in leaves if leaf.shape not in weights]
    return [Kept(leaf.shape, leaf.dtype.itemsize) for leaf in arrays]


class Estimator:
    """Estimates for one model and one global batch on different meshes.

    Attributes:
      arrays: The training state.
      rules: Which mesh axes each logical name is split over.
      rows: Of the global batch.
      batch_bytes: Of the global batch.
      fprop_itemsize: Bytes of an element of what is computed with.
    """

    def __init__(
        self,
        arrays: Sequence[StateArray],
        rules: ShardingRules,
        *,
        rows: int,
        batch_bytes: int,
        fprop_itemsize: int,
    ):
        self.arrays = list(arrays)
        self.rules = rules
        self.rows = rows
        self.batch_bytes = batch_bytes
        self.fprop_itemsize = fprop_itemsize
        self._last_mesh: dict[str, int] = {}
        self._last_state: tuple[int, int, dict[str, float]] = (0, 0, {})
        self._wide = {
            name: {a.shape[i] for a in self.arrays for i, axis in enumerate(a.axes) if axis == name}
            for name in _WIDE
        }

    def estimate(
        self,
        mesh: Mapping[str, int],
        kept: Sequence[Kept],
        handed_on: Sequence[Kept],
        *,
        share: float = 1.0,
    ) -> Estimate:
        """What a step takes on a mesh.

        Args:
          mesh: Sizes of the mesh axes by name.
          kept: What the forward pass keeps of the whole batch.
          handed_on: What it would keep at the least, the inputs of the layers.
          share: Of the batch, that is worked on at a time.

        Raises:
          ValueError: the mesh does not divide an array, or the rows; names it.
        """
        # Rules ask a mesh for its sizes alone.
        sizes: Any = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        sharding = BoundSharding(sizes, self.rules)
        shards = self.batch_shards(mesh)
        rows = round(self.rows * share)
        if rows % shards or rows < shards:
            raise ValueError(f"{rows} rows are not divided by {shards}")
        if mesh != self._last_mesh:  # candidates come mesh by mesh
            self._last_state = self._state(sharding)
            self._last_mesh = dict(mesh)
        state, gradients, weight_traffic = self._last_state
        kept_bytes = round(share * self._kept_bytes(kept, sharding))
        sent = dict(weight_traffic)
        self._add_activation_traffic(sent, handed_on, sharding)
        return Estimate(state, gradients, self.batch_bytes // shards, kept_bytes, sent)

    def _state(self, sharding: BoundSharding) -> tuple[int, int, dict[str, float]]:
        """Bytes of state and gradients on a device, and what it sends of weights and gradients."""
        state = gradients = 0
        sent: dict[str, float] = {}
        for array in self.arrays:
            size = self._shard_size(array, sharding)
            state += size * array.itemsize
            if array.is_weight:
                gradients += size * array.itemsize
                self._add_weight_traffic(sent, array, size, sharding)
        return state, gradients, sent

    def is_logits(self, array: Kept) -> bool:
        """Whether an array has an entry for every word."""
        return bool(self._wide["vocab"].intersection(array.shape))

    def batch_shards(self, mesh: Mapping[str, int]) -> int:
        """Into how many parts the rows of a batch are split on a mesh."""
        return math.prod(mesh.get(axis, 1) for axis in self.rules.mesh_axes("batch"))

    def _shard_size(self, array: StateArray, sharding: BoundSharding) -> int:
        """Elements on one device, padding included."""
        spec = sharding.spec(array.axes, shape=array.shape, owner=array.path, allow_uneven=True)
        parts = [_parts(entry, sharding) for entry in spec]
        return math.prod(-(-n // p) for n, p in zip(array.shape, parts, strict=True))

    def _kept_bytes(self, kept: Sequence[Kept], sharding: BoundSharding) -> int:
        """Rows are split, and with them what has one of the wide sizes among its dimensions."""
        total = 0
        for array in kept:
            split = {name for name in _WIDE if self._wide[name].intersection(array.shape)}
            if math.prod(array.shape) % self.rows == 0:
                split |= {"batch", "length"}
            total += math.prod(array.shape) * array.itemsize // self._parts_of(split, sharding)
        return total

    def _parts_of(self, names: Collection[str], sharding: BoundSharding) -> int:
        """Into how many parts the rules split an array with these logical names."""
        table = dict(self.rules.table)
        known = [name for name in names if name in table]
        axes = {axis for name in known for axis in self.rules.mesh_axes(name)}
        return math.prod(_mesh_shape(sharding).get(axis, 1) for axis in axes)

    def _add_weight_traffic(
        self, sent: dict[str, float], array: StateArray, size: int, sharding: BoundSharding
    ) -> None:
        """A weight split over the axes of the rows is gathered, and its gradient scattered; over
        those that it is not split over, gradients are added up."""
        mesh = _mesh_shape(sharding)
        spec = sharding.spec(array.axes, shape=array.shape, allow_uneven=True)
        split = {axis for entry in spec for axis in _entry_axes(entry)}
        for axis in self.rules.mesh_axes("batch"):
            n = mesh.get(axis, 1)
            if n == 1:
                continue
            if axis in split:
                per_element = _GATHERS * self.fprop_itemsize + array.itemsize
                sent[axis] = sent.get(axis, 0) + size * (n - 1) * per_element
            else:
                sent[axis] = sent.get(axis, 0) + 2 * size * array.itemsize * (n - 1) / n

    def _add_activation_traffic(
        self, sent: dict[str, float], handed_on: Sequence[Kept], sharding: BoundSharding
    ) -> None:
        mesh = _mesh_shape(sharding)
        handed = self._kept_bytes(handed_on, sharding)
        for axis in self.rules.mesh_axes("mlp"):
            n = mesh.get(axis, 1)
            if n > 1:
                sent[axis] = sent.get(axis, 0) + _SUMS_PER_LAYER * 2 * handed * (n - 1) / n


def _entry_axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _parts(entry: Any, sharding: BoundSharding) -> int:
    return math.prod(_mesh_shape(sharding)[axis] for axis in _entry_axes(entry))


def _mesh_shape(sharding: BoundSharding) -> dict[str, int]:
    return {} if sharding.mesh is None else dict(sharding.mesh.shape)
