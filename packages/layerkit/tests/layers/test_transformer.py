"""The Transformer layer, and that a stack in a loop is a stack in a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base_layer import CACHE, BaseLayer
from layerkit.config import sub_config_field
from layerkit.layers.activations import SiLU, SquaredReLU
from layerkit.layers.masks import AttentionMask
from layerkit.layers.positions import RotaryPositionalEmbedding
from layerkit.layers.stochastic import Dropout
from layerkit.layers.transformer import (
    StackedTransformer,
    StackedTransformerRepeated,
    Transformer,
    TransformerFeedForward,
)
from layerkit.weights import WeightInit, logical_axes

KEY = jax.random.key(0)
BATCH, LENGTH, DIMS, NUM_LAYERS = 3, 6, 8, 2
SIZES = {"input_dims": DIMS, "hidden_dims": 12, "num_heads": 4}
X = jax.random.normal(KEY, (BATCH, LENGTH, DIMS))
ROW = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, 1))
CAUSAL = AttentionMask.causal_mask(BATCH, LENGTH)
# One document in the first row, two in the others, and padding at the end of the second.
SEGMENTS = jnp.array([[1] * 6, [1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]], jnp.int32)
SEGMENT_POS = jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], jnp.int32)
PACKED = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)


def stack_config(stack=StackedTransformer, **fields):
    config = stack.HParams.config(**{"num_layers": NUM_LAYERS, **SIZES, **fields})
    config.layer_tpl.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    return config


def random_weights(layer):
    """Weights without the zeros and ones at which many mistakes are invisible."""
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def in_a_loop(variables):
    """The weights of a stack in a row, as those of a stack in a loop."""
    layers = variables["params"]
    stacked = jax.tree.map(
        lambda *copies: jnp.stack(copies), *(layers[f"layers_{i}"] for i in range(len(layers)))
    )
    return {"params": {"repeat": {"sub": stacked}}}


def loss_function(layer):
    def loss(variables, x):
        output = layer.apply(variables, x, mask=PACKED, positions=SEGMENT_POS)
        return jnp.sum(jnp.sin(output)), output

    return loss


def values_and_gradients(layer, variables):
    run = jax.value_and_grad(loss_function(layer), argnums=(0, 1), has_aux=True)
    (_, output), (weight_gradients, x_gradient) = jax.jit(run)(variables, X)
    return output, weight_gradients, x_gradient


def assert_close(first, second, *, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), first, second)


def refusal(config):
    with pytest.raises(ValueError) as caught:
        config.Instantiate().init(KEY)
    return str(caught.value)


@pytest.fixture(scope="module")
def row():
    """A stack in a row with its weights, values and gradients."""
    layer = stack_config().Instantiate()
    variables = random_weights(layer)
    return layer, variables, values_and_gradients(layer, variables)


@pytest.mark.parametrize(
    ("remat", "unroll"), [("none", 1), ("dots", 1), ("dots_no_batch", 2), ("full", 1)]
)
def test_a_loop_is_a_row(row, remat, unroll):
    _, variables, (output, weight_gradients, x_gradient) = row
    layer = stack_config(StackedTransformerRepeated, remat=remat, unroll=unroll).Instantiate()
    found = values_and_gradients(layer, in_a_loop(variables))
    assert_close(found, (output, in_a_loop(weight_gradients), x_gradient))


def test_remat_changes_no_result_of_a_row(row):
    _, variables, expected = row
    layer = stack_config(remat="full").Instantiate()
    assert_close(values_and_gradients(layer, variables), expected)


@pytest.mark.parametrize("stack", [StackedTransformer, StackedTransformerRepeated])
def test_stricter_policies_keep_less(stack):
    def kept(remat):
        layer = stack_config(stack, remat=remat).Instantiate()
        backward = lambda variables: jax.vjp(loss_function(layer), variables, X, has_aux=True)[1]  # noqa: E731
        leaves = jax.tree.leaves(jax.eval_shape(backward, jax.eval_shape(layer.init, KEY)))
        return sum(leaf.size for leaf in leaves)

    none, dots, no_batch, full = map(kept, ("none", "dots", "dots_no_batch", "full"))
    assert none > dots > no_batch > full


def test_the_program_of_a_loop_does_not_grow_with_depth():
    def num_lines(num_layers):
        layer = stack_config(StackedTransformerRepeated, num_layers=num_layers).Instantiate()
        gradient = jax.jit(jax.grad(lambda v: loss_function(layer)(v, X)[0]))
        return len(gradient.lower(jax.eval_shape(layer.init, KEY)).as_text().splitlines())

    assert num_lines(64) == num_lines(4)


@pytest.mark.parametrize("stack", [StackedTransformer, StackedTransformerRepeated])
def test_cached_steps_are_the_whole_row(row, stack):
    whole, variables, _ = row
    expected = jax.jit(lambda v: whole.apply(v, X, mask=CAUSAL, positions=ROW))(variables)
    layer = stack_config(stack).Instantiate()
    variables = variables if stack is StackedTransformer else in_a_loop(variables)
    _, state = layer.apply(variables, BATCH, LENGTH + 1, method="init_cache", mutable=[CACHE])

    @jax.jit
    def extend(state, x, start):
        positions = jnp.broadcast_to(start + jnp.arange(x.shape[1]), x.shape[:2])
        return layer.apply(
            {**variables, **state},
            x,
            time_step=start,
            positions=positions,
            method="extend_step",
            mutable=[CACHE],
        )

    found, position = [], 0
    for width in (3, 1, 1, 1):
        x = X[:, position : position + width]
        output, state = extend(state, x, jnp.int32(position))
        found.append(output)
        position += width
    assert_close(jnp.concatenate(found, axis=1), expected)


def test_a_later_token_changes_nothing_before_it(row):
    layer, variables, _ = row
    run = jax.jit(lambda x: layer.apply(variables, x, mask=CAUSAL, positions=ROW))
    before, after = run(X), run(X.at[:, 3].add(1.0))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.all(np.any(before[:, 3:] != after[:, 3:], axis=-1))


def test_branches_that_give_nothing_leave_the_residual():
    layer = Transformer(**SIZES)
    variables = random_weights(layer)
    for branch, projection in (("attention", "output"), ("feed_forward", "down")):
        weights = variables["params"][branch][projection]
        weights["w"] = np.zeros_like(weights["w"])
    run = jax.jit(lambda v: layer.apply(v, X, mask=CAUSAL, positions=ROW))
    np.testing.assert_array_equal(run(variables), X)


def test_dropout_acts_on_both_branches_in_training_alone():
    # With weights of one and constant inputs each branch is a constant, c.
    layer = Transformer(**SIZES, dropout_rate=0.5)
    variables = jax.tree.map(jnp.ones_like, jax.eval_shape(layer.init, KEY))
    x = jnp.zeros((BATCH, LENGTH, DIMS))

    @partial(jax.jit, static_argnums=0)
    def run(layer, key):
        return layer.apply(variables, x, mask=CAUSAL, positions=ROW, rngs={"random": key})

    assert np.unique(run(layer, KEY)).size == 1
    trained = run(layer.clone(train=True), KEY)
    kept_neither = np.mean(trained == 0.0)
    # Each branch is dropped with probability 1/2: both at once in a quarter of the 144 places.
    assert abs(kept_neither - 0.25) < 0.15
    assert np.any(trained != run(layer.clone(train=True), jax.random.key(1)))


class NoisyLayer(BaseLayer):
    """Adds noise; has the fields and the arguments that a stack hands to its layers."""

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    dropout_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)

    def setup(self):
        self.create_child("dropout", self.dropout_tpl)

    def fprop(self, x, *, mask, positions):
        return x + self.dropout(jnp.ones_like(x))


@pytest.mark.parametrize(
    ("stack", "remat"), [(StackedTransformer, "full"), (StackedTransformerRepeated, "none")]
)
def test_every_layer_and_every_step_drops_its_own(stack, remat):
    layer = stack.HParams.config(
        **SIZES, num_layers=4, layer_tpl=NoisyLayer.HParams.config(), remat=remat, train=True
    ).Instantiate()
    zeros = jnp.zeros((BATCH, LENGTH, 256))

    @jax.jit
    def run(seed):
        rngs = {"random": jax.random.key(seed)}
        return layer.apply({}, zeros, mask=CAUSAL, positions=ROW, rngs=rngs)

    total = run(0)
    # Were the masks of the layers the same, there would be nothing between 0 and 8.
    counts = [float(jnp.mean(total == 2.0 * hits)) for hits in range(5)]
    np.testing.assert_allclose(counts, np.array([1, 4, 6, 4, 1]) / 16, atol=0.04)
    np.testing.assert_array_equal(total, run(0))
    assert np.any(total != run(1))


def numpy_feed_forward(params, x, activation, *, has_bias, use_gate):
    up = x @ params["up"]["w"]
    if has_bias:
        up = up + params["up_bias"]["b"]
    hidden = activation(x @ params["gate"]["w"]) * up if use_gate else activation(up)
    output = hidden @ params["down"]["w"]
    return output + params["down_bias"]["b"] if has_bias else output


@pytest.mark.parametrize(
    ("has_bias", "use_gate", "activation", "reference"),
    [
        (True, False, SquaredReLU, lambda x: np.maximum(x, 0.0) ** 2),
        (False, True, SiLU, lambda x: x / (1.0 + np.exp(-x))),
    ],
)
def test_feed_forward(has_bias, use_gate, activation, reference):
    fields = {"has_bias": has_bias, "use_gate": use_gate}
    layer = TransformerFeedForward(
        input_dims=DIMS, hidden_dims=12, activation_tpl=activation.HParams.config(), **fields
    )
    variables = random_weights(layer)
    params = jax.tree.map(np.asarray, variables["params"])
    expected = numpy_feed_forward(params, np.asarray(X), reference, **fields)
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-4, atol=1e-5)


def test_feed_forward_drops_the_wide_activation():
    layer = TransformerFeedForward(input_dims=1, hidden_dims=1000, dropout_rate=0.25, train=True)
    variables = jax.tree.map(jnp.ones_like, layer.init(KEY))
    output = layer.apply(variables, jnp.ones((1, 1, 1)), rngs={"random": KEY})
    # A thousand ones, each kept with probability 3/4 and then worth 4/3.
    kept = float(output[0, 0, 0]) * 0.75
    assert abs(kept - round(kept)) < 1e-2 and 690 < kept < 810


def test_weights_say_their_axes():
    layer = TransformerFeedForward(input_dims=8, hidden_dims=12, has_bias=True, use_gate=True)
    axes = logical_axes(jax.eval_shape(layer.init_boxed, KEY))["params"]
    assert axes == {
        "up": {"w": ("embed", "mlp")},
        "gate": {"w": ("embed", "mlp")},
        "down": {"w": ("mlp", "embed")},
        "up_bias": {"b": ("mlp",)},
        "down_bias": {"b": ("embed",)},
    }


def test_fewer_kv_heads_and_another_head_size_are_handed_down():
    for stack in (StackedTransformer, StackedTransformerRepeated):
        layer = stack_config(stack, num_kv_heads=2, dim_per_head=6, num_layers=1).Instantiate()
        shapes = [leaf.shape[-3:] for leaf in jax.tree.leaves(jax.eval_shape(layer.init, KEY))]
        assert shapes.count((DIMS, 4, 6)) == 1 and shapes.count((DIMS, 2, 6)) == 2


def test_sizes_that_the_stack_leaves_open_are_the_layers_own():
    config = stack_config(num_layers=1)
    config.layer_tpl.num_kv_heads = 1
    shapes = jax.eval_shape(config.Instantiate().init, KEY)["params"]["layers_0"]
    assert shapes["attention"]["key"]["w"].shape == (DIMS, 1, 2)


def test_contradictions_are_refused_naming_both_sides():
    config = stack_config()
    config.layer_tpl.attention_tpl.num_heads = 3
    ending = (
        ": num_heads=3 is set in its config, but its owner derives num_heads=4;"
        " leave the field out or make them agree"
    )
    assert refusal(config) == f"Transformer(layers_0).attention{ending}"
    config = stack_config(StackedTransformerRepeated)
    config.layer_tpl.attention_tpl.num_heads = 3
    assert refusal(config) == f"Transformer(sub).attention{ending}"
    config = stack_config(StackedTransformerRepeated)
    config.layer_tpl.num_heads = 3
    assert refusal(config) == f"StackedTransformerRepeated().layer_tpl{ending}"


@pytest.mark.parametrize("stack", [StackedTransformer, StackedTransformerRepeated])
def test_wrong_fields_are_refused(stack):
    name = stack.__name__
    assert (
        refusal(stack_config(stack, num_layers=0)) == f"{name}(): num_layers=0, expected at least 1"
    )
    assert refusal(stack_config(stack, remat="fulll")) == (
        f"{name}(): remat='fulll' is not a policy; did you mean 'full'?"
        " Policies: none, dots, dots_no_batch, full."
    )


def test_the_projection_back_may_start_otherwise_than_the_others():
    config = TransformerFeedForward.HParams.config(input_dims=2, hidden_dims=3)
    config.linear_tpl.weight_init = WeightInit.Constant(1.0)
    config.down_init = WeightInit.Constant(2.0)
    weights = config.Instantiate().init(KEY)["params"]
    assert np.all(weights["up"]["w"] == 1.0) and np.all(weights["down"]["w"] == 2.0)
    config.down_init = None
    assert np.all(config.Instantiate().init(KEY)["params"]["down"]["w"] == 1.0)
