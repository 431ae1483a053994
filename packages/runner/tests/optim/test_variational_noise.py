"""Variational noise: what it shakes, when, and that nothing stored is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import Config
from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.weight_patterns import VariationalNoise
from layerkit_runner.training.metrics import GLOBAL_BATCH

PARAMS = {"lm": {"w": jnp.ones((100, 100)), "b": jnp.zeros(10)}}


def noise(**fields: Any) -> Config:
    return VariationalNoise.HParams.config(**{"scale": 0.5, **fields})


def test_matching_weights_are_shaken_from_the_start_step_on():
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


def test_training_is_at_shaken_weights_and_evaluation_is_not(tiny: SimpleNamespace):
    """With w = (1, 1) + n and the row (1, 0): loss ½·(1 + n₀)², gradient (1 + n₀, 0)."""
    batch = NestedMap(x=[[1.0, 0.0]], y=[0.0], weights=[1.0]).transform(np.float32)
    task = tiny.task_config().set(vn=noise()).Instantiate()
    state = task.init_state(jax.random.key(0))
    after, (metrics, _) = task.train_step(state, batch, GLOBAL_BATCH)
    shaken = np.sqrt(2 * float(metrics["loss"].value))
    assert abs(shaken - 1.0) > 0.01
    # The gradient is taken off the stored weight, not off the shaken one.
    np.testing.assert_allclose(after.params["linear"]["w"][:, 0], [1 - shaken, 1.0], rtol=1e-5)
    assert float(task.eval_step(state, batch, GLOBAL_BATCH)["loss"].value) == 0.5
    again, _ = task.train_step(state, batch, GLOBAL_BATCH)
    jax.tree.map(np.testing.assert_array_equal, again.params, after.params)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"scale": 0.0},
            "task.vn.scale=0.0 must be positive and finite; for no noise, vn=None",
        ),
        ({"start_step": -1}, "task.vn.start_step=-1 must be at least 0"),
        ({"weights": ()}, "task.vn.weights=(): expected at least one pattern"),
        (
            {"weights": ("linear/v",)},
            "task.vn.weights: 'linear/v' matches no weight; did you mean 'linear/w'? A pattern has"
            " to match the whole path. Weights: linear/w.",
        ),
    ],
)
def test_what_means_nothing_is_refused(tiny: SimpleNamespace, fields: dict[str, Any], text: str):
    config = tiny.task_config().set(vn=noise(**fields))
    with pytest.raises(UsageError) as caught:
        config.Instantiate().init_state(jax.random.key(0))
    assert str(caught.value) == text


def test_what_is_no_noise_is_refused_by_name(tiny: Any):
    with pytest.raises(
        UsageError, match=r"^task\.vn=3 must be a VariationalNoise, or None for none$"
    ):
        tiny.task_config().set(vn=3).Instantiate()
