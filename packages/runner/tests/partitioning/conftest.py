"""One small language model, and one step of it on any arrangement of the eight devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.layers.stacks import StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit.nested_map import NestedMap
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_hparams import TrainHParams

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


def sgd_task(model: Any, **learner: Any) -> SingleTask:
    """Gradient descent of rate 1: what a step takes off the weights is the gradient."""
    settings = {"optimizer": Partial(optax.sgd), "learning_rate": 1.0, **learner}
    train = TrainHParams.HParams.config(learner=Learner.HParams.config(**settings))
    return SingleTask.HParams.config(model=model, train=train).Instantiate()


def make_partitioner(shape: list[int] | None, *, devices: Any = None) -> Partitioner:
    """Started; None is pmap."""
    partitioner = PmapPartitioner() if shape is None else SpmdPartitioner(ici_mesh_shape=shape)
    partitioner.start(devices)
    return partitioner


def run_step(task: SingleTask, partitioner: Partitioner, batch: NestedMap) -> Step:
    """Evaluates and trains one step from the seed's weights."""
    before = _first_state(task)
    partitioner.bind(task)
    state = jax.device_put(before, partitioner.state_shardings(task))
    before = before.params
    placed = partitioner.put_batch(batch)
    evaluated = partitioner.eval_step_fn(task)(state, placed)
    state, (metrics, scalars) = partitioner.train_step_fn(task)(state, placed)
    taken = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
    return Step(
        gradients={
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(taken)
        },
        metrics=_pairs(metrics),
        scalars={name: float(value) for name, value in scalars.items()},
        eval_metrics=_pairs(evaluated),
    )


def _first_state(task: SingleTask) -> Any:
    """On the host. That each partitioner makes the same is a test of its own."""
    return jax.device_get(jax.jit(lambda: task.init_state(jax.random.key(0)))())


def _pairs(metrics: Any) -> dict[str, tuple[float, float]]:
    return {name: (float(m.value), float(m.weight)) for name, m in metrics.items()}


def assert_close(ours: Any, reference: Any, *, name: str = "") -> None:
    """‖a − b‖∞ ≤ 1e-5 · max(1, ‖b‖∞)."""
    a, b = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    limit = 1e-5 * max(1.0, np.abs(b).max())
    assert np.abs(a - b).max() <= limit, f"{name}: {np.abs(a - b).max()} > {limit}"


def assert_same_step(ours: Step, reference: Step) -> None:
    """Every leaf, metric and scalar."""
    assert ours.gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        assert_close(ours.gradients[name], gradient, name=name)
    for kind in ("metrics", "eval_metrics", "scalars"):
        mine, other = getattr(ours, kind), getattr(reference, kind)
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert_close(mine[name], value, name=name)


@dataclasses.dataclass(frozen=True)
class Arrangements:
    """The functions of this file, which tests cannot import."""

    language_model: Callable[..., Any] = language_model
    unequal_batch: Callable[[], NestedMap] = unequal_batch
    sgd_task: Callable[..., SingleTask] = sgd_task
    make_partitioner: Callable[..., Partitioner] = make_partitioner
    run_step: Callable[..., Step] = run_step
    assert_same_step: Callable[[Step, Step], None] = assert_same_step
    assert_close: Callable[..., None] = assert_close

    def one_device(self) -> Partitioner:
        """The reference."""
        return make_partitioner([1, 1, 1], devices=jax.devices()[:1])


@pytest.fixture(scope="session")
def arrangements() -> Arrangements:
    return Arrangements()


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
