"""Partitioner: where state and batches live, and how a step is compiled for them.

The task's steps, the programs and the checkpoints do not know which partitioner runs them. A
concrete one says three things: the shardings of state and batch, and how a step function is spread
over the mesh (`_spread`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.config import Configurable
from layerkit.nested_map import NestedMap
from layerkit.sharding import BoundSharding
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning.state_axes import axes_by_path, map_with_axes
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.task import SingleTask

ROWS = "rows"
REPLICATED = "replicated"


class Partitioner(Configurable):
    """Base of the SPMD and pmap partitioners; call `start` before anything else."""

    def __post_init__(self) -> None:
        self._mesh: Mesh | None = None
        self._abstract: tuple[SingleTask, TrainState] | None = None
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
        self._abstract = None
        self._evaluations.clear()

    def abstract_state(self, task: SingleTask) -> TrainState:
        """The state as shapes, dtypes and shardings; nothing is computed."""
        if self._abstract is None or self._abstract[0] is not task:
            self._abstract = (task, self._place_state(task))
        return self._abstract[1]

    def _place_state(self, task: SingleTask) -> TrainState:
        boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))

        def place(path: str, axes: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            spec = self._weight_spec(path, axes, leaf.shape)
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)
            )

        return map_with_axes(place, state, axes_by_path(boxed))

    def state_shardings(self, task: SingleTask) -> TrainState:
        """The shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(task))

    def init_fn(self, task: SingleTask) -> Callable[[], TrainState]:
        """A jitted function that makes the first state, born sharded: no device or host ever
        holds more than its part."""

        def init() -> TrainState:
            return task.init_state(jax.random.key(task.train.random_seed))

        return jax.jit(init, out_shardings=self.state_shardings(task))

    def first_state(self, task: SingleTask) -> TrainState:
        """The state before the first step, with the task's initial weights.

        Raises:
          UsageError: these cannot be read, or do not fit the model.
        """
        # Reading takes checkpoints and their storage, which other modes do not need.
        from layerkit_runner.init_from.first_state import plan_first_state

        return plan_first_state(self, task)().state

    def train_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch) -> (state, (metrics, scalars))`; the given state is consumed."""
        state = self.state_shardings(task)
        return jax.jit(
            self._spread(task.train_step, output=REPLICATED),
            in_shardings=(state, self.batch_sharding()),
            out_shardings=(state, self.replicated()),
            donate_argnums=0,
        )

    def eval_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch) -> metrics`; one function however often it is asked for."""
        return self._kept(
            "eval", task, lambda: self._evaluating(task, task.eval_step, output=REPLICATED)
        )

    def score_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch) -> (metrics, rows of all examples)`; see `score_step`."""
        return self._kept(
            "score",
            task,
            lambda: self._evaluating(task, task.score_step, output=(REPLICATED, ROWS)),
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
        jitted = jax.jit(
            lambda state, batch: spread(state, batch)[1],
            in_shardings=(self.state_shardings(task).for_inference(), self.batch_sharding()),
            out_shardings=self.replicated(),
        )
        return lambda state, batch: jitted(state.for_inference(), batch)

    def decode_step_fn(self, task: SingleTask) -> Any:
        """Jitted `(state, batch, batch_index) -> outputs of all examples`; see `decode_step`."""

        def step(whole: Any, batch: NestedMap, context: Any) -> tuple[Any, Any]:
            state, batch_index = whole
            return whole, task.decode_step(state, batch, context, batch_index=batch_index)

        # The index is held whole by every shard, as the state is, so it travels with it.
        spread = self._spread(step, output=ROWS)
        weights = self.state_shardings(task).for_inference()
        jitted = jax.jit(
            lambda state, batch, batch_index: spread((state, batch_index), batch)[1],
            in_shardings=(weights, self.batch_sharding(), self.replicated()),
            out_shardings=self.replicated(),
        )
        return lambda state, batch, batch_index: jitted(state.for_inference(), batch, batch_index)

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
        if rows < 1 or rows % shards:
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
            shape = (leaf.shape[0] * shards // held_here, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(place, batch)

    def put_batch(self, batch: NestedMap) -> NestedMap:
        """Puts this process's rows of a batch on its devices, as part of the global batch."""
        sharding = self.batch_sharding()
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch
        )
