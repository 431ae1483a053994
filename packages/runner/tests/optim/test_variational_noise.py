"""Variational noise: selection of weights, first step, and unchanged stored weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_runner.optim.weight_selection import VariationalNoise
from layerkit_runner.step.metrics import GLOBAL_BATCH

PARAMS = {"lm": {"w": jnp.ones((100, 100)), "b": jnp.zeros(10)}}


def noise(**fields: Any) -> Config:
    return VariationalNoise.HParams.config(**{"scale": 0.5, **fields})


def test_noise_is_added_to_matching_weights_from_start_step():
    vn = noise(weights=(".*/w",), start_step=3).Instantiate()
    key = jax.random.key(0)
    before = vn.add(PARAMS, key, step=jnp.int32(2))
    jax.tree.map(np.testing.assert_array_equal, before, PARAMS)
    after = vn.add(PARAMS, key, step=jnp.int32(3))
    drawn = np.asarray(after["lm"]["w"] - PARAMS["lm"]["w"])
    assert drawn.std() == pytest.approx(0.5, rel=0.03)
    assert drawn.mean() == pytest.approx(0.0, abs=0.03)
    np.testing.assert_array_equal(after["lm"]["b"], PARAMS["lm"]["b"])
    other = vn.add(PARAMS, jax.random.key(1), step=jnp.int32(3))
    assert np.all(other["lm"]["w"] != after["lm"]["w"])


def test_weights_in_integers_and_their_scales_get_no_noise():
    stored = {"w": jnp.arange(4, dtype=jnp.int8), "w_scale": jnp.full(4, 0.01), "b": jnp.zeros(9)}
    noisy = noise().Instantiate().add(stored, jax.random.key(0), step=jnp.int32(0))
    np.testing.assert_array_equal(noisy["w"], stored["w"])
    np.testing.assert_array_equal(noisy["w_scale"], stored["w_scale"])
    assert np.all(noisy["b"] != 0)


def test_training_has_noise_and_evaluation_has_none(tiny: SimpleNamespace):
    """With w = (1, 1) + n and the row (1, 0): loss ½·(1 + n₀)², gradient (1 + n₀, 0)."""
    x = np.array([[1.0, 0.0]])
    batch = NestedMap(x=x, y=np.zeros(1), weights=np.ones(1)).transform(np.float32)
    task = tiny.task_config().set(vn=noise()).Instantiate()
    state = task.init_state(jax.random.key(0))
    after, (metrics, _) = task.train_step(state, batch, GLOBAL_BATCH)
    shaken = np.sqrt(2 * float(metrics["loss"].value))
    assert abs(shaken - 1.0) > 0.01
    # The gradient is subtracted from the stored weight, which has no noise.
    np.testing.assert_allclose(after.params["linear"]["w"][:, 0], [1 - shaken, 1.0], rtol=1e-5)
    assert float(task.eval_step(state, batch, GLOBAL_BATCH)[0]["loss"].value) == 0.5
    again, _ = task.train_step(state, batch, GLOBAL_BATCH)
    jax.tree.map(np.testing.assert_array_equal, again.params, after.params)


def test_pattern_that_matches_no_weight_is_an_error(raises: Any):
    with raises(ConfigError, owner="task.vn", field="weights", value="lm/v"):
        noise(weights=("lm/v",)).Instantiate().add(PARAMS, jax.random.key(0), step=jnp.int32(0))
