"""Small models, and functions that train them on any arrangement of the eight devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Partial, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import FeedForward
from layerkit.layers.transformer.repeat import Repeat
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner
from layerkit_runner.partitioning.padding import axes_by_path, map_with_axes
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

ROWS, LENGTH, VOCAB = 8, 12, 32
MESHES = {
    "data 8": [8, 1, 1],
    "fsdp 8": [1, 8, 1],
    "tensor 8": [1, 1, 8],
    "2 x 2 x 2": [2, 2, 2],
    "pmap": None,
}


@dataclasses.dataclass
class Step:
    """What a training step gave, as NumPy arrays."""

    gradients: dict[str, np.ndarray]
    metrics: dict[str, tuple[float, float]]
    scalars: dict[str, float]
    eval_metrics: dict[str, tuple[float, float]]


def language_model() -> Any:
    """Two repeated layers; what is split divides by 8."""
    lm = TransformerLm.HParams.config(
        vocab_size=VOCAB,
        model_dims=32,
        hidden_dims=64,
        num_layers=2,
        num_heads=8,
        stack_tpl=StackedTransformerRepeated.HParams.config(),
    )
    return LanguageModel.HParams.config(lm_tpl=lm)


def unequal_batch() -> NestedMap:
    """Weights differ from row to row and those of row 2 are all zero; rows hold two documents."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCAB, size=(ROWS, LENGTH + 1)).astype(np.int32)
    weights = rng.uniform(0, 2, size=(ROWS, LENGTH)) * (rng.uniform(size=(ROWS, LENGTH)) < 0.7)
    weights[2] = 0.0
    half = np.arange(LENGTH) >= LENGTH // 2
    return NestedMap(
        ids=tokens[:, :-1].copy(),
        labels=tokens[:, 1:].copy(),
        weights=weights.astype(np.float32),
        segment_ids=np.tile(1 + half, (ROWS, 1)).astype(np.int32),
        segment_pos=np.tile(np.arange(LENGTH) % (LENGTH // 2), (ROWS, 1)).astype(np.int32),
    )


def mean_of_rows(errors: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
    """The loss of rows `[batch]`, by their weights."""
    weight = jnp.sum(batch.weights)
    loss = jnp.sum(errors * batch.weights) / jnp.maximum(weight, 1e-9)
    return {"loss": WeightedScalar.of(loss, weight)}, NestedMap()


class Hidden(BaseModel):
    """Moves 16 hidden units of 8 inputs to 1, and towards 0 by an auxiliary loss."""

    feed_forward_tpl: Any = sub_config_field(FeedForward.HParams)

    def setup(self) -> None:
        self.create_child("feed_forward", self.feed_forward_tpl, input_dims=8, output_dims=16)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        hidden = self.feed_forward(batch.x)
        self.add_aux_loss("size", 3.0 * jnp.mean(jnp.square(hidden)))
        self.add_summary("size", jnp.mean(jnp.square(hidden)))
        return hidden

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        return mean_of_rows(jnp.mean(jnp.square(predictions - 1.0), axis=-1), batch)


class Residual(FeedForward):
    def fprop(self, x: jax.Array) -> jax.Array:
        return self.constrain(x + super().fprop(x), "batch", "act_embed")


class Doubling(BaseModel):
    """Learns to double its 16 inputs, by two repeated layers and by one more if it is given."""

    stack_tpl: Any = sub_config_field(
        Repeat.HParams,
        sub_tpl=Residual.HParams.config(input_dims=16, output_dims=16),
        num_repeats=2,
    )
    last_tpl: Any = sub_config_field(None)

    def setup(self) -> None:
        self.create_child("stack", self.stack_tpl)
        if self.last_tpl is not None:
            self.create_child("last", self.last_tpl, input_dims=16, output_dims=16)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        hidden = self.stack(batch.x)
        return hidden if self.last_tpl is None else self.last(hidden)

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        return mean_of_rows(jnp.mean(jnp.square(predictions - 2.0 * batch.x), axis=-1), batch)


def sgd_task(model: Any, **learner: Any) -> SingleTask:
    """Gradient descent of rate 1: what a step takes off the weights is the gradient."""
    settings = {"optimizer": Partial(optax.sgd), "learning_rate": 1.0, **learner}
    train = TrainHParams.HParams.config(learner=Learner.HParams.config(**settings))
    return SingleTask.HParams.config(model=model, train=train).Instantiate()


def start(shape: list[int] | None, task: SingleTask | None = None, **fields: Any) -> Partitioner:
    """On as many devices as the mesh has, and bound to a task; None is pmap on all of them."""
    partitioner: Partitioner = PmapPartitioner()
    if shape is not None:
        partitioner = SpmdPartitioner(ici_mesh_shape=shape, **fields)
    partitioner.start(None if shape is None else jax.devices()[: math.prod(shape)])
    if task is not None:
        partitioner.bind(task)
    return partitioner


def train(
    partitioner: Partitioner, step_fn: Any, state: Any, batches: Iterable[NestedMap]
) -> tuple[Any, list[dict[str, float]]]:
    """The state after these batches, and for each step its scalars and values of metrics."""
    reported = []
    for batch in batches:
        state, (metrics, scalars) = step_fn(state, partitioner.put_batch(batch))
        values = {**scalars, **{name: metric.value for name, metric in metrics.items()}}
        reported.append({name: float(value) for name, value in values.items()})
    return state, reported


def through_checkpoint(folder: Path, state: Any, target: Any, **options: Any) -> Any:
    """Save a state, as step 1, and restore it like `target`."""
    policy = CheckpointPolicy(save_interval_steps=1)
    with CheckpointManager(folder, policy=policy, **options) as manager:
        manager.save(1, state, input_states={}, metadata={})
    with CheckpointManager(folder, read_only=True) as manager:
        return manager.restore(1, target).state


def axes_of_state(task: SingleTask) -> dict[str, Any]:
    """Logical axes of each array of a state, by path."""
    boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))
    result: dict[str, Any] = {}
    map_with_axes(lambda path, axes, *_: result.update({path: axes}), state, axes_by_path(boxed))
    return result


def run_step(task: SingleTask, partitioner: Partitioner, batch: NestedMap) -> Step:
    """Evaluates and trains one step from the seed's weights."""
    # On the host. That each partitioner makes the same is a test of its own.
    before = jax.device_get(jax.jit(lambda: task.init_state(jax.random.key(0)))())
    partitioner.bind(task)
    state = jax.device_put(before, partitioner.state_shardings(task))
    placed = partitioner.put_batch(batch)
    evaluated = partitioner.eval_step_fn(task)(state, placed)
    state, (metrics, scalars) = partitioner.train_step_fn(task)(state, placed)
    taken = jax.tree.map(lambda a, b: a - b, before.params, jax.device_get(state.params))
    return Step(
        gradients={
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(taken)
        },
        metrics=_pairs(metrics),
        scalars={name: float(value) for name, value in scalars.items()},
        eval_metrics=_pairs(evaluated),
    )


def _pairs(metrics: Any) -> dict[str, tuple[float, float]]:
    return {name: (float(m.value), float(m.weight)) for name, m in metrics.items()}


def assert_close(ours: Any, reference: Any, *, name: str = "") -> None:
    """‖a − b‖∞ ≤ 1e-5 · max(1, ‖b‖∞)."""
    a, b = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    limit = 1e-5 * max(1.0, np.abs(b).max())
    assert np.abs(a - b).max() <= limit, f"{name}: {np.abs(a - b).max()} > {limit}"


def assert_same_step(ours: Step, reference: Step) -> None:
    """Every leaf, metric and scalar."""
    for field in dataclasses.fields(Step):
        mine, other = getattr(ours, field.name), getattr(reference, field.name)
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert_close(mine[name], value, name=name)


def assert_trees_close(result: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Every leaf."""

    def check(path: Any, a: Any, b: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)

    jax.tree_util.tree_map_with_path(check, jax.device_get(result), jax.device_get(expected))


@pytest.fixture(scope="session")
def arrangements() -> SimpleNamespace:
    """The functions and models of this file, which tests cannot import."""
    return SimpleNamespace(
        one_device=[1, 1, 1],
        language_model=language_model,
        Hidden=Hidden,
        Doubling=Doubling,
        unequal_batch=unequal_batch,
        sgd_task=sgd_task,
        start=start,
        train=train,
        through_checkpoint=through_checkpoint,
        axes_of_state=axes_of_state,
        run_step=run_step,
        assert_same_step=assert_same_step,
        assert_close=assert_close,
        assert_trees_close=assert_trees_close,
    )


# Those that the slow tests have besides: a mesh with one axis is a part of one with three.
ORDINARY = ("2 x 2 x 2", "pmap")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=() if name in ORDINARY else pytest.mark.slow) for name in MESHES
    ],
)
def shape(request: pytest.FixtureRequest) -> list[int] | None:
    """Each mesh over eight devices; None is pmap."""
    return MESHES[request.param]
