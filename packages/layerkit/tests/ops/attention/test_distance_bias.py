"""Biases as one number per distance, compared with arrays of a number for each pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.errors import ConfigError
from layerkit.layers import MultiHeadAttention
from layerkit.layers.attention.biases import Alibi, RelativeBias
from layerkit.ops.attention.distance_bias import DistanceBias, sum_diagonals
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask

HEADS, LENGTH = 2, 12


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class SquaredPositions(BaseLayer):
    """A bias that does not depend on the distance alone."""

    num_heads: int = 0

    def fprop(self, query_positions, key_positions):
        squares = 0.1 * (query_positions[:, :, None] ** 2 - key_positions[:, None] ** 2)
        return jnp.repeat(squares[:, None], self.num_heads, axis=1)


def test_dense_bias_holds_the_number_of_each_distance():
    by_distance = draw(1, HEADS, 2 * LENGTH - 1)
    dense = np.asarray(DistanceBias(by_distance).dense())
    assert dense.shape == (1, HEADS, LENGTH, LENGTH)
    for head, query, key in np.ndindex(*dense.shape[1:]):
        assert dense[0, head, query, key] == by_distance[0, head, key - query + LENGTH - 1]


def test_sums_of_diagonals_equal_those_of_the_whole_matrix():
    size, count = 4, LENGTH // 4
    matrix = np.asarray(draw(HEADS, LENGTH, LENGTH))
    tiles = np.zeros((HEADS, 2 * count - 1, size, size), np.float32)
    for i, j in np.ndindex(count, count):
        rows, columns = (slice(n * size, (n + 1) * size) for n in (i, j))
        tiles[:, j - i + count - 1] += matrix[:, rows, columns]
    distances = range(-LENGTH + 1, LENGTH)
    expected = [[np.trace(head, offset) for offset in distances] for head in matrix]
    np.testing.assert_allclose(sum_diagonals(jnp.asarray(tiles)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "template",
    [
        RelativeBias.HParams.config(num_buckets=8, max_distance=7, bidirectional=True),
        Alibi.HParams.config(),
        SquaredPositions.HParams.config(),
    ],
)
def test_layer_with_rows_in_order_equals_the_layer_with_positions(template):
    """The gradients equal, too, for which the array's are a scatter."""
    layer = MultiHeadAttention(input_dims=8, num_heads=HEADS, relative_bias_tpl=template)
    x = draw(2, LENGTH, 8)
    in_order = AttentionMask.bidirectional_mask(2, LENGTH)
    positions = in_order.query_positions
    init = jax.jit(lambda key: layer.init(key, x, mask=in_order, positions=positions))
    weights = init(jax.random.key(0))

    @jax.jit
    def run(weights):
        def total(weights, mask):
            out = layer.apply(weights, x, mask=mask, positions=positions)
            return jnp.sum(out * draw(*out.shape, seed=1)), out

        in_any_order = in_order.replace(in_row_order=False)
        grad = jax.grad(total, has_aux=True)
        return grad(weights, in_order), grad(weights, in_any_order)

    ours, expected = run(weights)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_alibi_needs_no_gradient_and_a_sum_with_a_learned_bias_does():
    fixed = DistanceBias(draw(1, HEADS, 5), is_learned=False)
    learned = DistanceBias(draw(1, HEADS, 5, seed=1))
    assert not fixed.plus(fixed).is_learned
    assert learned.plus(fixed).is_learned
    np.testing.assert_array_equal(
        fixed.plus(learned).by_distance, fixed.by_distance + learned.by_distance
    )


def test_bias_by_distance_of_unknown_positions_raises(raises):
    x, bias = draw(1, LENGTH, HEADS, 4), DistanceBias(draw(1, HEADS, 2 * LENGTH - 1))
    mask = AttentionMask.decoding_mask(1, LENGTH, LENGTH, time_step=0)
    with raises(ConfigError, field="mask.in_row_order", value=False):
        dot_product_attention(x, x, x, AttentionOptions(scale=1.0, bias=bias, mask=mask))
