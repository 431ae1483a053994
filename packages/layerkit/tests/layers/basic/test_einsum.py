"""Tests of the Einsum layer, compared with jnp.einsum."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic.einsum import Einsum

KEY = jax.random.key(0)
SIZES = {"b": 2, "t": 3, "d": 4, "n": 5, "h": 6, "e": 7}
EQUATIONS = [
    "btd,dnh->btnh",
    "btd,nhd->btnh",
    "btd,dnh->nbht",
    "btnh,ndh->btd",
    "btnh,nhd->btnd",
    "ebd,edh->ebh",
    "bted,dhe->hbet",
    "bd,d->bd",
    "bt,d->btd",
]


def shape_of(letters):
    return tuple(SIZES[letter] for letter in letters)


def make(equation, **fields):
    weight = equation.split(",")[1].split("->")[0]
    fields = {"weight_axes": (None,) * len(weight), **fields}
    return Einsum(equation=equation, weight_shape=shape_of(weight), **fields)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients_equal_einsum(equation):
    layer, random = make(equation), np.random.default_rng(0)
    inputs, weight = equation.split("->")[0].split(",")
    w, x = (random.normal(size=shape_of(of)).astype(np.float32) for of in (weight, inputs))

    def run(function):
        value = lambda w, x: jnp.sum(jnp.sin(function(w, x)))  # noqa: E731
        both = lambda w, x: (function(w, x), jax.grad(value, argnums=(0, 1))(w, x))  # noqa: E731
        return jax.jit(both)(w, x)

    result = run(lambda w, x: layer.apply({"params": {"w": w}}, x))
    expected = run(lambda w, x: jnp.einsum(equation, x, w))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result, expected)


@pytest.mark.parametrize(
    ("equation", "fan_in", "fan_out"),
    [("btd,dnh->btnh", 4, 30), ("btnh,ndh->btd", 30, 4), ("ebd,edh->ebh", 4, 6)],
)
def test_initializer_uses_the_fans_of_the_equation(equation, fan_in, fan_out):
    w = np.asarray(make(equation).init(KEY)["params"]["w"])
    limit = np.sqrt(6 / (fan_in + fan_out))
    assert 0.85 * limit < np.abs(w).max() <= limit


def test_a_vector_of_factors_decays_as_the_weights_of_other_products():
    boxed = make("btd,d->bt").init_boxed(KEY)
    assert boxed["params"]["w"].decays
