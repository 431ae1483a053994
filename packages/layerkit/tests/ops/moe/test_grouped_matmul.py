"""Grouped products, compared with one product per group."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.layers import Fp8CurrentDot, MoeFeedForward
from layerkit.layers.basic import dots as products
from layerkit.ops.moe.grouped_matmul import (
    GroupedMatmul,
    RowGroups,
    RowsProduct,
    block_size,
    select_grouped_matmul,
)

ROWS, IN, OUT = 32, 5, 3
SIZES = {1: (7, 0, 12, 5), 4: (8, 0, 12, 4), 8: (8, 0, 8, 8), 16: (16, 0, 32, 16)}
RAGGED_DOT = GroupedMatmul("ragged_dot", "cpu")
BLOCKS = GroupedMatmul("blocks", "cpu")
KERNELS = {
    platform: GroupedMatmul("pallas", platform, interpret=True) for platform in ("tpu", "cuda")
}


def row_groups(sizes, block=1):
    return RowGroups(jnp.asarray(sizes, jnp.int32), block, ROWS)


def grouped_matmul(rows, w, groups):
    return (RAGGED_DOT if groups.block == 1 else BLOCKS)(rows, w, groups)


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def group_of_row(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@pytest.mark.parametrize("platform", KERNELS)
def test_unused_rows_of_fp8_products_with_a_bias_are_zero(platform):
    sizes = SIZES[16]
    num_rows = sum(sizes) + 64
    product = RowsProduct(row_groups(sizes, 16), KERNELS[platform], num_rows)
    layer = MoeFeedForward(
        input_dims=IN,
        hidden_dims=OUT,
        num_experts=len(sizes),
        dot_tpl=Fp8CurrentDot.HParams.config(),
    )
    rows, w, bias = drawn((num_rows, IN), (len(sizes), IN, OUT), (len(sizes), OUT))
    variables = jax.jit(layer.init)(jax.random.key(0))

    @jax.jit
    def run(rows, w, bias):
        return products.grouped_matmul(
            layer.bind(variables), rows, w, product, {}, name="up", bias=bias
        )

    result = run(rows, w, bias)
    used = sum(sizes)
    np.testing.assert_array_equal(result[used:], 0.0)
    of_row = group_of_row(sizes)
    expected = jnp.einsum("ri,rio->ro", rows[:used], w[of_row]) + bias[of_row]
    np.testing.assert_allclose(result[:used], expected, atol=0.5)


@pytest.mark.parametrize(
    ("matmul", "block", "dims"),
    [
        (RAGGED_DOT, 1, (IN, OUT)),
        (BLOCKS, 4, (IN, OUT)),
        (BLOCKS, 8, (IN, OUT)),
        (KERNELS["tpu"], 1, (IN, OUT)),
        (KERNELS["cuda"], 16, (48, 32)),
        (KERNELS["cuda"], 16, (IN, OUT)),
    ],
)
def test_values_and_gradients_equal_one_product_per_group(matmul, block, dims):
    sizes = SIZES[block]
    used, num_rows = sum(sizes), sum(sizes) + 4 * block
    groups = row_groups(sizes, block)
    rows, w, probe = drawn((num_rows, dims[0]), (len(sizes), *dims), (num_rows, dims[1]))

    def loss(rows, w):
        return jnp.sum(probe[:used] * jnp.sin(matmul(rows, w, groups)[:used]))

    def reference(rows, w):
        products = jnp.einsum("ri,rio->ro", rows[:used], w[group_of_row(sizes)])
        return jnp.sum(probe[:used] * jnp.sin(products))

    result, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(rows, w)
    expected, (rows_gradient, w_gradient) = jax.jit(jax.value_and_grad(reference, (0, 1)))(rows, w)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0][:used], rows_gradient[:used], atol=5e-5)
    np.testing.assert_allclose(gradients[1], w_gradient, atol=5e-5)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernels_equal_float32_products_on_gpu(dtype):
    """Groups of unequal sizes, one of them empty, with unused blocks of rows behind them."""
    sizes, block, dims = (256, 0, 896, 128, 640), 128, (256, 384)
    used, num_rows = sum(sizes), sum(sizes) + 3 * block
    rows, w, probe = (
        jnp.asarray(x, dtype)
        for x in drawn((num_rows, dims[0]), (len(sizes), *dims), (num_rows, dims[1]))
    )
    groups = RowGroups(jnp.asarray(sizes, jnp.int32), block, num_rows)
    kernel = GroupedMatmul("pallas", "cuda")

    def run(matmul, rows, w, probe):
        out, pull = jax.vjp(matmul, rows, w)
        of_rows, of_w = pull(probe)
        return out[:used], of_rows[:used], of_w

    ours = jax.jit(lambda *x: run(lambda rows, w: kernel(rows, w, groups), *x))(rows, w, probe)
    owner = group_of_row(sizes)
    left, weights, gradient = (np.asarray(x, np.float64) for x in (rows[:used], w, probe[:used]))
    expected = (
        np.stack([row @ weights[g] for row, g in zip(left, owner, strict=True)]),
        np.stack([row @ weights[g].T for row, g in zip(gradient, owner, strict=True)]),
        np.stack([left[owner == g].T @ gradient[owner == g] for g in range(len(sizes))]),
    )
    for a, b in zip(ours, expected, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b)
        assert error < float(jnp.finfo(dtype).eps) * np.linalg.norm(b)
    np.testing.assert_array_equal(ours[2][1], 0.0)


def test_blocks_skip_unused_rows():
    groups = row_groups([4, 0, 4], 4)
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
    groups = row_groups([65], 1)
    blocks = row_groups([65 * 8], 8)
    w = jnp.ones((1, 1, 1), jnp.bfloat16)
    padded = jnp.zeros((65, 8, 1), jnp.bfloat16).at[:, 0].set(rows).reshape(-1, 1)
    for given, sizes in ((rows, groups), (padded, blocks)):
        loss = lambda w, x=given, s=sizes: jnp.sum(grouped_matmul(x, w, s))  # noqa: E731
        gradient = jax.jit(jax.grad(loss))(w)
        assert gradient.item() == 320.0 and gradient.dtype == jnp.bfloat16


def test_batched_loop_is_as_long_as_the_longest():
    sizes = np.array([[8, 4], [0, 4]], np.int32)
    _, w = drawn((2, 16, IN), (2, 2, IN, OUT))
    rows = np.full((2, 16, IN), np.nan, np.float32)
    rows[0, :12], rows[1, :4] = 1.0, 1.0  # what is behind is nobody's

    def gradient(rows, w, sizes):
        out, pull = jax.vjp(lambda w: grouped_matmul(rows, w, row_groups(sizes, 4)), w)
        return pull(jnp.ones_like(out))[0]

    batched = jax.vmap(gradient)
    result = jax.jit(batched)(rows, w, sizes)
    np.testing.assert_array_equal(result[:, :, 0, 0], sizes)
    # Were the iterations counted for each, all of the sums would be copied at every iteration.
    traced = str(jax.make_jaxpr(batched)(rows, w, sizes))
    loops = [line for line in traced.splitlines() if "= while[" in line]
    assert loops and not any("i32[2]" in line.partition("=")[0] for line in loops)


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    # a quarter of a mean group: 4096/8/4 = 128, 1000/8/4 = 31 → 16
    [(4096, 8, 128), (1000, 8, 16), (16, 8, 8), (1, 8, 8), (10**7, 8, 512)],
)
def test_block_is_a_quarter_of_a_mean_group_rounded_to_a_power_of_two(rows, groups, expected):
    assert block_size(rows, groups) == expected


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [
        ("tpu", "bfloat16", "pallas"),
        ("tpu", "float32", "pallas"),
        ("tpu", "float16", "blocks"),
        ("cuda", "bfloat16", "pallas"),
        ("gpu", "float16", "pallas"),
        ("gpu", "float32", "blocks"),
        ("cpu", "bfloat16", "blocks"),
    ],
)
def test_auto_selects_the_kernel_of_the_platform(platform, dtype, expected, caplog):
    caplog.set_level("INFO", "layerkit")
    for name in ("auto", "ragged_dot"):
        select_grouped_matmul(name, platform=platform, dtype=dtype, owner="moe")
    chosen, by_name = caplog.messages
    assert chosen.startswith(f"grouped matmul: {expected} (auto: ")
    assert by_name == "grouped matmul: ragged_dot (as requested)"


@pytest.mark.parametrize(
    "call",
    [
        {"platform": "cpu", "dtype": "bfloat16"},
        {"platform": "cuda", "dtype": "float32"},
        {"platform": "gpu", "dtype": "float16", "compute_capability": "7.5"},
    ],
)
def test_kernel_by_name_raises_where_it_is_not_supported(raises, call):
    with raises(ConfigError, field="grouped_matmul", value="pallas"):
        select_grouped_matmul("pallas", owner="moe", **call)


def test_blocks_of_kernels_are_supported_by_triton():
    sizes = {(4096, 8): 128, (16, 8): 16, (10**7, 8): 128}
    for (rows, groups), expected in sizes.items():
        assert KERNELS["cuda"].block_size(rows, groups) == expected
        assert KERNELS["tpu"].block_size(rows, groups) == RAGGED_DOT.block_size(rows, groups) == 1


@pytest.mark.parametrize(
    ("matmul", "block"),
    [(BLOCKS, 4), (KERNELS["cuda"], 16), pytest.param(KERNELS["tpu"], 1, marks=pytest.mark.slow)],
)
def test_products_under_vmap_equal_separate_calls(matmul, block):
    sizes = np.array([[32, 16], [0, 16]], np.int32)
    rows, w = drawn((2, 64, 16), (2, 2, 16, 16))

    def loss(rows, w, sizes):
        is_used = jnp.arange(64)[:, None] < jnp.sum(sizes)
        product = matmul(rows, w, row_groups(sizes, block))
        return jnp.sum(jnp.sin(jnp.where(is_used, product, 0.0)))

    gradients = jax.grad(loss, (0, 1) if matmul is BLOCKS else 1)
    result = jax.jit(jax.vmap(gradients))(rows, w, sizes)
    alone = [jax.jit(gradients)(rows[i], w[i], sizes[i]) for i in range(2)]
    expected = jax.tree.map(lambda *each: np.stack(each), *alone)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), result, expected)
