from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from layerkit.base.base_layer import SUMMARIES
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightInit, is_box
from layerkit.layers.basic.embeddings import (
    Embedding,
    FullSoftmax,
    SharedEmbeddingSoftmax,
    lookup,
)
from layerkit.ops.losses.linear import class_logits
from layerkit.ops.losses.softmax import cross_entropy

KEY = jax.random.key(0)
SOFTMAXES = [FullSoftmax, SharedEmbeddingSoftmax]


def draw(*shape, seed=0):
    return jnp.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def draw_ids(*shape, classes, seed=1):
    return jnp.array(np.random.default_rng(seed).integers(0, classes, shape).astype(np.int32))


def weight(variables):
    return variables["params"]["w"]


# Looking ids up.


def test_embedding_returns_rows_of_its_weight():
    layer = Embedding(num_classes=7, input_dims=3)
    variables = layer.init(KEY)
    assert weight(variables).shape == (7, 3)
    ids = draw_ids(2, 4, classes=7)
    np.testing.assert_array_equal(layer.apply(variables, ids), weight(variables)[ids])


@pytest.mark.parametrize(
    ("cls", "method"), [(Embedding, "fprop"), (SharedEmbeddingSoftmax, "embed")]
)
def test_scale_by_sqrt_dims(cls, method):
    plain = cls(num_classes=7, input_dims=4)
    scaled = cls(num_classes=7, input_dims=4, scale_by_sqrt_dims=True)
    variables, ids = plain.init(KEY), draw_ids(2, 4, classes=7)
    vectors = scaled.apply(variables, ids, method=method)
    np.testing.assert_array_equal(vectors, 2 * plain.apply(variables, ids, method=method))


@pytest.mark.parametrize("bad", [-1, 7, 100])
def test_id_out_of_range_returns_nan(bad):
    layer = Embedding(num_classes=7, input_dims=3)
    vectors = layer.apply(layer.init(KEY), jnp.array([[2, bad]]))
    assert np.isfinite(vectors[0, 0]).all()
    assert np.isnan(vectors[0, 1]).all()


def test_embedding_in_the_compute_dtype():
    layer = Embedding(num_classes=7, input_dims=3, fprop_dtype=jnp.bfloat16)
    variables = layer.init(KEY)
    assert weight(variables).dtype == jnp.float32
    vectors = layer.apply(variables, jnp.array([[1]]))
    np.testing.assert_array_equal(vectors[0, 0], weight(variables)[1].astype(jnp.bfloat16))
    assert vectors.dtype == jnp.bfloat16


def test_gradient_of_a_frequent_row_is_summed_in_float32():
    # A bfloat16 sum of ones would stop at 256.
    ids = jnp.zeros(1000, jnp.int32)
    gradient = jax.grad(lambda table: lookup(table, ids).sum())(jnp.zeros((2, 1), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [[1000.0], [0.0]])


@pytest.mark.parametrize("cls", [Embedding, SharedEmbeddingSoftmax])
def test_weight_init_of_an_embedding_defaults_to_one_over_sqrt_dims(cls):
    sizes = {"num_classes": 300, "input_dims": 64}
    np.testing.assert_allclose(weight(cls(**sizes).init(KEY)).std(), 1 / 8, rtol=0.03)
    inherited = cls(**sizes, params_init=WeightInit.Constant(2.0))
    np.testing.assert_array_equal(weight(inherited.init(KEY)), 2.0)
    own = cls(**sizes, params_init=WeightInit.Constant(2.0), weight_init=WeightInit.Constant(3.0))
    np.testing.assert_array_equal(weight(own.init(KEY)), 3.0)


# Logits and losses.


@pytest.mark.parametrize("cls", SOFTMAXES)
def test_logits_equal_products_with_the_weight(cls):
    layer = cls(input_dims=3, num_classes=5, use_bias=True)
    variables = layer.init(KEY)
    assert weight(variables).shape == ((3, 5) if cls is FullSoftmax else (5, 3))
    np.testing.assert_array_equal(variables["params"]["b"], np.zeros(5))
    variables["params"]["b"] = jnp.arange(5.0)
    hidden, w = draw(2, 4, 3), weight(variables)
    logits = layer.apply(variables, hidden, method="logits")
    expected = hidden @ (w if cls is FullSoftmax else w.T) + np.arange(5.0)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_tied_softmax_embeds_with_its_class_vectors():
    layer = SharedEmbeddingSoftmax(input_dims=3, num_classes=5)
    variables, ids = layer.init(KEY), draw_ids(2, 4, classes=5)
    vectors = layer.apply(variables, ids, method="embed")
    logits = layer.apply(variables, vectors, method="logits")
    expected = weight(variables)[ids] @ weight(variables).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    assert set(variables["params"]) == {"w"}


@pytest.mark.parametrize("cls", SOFTMAXES)
def test_soft_cap_is_applied_after_the_bias(cls):
    layer = cls(input_dims=3, num_classes=5, use_bias=True, logit_soft_cap=2.0)
    variables = layer.init(KEY)
    variables["params"]["b"] = jnp.arange(5.0) * 10
    hidden = draw(2, 4, 3)
    uncapped = layer.clone(logit_soft_cap=None).apply(variables, hidden, method="logits")
    logits = layer.apply(variables, hidden, method="logits")
    np.testing.assert_allclose(logits, 2 * np.tanh(uncapped / 2), rtol=1e-5)
    assert np.abs(logits).max() <= 2.0


def test_logits_of_low_precision_are_accumulated_and_kept_in_float32():
    layer = FullSoftmax(input_dims=300, num_classes=4, fprop_dtype=jnp.bfloat16)
    variables, hidden = layer.init(KEY), draw(1, 2, 300)
    logits = layer.apply(variables, hidden, method="logits")
    assert logits.dtype == jnp.float32
    rounded = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (hidden, weight(variables))]
    np.testing.assert_allclose(logits, rounded[0] @ rounded[1], rtol=1e-4, atol=1e-5)


def contractions(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from contractions(inner)


def test_gradients_of_low_precision_logits_have_low_precision_products():
    hidden, vectors = draw(2, 3, 8).astype(jnp.bfloat16), draw(5, 8).astype(jnp.bfloat16)
    cotangent = draw(2, 3, 5, seed=2)

    def total(hidden, vectors):
        return jnp.sum(class_logits(hidden, vectors) * cotangent)

    gradient = jax.jit(jax.grad(total, (0, 1)))
    dots = list(contractions(jax.make_jaxpr(gradient)(hidden, vectors).jaxpr))
    assert len(dots) >= 2
    assert {operand.aval.dtype for dot in dots for operand in dot.invars} == {hidden.dtype}
    exact = gradient(hidden.astype(jnp.float32), vectors.astype(jnp.float32))
    for got, expected in zip(gradient(hidden, vectors), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("cls", SOFTMAXES)
def test_losses_equal_those_of_the_logits(cls):
    layer = cls(input_dims=3, num_classes=5, label_smoothing=0.1, z_loss_weight=0.01)
    variables, hidden = jax.jit(layer.init)(KEY), draw(2, 4, 3)
    labels, weights = draw_ids(2, 4, classes=5), jnp.array([[1.0, 2, 0, 1], [0.5, 0, 0, 1]])
    logits = layer.apply(variables, hidden, method="logits")
    options = {"label_smoothing": 0.1, "z_loss_weight": 0.01}
    expected = jax.jit(partial(cross_entropy, **options))(logits, labels)
    out = jax.jit(layer.apply)(variables, hidden, labels, weights)
    assert set(out) == {
        *("xent", "loss", "total_weight", "per_token_xent", "per_token_loss", "correct")
    }
    np.testing.assert_allclose(out.per_token_xent, expected.xent, rtol=1e-6)
    np.testing.assert_allclose(out.per_token_loss, expected.loss, rtol=1e-6)
    np.testing.assert_array_equal(out.correct, logits.argmax(-1) == labels)
    assert out.total_weight == 5.5
    np.testing.assert_allclose(out.xent, (expected.xent * weights).sum() / 5.5, rtol=1e-5)
    np.testing.assert_allclose(out.loss, (expected.loss * weights).sum() / 5.5, rtol=1e-5)


def test_z_loss_is_reported_separately():
    layer = FullSoftmax(input_dims=3, num_classes=5, z_loss_weight=0.01)
    batch = (draw(1, 2, 3), draw_ids(1, 2, classes=5), jnp.ones((1, 2)))
    variables = jax.jit(layer.init)(KEY)
    out, curves = jax.jit(partial(layer.apply, mutable=[SUMMARIES]))(variables, *batch)
    (z_loss,) = curves[SUMMARIES]["z_loss"]
    np.testing.assert_allclose(z_loss, out.loss - out.xent, rtol=1e-4)
    plain = partial(layer.clone(z_loss_weight=0.0).apply, mutable=[SUMMARIES])
    _, without = jax.eval_shape(plain, variables, *batch)
    assert not without


def value_and_gradient(layer, variables, hidden, labels, weights):
    def loss(variables, hidden):
        out = layer.apply(variables, hidden, labels, weights)
        return out.loss, out

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return run(variables, hidden)


# Lengths that divide, that do not, that are shorter than a chunk, and chunks of one. One of them
# in the ordinary tests.
@pytest.mark.parametrize(
    ("length", "chunk_size"),
    [
        (7, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(8, 4), (7, 4), (3, 8), (5, 1)]),
    ],
)
@pytest.mark.parametrize("cls", SOFTMAXES)
def test_chunked_loss_equals_full_loss_in_value_and_gradient(cls, length, chunk_size):
    options = {"logit_soft_cap": 3.0, "label_smoothing": 0.1, "z_loss_weight": 0.01}
    full = cls(input_dims=4, num_classes=6, use_bias=True, **options)
    hidden, weights = draw(2, length, 4), jnp.abs(draw(2, length, seed=5))
    batch = (hidden, draw_ids(2, length, classes=6), weights)
    variables = jax.jit(full.init)(KEY)
    expected = value_and_gradient(full, variables, *batch)
    got = value_and_gradient(full.clone(chunk_size=chunk_size), variables, *batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def test_chunks_do_not_apply_to_examples_without_positions():
    layer = FullSoftmax(input_dims=5, num_classes=3, chunk_size=2)
    batch = (draw(4, 5), draw_ids(4, classes=3), jnp.ones(4))
    variables = layer.init(KEY)
    expected = value_and_gradient(layer.clone(chunk_size=None), variables, *batch)
    got = value_and_gradient(layer, variables, *batch)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(("classes", "is_whole"), [(65_536, True), (65_537, False)])
def test_logits_above_a_gibibyte_are_chunked_by_default(classes, *, is_whole):
    layer = SharedEmbeddingSoftmax(input_dims=2, num_classes=classes)
    batch, length = 1, 4096
    hidden = jax.ShapeDtypeStruct((batch, length, 2), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    weights = jax.ShapeDtypeStruct((batch, length), jnp.float32)
    variables = jax.eval_shape(layer.init, KEY)

    def loss(*args):
        return layer.apply(*args).loss

    step = jax.jit(jax.grad(loss, (0, 1))).lower(variables, hidden, labels, weights).compile()
    bytes_of_all_logits = batch * length * classes * 4
    temporary = step.memory_analysis().temp_size_in_bytes
    # Logits and their gradient, of all tokens or of half of them.
    assert temporary / bytes_of_all_logits == pytest.approx(2 if is_whole else 1, rel=0.1)


def test_gradients_of_many_low_precision_chunks_are_summed_in_float32():
    # 600 equal tokens, one a chunk: a bfloat16 sum would stop at 256 of them.
    full = FullSoftmax(input_dims=2, num_classes=3, use_bias=True, fprop_dtype=jnp.bfloat16)
    batch = (jnp.ones((1, 600, 2)), jnp.ones((1, 600), jnp.int32), jnp.ones((1, 600)))
    variables = jax.jit(full.init)(KEY)
    _, (expected, _) = value_and_gradient(full, variables, *batch)
    _, (got, _) = value_and_gradient(full.clone(chunk_size=1), variables, *batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01), got, expected)


# On a mesh.


def bound():
    return BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor")))


CLASSES, ROWS, LENGTH = 48, 8, 12


def embed_and_classify(layer, variables, ids, labels, weights):
    def loss(variables):
        def run(layer):
            return layer(3.0 * layer.embed(ids), labels, weights).loss

        return layer.apply(variables, method=run)

    return jax.value_and_grad(loss)(variables)


@pytest.mark.parametrize("chunk_size", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_vocabulary_split_over_devices_equals_one_device(chunk_size):
    layer = SharedEmbeddingSoftmax(input_dims=8, num_classes=CLASSES, chunk_size=chunk_size)
    variables = layer.init(KEY)
    ids, labels = (np.asarray(draw_ids(ROWS, LENGTH, classes=CLASSES, seed=s)) for s in (1, 2))
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[:2] = 0.0  # the rows of one device do not count
    run = jax.jit(embed_and_classify, static_argnums=0)
    expected = run(layer, variables, ids, labels, weights)

    sharding = bound()
    rows = sharding.sharding(("batch", "length"))
    boxed = jax.eval_shape(layer.init_boxed, KEY)
    split = jax.tree.map(lambda box: sharding.sharding(box.axes), boxed, is_leaf=is_box)
    sharded = layer.clone(sharding=sharding)
    args = (
        jax.device_put(variables, split),
        *(jax.device_put(x, rows) for x in (ids, labels, weights)),
    )
    run = jax.jit(embed_and_classify, static_argnums=0, out_shardings=(None, split))
    got = run(sharded, *args)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(weight(got[1]), weight(expected[1]), rtol=1e-5, atol=1e-5)

    # No device ever holds the vectors, logits or gradients of the whole vocabulary, nor all rows.
    program = run.lower(sharded, *args).compile().as_text()
    assert f"[{CLASSES // 2},8]" in program
    assert f"[{CLASSES},8]" not in program
    assert f",{CLASSES}]" not in program
    assert f"[{ROWS},{LENGTH}," not in program
    # The class vectors are gathered once, not by every chunk.
    gathers = [line for line in program.splitlines() if " all-gather(" in line]
    assert gathers and not any("while/body" in line for line in gathers)


@pytest.mark.parametrize("chunk_size", [pytest.param(None, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_split_by_shard_map_equal_one_device(dtype, chunk_size):
    layer = SharedEmbeddingSoftmax(
        input_dims=8, num_classes=12, chunk_size=chunk_size, fprop_dtype=dtype
    )
    variables = layer.init(KEY)
    weights = np.ones((4, 6), np.float32)
    weights[:2] = 0.0  # the rows of one device do not count
    batch = (draw_ids(4, 6, classes=12, seed=1), draw_ids(4, 6, classes=12, seed=2), weights)

    def total_loss(variables, ids, labels, weights):
        def run(layer):
            out = layer(3.0 * layer.embed(ids), labels, weights)
            return out.loss * out.total_weight

        return layer.apply(variables, method=run)

    def summed(variables, *batch):
        total = lambda variables: jax.lax.psum(total_loss(variables, *batch), "rows")  # noqa: E731
        return jax.value_and_grad(total)(variables)

    mesh = Mesh(jax.devices()[:2], ("rows",))
    replicated, rows = PartitionSpec(), PartitionSpec("rows")
    split = jax.shard_map(
        summed, mesh=mesh, in_specs=(replicated, rows, rows, rows), out_specs=replicated
    )
    expected = jax.jit(jax.value_and_grad(total_loss))(variables, *batch)
    got = jax.jit(split)(variables, *batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    tolerance = (1e-5 if dtype == jnp.float32 else 1e-2) * np.abs(weight(expected[1])).max()
    np.testing.assert_allclose(weight(got[1]), weight(expected[1]), rtol=0, atol=tolerance)
