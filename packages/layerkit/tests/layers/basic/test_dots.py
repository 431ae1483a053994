"""Tests of products over merged tokens, and of their replacement."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import BoundSharding, ShardingRules
from layerkit.base.weights import WeightHParams
from layerkit.config import Configurable, sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection
from layerkit.layers.basic.dots import (
    Dot,
    add_bias,
    batched_matmul,
    constrain_tokens,
    create_dot,
    matmul,
    merge_tokens,
    replace_dots,
    weight_of_dot,
)
from layerkit.layers.basic.linears import FeedForward, Linear
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.transformer.stacks import StackedTransformerRepeated

KEY = jax.random.key(0)
BATCH, LENGTH, IN, OUT = 4, 6, 8, 5
X = jax.random.normal(KEY, (BATCH, LENGTH, IN))
W = jax.random.normal(jax.random.key(1), (IN, OUT))


class Calling(BaseLayer):
    """Gives a function of this module a layer, with whatever sharding is bound to it."""

    def fprop(self, function, *args):
        return function(self, *args)


def on_mesh(*shape, names):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[: math.prod(shape)], shape), names)
    rules = ShardingRules.of(batch="data", length="context", act_mlp=None)
    return Calling(sharding=BoundSharding(mesh, rules))


LAYERS = {
    "no mesh": Calling(),
    "one device": on_mesh(1, names=("data",)),
    "batch split": on_mesh(4, names=("data",)),
    "context of one device": on_mesh(2, 1, names=("data", "context")),
    "length split": on_mesh(2, 2, names=("data", "context")),
}


def apply(layer, function, *args):
    return layer.apply({}, function, *args)


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_are_merged_unless_the_length_is_split(name):
    merged = apply(LAYERS[name], merge_tokens, X)
    if name == "length split":
        assert merged is X
    else:
        np.testing.assert_array_equal(merged, np.asarray(X).reshape(BATCH * LENGTH, IN))


def test_leading_axes_and_empty_batches_are_merged():
    for shape in [(IN,), (3, IN), (2, 3, 4, IN), (0, LENGTH, IN)]:
        merged = apply(Calling(), merge_tokens, jnp.zeros(shape))
        assert merged.shape == (int(np.prod(shape[:-1])), IN)
        assert apply(Calling(), matmul, jnp.zeros(shape), W).shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_equal_the_plain_product(name):
    def loss(product, x, w):
        outputs = product(x, w)
        return jnp.sum(jnp.sin(outputs)), outputs

    def run(product):
        gradient = jax.grad(loss, argnums=(1, 2), has_aux=True)
        return jax.jit(lambda x, w: gradient(product, x, w))(X, W)

    result = run(lambda x, w: apply(LAYERS[name], matmul, x, w))
    expected = run(lambda x, w: jnp.einsum("bti,io->bto", x, w))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), result, expected)


def test_transposed_inputs_of_weight_gradients_are_copied_on_a_single_cpu():
    """XLA's fast kernels contract the last axis of the left factor."""
    program = jax.jit(jax.grad(lambda w: jnp.sum(apply(LAYERS["one device"], matmul, X, w) ** 2)))
    assert "lhs_contracting_dims={0}" not in program.lower(W).compile().as_text()


def test_product_on_a_single_cpu_is_saved_by_rematerialization_policies():
    def loss(w):
        return jnp.sum(jnp.sin(apply(LAYERS["one device"], matmul, X, w)))

    saved = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
    for function, products in ((saved, 2), (jax.checkpoint(loss), 3)):
        program = str(jax.make_jaxpr(jax.grad(function))(W))
        assert program.count("dot_general[") == products


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.checkpoint])
def test_product_on_a_single_cpu_has_derivatives_of_both_modes(wrap):
    def function(matmul):
        product = wrap(lambda x, w: jnp.sin(matmul(x, w)))
        w = jnp.stack([W] * BATCH) if wrap is jax.vmap else W
        return lambda t: product(t * X, jnp.cos(t) * w)

    ours = function(lambda x, w: apply(LAYERS["one device"], matmul, x, w))
    plain = function(jnp.matmul)
    for differentiate in (jax.jacfwd, jax.jacrev):
        a, b = (jax.jit(differentiate(jax.jacrev(one)))(0.3) for one in (ours, plain))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_merged_tokens_have_the_batch_axis_and_others_batch_and_length():
    def spec(layer, x):
        laid_out = jax.jit(lambda x: apply(layer, constrain_tokens, x, "act_mlp"))(x)
        return laid_out.sharding.spec

    layer = LAYERS["length split"]
    assert tuple(spec(layer, X))[:2] == ("data", "context")
    assert tuple(spec(layer, X.reshape(-1, IN)))[:1] == ("data",)


class Doubled(Dot):
    """A product that can be told from the plain one, and is told its weight."""

    weight: WeightHParams | None = None

    def fprop(self, x, w):
        assert self.weight is not None
        self.add_summary("weight", jnp.array(self.weight.shape))
        return 2.0 * (x @ w)


class Experts(BaseLayer):
    """Two weights in one layer, each with a product of its own."""

    dot_tpl: Any = sub_config_field(None)

    def setup(self):
        for name, shape in (("up", (3, IN, OUT)), ("w", (3, OUT, IN))):
            weight = WeightHParams(shape, ("expert", None, None))
            self.create_variable(name, weight)
            create_dot(self, weight, name=name)

    def fprop(self, x):
        return batched_matmul(self, batched_matmul(self, x, self.theta.up, name="up"), self.theta.w)


def test_groups_are_multiplied_with_their_weights():
    x = jax.random.normal(KEY, (3, 4, IN))
    variables = Experts().init(KEY)
    up, down = variables["params"]["up"], variables["params"]["w"]
    expected = np.einsum("eti,eio,eoj->etj", x, up, down)
    np.testing.assert_allclose(Experts().apply(variables, x), expected, rtol=1e-5, atol=1e-5)
    layer = Experts(dot_tpl=Doubled.HParams.config())
    outputs, told = layer.apply(variables, x, mutable=["summaries"])
    np.testing.assert_allclose(outputs, 4.0 * expected, rtol=1e-5, atol=1e-5)
    told = jax.tree.map(np.asarray, told["summaries"])
    np.testing.assert_array_equal(told["up_dot"]["weight"][0], (3, IN, OUT))
    np.testing.assert_array_equal(told["dot"]["weight"][0], (3, OUT, IN))
    assert [weight_of_dot(name) for name in ("up_dot", "dot")] == ["up", "w"]


PROJECTIONS = {
    "linear": (Linear(input_dims=IN, output_dims=OUT), X),
    "into heads": (HeadProjection(input_dims=IN, num_heads=2, head_dim=3), X),
    "out of heads": (
        OutputProjection(output_dims=5, num_heads=2, head_dim=4),
        X.reshape(BATCH, LENGTH, 2, 4),
    ),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_every_projection_uses_its_dot(name):
    layer, x = PROJECTIONS[name]
    variables = layer.init(KEY)
    doubled = layer.clone(dot_tpl=Doubled.HParams.config())
    assert jax.tree.map(jnp.shape, doubled.init(KEY)) == jax.tree.map(jnp.shape, variables)
    expected = layer.apply(variables, x)
    np.testing.assert_allclose(doubled.apply(variables, x), 2 * expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "into heads"])
def test_plain_product_is_one_contraction_of_merged_tokens(name):
    layer, x = PROJECTIONS[name]
    variables = layer.init(KEY)

    def program(layer):
        return str(jax.make_jaxpr(layer.apply)(variables, x))

    assert program(layer).count("dot_general") == 1
    assert program(layer) == program(layer.clone(dot_tpl=Dot.HParams.config()))


def test_gradient_of_a_bias_is_summed_in_float32():
    random = np.random.default_rng(0)
    given = jnp.asarray(random.normal(0.5, 1.0, (8, 2048, 32)), jnp.bfloat16)
    bias = jnp.zeros(32, jnp.bfloat16)
    (result,) = jax.vjp(lambda bias: add_bias(jnp.zeros_like(given), bias), bias)[1](given)
    assert result.dtype == jnp.bfloat16
    expected = np.asarray(given, np.float64).sum((0, 1))
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=2.0**-8)


def test_backward_pass_of_the_output_projection_keeps_its_input_unchanged():
    layer, heads = PROJECTIONS["out of heads"]
    variables = layer.init(KEY)
    _, backward = jax.vjp(layer.apply, variables, heads)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size == heads.size]
    assert [leaf.shape for leaf in kept] == [heads.shape]


def small_model():
    config = StackedTransformerRepeated.HParams.config(num_layers=2)
    return config.set(input_dims=8, hidden_dims=12, num_heads=2)


def test_with_dots_replaces_all_dots_of_a_model_or_those_of_a_pattern():
    config = small_model()
    switched = replace_dots(config, Doubled.HParams.config())
    layer = switched.layer_tpl
    assert layer.feed_forward_tpl.linear_tpl.dot_tpl == Doubled.HParams.config()
    for projection in ("query_tpl", "key_tpl", "value_tpl", "output_tpl"):
        assert getattr(layer.attention_tpl, projection).dot_tpl == Doubled.HParams.config()
    assert config == small_model()
    assert replace_dots(switched, None) == config

    pattern = r"layer_tpl\.attention_tpl\.(query|value)_tpl"
    layer = replace_dots(config, Doubled.HParams.config(), only=pattern).layer_tpl
    attention = layer.attention_tpl
    assert attention.query_tpl.dot_tpl == attention.value_tpl.dot_tpl == Doubled.HParams.config()
    assert attention.key_tpl.dot_tpl is layer.feed_forward_tpl.linear_tpl.dot_tpl is None


def test_with_dots_ignores_layer_tpl_beside_block_tpls():
    config = small_model()
    config.set(block_tpls=(config.layer_tpl.clone(), config.layer_tpl.clone()))
    switched = replace_dots(config, Doubled.HParams.config())
    assert switched.layer_tpl == config.layer_tpl
    linears = [block.feed_forward_tpl.linear_tpl for block in switched.block_tpls]
    assert [linear.dot_tpl for linear in linears] == [Doubled.HParams.config()] * 2
    # A stack refuses a pattern beside a layer that is not the default one.
    jax.eval_shape(switched.Instantiate().init, jax.random.key(0))
    with pytest.raises(ConfigError):
        replace_dots(config, None, only=r"layer_tpl\..*")


def test_with_dots_finds_layers_in_lists_and_dicts():
    class Holder(Configurable):
        layers: Any = None

    linear = Linear.HParams.config
    config = Holder.HParams.config(layers=[linear(), {"a": linear()}])
    switched = replace_dots(config, Dot.HParams.config(), only="layers.1.a")
    assert switched.layers[0].dot_tpl is None
    assert switched.layers[1]["a"].dot_tpl == Dot.HParams.config()


def test_with_dots_raises_for_a_pattern_that_matches_no_layer(raises):
    config = FeedForward.HParams.config(input_dims=2, output_dims=2)
    with raises(ConfigError, field="only", value="linear", choices=("linear_tpl",)):
        replace_dots(config, None, only="linear")
    with raises(ConfigError, field="only", choices=()):
        replace_dots(LayerNorm.HParams.config(), None)
    with raises(ConfigError, field="only", value="("):
        replace_dots(config, None, only="(")
