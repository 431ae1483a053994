"""Recipes whose layout or products differ from the usual ones train as the usual ones do."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

SMALL: dict[str, Any] = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 32,
    "HIDDEN_DIMS": 64,
    "NUM_HEADS": 4,
    "DIMS_PER_HEAD": 8,
    "VOCAB_SIZE": 64,
    "MAX_SEQ_LEN": 16,
    "MAX_POSITIONS": None,
    "FPROP_DTYPE": "float32",
    "WARMUP_STEPS": 0,
    "DECAY_START": 1,
    "DCN_MESH_SHAPE": None,
}
ROWS, STEPS = 8, 3


def trained(name: str, *, steps: int, mesh: list[int], **fields: Any) -> dict[str, np.ndarray]:
    """Return the losses and gradient norms of the first steps on a mesh."""
    values = {**SMALL, "PERCORE_BATCH_SIZE": ROWS / math.prod(mesh), "ICI_MESH_SHAPE": mesh}
    experiment = load_experiment(find_experiment(name))(**values, **fields)
    partitioner, task = build_parts(resolve(experiment))
    partitioner.start(jax.devices()[: math.prod(mesh)])
    partitioner.bind(task)
    state = jax.jit(functools.partial(task.init_state, task.first_key()))()
    state = jax.device_put(jax.device_get(state), partitioner.state_shardings(task))
    step = partitioner.train_step_fn(task)
    rng = np.random.default_rng(1)
    result: dict[str, list[float]] = {"loss": [], "gradient_norm": []}
    for _ in range(steps):
        tokens = rng.integers(0, SMALL["VOCAB_SIZE"], (ROWS, SMALL["MAX_SEQ_LEN"] + 1), np.int32)
        weights = np.ones((ROWS, SMALL["MAX_SEQ_LEN"]), np.float32)
        batch = NestedMap(ids=tokens[:, :-1], labels=tokens[:, 1:], weights=weights)
        state, (metrics, scalars) = step(state, partitioner.put_batch(batch))
        result["loss"].append(float(metrics["loss"].value))
        result["gradient_norm"].append(float(scalars["learning/raw_grad_norm"]))
    return {name: np.array(numbers) for name, numbers in result.items()}


PIPELINE = {"NUM_STAGES": 2, "MICROBATCH_SIZE": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "fields"),
    [("lm.lm_cloud.LmCloudSpmd32B", [2, 2, 2], {}), ("lm.nvidia.NVIDIA5B", [2, 1, 2, 2], PIPELINE)],
)
def test_activations_sharded_by_features_train_as_whole_ones(
    name: str, mesh: list[int], fields: dict[str, Any]
):
    sharded = trained(name, steps=STEPS, mesh=mesh, **fields)
    whole = trained(name, steps=STEPS, mesh=[1] * len(mesh), **fields)
    for number, result in sharded.items():
        np.testing.assert_allclose(result, whole[number], rtol=2e-5, err_msg=number)


@pytest.mark.slow
def test_step_in_fp8_is_near_that_in_float32():
    fp8, exact = (
        trained("lm.nvidia.NVIDIA1_3B", steps=1, mesh=[1, 1, 1], USE_FP8=use_fp8)
        for use_fp8 in (True, False)
    )
    for number, result in fp8.items():
        # An e4m3 value has 3 bits after the first, so it is off by a 16th at most.
        np.testing.assert_allclose(result, exact[number], rtol=1 / 16, err_msg=number)
        assert not np.array_equal(result, exact[number])
