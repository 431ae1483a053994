"""Tests of LoRA, compared with its formula, and of merged weights."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import OVERWRITE_WITH_GRADIENT, PARAMS, BaseLayer
from layerkit.base.weights import WeightHParams, logical_axes
from layerkit.config import sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection
from layerkit.layers.attention.combined_projection import CombinedProjection
from layerkit.layers.basic.dots import batched_matmul, create_dot, replace_dots
from layerkit.layers.basic.linears import FeedForward, Linear
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.quantization.lora import (
    LORA_WEIGHTS,
    add_lora,
    merge_lora,
    remove_lora,
)
from layerkit.layers.transformer.repeat import Repeat
from layerkit.layers.transformer.stacks import StackedTransformerRepeated

KEY = jax.random.key(0)
RANK, ALPHA = 3, 6.0
X = jax.random.normal(KEY, (2, 5, 8))


def drawn(tree):
    """Random numbers in place of all weights, since b starts at 0."""
    random = np.random.default_rng(7)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), tree)


class Group(BaseLayer):
    dot_tpl: object = sub_config_field(None)

    def setup(self):
        axes = ("expert", "embed", "mlp")
        weight = WeightHParams((2, 8, 6), axes, fan_in_dims=(1,), fan_out_dims=(2,))
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)

    def fprop(self, x):
        return batched_matmul(self, x, self.theta.w)


LAYERS = {
    "linear": (Linear.HParams.config(input_dims=8, output_dims=6), X, "btd,do->bto"),
    "into heads": (
        HeadProjection.HParams.config(input_dims=8, num_heads=2, head_dim=3),
        X,
        "btd,dnh->btnh",
    ),
    "out of heads": (
        OutputProjection.HParams.config(output_dims=6, num_heads=2, head_dim=4),
        X.reshape(2, 5, 2, 4),
        "btnh,nhd->btd",
    ),
    "group": (
        Group.HParams.config(),
        X,
        "ebd,edh->ebh",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_equal_their_formula(name):
    config, x, equation = LAYERS[name]
    layer = add_lora(config, rank=RANK, alpha=ALPHA).Instantiate()
    params = drawn(jax.eval_shape(layer.init, KEY)[PARAMS])
    w, a, b = params["w"], params["dot"]["lora_a"], params["dot"]["lora_b"]
    leading = 1 if name == "group" else 0
    delta = np.reshape(
        np.reshape(a, (*w.shape[:leading], -1, RANK))
        @ np.reshape(b, (*w.shape[:leading], RANK, -1)),
        w.shape,
    )
    expected = np.einsum(equation, x, np.asarray(w) + (ALPHA / RANK) * delta)
    result = jax.jit(layer.apply)({PARAMS: params}, x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_columns_of_dora_have_the_learned_norms(name):
    config, x, equation = LAYERS[name]
    adapted = add_lora(config, rank=RANK, alpha=ALPHA, has_magnitude=True)
    layer = adapted.Instantiate()
    params = drawn(jax.eval_shape(layer.init, KEY)[PARAMS])
    w, dot = params["w"], params["dot"]
    merged = np.asarray(merge_lora(adapted, {PARAMS: params})[PARAMS]["w"])
    first = int(name == "group")
    axes = tuple(range(first, first + w.ndim - dot["lora_magnitude"].ndim))
    norms = np.sqrt(np.square(w).sum(axes))
    learned = np.sqrt(np.square(merged).sum(axes))
    np.testing.assert_allclose(learned, np.abs(norms + dot["lora_magnitude"]), rtol=1e-5)
    expected = np.einsum(equation, x, merged)
    np.testing.assert_allclose(layer.apply({PARAMS: params}, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("has_magnitude", [False, True])
def test_initial_adapters_do_not_change_outputs(name, has_magnitude):
    config, x, _ = LAYERS[name]
    adapted = add_lora(config, rank=RANK, has_magnitude=has_magnitude).Instantiate()
    plain = config.Instantiate()
    variables, base = jax.jit(lambda key: (adapted.init(key), plain.init(key)))(KEY)
    # A base checkpoint fits in by its paths, and all that it lacks are adapters.
    result, known = (flatten_dict(tree[PARAMS], sep="/") for tree in (variables, base))
    assert all(result[path].shape == x.shape for path, x in known.items())
    adapter = {"dot/lora_a", "dot/lora_b"} | ({"dot/lora_magnitude"} if has_magnitude else set())
    assert result.keys() - known.keys() == adapter
    restored = {PARAMS: unflatten_dict({**result, **known}, sep="/")}
    both = jax.jit(lambda a, b: (adapted.apply(a, x), plain.apply(b, x)))(restored, base)
    np.testing.assert_allclose(*both, rtol=1e-6 * has_magnitude)
    assert float(jnp.abs(result["dot/lora_a"]).max()) > 0


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("linear", ("embed", None), (None, "mlp")),
        ("into heads", ("embed", None), (None, "heads", "head_dim")),
        ("out of heads", ("heads", "head_dim", None), (None, "embed")),
        ("group", ("expert", "embed", None), ("expert", None, "mlp")),
    ],
)
def test_adapters_have_the_axes_of_the_weight(name, a, b):
    layer = add_lora(LAYERS[name][0], rank=RANK).Instantiate()
    axes = logical_axes(jax.eval_shape(layer.init_boxed, KEY))[PARAMS]["dot"]
    assert axes == {"lora_a": a, "lora_b": b}


def test_lora_a_has_the_standard_deviation_of_its_fan_in():
    config = OutputProjection.HParams.config(output_dims=6, num_heads=16, head_dim=16)
    a = add_lora(config, rank=64).Instantiate().init(KEY)[PARAMS]["dot"]["lora_a"]
    assert a.shape == (16, 16, 64)
    np.testing.assert_allclose(np.std(a), 1 / 16, rtol=0.05)


class Block(BaseLayer):
    """All kinds of projections, one after another."""

    query_tpl: Any = sub_config_field(HeadProjection.HParams)
    output_tpl: Any = sub_config_field(OutputProjection.HParams)
    feed_forward_tpl: Any = sub_config_field(FeedForward.HParams)

    def setup(self):
        heads = {"num_heads": 2, "head_dim": 4}
        self.create_child("query", self.query_tpl, input_dims=8, **heads)
        self.create_child("output", self.output_tpl, output_dims=8, **heads)
        self.create_child("feed_forward", self.feed_forward_tpl, input_dims=8, output_dims=8)

    def fprop(self, x):
        return x + self.feed_forward(x + self.output(jnp.tanh(self.query(x))))


BLOCK = Block.HParams.config()
REPEATED = Repeat.HParams.config(sub_tpl=BLOCK.clone(), num_repeats=2)


@pytest.mark.parametrize("plain", [BLOCK, REPEATED], ids=["alone", "repeated"])
@pytest.mark.parametrize("only", [".*", ".*(query|linear)_tpl"])
def test_merged_weights_give_the_same_outputs_without_adapters(plain, only):
    config = add_lora(plain, rank=RANK, alpha=ALPHA, only=only)
    adapted, model = config.Instantiate(), plain.Instantiate()
    variables = drawn(jax.eval_shape(adapted.init, KEY))
    expected = jax.jit(adapted.apply)(variables, X)
    run = jax.jit(model.apply)
    base = {PARAMS: without_adapters(variables[PARAMS])}
    assert float(jnp.abs(run(base, X) - expected).max()) > 0.05

    merged = merge_lora(config, variables)
    assert jax.tree.structure(merged) == jax.tree.structure(jax.eval_shape(model.init, KEY))
    np.testing.assert_allclose(run(merged, X), expected, rtol=1e-4, atol=1e-4)


def without_adapters(params):
    flat = flatten_dict(params)
    return unflatten_dict(
        {path: x for path, x in flat.items() if not re.fullmatch(LORA_WEIGHTS, "/".join(path))}
    )


def test_only_matching_layers_are_adapted():
    stack = StackedTransformerRepeated.HParams.config(num_layers=2, input_dims=8)
    stack.set(hidden_dims=12, num_heads=2)
    layer = add_lora(stack, only=r".*\.(query|value)_tpl").Instantiate()
    flat = flatten_dict(jax.eval_shape(layer.init, KEY)[PARAMS])
    result = {path[-3] for path in flat if path[-1] == "lora_a"}
    assert result == {"query", "value"}
    names = ["/".join(path) for path in flat]
    assert sum(bool(re.fullmatch(LORA_WEIGHTS, name)) for name in names) == 4


def test_combined_projection_has_one_adapter():
    config = CombinedProjection.HParams.config(input_dims=8, num_heads=4, num_kv_heads=2)
    config.head_dim = 3
    adapted = add_lora(config, rank=RANK, alpha=ALPHA)
    variables = drawn(jax.eval_shape(adapted.Instantiate().init, KEY))
    shapes = jax.tree.map(jnp.shape, variables[PARAMS]["dot"])
    assert shapes == {"lora_a": (8, RANK), "lora_b": (RANK, 2, 4, 3)}
    expected = jax.jit(adapted.Instantiate().apply)(variables, X)
    result = jax.jit(config.Instantiate().apply)(merge_lora(adapted, variables), X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result, expected
    )


def test_adapters_wrap_quantized_products_in_either_order():
    plain = Linear.HParams.config(input_dims=8, output_dims=8)
    fp8 = Fp8Dot.HParams.config(amax_history_length=2)
    config = add_lora(replace_dots(plain, fp8), rank=2)
    assert replace_dots(add_lora(plain, rank=2), fp8) == config
    layer = config.Instantiate()
    variables = jax.jit(layer.init)(KEY)
    assert set(variables[OVERWRITE_WITH_GRADIENT]["dot"]) == {"base"}
    variables[PARAMS] = drawn(variables[PARAMS])
    merged = merge_lora(config, variables)
    quantized = replace_dots(plain, fp8).Instantiate()
    assert jax.tree.structure(merged) == jax.tree.structure(jax.eval_shape(quantized.init, KEY))


def test_dropout_acts_on_the_adapter_in_training_only():
    config = add_lora(Linear.HParams.config(input_dims=8, output_dims=6), dropout_rate=0.5)
    layer = config.Instantiate()
    variables = drawn(jax.eval_shape(layer.init, KEY))
    evaluated = layer.apply(variables, X)
    trained = [
        layer.clone(train=True).apply(variables, X, rngs={"random": jax.random.key(i)})
        for i in range(2)
    ]
    assert float(jnp.abs(trained[0] - trained[1]).max()) > 0.1
    zeros = jax.tree.map(jnp.zeros_like, variables[PARAMS]["dot"])
    off = {PARAMS: {**variables[PARAMS], "dot": zeros}}
    np.testing.assert_allclose(
        layer.clone(train=True).apply(off, X, rngs={"random": KEY}), layer.apply(off, X)
    )
    without = add_lora(Linear.HParams.config(input_dims=8, output_dims=6), dropout_rate=0.0)
    np.testing.assert_array_equal(evaluated, without.Instantiate().apply(variables, X))


def test_adapters_with_several_alphas_and_ranks_are_merged():
    model = add_lora(BLOCK, alpha=1.0, rank=4, only="query_tpl", rank_stabilized=True)
    model = add_lora(model, alpha=2.0, rank=2, only="output_tpl", has_magnitude=True)
    variables = drawn(jax.eval_shape(model.Instantiate().init, KEY))
    expected = model.Instantiate().apply(variables, X)
    plain, merged = remove_lora(model, variables)
    assert plain == BLOCK
    np.testing.assert_allclose(plain.Instantiate().apply(merged, X), expected, atol=1e-5, rtol=1e-4)


def test_merge_lora_raises_without_adapters(raises):
    variables = jax.eval_shape(BLOCK.Instantiate().init, KEY)
    with raises(ConfigError, field="config", value="Block"):
        merge_lora(BLOCK, variables)
    with raises(ConfigError, value="query/dot/lora_a"):
        merge_lora(add_lora(BLOCK, only="query_tpl"), variables)
