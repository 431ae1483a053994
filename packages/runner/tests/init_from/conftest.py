"""A small deep model, and a checkpoint of it whose values are all different."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Partial, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import FeedForward, Linear
from layerkit.layers.transformer.repeat import Repeat
from layerkit_runner.checkpointing import CheckpointManager, StateFormat
from layerkit_runner.checkpointing.stored_state import named_leaves
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

DIMS = 8


def halved(count: Any) -> Any:
    """A schedule: 1/2, 1/3, …"""
    return 1.0 / (2.0 + count)


class Residual(FeedForward):
    """x + f(x), laid out as the batch is."""

    def fprop(self, x: jax.Array) -> jax.Array:
        return self.constrain(x + super().fprop(x), "batch", "act_embed")


class Deep(BaseModel):
    """Layers in a row and a head: ½·(head(stack(x)) − y)².

    Weights: `stack/sub/linear/w` `[layers, dims, dims]` if repeated, else `layers_0/linear/w` and
    so on; `head/w` `[dims, 4]`.
    """

    num_layers: int = 2
    repeated: bool = True
    sub_tpl: Any = sub_config_field(Residual.HParams, input_dims=DIMS, output_dims=DIMS)
    head_tpl: Any = sub_config_field(Linear.HParams, input_dims=DIMS, output_dims=4)

    def setup(self) -> None:
        if self.repeated:
            repeat = Repeat.HParams.config(sub_tpl=self.sub_tpl, num_repeats=self.num_layers)
            self.create_child("stack", repeat)
        else:
            for i in range(self.num_layers):
                self.create_child(f"layers_{i}", self.sub_tpl)
        self.create_child("head", self.head_tpl)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        return self.head(self.stack(batch.x))

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = 0.5 * jnp.sum(jnp.square(predictions - batch.y), axis=-1)
        loss = jnp.mean(errors)
        return {"loss": WeightedScalar.of(loss, jnp.float32(len(errors)))}, NestedMap()


def bound(
    model: Any,
    shape: list[int] | None = None,
    *,
    begin: Any = None,
    pmap: bool = False,
    **more: Any,
) -> tuple[Partitioner, SingleTask]:
    """A started partitioner and a task that trains by Adam; one device unless a mesh is given."""
    settings = {"optimizer": Partial(optax.adam), "learning_rate": halved, **more}
    train = TrainHParams.HParams.config(learner=Learner.HParams.config(**settings))
    task = SingleTask.HParams.config(model=model, train=train).Instantiate()
    task.initial_weights = begin
    if pmap:
        partitioner: Partitioner = PmapPartitioner()
    else:
        partitioner = SpmdPartitioner(ici_mesh_shape=shape or [1, 1, 1])
    partitioner.start(None if shape or pmap else jax.devices()[:1])
    partitioner.bind(task)
    return partitioner, task


def filled(tree: Any, *, seed: int = 0) -> Any:
    """A tree of the same shapes, each value drawn anew; whole numbers are 7."""
    rng = np.random.default_rng(seed)

    def fill(leaf: Any) -> Any:
        if not np.issubdtype(np.asarray(np.zeros(0, leaf.dtype)).dtype, np.integer):
            values = rng.normal(size=leaf.shape).astype(leaf.dtype)
        else:
            values = np.full(leaf.shape, 7, leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(fill, tree)


def filled_state(model: Any, **options: Any) -> Any:
    """Return a filled state of a run with the options of `bound`."""
    partitioner, task = bound(model, **options)
    return filled(partitioner.abstract_state(task))


def save(
    folder: Path, state: Any, *, step: int = 7, one_file: bool = False, where: str = "checkpoints"
) -> None:
    """Writes a checkpoint as a job of this folder does."""
    kind = StateFormat.MSGPACK if one_file else StateFormat.TENSORSTORE
    with CheckpointManager(folder / where, state_format=kind) as checkpoints:
        checkpoints.save(step, state, input_states={}, metadata={}, force=True)


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """On the host, by path such as `params/lm/softmax/w`."""
    return {"/".join(path): np.asarray(leaf) for path, leaf in named_leaves(tree).items()}


def init_from(*sources: Any, **fields: Any) -> InitFrom:
    """From folders, or from the fields of sources."""
    built = [Source(**(one if isinstance(one, dict) else {"folder": str(one)})) for one in sources]
    return InitFrom(sources=built, **fields)


@dataclasses.dataclass(frozen=True)
class Begin:
    """The functions of this file, which tests cannot import; and what was saved.

    Attributes:
      job: The folder of a job whose checkpoint of step 7 holds `values`.
      values: By path.
    """

    job: Path
    values: dict[str, np.ndarray]
    model: Callable[..., Any] = Deep.HParams.config
    bound: Callable[..., Any] = bound
    filled: Callable[..., Any] = filled
    filled_state: Callable[..., Any] = filled_state
    save: Callable[..., None] = save
    leaves: Callable[..., dict[str, np.ndarray]] = leaves
    init_from: Callable[..., InitFrom] = init_from


@pytest.fixture(scope="session")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Begin:
    job = tmp_path_factory.mktemp("base")
    state = filled_state(Deep.HParams.config())
    save(job, state)
    return Begin(job, leaves(state))
