"""Projections to and from heads: products, fans, biases and shardings."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection

INTO = HeadProjection(input_dims=6, num_heads=4, head_dim=2, use_bias=True)
OUT_OF = OutputProjection(output_dims=6, num_heads=4, head_dim=2, use_bias=True)


def drawn_weights(layer):
    weights = layer.init(jax.random.key(0))
    # The biases start at 0 and would hide a fault.
    leaves, structure = jax.tree.flatten(weights)
    streams = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(s, leaf.shape) for s, leaf in zip(streams, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


@pytest.mark.parametrize(
    ("layer", "shape", "equation"),
    [(INTO, (2, 3, 6), "bld,dnh->blnh"), (OUT_OF, (2, 3, 4, 2), "blnh,nhd->bld")],
)
def test_projection_equals_einsum(layer, shape, equation):
    x, weights = jax.random.normal(jax.random.key(2), shape), drawn_weights(layer)
    expected = np.einsum(equation, x, weights["params"]["w"]) + weights["params"]["b"]
    np.testing.assert_allclose(layer.apply(weights, x), expected, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        HeadProjection(input_dims=40, num_heads=5, head_dim=12),
        OutputProjection(output_dims=40, num_heads=5, head_dim=12),
    ],
)
def test_fans_are_those_of_all_heads_together(layer):
    # Xavier over 40 and 5·12 = 60: ±√(6/100). Of 2400 draws the largest is within 1% of the bound.
    w = np.abs(layer.init(jax.random.key(0))["params"]["w"])
    bound = math.sqrt(6 / 100)
    assert 0.99 * bound < w.max() <= bound
