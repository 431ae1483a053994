"""Partitioner: where state and batches live, and how a step is compiled for them.

The task's steps, the programs and the checkpoints do not know which partitioner runs them. A
concrete one says three things: the shardings of state and batch, and how a step function is spread
over the mesh (`_spread`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.config import Configurable
from layerkit.nested_map import NestedMap
from layerkit.sharding import BoundSharding
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import padding
from layerkit_runner.partitioning.state_axes import axes_by_path, map_with_axes
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState, batch_spec

ROWS = "rows"
REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True)
class _PlacedState:
    """Where the state of a task lives: shapes, dtypes and shardings, and what is padded there."""

    task: SingleTask
    on_devices: TrainState
    padded: padding.Uneven


class Partitioner(Configurable):
    """Base of the SPMD and pmap partitioners; call `start` before anything else."""

    def __post_init__(self) -> None:
        self._mesh: Mesh | None = None
        self._placed: _PlacedState | None = None
        self._evaluations: dict[str, tuple[SingleTask, Any]] = {}

    def start(self, devices: Any = None) -> None:
        """Arranges the devices (all of them by default) in this partitioner's mesh."""
        self._mesh = self._make_mesh(devices)

    @property
    def mesh(self) -> Mesh:
        """The devices and their named axes."""
        if self._mesh is None:
            raise RuntimeError("Partitioner.start() has not been called")
        return self._mesh

    # What a concrete partitioner defines.

    def _make_mesh(self, devices: Any) -> Mesh:
        raise NotImplementedError

    def model_sharding(self) -> BoundSharding:
        """What the model's layers are bound to."""
        raise NotImplementedError

    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that the rows of a batch are split over."""
        raise NotImplementedError

    def _weight_spec(self, path: str, axes: Any, shape: tuple[int, ...]) -> PartitionSpec:
        raise NotImplementedError

    def _spread(
        self, step: Callable[..., Any], *, output: str | tuple[str, ...]
    ) -> Callable[..., Any]:
        """`step(state, batch, context)` as a function of global `(state, batch)`.

        Args:
          step: Returns a state and an output.
          output: `ROWS` or `REPLICATED`; of an output that is a tuple, one for each part.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """One line for people."""
        raise NotImplementedError

    # What is the same for all.

    def bind(self, task: SingleTask) -> None:
        """Binds the task's model to this partitioner's mesh and rules."""
        task.bind_sharding(self.model_sharding())
        self._placed = None
        self._evaluations.clear()

    def abstract_state(self, task: SingleTask) -> TrainState:
        """The state on the devices as shapes, dtypes and shardings; nothing is computed."""
        return self._place(task).on_devices

    def abstract_stored_state(self, task: SingleTask) -> TrainState:
        """The same as a checkpoint holds it: nothing is padded (`partitioning/padding.py`)."""
        placed = self._place(task)
        return padding.stored_shapes(placed.on_devices, placed.padded)

    def _place(self, task: SingleTask) -> _PlacedState:
        if self._placed is None or self._placed.task is not task:
            self._placed = self._place_state(task)
        return self._placed

    def _place_state(self, task: SingleTask) -> _PlacedState:
        boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))
        arrays: dict[str, padding.UnevenArray] = {}

        def place(path: str, axes: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            spec = self._weight_spec(path, axes, leaf.shape)
            sharding = NamedSharding(self.mesh, spec)
            array = padding.UnevenArray(leaf.shape, leaf.dtype, tuple(axes), sharding)
            if array.padded_shape != leaf.shape:
                arrays[path] = array
            return array.on_devices

        on_devices = map_with_axes(place, state, axes_by_path(boxed))
        return _PlacedState(task, on_devices, arrays)

    def padding_text(self, task: SingleTask) -> str:
        """Which weights are padded on the devices, and how; "" if the mesh divides them all."""
        return padding.padding_text(self._place(task).padded)

    def state_shardings(self, task: SingleTask) -> TrainState:
        """The shardings of the state on the devices."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(task))

    def stored_state(self, task: SingleTask, state: TrainState) -> TrainState:
        """What storage is given of a state on the devices, or of a part of one.

        What the mesh divides is the very same array.
        """
        return padding.to_storage(state, self._place(task).padded)

    def device_state(self, task: SingleTask, stored: TrainState) -> TrainState:
        """The state on the devices, of what storage gave for `abstract_stored_state`."""
        return padding.to_devices(stored, self._place(task).padded)

    def init_fn(self, task: SingleTask) -> Callable[[], TrainState]:
        """A jitted function that makes the first state, born sharded: no device or host ever
        holds more than its part."""

        def init() -> TrainState:
            return task.init_state(task.first_key())

        return self.jit_making(task, init)

    def jit_making(
        self, task: SingleTask, function: Callable[..., TrainState], **options: Any
    ) -> Any:
        """Jits a function that makes a state, which is laid out as steps take it.

        Args:
          task: Whose state it is.
          function: Returns a state as the model knows it.
          options: Of `jax.jit`, such as `donate_argnums`.
        """
        arrays = self._place(task).padded

        def making(*args: Any) -> TrainState:
            return padding.padded(function(*args), arrays)

        return jax.jit(making, out_shardings=self.state_shardings(task), **options)

    def train_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch) -> (state, (metrics, scalars))`; the given state is consumed."""
        state, arrays = self.state_shardings(task), self._place(task).padded
        step = self._spread(task.train_step, output=REPLICATED)

        def train_step(state: TrainState, batch: NestedMap) -> tuple[TrainState, Any]:
            state, reported = step(padding.cut(state, arrays), batch)
            return padding.padded(state, arrays), reported

        return jax.jit(
            train_step,
            in_shardings=(state, self.batch_sharding()),
            out_shardings=(state, self.replicated()),
            donate_argnums=0,
        )

    def eval_step_fn(self, task: SingleTask, *, averaged: bool | None = None) -> Any:
        """Jitted `(state, batch) -> metrics`; one function however often it is asked for.

        Args:
          task: What is evaluated.
          averaged: Whether with the averaged weights; None as the task says.
        """
        averaged = task.train.eval_use_ema_states if averaged is None else averaged
        step = functools.partial(task.eval_step, averaged=averaged)
        return self._kept(
            f"eval {averaged}", task, lambda: self._evaluating(task, step, output=REPLICATED)
        )

    def score_step_fn(self, task: SingleTask, *, averaged: bool | None = None) -> Any:
        """Jitted `(state, batch) -> (metrics, rows of all examples)`; see `score_step`."""
        averaged = task.train.eval_use_ema_states if averaged is None else averaged
        step = functools.partial(task.score_step, averaged=averaged)
        return self._kept(
            f"score {averaged}",
            task,
            lambda: self._evaluating(task, step, output=(REPLICATED, ROWS)),
        )

    def _kept(self, name: str, task: SingleTask, make: Callable[[], Any]) -> Any:
        """What `make` made for this task before; many data sets are evaluated by one program."""
        kept_for, made = self._evaluations.get(name, (None, None))
        if kept_for is not task:
            made = make()
            self._evaluations[name] = (task, made)
        return made

    def _evaluating(
        self, task: SingleTask, evaluate: Callable[..., Any], *, output: str | tuple[str, ...]
    ) -> Any:
        def step(state: TrainState, batch: NestedMap, context: Any) -> tuple[Any, Any]:
            return state, evaluate(state, batch, context)

        spread = self._spread(step, output=output)
        return self.jit_reading(
            task, lambda state, batch: spread(state, batch)[1], self.batch_sharding()
        )

    def summary_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch) -> (histograms, images)`; see `summary_step`."""
        return self._evaluating(task, task.summary_step, output=(REPLICATED, ROWS))

    def decode_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch, batch_index) -> outputs of all examples`; see `decode_step`."""

        def step(whole: Any, batch: NestedMap, context: Any) -> tuple[Any, Any]:
            state, batch_index = whole
            return whole, task.decode_step(state, batch, context, batch_index=batch_index)

        # The index is held whole by every shard, as the state is, so it travels with it.
        spread = self._spread(step, output=ROWS)
        return self.jit_reading(
            task,
            lambda state, batch, batch_index: spread((state, batch_index), batch)[1],
            self.batch_sharding(),
            self.replicated(),
        )

    def jit_reading(self, task: SingleTask, function: Callable[..., Any], *shardings: Any) -> Any:
        """Jits a function that reads a state, without what only training needs, and changes none.

        Args:
          task: Whose states they are.
          function: Called with the state and as many arguments as there are `shardings`; what it
            returns is held whole by every device.
          shardings: Of the arguments after the state.
        """
        arrays = self._place(task).padded

        def reading(state: TrainState, *rest: Any) -> Any:
            return function(padding.cut(state, arrays), *rest)

        jitted = jax.jit(
            reading,
            in_shardings=(self.state_shardings(task).for_inference(), *shardings),
            out_shardings=self.replicated(),
        )
        return lambda state, *rest: jitted(state.for_inference(), *rest)

    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch: rows over `batch_axes`, everything else whole."""
        return NamedSharding(self.mesh, PartitionSpec(self.batch_axes()))

    def num_batch_shards(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.batch_axes()]))

    def check_batch_size(self, rows: int, *, source: str) -> None:
        """Raises UsageError when a global batch cannot be split evenly over the mesh."""
        shards = self.num_batch_shards()
        if rows < 1:
            raise UsageError(
                f"{source}: a batch of {rows} rows holds nothing; the input's batch_size or"
                " percore_batch_size must come to at least one row"
            )
        if rows % shards:
            raise UsageError(
                f"{source}: a global batch of {rows} rows cannot be split evenly over"
                f" {' × '.join(self.batch_axes())} = {shards} devices; use a multiple of {shards}"
            )

    def abstract_batch(self, batch: Any) -> Any:
        """Shapes, dtypes and shardings of the global batch that a host batch is part of."""
        sharding, shards = self.batch_sharding(), self.num_batch_shards()
        # Processes that hold the same rows read the same, so they do not all add up.
        held = sharding.addressable_devices_indices_map((shards,)).values()
        held_here = len({index[0].indices(shards) for index in held if index is not None})

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return batch_spec(leaf, rows=leaf.shape[0] * shards // held_here, sharding=sharding)

        return jax.tree.map(place, batch)

    def put_batch(self, batch: NestedMap) -> NestedMap:
        """Puts this process's rows of a batch on its devices, as part of the global batch."""
        sharding = self.batch_sharding()
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch
        )
