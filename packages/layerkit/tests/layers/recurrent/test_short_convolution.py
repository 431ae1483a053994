"""The gated convolution of LFM2 against NumPy, packed rows and cached steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import PARAMS
from layerkit.layers import ShortConvolution
from layerkit.ops.attention.masks import AttentionMask

DIMS, LENGTH = 6, 7
X = np.random.default_rng(0).normal(size=(2, LENGTH, DIMS)).astype(np.float32)


@pytest.fixture(scope="module")
def bound():
    layer = ShortConvolution.HParams.config(input_dims=DIMS, use_bias=True).Instantiate()
    draw = np.random.default_rng(1)
    params = jax.tree.map(
        lambda w: draw.normal(size=w.shape).astype(np.float32),
        jax.eval_shape(layer.init, jax.random.key(0)),
    )
    return layer.bind(params), params[PARAMS]


def test_outputs_equal_numpy(bound):
    layer, params = bound
    gates, after, values = (
        X @ params[name]["w"][:, 0] + params[name]["b"][0]
        for name in ("input_gate", "output_gate", "input")
    )
    read = np.pad(gates * values, ((0, 0), (2, 0), (0, 0)))
    w, b = params["conv"]["w"][:, 0], params["conv"]["b"][0]
    mixed = b + sum(w[tap] * read[:, tap : tap + LENGTH] for tap in range(3))
    expected = after * mixed @ params["output"]["w"][0] + params["output"]["b"]
    result = jax.jit(lambda x: layer(x, mask=AttentionMask.causal_mask(2, LENGTH)))(X)
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.slow
def test_packed_rows_and_steps_equal_whole_rows(bound):
    layer, _ = bound
    whole = layer(X[:1], mask=AttentionMask.causal_mask(1, LENGTH))
    segments = jnp.array([[1] * LENGTH + [2] * LENGTH])
    mask = AttentionMask.causal_mask(1, 2 * LENGTH, segment_ids=segments)
    packed = layer(np.concatenate([X[1:], X[:1]], axis=1), mask=mask)
    np.testing.assert_allclose(packed[:, LENGTH:], whole, atol=1e-5)
    state = layer.initial_state(1)
    for token in range(LENGTH):
        step, state = layer.mix(X[:1, token : token + 1], state, segments=None)
        np.testing.assert_allclose(step, whole[:, token : token + 1], atol=1e-5)
