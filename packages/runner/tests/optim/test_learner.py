"""Learner: clipping, the reported learning rate, and errors of its fields."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Config, Partial
from layerkit.errors import ConfigError
from layerkit_runner.optim.learner import Learner, global_norm

PARAMS = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(())}}
# Norms 5 and 12, together 13.
GRADS = {"a": jnp.array([3.0, 4.0]), "b": {"c": jnp.array(12.0)}}


def sgd(**fields) -> Learner:
    fields = {"optimizer": Partial(optax.sgd), "learning_rate": 1.0, **fields}
    return Learner.HParams.config(**fields).Instantiate()


def step(learner: Learner, grads=GRADS):
    result = learner.update(grads, learner.init(PARAMS), PARAMS, step=jnp.int32(0))
    return result.params, result.scalars


@pytest.mark.parametrize(("limit", "scale"), [(6.5, 0.5), (13.0, 1.0), (100.0, 1.0)])
def test_global_norm_scales_all_gradients_together(limit: float, scale: float):
    params, scalars = step(sgd(clip_global_norm=limit))
    np.testing.assert_allclose(params["a"], [-3.0 * scale, -4.0 * scale])
    np.testing.assert_allclose(params["b"]["c"], -12.0 * scale)
    assert float(scalars["learning/grad_scale"]) == scale
    assert float(scalars["learning/raw_grad_norm"]) == 13.0


def test_per_tensor_norm_scales_each_gradient_by_itself():
    params, _ = step(sgd(clip_per_tensor_norm=6.0))
    np.testing.assert_allclose(params["a"], [-3.0, -4.0])
    np.testing.assert_allclose(params["b"]["c"], -6.0)


@pytest.mark.parametrize("per_layer", [True, False])
def test_per_tensor_norm_is_that_of_a_layer_or_of_the_stack_as_in_pax(*, per_layer: bool):
    # The layers have norms 0.5 and 5.
    stack, stacks = {"w": jnp.array([[0.3, 0.4], [3.0, 4.0]])}, {("w",): (2,)}
    learner = sgd(clip_per_tensor_norm=2.0, clip_per_layer=per_layer)
    state = learner.init(stack, stacks=stacks)
    update = learner.update(stack, state, stack, step=jnp.int32(0), stacks=stacks)
    scales = np.array([1.0, 2 / 5] if per_layer else [2 / np.sqrt(25.25)] * 2)
    expected = stack["w"] * (1 - scales[:, None])
    np.testing.assert_allclose(update.params["w"], expected, rtol=1e-6)


def test_the_norm_is_taken_in_float32():
    # 300² overflows float16, and 2⁻¹³ ² vanishes in it.
    assert float(global_norm({"w": jnp.array([300.0, 400.0], jnp.float16)})) == 500.0


def test_complete_optimizer_keeps_its_rate():
    learner = sgd(optimizer=Config(optax.sgd, 0.5), learning_rate=None)
    params, scalars = step(learner)
    np.testing.assert_array_equal(params["a"], [-1.5, -2.0])
    assert "learning/lr" not in scalars


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("learning_rate", {"learning_rate": None}),
        ("learning_rate", {"learning_rate": "0.1"}),
        ("learning_rate", {"optimizer": Config(optax.sgd, 0.5)}),
        ("clip_per_tensor_norm", {"clip_global_norm": 1.0, "clip_per_tensor_norm": 2.0}),
        ("ema_decay", {"ema_decay": 1.0}),
        ("ema_before_step", {"ema_before_step": True}),
    ],
)
def test_invalid_field_is_an_error(raises, field: str, fields: dict):
    with raises(ConfigError, owner="Learner", field=field):
        sgd(**fields)
