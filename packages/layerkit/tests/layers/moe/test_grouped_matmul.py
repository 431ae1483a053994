"""Grouped products, compared with one product per group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.moe.grouped_matmul import (
    RowGroups,
    block_size,
    grouped_matmul,
    select_implementation,
)

ROWS, IN, OUT = 32, 5, 3
SIZES = {1: (7, 0, 12, 5), 4: (8, 0, 12, 4), 8: (8, 0, 8, 8)}


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def group_of_row(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.parametrize("block", [1, 4, 8])
def test_values_and_gradients_equal_one_product_per_group(block):
    sizes = SIZES[block]
    used = sum(sizes)
    groups = RowGroups(jnp.array(sizes, jnp.int32), block)
    rows, w, probe = drawn((ROWS, IN), (len(sizes), IN, OUT), (ROWS, OUT))

    def loss(rows, w):
        return jnp.sum(probe[:used] * jnp.sin(grouped_matmul(rows, w, groups)[:used]))

    def reference(rows, w):
        products = jnp.einsum("ri,rio->ro", rows[:used], w[group_of_row(sizes)])
        return jnp.sum(probe[:used] * jnp.sin(products))

    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(rows, w)
    expected = jax.jit(jax.value_and_grad(reference, (0, 1)))(rows, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_blocks_skip_unused_rows():
    groups = RowGroups(jnp.array([4, 0, 4], jnp.int32), 4)
    rows = np.where(np.arange(ROWS)[:, None] < 8, np.ones((ROWS, IN), np.float32), np.nan)

    @jax.jit
    def run(w):
        out, pull = jax.vjp(lambda w: grouped_matmul(rows, w, groups), w)
        return out, pull(jnp.ones_like(out))[0]

    out, gradient = run(np.ones((3, IN, OUT), np.float32))
    np.testing.assert_array_equal(out[:8], IN)
    np.testing.assert_array_equal(out[8:], 0.0)
    np.testing.assert_array_equal(gradient[:, 0, 0], [4.0, 0.0, 4.0])


def test_gradients_of_weights_are_summed_in_float32():
    # Each of 64 blocks adds 1 to 256, which bfloat16 cannot hold.
    rows = jnp.ones((65, 1), jnp.bfloat16).at[0].set(256.0)
    groups = RowGroups(jnp.array([65], jnp.int32), 1)
    blocks = RowGroups(jnp.array([65 * 8], jnp.int32), 8)
    w = jnp.ones((1, 1, 1), jnp.bfloat16)
    padded = jnp.zeros((65, 8, 1), jnp.bfloat16).at[:, 0].set(rows).reshape(-1, 1)
    for given, sizes in ((rows, groups), (padded, blocks)):
        loss = lambda w, x=given, s=sizes: jnp.sum(grouped_matmul(x, w, s))  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(w)
        assert gradient.item() == 320.0 and gradient.dtype == jnp.bfloat16


def test_blocks_under_vmap_equal_separate_calls():
    sizes = np.array([[8, 4], [0, 12]], np.int32)
    rows, w = drawn((2, 16, IN), (2, 2, IN, OUT))

    def run(rows, w, sizes):
        return jnp.sum(jnp.sin(grouped_matmul(rows, w, RowGroups(sizes, 4))))

    gradients = jax.grad(run, (0, 1))
    found = jax.jit(jax.vmap(gradients))(rows, w, sizes)
    alone = jax.jit(gradients)
    expected = [alone(rows[i], w[i], sizes[i]) for i in range(2)]
    for index in range(2):
        np.testing.assert_allclose(found[index], np.stack([e[index] for e in expected]), atol=1e-5)


def test_batched_loop_is_as_long_as_the_longest():
    sizes = np.array([[8, 4], [0, 4]], np.int32)
    _, w = drawn((2, 16, IN), (2, 2, IN, OUT))
    rows = np.full((2, 16, IN), np.nan, np.float32)
    rows[0, :12], rows[1, :4] = 1.0, 1.0  # what is behind is nobody's

    def gradient(rows, w, sizes):
        out, pull = jax.vjp(lambda w: grouped_matmul(rows, w, RowGroups(sizes, 4)), w)
        return pull(jnp.ones_like(out))[0]

    batched = jax.vmap(gradient)
    found = jax.jit(batched)(rows, w, sizes)
    np.testing.assert_array_equal(found[:, :, 0, 0], sizes)
    # Were the iterations counted for each, all of the sums would be copied at every iteration.
    traced = str(jax.make_jaxpr(batched)(rows, w, sizes))
    loops = [line for line in traced.splitlines() if "= while[" in line]
    assert loops and not any("i32[2]" in line.partition("=")[0] for line in loops)


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    # a quarter of a mean group: 4096/8/4 = 128, 1000/8/4 = 31 → 16
    [(4096, 8, 128), (1000, 8, 16), (16, 8, 8), (1, 8, 8), (10**7, 8, 512)],
)
def test_block_size(rows, groups, expected):
    assert block_size(rows, groups) == expected


def test_auto_selects_ragged_dot_on_tpus_only():
    platforms = {"tpu": "ragged_dot", "cpu": "blocks", "gpu": "blocks", "cuda": "blocks"}
    for platform, expected in platforms.items():
        assert select_implementation("auto", platform=platform) == expected
    assert select_implementation("ragged_dot", platform="cpu") == "ragged_dot"
