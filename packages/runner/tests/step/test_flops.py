from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.dot_product import AttentionOptions, dot_product_attention
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.moe.grouped_matmul import GroupedMatmul, RowGroups
from layerkit_runner.step.step_cost import (
    forward_flops,
    program_flops,
    scoped_flops,
    training_flops,
)


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


SQUARE = shape(4, 4)
SQUARE_FLOPS = 2 * 4 * 4 * 4


def square(x):
    return x @ x


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "expected"),
    [
        ("mk,kn->mn", (3, 5), (5, 7), 2 * 3 * 5 * 7),
        ("bmk,bkn->bmn", (2, 3, 5), (2, 5, 7), 2 * 2 * 3 * 5 * 7),
        ("btnh,bsnh->bnts", (2, 3, 4, 5), (2, 6, 4, 5), 2 * 2 * 4 * 3 * 6 * 5),
        ("btd,dnh->btnh", (2, 3, 8), (8, 4, 5), 2 * (2 * 3) * 8 * (4 * 5)),
        ("k,k->", (9,), (9,), 2 * 9),
        ("m,n->mn", (3,), (5,), 2 * 3 * 5),  # einsum writes it as a contraction over nothing
    ],
)
def test_contractions_cost_two_flops_for_each_multiply_add(spec, lhs, rhs, expected):
    flops = forward_flops(lambda a, b: jnp.einsum(spec, a, b), shape(*lhs), shape(*rhs))
    assert flops == expected


def test_vmap_multiplies_by_the_mapped_axis():
    assert forward_flops(jax.vmap(square), shape(6, 4, 4)) == 6 * SQUARE_FLOPS
    # A shared right side is one bigger product: [6 · 4, 4] with [4, 4].
    shared = jax.vmap(lambda a, b: a @ b, in_axes=(0, None))
    assert forward_flops(shared, shape(6, 4, 4), SQUARE) == 6 * SQUARE_FLOPS


def test_nested_scans_multiply_by_their_lengths():
    def body(carry, _):
        return lax.scan(lambda c, _: (square(c), None), carry, length=3)[0], None

    assert forward_flops(lambda x: lax.scan(body, x, length=5)[0], SQUARE) == 15 * SQUARE_FLOPS
    loop = forward_flops(lambda x: lax.fori_loop(0, 7, lambda _, c: square(c), x), SQUARE)
    assert loop == 7 * SQUARE_FLOPS


def test_transparent_wrappers_count_once():
    @jax.custom_vjp
    def with_vjp(x):
        return square(x)

    with_vjp.defvjp(lambda x: (square(x), x), lambda x, g: (g,))

    @jax.custom_jvp
    def with_jvp(x):
        return square(x)

    with_jvp.defjvp(lambda p, t: (square(p[0]), t[0]))
    for fn in (jax.jit(square), jax.checkpoint(square), with_vjp, with_jvp):
        assert forward_flops(fn, SQUARE) == SQUARE_FLOPS


def test_conditionals_count_their_most_expensive_branch_and_while_its_body_once():
    def switched(index, x):
        return lax.switch(index, [lambda c: square(square(c)), square, lambda c: c], x)

    def unbounded(x):
        return lax.while_loop(lambda c: c[0, 0] < 9, square, x)

    assert forward_flops(switched, shape(dtype=jnp.int32), SQUARE) == 2 * SQUARE_FLOPS
    assert forward_flops(unbounded, SQUARE) == SQUARE_FLOPS


def test_gradients_of_a_chain_cost_two_more_forwards():
    def loss(weights, x):
        return sum(jnp.sum(jnp.tanh(x @ w)) for w in weights)

    weights, x = [SQUARE] * 3, shape(8, 4)
    forward = 3 * 2 * 8 * 4 * 4
    assert forward_flops(loss, weights, x) == forward
    assert training_flops(loss, weights, x) == 3 * forward
    both = forward_flops(jax.grad(loss, argnums=(0, 1)), weights, x)
    assert both == training_flops(loss, weights, x)


def test_convolutions_count_window_times_channels_for_each_output():
    image, window = shape(2, 8, 8, 6), shape(3, 3, 6, 10)
    options = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def flops(kernel, *, strides=(1, 1), **more):
        how = {"window_strides": strides, **options, **more}
        return forward_flops(functools.partial(lax.conv_general_dilated, **how), image, kernel)

    plain = flops(window)
    assert plain == 2 * (2 * 8 * 8 * 10) * (3 * 3 * 6)
    assert flops(window, strides=(2, 2)) == plain / 4
    assert flops(shape(3, 3, 1, 6), feature_group_count=6) == 2 * (2 * 8 * 8 * 6) * (3 * 3)
    # Stride 2 transposed: 16x16 outputs, of which a 3x3 window meets a true input in one of four.
    transposed = functools.partial(lax.conv_transpose, strides=(2, 2), **options)
    assert forward_flops(transposed, image, window) == plain


def test_shard_map_counts_all_shards():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.P

    def product(in_specs, out_specs, **options):
        return jax.shard_map(
            lambda a, b: a @ b, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
        )

    x, w = shape(8, 16), shape(16, 4)
    whole = 2 * 8 * 16 * 4
    by_both = product((spec("data"), spec(None, "tensor")), spec("data", "tensor"))
    by_data = product((spec("data"), spec()), spec("data"))
    one_axis_manual = product((spec("data"), spec()), spec("data"), axis_names={"data"})
    together = product((spec(("data", "tensor")), spec()), spec(("data", "tensor")))
    for fn in (by_both, by_data, one_axis_manual, together):
        assert forward_flops(fn, x, w) == whole


def test_pallas_kernels_count_each_cell_of_their_grid():
    def kernel(a, out):
        out[...] = a[...] @ a[...]

    blocked = pl.pallas_call(
        kernel,
        grid=(3, 2),
        in_specs=[pl.BlockSpec((4, 4), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((4, 4), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((12, 8), jnp.float32),
    )
    assert forward_flops(blocked, shape(12, 8)) == 6 * SQUARE_FLOPS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_flash_attention_counts_like_plain_attention(platform, causal):
    query, key = shape(2, 256, 4, 16), shape(2, 256, 2, 16)
    mask = AttentionMask.causal_mask if causal else AttentionMask.bidirectional_mask

    def flops(backend):
        def attend(q, k):
            return dot_product_attention(
                q,
                k,
                k,
                AttentionOptions(mask=mask(2, 256), scale=1.0, backend=backend, platform=platform),
            )

        return forward_flops(attend, query, key)

    whole = 2 * 2 * (2 * 4) * 256 * 256 * 16
    assert flops("pallas") == flops("xla") == (whole / 2 if causal else whole)


@pytest.mark.parametrize(
    ("window", "chunk"), [(32, None), (90, None), (200, None), (None, 48), (None, 100), (16, 48)]
)
@pytest.mark.parametrize(("backend", "platform"), [("pallas", "cuda"), ("xla", "cpu")])
def test_attention_counts_the_pairs_in_windows_and_chunks(backend, platform, window, chunk):
    mask = AttentionMask.causal_mask(2, 256).within(window).split_chunks(chunk)
    options = AttentionOptions(mask=mask, scale=1.0, backend=backend, platform=platform)
    flops = forward_flops(lambda x: dot_product_attention(x, x, x, options), shape(2, 256, 4, 16))
    num_pairs = np.asarray(mask.dense()).sum() / 2
    assert flops == 2 * 2 * (2 * 4) * 16 * num_pairs


def test_cudnn_attention_counts_like_plain_attention(monkeypatch):
    # Tracing needs no GPU, but asks for cuDNN's version; only the question is answered here.
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda *_, **__: True)
    query = shape(2, 64, 8, 32, dtype=jnp.bfloat16)
    key = shape(2, 128, 2, 32, dtype=jnp.bfloat16)

    def flops(implementation):
        return forward_flops(
            lambda q, k: jax.nn.dot_product_attention(q, k, k, implementation=implementation),
            query,
            key,
        )

    assert flops("cudnn") == flops("xla") == 2 * 2 * (2 * 8) * 64 * 128 * 32


def test_fused_attention_counts_values_by_their_size():
    # Latent attention: keys of 192 and values of 128 dimensions.
    query, key, value = shape(2, 64, 8, 192), shape(2, 128, 8, 192), shape(2, 128, 8, 128)

    @jax.jit
    def tokamax_attention(query, key, value):
        return jnp.zeros(())

    @jax.jit
    def tokamax_attention_gradients(query, key, value):
        return jnp.zeros(())

    pairs = 2 * 8 * 64 * 128
    assert forward_flops(tokamax_attention, query, key, value) == 2 * pairs * (192 + 128)
    backward = forward_flops(tokamax_attention_gradients, query, key, value)
    assert backward == 2 * pairs * (3 * 192 + 2 * 128)


def test_ragged_and_block_scaled_products_count_like_plain_ones():
    # Each row counts with its own group.
    rows, weights, sizes = shape(12, 4), shape(3, 4, 5), shape(3, dtype=jnp.int32)
    assert forward_flops(lax.ragged_dot, rows, weights, sizes) == 2 * 12 * 4 * 5
    lhs, rhs = (shape(2, rows, 128, dtype=jnp.float8_e4m3fn) for rows in (64, 32))
    scales = [shape(2, rows, 4, dtype=jnp.float8_e8m0fnu) for rows in (64, 32)]
    assert forward_flops(jax.nn.scaled_matmul, lhs, rhs, *scales) == 2 * 2 * 64 * 128 * 32


def scoped(fn, name="causal_attention"):
    def inside(x):
        with jax.named_scope(name):
            return fn(x)

    return inside


def repeated(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=3)[0]


def test_causal_scope_halves_through_every_wrapper():
    for fn in (
        scoped(square),
        jax.jit(scoped(square)),
        scoped(jax.jit(square)),
        jax.checkpoint(scoped(square)),
        scoped(jax.checkpoint(square)),
        scoped(lambda x: scoped(square)(x)),
    ):
        assert forward_flops(fn, SQUARE) == SQUARE_FLOPS / 2
    for fn in (repeated(jax.checkpoint(scoped(square))), scoped(repeated(square))):
        assert forward_flops(fn, SQUARE) == 3 * SQUARE_FLOPS / 2
    batched = jax.vmap(scoped(square))
    assert forward_flops(batched, shape(2, 4, 4)) == 2 * SQUARE_FLOPS / 2
    gradient = jax.grad(lambda x: batched(x).sum())
    assert forward_flops(gradient, shape(2, 4, 4)) == 3 * 2 * SQUARE_FLOPS / 2


def test_only_operations_in_a_scope_of_the_exact_name_are_halved():
    for name in ("causal_attention_2", "non_causal_attention", "attention"):
        assert forward_flops(scoped(square, name), SQUARE) == SQUARE_FLOPS
    assert forward_flops(lambda x: square(scoped(square)(x)), SQUARE) == SQUARE_FLOPS * 1.5


def test_products_have_the_wider_dtype_of_their_factors():
    def products(x, y):
        narrow = x.astype(jnp.float8_e4m3fn)
        same = lax.dot(narrow, x.astype(jnp.float8_e5m2), preferred_element_type=jnp.float32)
        mixed = lax.dot(narrow, y, preferred_element_type=jnp.float32)
        return same + mixed + lax.dot(x, x)

    program = jax.make_jaxpr(products)(SQUARE, shape(4, 4, dtype=jnp.bfloat16))
    flops = {dtype: value for (_, dtype), value in scoped_flops(program).items()}
    assert flops == dict.fromkeys(("float8", "bfloat16", "float32"), SQUARE_FLOPS)


def test_causal_attention_by_blocks_of_queries_counts_half():
    batch, length, heads, head = 2, 256, 4, 8
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    mask = AttentionMask.causal_mask(batch, length)

    def attend(x, sharding):
        return dot_product_attention(
            x, x, x, AttentionOptions(mask=mask, scale=1.0, sharding=sharding)
        )

    for sharding in (None, BoundSharding(mesh)):
        flops = forward_flops(lambda x, s=sharding: attend(x, s), shape(batch, length, heads, head))
        assert flops == pytest.approx(2 * 2 * batch * heads * length**2 * head / 2)


def test_a_transformer_costs_six_flops_per_weight_and_token_plus_attention():
    layers, batch, length, dims, heads, hidden, vocab = 3, 2, 16, 8, 2, 32, 64
    head_dim = dims // heads

    def layer(x, weights):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
        with jax.named_scope("causal_attention"):
            scores = jnp.einsum("btnh,bsnh->bnts", q, k)
            mask = jnp.tril(jnp.ones((length, length), bool))
            probs = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            mixed = jnp.einsum("bnts,bsnh->btnh", probs, v)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, weights["o"])
        return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None

    def loss(weights, tokens):
        x = weights["embedding"][tokens]
        x, _ = lax.scan(jax.checkpoint(layer), x, weights["layers"])
        log_probs = jax.nn.log_softmax(x @ weights["embedding"].T)
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1))

    weights = {
        "embedding": shape(vocab, dims),
        "layers": {
            **{name: shape(layers, dims, heads, head_dim) for name in "qkv"},
            "o": shape(layers, heads, head_dim, dims),
            "up": shape(layers, dims, hidden),
            "down": shape(layers, hidden, dims),
        },
    }
    tokens = shape(batch, length, dtype=jnp.int32)
    num_weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(weights))
    # Forward, per layer: two products of [length, length, dims], half of them masked out.
    attention = 3 * layers * batch * (2 * 2 * length * length * dims) / 2
    assert training_flops(loss, weights, tokens) == 6 * num_weights * batch * length + attention


@pytest.mark.parametrize(
    ("name", "platform"),
    [("ragged_dot", "cpu"), ("blocks", "cpu"), ("pallas", "tpu"), ("pallas", "cuda")],
)
def test_grouped_products_count_the_rows_in_use(name, platform):
    # A quarter of the buffer of 256 rows is in use if routing is balanced.
    matmul = GroupedMatmul(name, platform, interpret=True)
    groups = RowGroups(jnp.full((4,), 16, jnp.int32), matmul.block_size(64, 4), 64)

    def loss(rows, w):
        return jnp.sum(matmul(rows, w, groups))

    rows, w, expected = shape(256, 32), shape(4, 32, 48), 2 * 64 * 32 * 48
    assert forward_flops(loss, rows, w) == expected
    gradients = jax.jit(jax.grad(loss, (0, 1))).trace(rows, w)
    assert program_flops(gradients.jaxpr) == 2 * expected  # the product itself is not used
