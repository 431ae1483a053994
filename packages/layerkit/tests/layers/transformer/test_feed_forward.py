"""Tests of the feed-forward block, compared with its formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic.elementwise import GELU, Identity, ReLU, Sigmoid, SiLU, SquaredReLU
from layerkit.layers.transformer.transformer import TransformerFeedForward

KEY = jax.random.key(0)
DIMS = 8
X = jax.random.normal(KEY, (3, 6, DIMS))


def random_weights(layer):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


# The gated ones in the order of Shazeer's table: GLU, bilinear, ReGLU, GEGLU, SwiGLU.
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("use_gate", "activation", "reference"),
    [
        (False, SquaredReLU, lambda x: jax.nn.relu(x) ** 2),
        (True, Sigmoid, jax.nn.sigmoid),
        (True, Identity, lambda x: x),
        (True, ReLU, jax.nn.relu),
        (True, GELU, jax.nn.gelu),
        (True, SiLU, jax.nn.silu),
    ],
)
def test_fprop_equals_its_formula(has_bias, use_gate, activation, reference):
    layer = TransformerFeedForward(
        input_dims=DIMS,
        hidden_dims=12,
        has_bias=has_bias,
        use_gate=use_gate,
        activation_tpl=activation.HParams.config(),
    )
    variables = random_weights(layer)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])

    def project(name, x):
        bias = params[f"{name}_bias"]["b"] if has_bias else 0.0
        return x @ params[name]["w"] + bias

    x = np.asarray(X, np.float64)
    hidden = project("up", x)
    hidden = reference(project("gate", x)) * hidden if use_gate else reference(hidden)
    expected = project("down", hidden)
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-4, atol=1e-5)


def test_padding_has_no_effect():
    layer = TransformerFeedForward(input_dims=DIMS, hidden_dims=12)
    variables = layer.init(KEY)
    is_token = jnp.arange(6)[None] < jnp.array([[6], [2], [0]])
    result = layer.apply(variables, X, is_token=is_token)
    np.testing.assert_array_equal(result, layer.apply(variables, X))


def test_dropout_acts_on_the_hidden_activation():
    layer = TransformerFeedForward(input_dims=1, hidden_dims=1000, dropout_rate=0.25, train=True)
    variables = jax.tree.map(jnp.ones_like, layer.init(KEY))
    output = layer.apply(variables, jnp.ones((1, 1, 1)), rngs={"random": KEY})
    # A thousand ones, each kept with probability 3/4 and then worth 4/3.
    kept = float(output[0, 0, 0]) * 0.75
    assert abs(kept - round(kept)) < 1e-2 and 690 < kept < 810


@pytest.mark.parametrize(("use_gate", "num_kept"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("activation", [GELU, SiLU, SquaredReLU])
def test_backward_pass_keeps_slopes_and_hidden(activation, use_gate, num_kept):
    layer = TransformerFeedForward(
        input_dims=DIMS,
        hidden_dims=12,
        has_bias=True,
        use_gate=use_gate,
        activation_tpl=activation.HParams.config(),
        fprop_dtype=jnp.bfloat16,
    )

    def save(variables):
        return jax.tree.leaves(jax.vjp(layer.apply, variables, X)[1])

    saved = jax.eval_shape(save, random_weights(layer))
    wide = [leaf for leaf in saved if leaf.size == X.size // DIMS * 12]
    assert [leaf.dtype for leaf in wide] == [jnp.bfloat16] * num_kept
