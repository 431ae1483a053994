"""fp8 state and frozen weights: the same on all meshes, under pmap, and through a checkpoint."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.dots import replace_dots
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.quantization.lora import LORA_WEIGHTS, add_lora

FP8 = Fp8Dot.HParams.config(amax_history_length=4)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MESH = [2, 2, 2]
PMAP_IS_SLOW = [MESH, pytest.param(None, id="pmap", marks=pytest.mark.slow)]


def batch(step: int) -> NestedMap:
    """Unequal rows of unequal weights, one of them without any."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 16)) * rng.uniform(0.1, 3.0, size=(8, 1))
    weights = rng.uniform(size=8)
    weights[3] = 0.0
    return NestedMap(x=x, weights=weights).transform(np.float32)


def started(
    arrangements: Any, shape: Any, *, fp8: bool = True, lora: bool = False, **learner: Any
) -> Any:
    """(task, partitioner, first state) of a model that doubles its inputs."""
    model = arrangements.Doubling.HParams.config()
    model = replace_dots(model, FP8) if fp8 else model
    model = add_lora(model, rank=2) if lora else model
    task = arrangements.sgd_task(model, learning_rate=0.1, **learner)
    partitioner = arrangements.start(shape, task)
    return task, partitioner, partitioner.init_fn(task)()


def trained(arrangements: Any, task: Any, partitioner: Any, state: Any, steps: Any) -> Any:
    """(state, what each step reported), after a step on each of these batches."""
    step_fn = partitioner.train_step_fn(task)
    return arrangements.train(partitioner, step_fn, state, map(batch, steps))


@pytest.mark.parametrize("shape", PMAP_IS_SLOW)
def test_fp8_steps_equal_those_of_one_device(arrangements: Any, shape: Any):
    (expected, reported), (result, more_reported) = (
        trained(arrangements, *started(arrangements, each), range(3))
        for each in (arrangements.one_device, shape)
    )
    dot = expected.overwrite_with_gradient["stack"]["sub"]["linear"]["dot"]
    assert dot["output_grad_amax_history"].shape == (2, 4)
    assert all(float(np.min(dot[f"{t}_scale"])) not in (0.0, 1.0) for t in ("input", "kernel"))
    arrangements.assert_trees_close(result, expected, **CLOSE)
    arrangements.assert_trees_close(more_reported, reported, **CLOSE)


def test_fp8_state_is_not_clipped_and_not_part_of_the_norm(arrangements: Any):
    alone = arrangements.one_device
    task, partitioner, state = started(arrangements, alone)
    before = jax.device_get(state.params)
    after, [reported] = trained(arrangements, task, partitioner, state, [0])
    steps = jax.tree.map(lambda a, b: (a - b) / 0.1, before, jax.device_get(after.params))
    norm = float(optax.tree.norm(steps))
    assert reported["learning/raw_grad_norm"] == pytest.approx(norm, rel=1e-4)
    first = started(arrangements, alone, clip_global_norm=1e-3)
    clipped, _ = trained(arrangements, *first, [0])
    states = (each.overwrite_with_gradient for each in (clipped, after))
    arrangements.assert_trees_close(*states, **CLOSE)


def test_state_axes_of_adapters_and_scales(arrangements: Any):
    optimizer = {"optimizer": Partial(optax.adamw)}
    task, _, _ = started(arrangements, arrangements.one_device, lora=True, **optimizer)
    result = arrangements.axes_of_state(task)
    dot = "['stack']['sub']['linear']['dot']"
    assert result[f".params{dot}['lora_b']"] == ("layers", None, "mlp")
    assert result[f".opt_state[0].mu{dot}['lora_b']"] == ("layers", None, "mlp")
    scale = f".overwrite_with_gradient{dot}['base']['input_scale']"
    assert result[scale] == ("layers", None)


@pytest.mark.slow  # other states do in test_learner_on_meshes.py
def test_training_resumes_from_a_checkpoint_on_another_mesh(arrangements: Any, tmp_path: Any):
    fields = {"lora": True, "optimizer": Partial(optax.adam), "trainable": (LORA_WEIGHTS,)}
    task, partitioner, state = started(arrangements, MESH, **fields)
    state, _ = trained(arrangements, task, partitioner, state, range(2))
    other_task, other, _ = started(arrangements, None, **fields)
    target = other.abstract_state(other_task)
    restored = arrangements.through_checkpoint(tmp_path, state, target)
    expected, _ = trained(arrangements, task, partitioner, state, range(2, 4))
    result, _ = trained(arrangements, other_task, other, restored, range(2, 4))
    arrangements.assert_trees_close(result, expected, **CLOSE)
