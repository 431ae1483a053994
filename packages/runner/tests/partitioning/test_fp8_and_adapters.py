"""fp8 state and frozen weights: the same on all meshes, under pmap, and through a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Partial, sub_config_field
from layerkit.layers.adapters import LORA_WEIGHTS, with_lora
from layerkit.layers.linears import FeedForward
from layerkit.layers.products import with_dots
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.repeat import Repeat
from layerkit.nested_map import NestedMap
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.partitioning.padding import axes_by_path, map_with_axes

DIMS, ROWS = 16, 8
FP8 = Fp8Dot.HParams.config(amax_history_length=4)
SHAPES = {"2 x 2 x 2": [2, 2, 2], "pmap": None}
PMAP_IS_SLOW = ["2 x 2 x 2", pytest.param("pmap", marks=pytest.mark.slow)]


class Residual(FeedForward):
    def fprop(self, x: jax.Array) -> jax.Array:
        return self.constrain(x + super().fprop(x), "batch", "act_embed")


class Autoencoder(BaseModel):
    """Learns to double its inputs, by two repeated layers."""

    stack_tpl: Any = sub_config_field(
        Repeat.HParams,
        sub_tpl=Residual.HParams.config(input_dims=DIMS, output_dims=DIMS),
        num_repeats=2,
    )

    def setup(self) -> None:
        self.create_child("stack", self.stack_tpl)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        return self.stack(batch.x)

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = jnp.mean(jnp.square(predictions - 2.0 * batch.x), axis=-1)
        weight = jnp.sum(batch.weights)
        loss = jnp.sum(errors * batch.weights) / jnp.maximum(weight, 1e-9)
        return {"loss": WeightedScalar.of(loss, weight)}, NestedMap()


MODEL = Autoencoder.HParams.config()
WITH_FP8 = with_dots(MODEL, FP8)
WITH_LORA = with_lora(WITH_FP8, rank=2)


def batch(step: int) -> NestedMap:
    """Unequal rows of unequal weights, one of them without any."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(ROWS, DIMS)) * rng.uniform(0.1, 3.0, size=(ROWS, 1))
    weights = rng.uniform(size=ROWS)
    weights[3] = 0.0
    return NestedMap(x=x, weights=weights).transform(np.float32)


def trained(task: Any, partitioner: Any, state: Any, steps: Iterable[int]) -> Any:
    """(state, losses, scalars of the last step), after a step on each of these batches."""
    step_fn = partitioner.train_step_fn(task)
    losses = []
    for step in steps:
        state, (metrics, scalars) = step_fn(state, partitioner.put_batch(batch(step)))
        losses.append(float(metrics["loss"].value))
    return state, losses, scalars


def started(arrangements: Any, model: Any, shape: Any, **learner: Any) -> Any:
    task = arrangements.sgd_task(model, learning_rate=0.1, **learner)
    single = shape == "one device"
    partitioner = (
        arrangements.one_device() if single else arrangements.make_partitioner(SHAPES[shape])
    )
    partitioner.bind(task)
    return task, partitioner, partitioner.init_fn(task)()


def assert_close(found: Any, expected: Any) -> None:
    def check(path: Any, a: Any, b: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)

    jax.tree_util.tree_map_with_path(check, jax.device_get(found), jax.device_get(expected))


@pytest.mark.parametrize("shape", PMAP_IS_SLOW)
def test_fp8_steps_equal_those_of_one_device(arrangements: Any, shape: str):
    runs = []
    for each in ("one device", shape):
        task, partitioner, state = started(arrangements, WITH_FP8, each)
        runs.append(trained(task, partitioner, state, range(3)))
    (expected, _, scalars), (found, _, more_scalars) = runs
    dot = expected.overwrite_with_gradient["stack"]["sub"]["linear"]["dot"]
    assert dot["output_grad_amax_history"].shape == (2, 4)
    assert all(float(np.min(dot[f"{t}_scale"])) not in (0.0, 1.0) for t in ("input", "kernel"))
    assert_close(found, expected)
    assert_close(more_scalars, scalars)


def test_fp8_trains_nearly_as_well_as_float32(arrangements: Any):
    losses = {}
    for name, model in (("float32", MODEL), ("fp8", WITH_FP8)):
        task, partitioner, state = started(arrangements, model, "one device")
        _, losses[name], _ = trained(task, partitioner, state, [0] * 40)
    assert losses["fp8"][-1] < 0.2 * losses["fp8"][0]
    assert losses["fp8"] != losses["float32"]
    np.testing.assert_allclose(losses["fp8"], losses["float32"], rtol=0.25)


def test_fp8_state_is_not_clipped_and_not_part_of_the_norm(arrangements: Any):
    task, partitioner, state = started(arrangements, WITH_FP8, "one device")
    before = jax.device_get(state.params)
    after, _, scalars = trained(task, partitioner, state, range(1))
    steps = jax.tree.map(lambda a, b: (a - b) / 0.1, before, jax.device_get(after.params))
    assert float(scalars["learning/raw_grad_norm"]) == pytest.approx(
        float(optax.tree.norm(steps)), rel=1e-4
    )
    limits = {"clip_global_norm": 1e-3}
    task, partitioner, state = started(arrangements, WITH_FP8, "one device", **limits)
    clipped, _, _ = trained(task, partitioner, state, range(1))
    assert_close(clipped.overwrite_with_gradient, after.overwrite_with_gradient)


@pytest.mark.parametrize("shape", PMAP_IS_SLOW)
def test_training_changes_adapters_only(arrangements: Any, shape: str):
    optimizer = {"optimizer": Partial(optax.adamw, weight_decay=0.1), "trainable": (LORA_WEIGHTS,)}
    task, partitioner, state = started(arrangements, WITH_LORA, shape, **optimizer)
    before = jax.device_get(state.params)
    state, _, _ = trained(task, partitioner, state, range(4))
    after = jax.device_get(state.params)
    moved = {
        jax.tree_util.keystr(path): bool(np.any(old != new))
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }
    assert {name for name, has_moved in moved.items() if has_moved} == {
        name for name in moved if "lora" in name
    }
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert not [name for name in names if ".opt_state" in name and "['w']" in name]
    assert any(".opt_state" in name and "lora_a" in name for name in names)


def test_state_axes_of_adapters_and_scales(arrangements: Any):
    task = arrangements.sgd_task(WITH_LORA, optimizer=Partial(optax.adamw))
    boxed, state = jax.eval_shape(lambda: task.init_boxed_state(jax.random.key(0)))
    found: dict[str, Any] = {}
    map_with_axes(lambda path, axes, leaf: found.update({path: axes}), state, axes_by_path(boxed))
    dot = "['stack']['sub']['linear']['dot']"
    assert found[f".params{dot}['lora_b']"] == ("layers", None, "mlp")
    assert found[f".opt_state[0].mu{dot}['lora_b']"] == ("layers", None, "mlp")
    scale = f".overwrite_with_gradient{dot}['base']['input_scale']"
    assert found[scale] == ("layers", None)


def test_training_resumes_from_a_checkpoint_on_another_mesh(arrangements: Any, tmp_path: Any):
    fields = {"optimizer": Partial(optax.adam), "trainable": (LORA_WEIGHTS,)}
    task, partitioner, state = started(arrangements, WITH_LORA, "2 x 2 x 2", **fields)
    state, _, _ = trained(task, partitioner, state, range(2))
    with CheckpointManager(tmp_path, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
        manager.save(2, state, input_states={}, metadata={})
    expected, _, _ = trained(task, partitioner, state, range(2, 4))

    task, partitioner, _ = started(arrangements, WITH_LORA, "pmap", **fields)
    with CheckpointManager(tmp_path, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
        restored = manager.restore(2, partitioner.abstract_state(task)).state
    found, _, _ = trained(task, partitioner, restored, range(2, 4))
    assert_close(found, expected)
