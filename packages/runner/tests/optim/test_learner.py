"""Learner: clipping, the reported learning rate, and contradictions that it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Config, Partial
from layerkit_runner.optim.learner import Learner, global_norm

PARAMS = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(())}}
# Norms 5 and 12, together 13.
GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array(12.0)}}


def sgd(**fields) -> Learner:
    fields = {"optimizer": Partial(optax.sgd), "learning_rate": 1.0, **fields}
    return Learner.HParams.config(**fields).Instantiate()


def step(learner: Learner, grads=None, count: int = 0):
    grads = GRADS if grads is None else grads
    found = learner.update(grads, learner.init(PARAMS), PARAMS, step=jnp.int32(count))
    return found.params, found.opt_state, found.scalars


def test_without_clipping_the_update_is_the_gradient():
    params, _, scalars = step(sgd())
    np.testing.assert_array_equal(params["a"], [-3.0, -4.0])
    assert float(scalars["learning/raw_grad_norm"]) == 13.0
    assert "learning/grad_scale" not in scalars


@pytest.mark.parametrize(("limit", "scale"), [(6.5, 0.5), (13.0, 1.0), (100.0, 1.0)])
def test_global_norm_scales_all_together(limit: float, scale: float):
    params, _, scalars = step(sgd(clip_global_norm=limit))
    np.testing.assert_allclose(params["a"], [-3.0 * scale, -4.0 * scale])
    np.testing.assert_allclose(params["b"]["c"], -12.0 * scale)
    assert float(scalars["learning/grad_scale"]) == scale
    assert float(scalars["learning/raw_grad_norm"]) == 13.0


def test_per_tensor_norm_scales_each_alone():
    params, _, _ = step(sgd(clip_per_tensor_norm=6.0))
    np.testing.assert_allclose(params["a"], [-3.0, -4.0])
    np.testing.assert_allclose(params["b"]["c"], -6.0)


@pytest.mark.parametrize("clip", ["clip_global_norm", "clip_per_tensor_norm"])
def test_a_gradient_of_zero_stays_zero(clip: str):
    zero = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(())}}
    params, _, _ = step(sgd(**{clip: 1.0}), zero)
    np.testing.assert_array_equal(params["a"], 0.0)


def test_the_norm_is_taken_in_float32():
    # 300² overflows float16, and 2⁻¹³ ² vanishes in it.
    assert float(global_norm({"w": jnp.array([300.0, 400.0], jnp.float16)})) == 500.0


def test_the_reported_rate_is_the_one_applied():
    learner = sgd(learning_rate=Config(optax.linear_schedule, 0.0, 1.0, 10))
    state = learner.init(PARAMS)
    params = PARAMS
    for count in range(3):
        before = params
        update = learner.update(GRADS, state, params, step=jnp.int32(count))
        params, state, scalars = update.params, update.opt_state, update.scalars
        applied = (before["a"] - params["a"])[0] / 3.0
        assert float(scalars["learning/lr"]) == pytest.approx(float(applied)) == count / 10


def test_a_complete_optimizer_keeps_its_rate():
    learner = sgd(optimizer=Config(optax.sgd, 0.5), learning_rate=None)
    params, _, scalars = step(learner)
    np.testing.assert_array_equal(params["a"], [-1.5, -2.0])
    assert "learning/lr" not in scalars


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"optimizer": None}, "Learner.optimizer is not set; for example Partial(optax.adamw)"),
        ({"learning_rate": None}, "Learner.learning_rate is not set, and the optimizer needs one"),
        (
            {"clip_global_norm": 1.0, "clip_per_tensor_norm": 2.0},
            "Learner: set clip_global_norm or clip_per_tensor_norm, not both (1.0 and 2.0)",
        ),
        (
            {"clip_global_norm": 0.0},
            "Learner.clip_global_norm=0.0 must be positive, or None for no clipping",
        ),
        (
            {"optimizer": Config(optax.sgd, 0.5)},
            "Learner.learning_rate is set, but the optimizer is already complete; give it as"
            " Partial(optimizer) without a rate, or leave learning_rate out",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict, text: str):
    with pytest.raises(ValueError) as caught:
        sgd(**fields)
    assert text in str(caught.value)
