"""TransformerLm compared with NumPy, and invariances of a causal model of packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from layerkit.base.base_layer import CACHE
from layerkit.base.weights import logical_axes
from layerkit.errors import ConfigError
from layerkit.layers.basic.elementwise import SiLU
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.basic.positions import (
    PositionalEmbedding,
    RotaryPositionalEmbedding,
    TrainablePositionalEmbedding,
)
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.models.transformer_lm import TransformerLm

KEY = jax.random.key(0)
VOCAB, LENGTH = 11, 8
SIZES = {"vocab_size": VOCAB, "model_dims": 8, "hidden_dims": 12, "num_layers": 2, "num_heads": 4}


def llama_like(stack=StackedTransformerRepeated, **fields):
    """Rotary, RMS norms, grouped queries, a gate, tied."""
    config = TransformerLm.HParams.config(
        **{
            **SIZES,
            "num_kv_heads": 2,
            "stack_tpl": stack.HParams.config(),
            "final_norm_tpl": RmsNorm.HParams.config(),
            **fields,
        }
    )
    layer = config.stack_tpl.layer_tpl
    layer.norm_tpl = RmsNorm.HParams.config()
    layer.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    layer.feed_forward_tpl.set(use_gate=True, activation_tpl=SiLU.HParams.config())
    return config


def gpt_like(position, stack=StackedTransformer, **fields):
    """Positions added to embeddings, layer norms, biases, an embedding of its own."""
    config = TransformerLm.HParams.config(
        **{**SIZES, **fields},
        stack_tpl=stack.HParams.config(),
        position_tpl=position,
        embedding_tpl=Embedding.HParams.config(scale_by_sqrt_dims=True),
        softmax_tpl=FullSoftmax.HParams.config(use_bias=True, logit_soft_cap=3.0),
    )
    layer = config.stack_tpl.layer_tpl
    layer.attention_tpl.use_bias = True
    layer.feed_forward_tpl.has_bias = True
    return config


SINUSOIDAL = PositionalEmbedding.HParams.config()
TRAINABLE = TrainablePositionalEmbedding.HParams.config(max_length=LENGTH)
MODELS = {
    "rotary": llama_like(embedding_multiplier=3.0),
    "sinusoidal": gpt_like(SINUSOIDAL),
    "trainable": gpt_like(TRAINABLE),
}


def random_weights(model):
    """Weights without the zeros and ones at which many mistakes are invisible."""
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.4, x.shape).astype(np.float32), shapes)


@pytest.fixture(
    scope="module",
    params=["rotary", pytest.param("sinusoidal", marks=pytest.mark.slow), "trainable"],
)
def case(request):
    """The name of a model, its weights, and its jitted logits."""
    model = MODELS[request.param].Instantiate()
    variables = random_weights(model)

    @jax.jit
    def logits(ids, segment_ids, segment_pos):
        segments = {"segment_ids": segment_ids, "segment_pos": segment_pos}
        return model.apply(variables, ids, **segments, method="logits")

    return request.param, variables, logits


def random_ids(rows, length=LENGTH):
    return np.random.default_rng(3).integers(1, VOCAB, (rows, length)).astype(np.int32)


# Two rows: documents of 5 and 3 tokens; documents of 2 and 4, then padding.
SEGMENT_IDS = np.array([[1] * 5 + [2] * 3, [1] * 2 + [2] * 4 + [0] * 2], np.int32)
SEGMENT_POS = np.array([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 0, 0]], np.int32)
DOCUMENTS = [(0, 0, 5), (0, 5, 8), (1, 0, 2), (1, 2, 6)]  # row, start, end


# The whole forward pass once more, in float64 NumPy, from its equations.


def numpy_logits(params, ids, positions, allowed, *, is_llama):
    """Logits `[batch, length, vocab]`; `allowed` is `[batch, queries, keys]`."""
    head_dim, groups = 2, 2 if is_llama else 1

    def layer_of(index):
        stack = params["stack"]
        if "repeat" in stack:
            return jax.tree.map(lambda stacked: stacked[index], stack["repeat"]["sub"])
        return stack[f"layers_{index}"]

    def norm(weights, x):
        if is_llama:
            return weights["scale"] * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
        deviation = np.sqrt(np.var(x, -1, keepdims=True) + 1e-6)
        centered = (x - x.mean(-1, keepdims=True)) / deviation
        return (1.0 + weights["scale"]) * centered + weights["bias"]

    def turn(heads):
        pairs = heads[..., : head_dim // 2] + 1j * heads[..., head_dim // 2 :]
        rates = 10_000.0 ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        pairs = pairs * np.exp(1j * positions[:, :, None, None] * rates)
        return np.concatenate([pairs.real, pairs.imag], -1)

    def attention(weights, x):
        query, key, value = (
            np.einsum("bld,dnh->blnh", x, weights[name]["w"]) + weights[name].get("b", 0.0)
            for name in ("query", "key", "value")
        )
        if is_llama:
            query, key = turn(query), turn(key)
        key, value = (np.repeat(heads, groups, axis=2) for heads in (key, value))
        scores = np.einsum("bqnh,bknh->bnqk", query, key) / np.sqrt(head_dim)
        scores = np.where(allowed[:, None], np.exp(scores), 0.0)
        read = np.einsum("bnqk,bknh->bqnh", scores / scores.sum(-1, keepdims=True), value)
        output = weights["output"]
        return np.einsum("bqnh,nhd->bqd", read, output["w"]) + output.get("b", 0.0)

    def feed_forward(weights, x):
        if is_llama:
            gate = x @ weights["gate"]["w"]
            return (gate / (1.0 + np.exp(-gate)) * (x @ weights["up"]["w"])) @ weights["down"]["w"]
        hidden = np.maximum(x @ weights["up"]["w"] + weights["up_bias"]["b"], 0.0)
        return hidden @ weights["down"]["w"] + weights["down_bias"]["b"]

    table, factor = ("softmax", 3.0) if is_llama else ("embedding", np.sqrt(8.0))
    x = params[table]["w"][ids] * factor
    if "position" in params:
        x = x + params["position"]["w"][positions]
    elif not is_llama:
        angles = positions[..., None] / 10_000.0 ** (np.arange(4) / 3)
        x = x + np.concatenate([np.sin(angles), np.cos(angles)], -1)
    for index in range(2):
        layer = layer_of(index)
        x = x + attention(layer["attention"], norm(layer["attention_norm"], x))
        x = x + feed_forward(layer["feed_forward"], norm(layer["feed_forward_norm"], x))
    x = norm(params["final_norm"], x)
    if is_llama:
        return x @ params["softmax"]["w"].T
    return 3.0 * np.tanh((x @ params["softmax"]["w"] + params["softmax"]["b"]) / 3.0)


def test_forward_pass_equals_numpy(case):
    name, variables, logits = case
    ids = random_ids(2)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    allowed = causal & (SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None, :])
    expected = numpy_logits(params, ids, SEGMENT_POS, allowed, is_llama=name == "rotary")
    result = logits(ids, SEGMENT_IDS, SEGMENT_POS)
    assert result.dtype == jnp.float32 and result.shape == (2, LENGTH, VOCAB)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_packed_documents_equal_separate_rows(case):
    _, _, logits = case
    ids = random_ids(2)
    packed = np.asarray(logits(ids, SEGMENT_IDS, SEGMENT_POS))
    # Each document at the start of a row of its own, with rubbish behind it as padding.
    rows = np.full((2, 2, LENGTH), 9, np.int32)
    segments, positions = np.zeros_like(rows), np.zeros_like(rows)
    for place, (row, start, end) in zip(np.ndindex(2, 2), DOCUMENTS, strict=True):
        rows[place][: end - start] = ids[row, start:end]
        segments[place][: end - start] = 1
        positions[place] = np.arange(LENGTH)
    alone = [np.asarray(logits(*batch)) for batch in zip(rows, segments, positions, strict=True)]
    for place, (row, start, end) in zip(np.ndindex(2, 2), DOCUMENTS, strict=True):
        result = alone[place[0]][place[1], : end - start]
        np.testing.assert_allclose(result, packed[row, start:end], rtol=1e-5, atol=1e-5)


def test_positions_count_from_the_start_of_the_row_by_default():
    model, ids = MODELS["sinusoidal"].Instantiate(), random_ids(2)
    given = {"segment_pos": np.tile(np.arange(LENGTH), (2, 1))}
    run = jax.jit(
        lambda v: [model.apply(v, ids, method="logits", **fields) for fields in ({}, given)]
    )
    left_out, as_given = run(random_weights(model))
    np.testing.assert_allclose(left_out, as_given, rtol=1e-5, atol=1e-5)


def test_cached_steps_equal_the_full_pass(case):
    name, variables, logits = case
    model, ids = MODELS[name].Instantiate(), random_ids(2)
    _, cache = model.apply(variables, 2, LENGTH, method="init_cache", mutable=[CACHE])

    @jax.jit
    def extend(cache, ids, time_step):
        return model.apply(
            {**variables, **cache}, ids, time_step=time_step, method="extend_step", mutable=[CACHE]
        )

    first, cache = extend(cache, ids[:, :6], 0)
    second, cache = extend(cache, ids[:, 6:7], 6)
    third, _ = extend(cache, ids[:, 7:8], 7)
    whole = logits(ids, np.ones_like(ids), np.tile(np.arange(8), (2, 1)))
    result = jnp.concatenate([first, second, third], axis=1)
    np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-5)


def test_cache_longer_than_the_position_table_raises(raises):
    model = MODELS["trainable"].Instantiate()
    variables = random_weights(model)
    with raises(ConfigError, field="length of rows", value=9):
        model.apply(variables, 2, LENGTH + 1, method="init_cache", mutable=[CACHE])


def test_encoder_attends_to_its_whole_document(raises):
    model = llama_like(is_causal=False).Instantiate()
    variables, ids = random_weights(model), random_ids(2)
    changed = ids.copy()
    changed[:, 3] = changed[:, 3] % (VOCAB - 1) + 1
    segments = {"segment_ids": SEGMENT_IDS, "segment_pos": SEGMENT_POS}
    run = jax.jit(lambda ids: model.apply(variables, ids, **segments, method="logits"))
    differ = np.any(np.asarray(run(ids)) != np.asarray(run(changed)), axis=-1)
    np.testing.assert_array_equal(differ, SEGMENT_IDS[:, 3:4] == SEGMENT_IDS)
    with raises(ConfigError, owner="TransformerLm()", field="is_causal", value=False):
        model.apply(variables, 2, LENGTH, method="init_cache", mutable=[CACHE])


def test_embedding_norm_removes_the_scale_of_embeddings():
    config = gpt_like(None, num_layers=1).set(embedding_norm_tpl=RmsNorm.HParams.config())
    model, ids = config.Instantiate(), random_ids(2)
    variables = random_weights(model)
    run = jax.jit(lambda v: model.apply(v, ids, method="logits"))
    expected = run(variables)
    variables["params"]["embedding"]["w"] *= 10.0
    np.testing.assert_allclose(run(variables), expected, rtol=1e-4, atol=1e-4)
    variables["params"]["embedding"]["w"][3] *= -1.0
    assert np.any(np.abs(run(variables) - expected) > 1e-2)


def test_bfloat16_is_close_to_float32():
    ids = random_ids(4)

    model = MODELS["rotary"].Instantiate()
    low_model = model.clone(fprop_dtype=jnp.bfloat16)
    variables = random_weights(model)
    assert jax.eval_shape(low_model.init, KEY) == jax.eval_shape(model.init, KEY)
    stored = jax.tree.leaves(jax.eval_shape(model.clone(dtype=jnp.bfloat16).init, KEY))
    assert {leaf.dtype.name for leaf in stored} == {"bfloat16"}
    exact, low = (
        jax.jit(lambda v, model=model: model.apply(v, ids, method="logits"))(variables)
        for model in (model, low_model)
    )
    assert low.dtype == jnp.float32
    # Eight bits of mantissa: each of some twenty roundings in a row is off by at most 2^-9.
    scale = float(jnp.max(jnp.abs(exact)))
    assert 0.0 < float(jnp.max(jnp.abs(low - exact))) < 20 * 2**-9 * scale


def parameter_lines(config):
    boxed = jax.eval_shape(config.Instantiate().init_boxed, KEY)
    axes = traverse_util.flatten_dict(logical_axes(boxed)["params"], sep="/")
    boxes = traverse_util.flatten_dict(boxed["params"], sep="/")
    return [
        f"{path} {list(boxes[path].value.shape)} {' '.join(axes[path])}" for path in sorted(boxes)
    ]


# Parameter paths are public: checkpoints and whoever reads them depend on every line below.
REPEATED_PARAMETERS = """\
final_norm/scale [8] norm
softmax/w [11, 8] vocab embed
stack/repeat/sub/attention/key/w [2, 8, 2, 2] layers embed kv_heads head_dim
stack/repeat/sub/attention/output/w [2, 4, 2, 8] layers heads head_dim embed
stack/repeat/sub/attention/query/w [2, 8, 4, 2] layers embed heads head_dim
stack/repeat/sub/attention/value/w [2, 8, 2, 2] layers embed kv_heads head_dim
stack/repeat/sub/attention_norm/scale [2, 8] layers norm
stack/repeat/sub/feed_forward/down/w [2, 12, 8] layers mlp embed
stack/repeat/sub/feed_forward/gate/w [2, 8, 12] layers embed mlp
stack/repeat/sub/feed_forward/up/w [2, 8, 12] layers embed mlp
stack/repeat/sub/feed_forward_norm/scale [2, 8] layers norm
"""
UNROLLED_PARAMETERS = """\
embedding/w [11, 8] vocab embed
final_norm/bias [8] norm
final_norm/scale [8] norm
position/w [8, 8] positions embed
softmax/b [11] vocab
softmax/w [8, 11] embed vocab
stack/layers_0/attention/key/b [4, 2] kv_heads head_dim
stack/layers_0/attention/key/w [8, 4, 2] embed kv_heads head_dim
stack/layers_0/attention/output/b [8] embed
stack/layers_0/attention/output/w [4, 2, 8] heads head_dim embed
stack/layers_0/attention/query/b [4, 2] heads head_dim
stack/layers_0/attention/query/w [8, 4, 2] embed heads head_dim
stack/layers_0/attention/value/b [4, 2] kv_heads head_dim
stack/layers_0/attention/value/w [8, 4, 2] embed kv_heads head_dim
stack/layers_0/attention_norm/bias [8] norm
stack/layers_0/attention_norm/scale [8] norm
stack/layers_0/feed_forward/down/w [12, 8] mlp embed
stack/layers_0/feed_forward/down_bias/b [8] embed
stack/layers_0/feed_forward/up/w [8, 12] embed mlp
stack/layers_0/feed_forward/up_bias/b [12] mlp
stack/layers_0/feed_forward_norm/bias [8] norm
stack/layers_0/feed_forward_norm/scale [8] norm
"""


def test_parameter_paths_shapes_and_axes():
    assert parameter_lines(llama_like()) == REPEATED_PARAMETERS.splitlines()
    assert parameter_lines(gpt_like(TRAINABLE, num_layers=1)) == UNROLLED_PARAMETERS.splitlines()


def test_softmax_that_cannot_embed_needs_an_embedding(raises):
    config = TransformerLm.HParams.config(**SIZES, softmax_tpl=FullSoftmax.HParams.config())
    with raises(ConfigError, owner="TransformerLm()", field="embedding_tpl", value=None):
        config.Instantiate().init(KEY)
