"""S4D and S5 against Praxis' formulas, in packed rows and in cached steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import CACHE, PARAMS
from layerkit.layers import S4D, S5
from layerkit.layers.recurrent.state_space import poles_of
from layerkit.ops.attention.masks import AttentionMask

DIMS, STATES, LENGTH = 4, 6, 15
X = np.random.default_rng(0).normal(size=(3, LENGTH, DIMS)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 0]] * 3, 5, axis=1)
SIZES = {"input_dims": DIMS, "num_states": STATES, "step_size": 0.1}


def with_weights(layer_class, poles):
    layer = layer_class(poles=poles, **SIZES)
    return layer, layer.init(jax.random.key(1))[PARAMS]


def whole(layer, params, x, segments=None):
    mask = AttentionMask.causal_mask(*x.shape[:2], segment_ids=segments)
    return layer.apply({PARAMS: params}, x, mask=mask)


def complex_of(params, name):
    return np.asarray(params[f"{name}_re"], np.complex128) + 1j * np.asarray(params[f"{name}_im"])


@pytest.mark.parametrize(
    "poles", ["lagt", *(pytest.param(p, marks=pytest.mark.slow) for p in ("linear", "legs"))]
)
def test_s4d_equals_a_convolution_with_its_kernel(poles):
    layer, params = with_weights(S4D, poles)
    a = poles_of(poles, STATES)[:, None]
    c = complex_of(params, "c")
    kernel = np.stack(
        [
            np.sum(c * (np.exp(0.1 * a) - 1) / a * np.exp(t * 0.1 * a), axis=0).real
            for t in range(LENGTH)
        ]
    )
    expected = X * np.asarray(params["skip"])
    for t in range(LENGTH):
        for ago in range(t + 1):
            expected[:, t] += kernel[ago] * X[:, t - ago]
    np.testing.assert_allclose(whole(layer, params, X), expected, atol=2e-6)


def test_s5_equals_its_recurrence_in_packed_rows():
    layer, params = with_weights(S5, "legs")
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
    layer, params = with_weights(layer_class, "linear")
    _, state = layer.apply({PARAMS: params}, 3, LENGTH, method="init_cache", mutable=[CACHE])
    cache, outputs = {**state[CACHE], "num_prompt": jnp.int32(4)}, []
    for first, last in ((0, 6), (4, 5), (5, LENGTH)):
        step, state = layer.apply(
            {PARAMS: params, CACHE: cache},
            X[:, first:last],
            time_step=jnp.int32(first),
            method="extend_step",
            mutable=[CACHE],
        )
        cache = state[CACHE]
        outputs.append(step[:, : 4 if first == 0 else None])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole(layer, params, X), atol=2e-6)
