"""S4D and S5 equal those of Praxis, and their recurrence in packed rows and in cached steps."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE, PARAMS
from layerkit.layers import S4D, S5
from layerkit.layers.recurrent.state_space import poles_of
from layerkit.ops.attention.masks import AttentionMask

DIMS, STATES, LENGTH = 4, 6, 16
X = np.random.default_rng(0).normal(size=(3, LENGTH, DIMS)).astype(np.float32)
SEGMENTS = np.array([[1] * 5 + [2] * 5 + [0] * 6] * 3)
SIZES = {"input_dims": DIMS, "num_states": STATES, "step_size": 0.1}


def draw_weights(layer_class, poles):
    layer = layer_class(poles=poles, **SIZES)
    return layer, layer.init(jax.random.key(1))[PARAMS]


@functools.partial(jax.jit, static_argnums=0)
def whole(layer, params, x, segments=None):
    mask = AttentionMask.causal_mask(*x.shape[:2], segment_ids=segments)
    return layer.apply({PARAMS: params}, x, mask=mask)


POLES = {"linear": "ss4d-1d", "legs": "ss4d-1d-legs", "lagt": "ss4d-1d-lagt"}
SMOKE = [(S4D, "lagt"), (S5, "linear")]


@pytest.mark.parametrize(
    ("layer_class", "poles"),
    [
        pytest.param(*case, marks=() if case in SMOKE else pytest.mark.slow)
        for case in itertools.product((S4D, S5), POLES)
    ],
)
def test_outputs_and_gradients_equal_praxis(praxis, layer_class, poles):
    case = praxis(f"{layer_class.__name__.lower()}_{POLES[poles]}")
    layer = layer_class(poles=poles, **SIZES)

    def convert(weights):
        return {name.lower(): x for name, x in weights.items()} | {"skip": weights["D"].ravel()}

    params = convert(case["weights"])
    del params["d"]
    if layer_class is S5:
        # Praxis creates B of S5 and computes with ones.
        params |= {"b_re": np.ones((STATES, DIMS), "f"), "b_im": np.zeros((STATES, DIMS), "f")}

    @jax.jit
    def run(params, x):
        outputs, pull = jax.vjp(functools.partial(whole, layer), params, x)
        return outputs, pull(case["cotangent"])

    outputs, (gradients, of_x) = run(params, case["x"])
    np.testing.assert_allclose(outputs, case["outputs"], atol=1e-5)
    np.testing.assert_allclose(of_x, case["gradient_of_x"], atol=1e-4)
    expected = convert(case["gradients"])
    for name in ("c_re", "c_im", "skip"):
        np.testing.assert_allclose(gradients[name], expected[name], atol=1e-4, err_msg=name)


def complex_of(params, name):
    return np.asarray(params[f"{name}_re"], np.complex128) + 1j * np.asarray(params[f"{name}_im"])


def test_s5_equals_its_recurrence_in_packed_rows():
    layer, params = draw_weights(S5, "legs")
    a, b, c = poles_of("legs", STATES), complex_of(params, "b"), complex_of(params, "c")
    state, expected = np.zeros((3, STATES), np.complex128), np.zeros_like(X)
    for t in range(10):
        state = state * (t != 5)
        state = np.exp(0.1 * a) * state + X[:, t] @ (((np.exp(0.1 * a) - 1) / a)[:, None] * b).T
        expected[:, t] = (state @ c.T).real + params["skip"] * X[:, t]
    np.testing.assert_allclose(
        whole(layer, params, X, SEGMENTS)[:, :10], expected[:, :10], atol=2e-6
    )


@pytest.mark.parametrize("layer_class", [S4D, S5])
def test_prompt_and_cached_steps_equal_the_whole_rows(layer_class):
    layer, params = draw_weights(layer_class, "linear")
    _, state = layer.apply({PARAMS: params}, 3, LENGTH, method="init_cache", mutable=[CACHE])
    cache, outputs = {**state[CACHE], "num_prompt": jnp.int32(4)}, []
    step = jax.jit(functools.partial(layer.apply, method="extend_step", mutable=[CACHE]))
    for first, last in ((0, 6), (4, 10), (10, LENGTH)):
        variables = {PARAMS: params, CACHE: cache}
        y, state = step(variables, X[:, first:last], time_step=jnp.int32(first))
        cache = state[CACHE]
        outputs.append(y[:, : 4 if first == 0 else None])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole(layer, params, X), atol=2e-6)
