"""Partitioners: layout of state and batches on devices, and compilation of steps for it.

`SpmdPartitioner` compiles one program for all devices, with named shardings (Pax's pjit).
`PmapPartitioner` keeps the whole state on every device and splits the rows of a batch. The steps of
a task, the programs and the checkpoints do not depend on the partitioner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import DEFAULT_RULES, HOST_MEMORY, BoundSharding, ShardingRules
from layerkit.config import Configurable
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.weight_selection import mesh_axes
from layerkit_runner.partitioning import padding
from layerkit_runner.partitioning.mesh import make_mesh
from layerkit_runner.partitioning.padding import (
    Declared,
    Uneven,
    UnevenArray,
    axes_by_path,
    map_uneven,
    map_with_axes,
    split_over,
)
from layerkit_runner.step.metrics import GLOBAL_BATCH, StepContext
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import OPTIMIZER_FIELDS, TrainState, batch_spec

BATCH_AXIS = "batch"
# Layouts of the arguments and outputs of a step.
ROWS = PartitionSpec(BATCH_AXIS)
REPLICATED = PartitionSpec()
_Layout = PartitionSpec | tuple[PartitionSpec, ...]
# Starts of `jax.tree_util.keystr` of the arrays of the optimizer.
_OPTIMIZER_PATHS = tuple(f".{name}" for name in OPTIMIZER_FIELDS)


@dataclasses.dataclass(frozen=True)
class _PlacedState:
    """The state of a task as shapes, dtypes and shardings, and its padded arrays."""

    task: SingleTask
    on_devices: TrainState
    padded: Uneven


class Partitioner(Configurable):
    """Base class of partitioners; call `start` before other methods."""

    def __post_init__(self) -> None:
        """Set the initial state."""
        self._mesh: Mesh | None = None
        self._placed: _PlacedState | None = None
        self._evaluations: dict[tuple[bool | None, bool], Any] = {}  # of the bound task

    def start(self, devices: Any = None) -> None:
        """Make the mesh of the devices, by default of all devices."""
        self._mesh = self._make_mesh(devices)
        self._copy_batch = jax.jit(lambda batch: batch, out_shardings=self.batch_sharding())

    @property
    def mesh(self) -> Mesh:
        """Devices and their named axes."""
        if self._mesh is None:
            raise RuntimeError("Partitioner.start() has not been called")
        return self._mesh

    def __repr__(self) -> str:
        """Return the devices and the mesh once started, and the fields before."""
        return super().__repr__() if self._mesh is None else f"<{self.describe()}>"

    # Methods that a subclass defines.

    def _make_mesh(self, devices: Any) -> Mesh:
        raise NotImplementedError

    def model_sharding(self) -> BoundSharding:
        """Return the mesh and rules that the model's layers are bound to."""
        raise NotImplementedError

    def batch_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that the rows of a batch are split over."""
        raise NotImplementedError

    def _array_sharding(
        self, path: str, axes: Any, shape: tuple[int, ...], weight: Declared | None
    ) -> NamedSharding:
        """Return the sharding between steps of an array of a state; see `map_with_axes`."""
        raise NotImplementedError

    def _spread(self, step: Callable[..., Any], *layouts: _Layout) -> Callable[..., Any]:
        """Return `step(*arguments, context)` as a function of global arguments.

        `layouts` are those of the arguments and, last, of the result: `ROWS` or `REPLICATED`, or a
        tuple of these for a tuple of results.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Return one line for the start report."""
        raise NotImplementedError

    # Methods that all partitioners share.

    def bind(self, task: SingleTask) -> None:
        """Bind the task's model to this partitioner's mesh and rules."""
        task.bind_sharding(self.model_sharding())
        self._placed = None
        self._evaluations.clear()

    def abstract_state(self, task: SingleTask) -> TrainState:
        """Return the state on the devices as shapes, dtypes and shardings; compute nothing."""
        return self._place(task).on_devices

    def abstract_stored_state(self, task: SingleTask) -> TrainState:
        """Return the state in a checkpoint, without padding, as shapes, dtypes and shardings."""
        placed = self._place(task)
        return map_uneven(lambda array, _: array.stored_spec, placed.on_devices, placed.padded)

    def _place(self, task: SingleTask) -> _PlacedState:
        if self._placed is None or self._placed.task is not task:
            self._placed = self._place_state(task)
        return self._placed

    def _place_state(self, task: SingleTask) -> _PlacedState:
        boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))
        arrays: dict[str, UnevenArray] = {}

        def place(path: str, axes: Any, leaf: Any, weight: Any) -> jax.ShapeDtypeStruct:
            sharding = self._array_sharding(path, axes, leaf.shape, weight)
            array = UnevenArray(leaf.shape, leaf.dtype, tuple(axes), sharding)
            if array.padded_shape != leaf.shape:
                arrays[path] = array
            return array.on_devices

        return _PlacedState(task, map_with_axes(place, state, axes_by_path(boxed)), arrays)

    def padding_text(self, task: SingleTask) -> str:
        """Return one line about the padded weights; see `padding.padding_text`."""
        return padding.padding_text(self._place(task).padded)

    def state_shardings(self, task: SingleTask) -> TrainState:
        """Return the shardings of the state on the devices."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(task))

    def stored_state(self, task: SingleTask, state: TrainState) -> TrainState:
        """Return a state on the devices, or a part of one, in the form of storage."""
        return map_uneven(UnevenArray.to_storage, state, self._place(task).padded)

    def device_state(self, task: SingleTask, stored: TrainState) -> TrainState:
        """Return a restored state in the form of the devices."""
        return map_uneven(UnevenArray.to_devices, stored, self._place(task).padded)

    def init_fn(self, task: SingleTask) -> Callable[[], TrainState]:
        """Return a jitted function that makes the initial state in its shardings."""
        return self.jit_making(task, lambda: task.init_state(task.first_key()))

    def jit_making(
        self, task: SingleTask, function: Callable[..., TrainState], **options: Any
    ) -> Any:
        """Jit a function that makes a state, with the layout that steps expect."""
        arrays = self._place(task).padded

        def making(*args: Any) -> TrainState:
            return map_uneven(UnevenArray.padded, function(*args), arrays)

        return jax.jit(making, out_shardings=self.state_shardings(task), **options)

    def train_step_fn(self, task: SingleTask) -> Any:
        """Return jitted `(state, batch) -> (state, (metrics, scalars))`; the state is donated."""
        state, arrays = self.state_shardings(task), self._place(task).padded
        step = self._spread(task.train_step, REPLICATED, ROWS, REPLICATED)

        def train_step(state: TrainState, batch: NestedMap) -> tuple[TrainState, Any]:
            state, reported = step(map_uneven(UnevenArray.cut, state, arrays), batch)
            return map_uneven(UnevenArray.padded, state, arrays), reported

        return jax.jit(
            train_step,
            in_shardings=(state, self.batch_sharding()),
            out_shardings=(state, self.replicated()),
            donate_argnums=0,
        )

    def eval_step_fn(
        self, task: SingleTask, *, averaged: bool | None = None, with_scores: bool = False
    ) -> Any:
        """Return jitted `(state, batch) -> metrics`; data sets share the function.

        Args:
          task: Task, bound to this partitioner.
          averaged: True to use the averaged weights; None for the task's setting.
          with_scores: True to return (metrics, NestedMap of `scores` float32 and `provenance` int32
            `[rows]`).
        """

        def step(state: TrainState, batch: NestedMap, context: StepContext) -> Any:
            metrics, outputs = task.eval_step(state, batch, context, averaged=averaged)
            if not with_scores:
                return metrics
            if "scores" not in outputs:
                owner = f"{type(task.model).__qualname__}.compute_loss"
                expected = "'scores', which the metrics of the data set need"
                raise UsageError(owner=owner, field="outputs", value=[*outputs], expected=expected)
            return metrics, NestedMap(scores=outputs.scores, provenance=batch.provenance)

        key = (averaged, with_scores)
        if key not in self._evaluations:
            output = (REPLICATED, ROWS) if with_scores else REPLICATED
            self._evaluations[key] = self._jit_rows(task, step, output)
        return self._evaluations[key]

    def summary_step_fn(self, task: SingleTask) -> Any:
        """Return jitted `(state, batch) -> (histograms, images)`; see `summary_step`."""
        return self._jit_rows(task, task.summary_step, (REPLICATED, ROWS))

    def decode_step_fn(self, task: SingleTask) -> Any:
        """Return jitted `(state, batch, batch_index) -> outputs of all examples`."""

        def decode(state: TrainState, batch: Any, batch_index: Any, context: StepContext) -> Any:
            return task.decode_step(state, batch, context, batch_index=batch_index)

        spread = self._spread(decode, REPLICATED, ROWS, REPLICATED, ROWS)
        return self.jit_reading(task, spread, self.batch_sharding(), self.replicated())

    def _jit_rows(self, task: SingleTask, step: Callable[..., Any], output: _Layout) -> Any:
        """Jit `step(state, batch, context)` that reads a state; `output` is the result's layout."""
        spread = self._spread(step, REPLICATED, ROWS, output)
        return self.jit_reading(task, spread, self.batch_sharding())

    def jit_reading(
        self,
        task: SingleTask,
        function: Callable[..., Any],
        *shardings: Any,
        replicates: bool = True,
        donates: Sequence[int] = (),
    ) -> Any:
        """Jit a function that reads a state, without the fields that only training needs.

        Args:
          task: Task, bound to this partitioner.
          function: Function of the state and one argument for each of `shardings`.
          *shardings: Shardings of the arguments after the state; None for those of the values.
          replicates: True to replicate the result; False to leave its layout to the compiler.
          donates: Numbers of the arguments whose memory the result may take; the state is 0.
        """
        arrays = self._place(task).padded

        def reading(state: TrainState, *rest: Any) -> Any:
            return function(map_uneven(UnevenArray.cut, state, arrays), *rest)

        jitted = jax.jit(
            reading,
            in_shardings=(self.state_shardings(task).for_inference(), *shardings),
            out_shardings=self.replicated() if replicates else None,
            donate_argnums=tuple(donates),
        )
        return lambda state, *rest: jitted(state.for_inference(), *rest)

    def replicated(self) -> NamedSharding:
        """Return the sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a batch, with rows split over `batch_axes`."""
        return NamedSharding(self.mesh, PartitionSpec(self.batch_axes()))

    def num_batch_shards(self) -> int:
        """Return the number of parts that the rows of a batch are split into."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.batch_axes()]))

    def check_batch_size(self, rows: float, *, owner: str, field: str, value: float) -> None:
        """Raise `UsageError` if a global batch cannot be split evenly over the mesh.

        Args:
          rows: Number of rows of the global batch.
          owner: Name of the data set, for the error.
          field: Field of the data set from which the number follows.
          value: Value of the field.
        """
        shards = self.num_batch_shards()
        if rows < 1 or rows % shards:
            axes = " × ".join(self.batch_axes())
            expected = f"a global batch of a multiple of {shards} rows, the number of devices of"
            expected += f" {axes}, not of {rows:g}"
            raise UsageError(owner=owner, field=field, value=value, expected=expected)

    def abstract_batch(self, batch: Any) -> Any:
        """Return shapes, dtypes and shardings of the global batch of a host-local batch."""
        sharding, shards = self.batch_sharding(), self.num_batch_shards()
        # Processes that hold the same rows read the same data, so their rows do not add up.
        held = sharding.addressable_devices_indices_map((shards,)).values()
        held_here = len({index[0].indices(shards) for index in held if index is not None})

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return batch_spec(leaf, rows=leaf.shape[0] * shards // held_here, sharding=sharding)

        return jax.tree.map(place, batch)

    def put_batch(self, batch: NestedMap) -> NestedMap:
        """Put this process's rows of a batch on its devices, as part of the global batch."""
        if jax.process_count() == 1:
            # `jax.device_put` takes several times as long on the host.
            copied: NestedMap = self._copy_batch(batch)
            return copied
        sharding = self.batch_sharding()
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch
        )


class SpmdPartitioner(Partitioner):
    """A partitioner that splits weights and activations over a named mesh.

    The compiler inserts the communication.

    Attributes:
      mesh_axis_names: Names of the mesh axes, the slowest network first.
      ici_mesh_shape: Size of each axis within a slice; None puts all devices on the axis `data`,
        or on the first one if there is none.
      dcn_mesh_shape: Size of each axis across slices; None for one slice.
      rules: Mesh axes of the logical axes of weights and activations.
      shard_optimizer_over_data: True to split the optimizer's state, the averages of the weights
        and the update over the mesh axes of the batch that replicate a weight (ZeRO stage 1).
      offload_optimizer_state: True to hold the optimizer's state of repeated layers in pinned host
        memory, and to copy that of one layer at a time to the device.
    """

    mesh_axis_names: Sequence[str] = ("data", "fsdp", "tensor")
    ici_mesh_shape: Sequence[int] | None = None
    dcn_mesh_shape: Sequence[int] | None = None
    rules: ShardingRules = DEFAULT_RULES
    shard_optimizer_over_data: bool = False
    offload_optimizer_state: bool = False

    def _make_mesh(self, devices: Any) -> Mesh:
        return make_mesh(
            self.mesh_axis_names,
            ici_mesh_shape=self.ici_mesh_shape,
            dcn_mesh_shape=self.dcn_mesh_shape,
            devices=devices,
        )

    def _array_sharding(
        self, path: str, axes: Any, shape: tuple[int, ...], weight: Declared | None
    ) -> NamedSharding:
        bound = self.model_sharding()
        spec = bound.spec(axes, shape=shape, owner=path, allow_uneven=True)
        if weight is not None:
            of_weight = bound.spec(weight[0], shape=weight[1], owner=path, allow_uneven=True)
            split = sum(mesh_axes(of_weight, len(weight[1])), ())
            spec = split_over(spec, shape, mesh=self.mesh, axes=split)
        if self.shard_optimizer_over_data and path.startswith(_OPTIMIZER_PATHS):
            spec = split_over(spec, shape, mesh=self.mesh, axes=self.batch_axes())
        is_stacked = bool(axes) and axes[0] == "layers" and (not spec or spec[0] is None)
        on_host = self.offload_optimizer_state and is_stacked and path.startswith(".opt_state")
        return NamedSharding(self.mesh, spec, memory_kind=HOST_MEMORY if on_host else None)

    def _place_state(self, task: SingleTask) -> _PlacedState:
        placed, offloads = super()._place_state(task), self.offload_optimizer_state
        if not offloads:
            return placed
        leaves = jax.tree_util.tree_leaves_with_path(placed.on_devices)
        on_host = [path for path, leaf in leaves if leaf.sharding.memory_kind == HOST_MEMORY]
        expected = "False for an optimizer without a state of repeated layers"
        require(on_host, "SpmdPartitioner", "offload_optimizer_state", offloads, expected)
        is_even = placed.padded.keys().isdisjoint(map(jax.tree_util.keystr, on_host))
        expected = "a mesh that divides the weights of layers, with an optimizer state on the host"
        require(is_even, "SpmdPartitioner", "mesh", dict(self.mesh.shape), expected)
        return placed

    def model_sharding(self) -> BoundSharding:
        """Return the mesh and the rules."""
        return BoundSharding(self.mesh, self.rules)

    def batch_axes(self) -> tuple[str, ...]:
        """Return the mesh axes of the rule for `batch`."""
        return tuple(axis for axis in self.rules.mesh_axes("batch") if axis in self.mesh.shape)

    def _spread(self, step: Callable[..., Any], *layouts: _Layout) -> Callable[..., Any]:
        del layouts  # Results are global, and out_shardings of jit lay them out.
        context = dataclasses.replace(
            GLOBAL_BATCH,
            row_shards=self.num_batch_shards(),
            optimizer_layout=functools.partial(self._array_sharding, ".opt_state"),
        )
        return lambda *arguments: step(*arguments, context)

    def describe(self) -> str:
        """Return the number of devices and the mesh."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return f"SPMD over {self.mesh.size} device(s): {sizes}"


class PmapPartitioner(Partitioner):
    """A partitioner with the state replicated and the rows of a batch split.

    `jax.pmap` is in maintenance mode and is itself jit + shard_map, so this is
    `jit(shard_map(step))` over one `batch` axis. A step sees its own rows only and adds over the
    devices through its StepContext.

    Attributes:
      rules: Rules whose axis names weights and activations may use; their mesh axes are ignored.
    """

    rules: ShardingRules = DEFAULT_RULES

    def _make_mesh(self, devices: Any) -> Mesh:
        return make_mesh([BATCH_AXIS], devices=devices)

    def model_sharding(self) -> BoundSharding:
        """Return the rules without a mesh."""
        return BoundSharding(None, self.rules)

    def batch_axes(self) -> tuple[str, ...]:
        """Return the only mesh axis."""
        return (BATCH_AXIS,)

    def _array_sharding(
        self, path: str, axes: Any, shape: tuple[int, ...], weight: Declared | None
    ) -> NamedSharding:
        # This raises an error for unknown names.
        self.model_sharding().spec(axes, shape=shape, owner=path)
        return self.replicated()

    def _spread(self, step: Callable[..., Any], *layouts: _Layout) -> Callable[..., Any]:
        *inputs, output = layouts
        context = StepContext(
            batch_sum=functools.partial(jax.lax.psum, axis_name=BATCH_AXIS),
            batch_max=functools.partial(jax.lax.pmax, axis_name=BATCH_AXIS),
            fold_shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index(BATCH_AXIS)),
            num_shards=self.num_batch_shards(),
        )
        # The step adds the gradients of all devices. With check_vma=True, JAX would also add them
        # in the backward pass.
        return jax.shard_map(
            lambda *arguments: step(*arguments, context),
            mesh=self.mesh,
            in_specs=tuple(inputs),
            out_specs=output,
            check_vma=False,
        )

    def describe(self) -> str:
        """Return the number of devices."""
        return f"pmap over {self.mesh.size} device(s), state replicated"
