"""Tests of Repeat, compared with sequential layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from layerkit.base.base_layer import AUX_LOSS, CACHE, NON_TRAINABLE, SUMMARIES, BaseLayer
from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import WeightHParams, WeightInit, logical_axes
from layerkit.config import sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.linears import Linear
from layerkit.layers.transformer.repeat import Repeat
from layerkit.layers.transformer.stacks import StackedTransformer
from layerkit.layers.transformer.transformer import Transformer
from layerkit.ops.attention.masks import AttentionMask

KEY = jax.random.key(0)
X = np.array([[1.0, -2.0], [0.5, 0.25], [3.0, 1.0]], np.float32)
LINEAR = Linear.HParams.config(input_dims=2, output_dims=2)
MESH = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor"))


class Block(BaseLayer):
    """x·w, with everything that a layer may do on the side."""

    linear_tpl: Any = sub_config_field(Linear.HParams, input_dims=2, output_dims=2)

    def setup(self):
        self.create_child("linear", self.linear_tpl)
        count = WeightHParams((), axes=(), init=WeightInit.Constant(0.0))
        self.create_variable("count", count, trainable=False)

    def fprop(self, x, *, shift=0.0):
        self.add_aux_loss("half", 0.5)
        self.add_summary("mean", jnp.mean(x))
        if self.is_mutable_collection(NON_TRAINABLE):
            self.update_var("count", self.get_var("count") + 1.0)
        return self.linear(x) + shift

    def init_cache(self, size):
        self.put_variable(CACHE, "memory", jnp.zeros((size,)))

    def remember(self, x):
        self.put_variable(CACHE, "memory", self.get_variable(CACHE, "memory") + jnp.sum(x))
        return 2.0 * x


class Noise(BaseLayer):
    """x plus a mask of zeros and twos."""

    dropout_tpl: Any = sub_config_field(Dropout.HParams, rate=0.5)

    def setup(self):
        self.create_child("dropout", self.dropout_tpl)

    def fprop(self, x, *, is_on=True):
        return x + self.dropout(jnp.ones_like(x)) if is_on else x


class Tied(BaseLayer):
    """Two linear layers on one weight."""

    linear_tpl: Any = sub_config_field(
        Linear.HParams, input_dims=2, output_dims=2, shared_weight_id="tied"
    )

    def setup(self):
        self.create_child("first", self.linear_tpl)
        self.create_child("second", self.linear_tpl)

    def fprop(self, x):
        return self.second(self.first(x))


class Pair(BaseLayer):
    first_tpl: Any = sub_config_field(None)
    second_tpl: Any = sub_config_field(None)

    def setup(self):
        self.create_child("first", self.first_tpl)
        self.create_child("second", self.second_tpl)

    def fprop(self, x):
        return self.second(self.first(x))


def repeated(times, sub=None, **fields):
    sub = Block.HParams.config() if sub is None else sub
    return Repeat.HParams.config(sub_tpl=sub, num_repeats=times, **fields).Instantiate()


@pytest.fixture(scope="module")
def five():
    layer = repeated(5)
    return layer, jax.jit(layer.init)(KEY)


def test_weights_have_a_leading_layers_axis(five):
    layer, variables = five
    assert variables["params"]["sub"]["linear"]["w"].shape == (5, 2, 2)
    assert variables["non_trainable"]["sub"]["count"].shape == (5,)
    axes = logical_axes(jax.eval_shape(layer.init_boxed, KEY))
    assert axes["params"]["sub"]["linear"]["w"] == ("layers", "embed", "mlp")
    assert axes["non_trainable"]["sub"]["count"] == ("layers",)


def test_extra_arguments_are_passed_to_every_copy(five):
    layer, variables = five
    w = np.asarray(variables["params"]["sub"]["linear"]["w"])
    expected = X
    for copy in w:
        expected = expected @ copy + 3.0
    np.testing.assert_allclose(layer.apply(variables, X, shift=3.0), expected, rtol=1e-5)


def test_auxiliary_losses_summaries_and_state_are_kept_per_copy(five):
    layer, variables = five
    layer = layer.clone(train=False)
    _, updates = layer.apply(variables, X, mutable=[AUX_LOSS, SUMMARIES, NON_TRAINABLE])
    (aux,) = updates[AUX_LOSS]["sub"]["half"]
    assert aux.shape == (5,) and float(jnp.sum(aux)) == 5 * 0.5
    np.testing.assert_array_equal(updates[NON_TRAINABLE]["sub"]["count"], np.ones(5))
    w, inputs, means = np.asarray(variables["params"]["sub"]["linear"]["w"]), X, []
    for copy in w:
        means.append(inputs.mean())
        inputs = inputs @ copy
    np.testing.assert_allclose(updates[SUMMARIES]["sub"]["mean"][0], means, rtol=1e-5)


def test_training_raises_if_an_auxiliary_loss_in_the_loop_is_not_collected(raises, five):
    layer, variables = five
    with raises(ConfigError, owner="Block(sub)", field="half"):
        layer.clone(train=True).apply(variables, X)


def test_copies_have_different_weights_with_the_fans_of_one_layer():
    linear = Linear.HParams.config(input_dims=32, output_dims=32)
    w = np.asarray(repeated(5, linear).init(KEY)["params"]["sub"]["w"])
    bound = np.sqrt(6.0 / (32 + 32))
    # Were `layers` an input dimension, the bound would be √(6 / (5·32 + 32)), 0.58 of this.
    assert 0.99 * bound < np.abs(w).max() <= bound
    assert all(not np.array_equal(w[i], w[j]) for i in range(5) for j in range(i))


@pytest.mark.parametrize(("times", "remat"), [(4, "none"), (4, "full"), ((2, 2), "none")])
def test_copies_have_different_random_numbers(times, remat):
    layer = repeated(times, Noise.HParams.config(), remat=remat, train=True)
    total = np.asarray(layer.apply({}, jnp.zeros((4096,)), rngs={"random": KEY}))
    # One mask for all would leave 0 and 8 alone. Four give 2·Binomial(4, 1/2), so 1, 4, 6, 4, 1
    # sixteenths; the deviation of each count is at most √(4096·6/16·10/16) < 32.
    counts = [int(np.sum(total == 2.0 * hits)) for hits in range(5)]
    assert sum(counts) == 4096
    np.testing.assert_allclose(counts, 256 * np.array([1, 4, 6, 4, 1]), atol=4 * 32)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_static_argument_stays_static(remat):
    layer = repeated(2, Noise.HParams.config(), remat=remat, train=True)
    np.testing.assert_array_equal(layer.apply({}, X, is_on=False), X)


@pytest.mark.parametrize(("remat", "unroll"), [("dots_no_batch", 1), ("none", 2), ("full", 9)])
def test_remat_and_unroll_do_not_change_values_and_gradients(five, remat, unroll):
    layer, variables = five
    other = repeated(5, remat=remat, unroll=unroll)

    def run(layer):
        loss = lambda params: jnp.sum(jnp.sin(layer.apply({**variables, "params": params}, X)))  # noqa: E731
        return jax.value_and_grad(loss)(variables["params"])

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), run(other), run(layer))


@pytest.mark.parametrize(
    ("num_devices", "copies", "is_loop"), [(1, 12, False), (1, 13, True), (2, 12, True)]
)
def test_few_copies_are_unrolled_on_one_cpu(num_devices, copies, is_loop):
    devices = np.array(jax.devices("cpu")[:num_devices])
    bound = BoundSharding(jax.sharding.Mesh(devices, ("data",)))
    layer, loop = repeated(copies, sharding=bound), repeated(copies, sharding=bound, unroll=1)
    variables = jax.jit(layer.init)(KEY)
    program = jax.jit(layer.apply).lower(variables, X).as_text()
    assert ("stablehlo.while" in program) is is_loop
    np.testing.assert_allclose(layer.apply(variables, X), loop.apply(variables, X), rtol=1e-6)


class TwoLayers(StackedTransformer):
    """A period of a pattern, here of feed-forward layers that read the input alone."""

    num_layers: int = 2
    input_dims: int = 2
    hidden_dims: int = 2
    layer_tpl: Any = sub_config_field(Transformer.HParams, attention_tpl=None)

    def fprop(self, x):
        mask = AttentionMask.causal_mask(*x.shape[:2])
        return super().fprop(x, mask=mask, positions=jnp.arange(x.shape[1])[None])


PERIOD = TwoLayers.HParams.config()


@pytest.mark.parametrize(
    ("copies", "sub", "fields", "is_loop"),
    [
        (24, LINEAR, {"train": True}, False),
        (25, LINEAR, {"train": True}, True),
        (3, LINEAR, {}, True),  # without a backward pass
        ((2, 3), LINEAR, {"train": True}, True),
        (3, LINEAR, {"train": True, "remat": "full"}, True),
        (2, PERIOD, {"train": True}, False),
        (2, PERIOD.clone(remat="full"), {"train": True}, True),
        (13, PERIOD, {"train": True}, True),
    ],
)
def test_few_layers_without_rematerialization_are_unrolled_in_training_on_gpus(
    copies, sub, fields, is_loop
):
    kind = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    layer = repeated(copies, sub, **fields)
    variables = jax.eval_shape(layer.init, KEY)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        program = jax.jit(layer.apply).trace(variables, X[None])
        program = program.lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.while" in program) is is_loop


@pytest.mark.parametrize("shape", [(5,), (2, 2)])
def test_run_method_calls_any_method_and_stacks_caches(shape):
    layer, count = repeated(shape), math.prod(shape)
    variables = jax.jit(layer.init)(KEY)

    @jax.jit
    def remember(variables):
        _, state = layer.apply(variables, 3, method="init_cache", mutable=[CACHE])
        assert state[CACHE]["sub"]["memory"].shape == (*shape, 3)
        variables = {**variables, **state}
        options = {"method": "run", "mutable": [CACHE]}
        return layer.apply(variables, "remember", jnp.ones((2,)), **options)

    result, state = remember(variables)
    np.testing.assert_array_equal(result, 2.0**count * np.ones(2))
    # Copy i was given 2^i · [1, 1].
    expected = 2.0 ** np.arange(1, count + 1).reshape(*shape, 1) * np.ones(3)
    np.testing.assert_array_equal(state[CACHE]["sub"]["memory"], expected)


def test_nested_repeat_equals_a_longer_repeat():
    inner = Repeat.HParams.config(sub_tpl=Block.HParams.config(), num_repeats=3)
    layer = repeated(2, inner)
    variables = jax.jit(layer.init)(KEY)
    w = variables["params"]["sub"]["sub"]["linear"]["w"]
    assert w.shape == (2, 3, 2, 2)
    axes = logical_axes(jax.eval_shape(layer.init_boxed, KEY))
    assert axes["params"]["sub"]["sub"]["linear"]["w"] == ("layers", "layers", "embed", "mlp")
    expected = X
    for copy in np.asarray(w).reshape(6, 2, 2):
        expected = expected @ copy
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-5)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_stacked_shape_equals_a_longer_repeat(remat):
    flat, grid = repeated(6, train=False), repeated((2, 3), remat=remat, train=False)
    variables = jax.jit(flat.init)(KEY)
    stacked = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), variables)
    shapes = jax.tree.map(jnp.shape, stacked)
    assert jax.tree.map(jnp.shape, jax.eval_shape(grid.init, KEY)) == shapes
    axes = logical_axes(jax.eval_shape(grid.init_boxed, KEY))
    assert axes["params"]["sub"]["linear"]["w"] == ("layers", "layers", "embed", "mlp")

    def run(layer, variables):
        def loss(params):
            outputs, updates = layer.apply(
                {**variables, "params": params}, X, mutable=[AUX_LOSS, SUMMARIES, NON_TRAINABLE]
            )
            return jnp.sum(jnp.sin(outputs)), updates

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    (value, updates), gradients = run(grid, stacked)
    (expected, flat_updates), flat_gradients = run(flat, variables)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for actual, required in ((updates, flat_updates), (gradients, flat_gradients)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-6),
            actual,
            required,
        )
    assert updates[AUX_LOSS]["sub"]["half"][0].shape == (2, 3)


@pytest.mark.parametrize("shape", [(6, 1), (2, 3)])
def test_scanned_arguments_differ_between_copies(shape):
    layer = repeated(shape)
    variables = jax.jit(layer.init)(KEY)
    w = np.asarray(variables["params"]["sub"]["linear"]["w"]).reshape(6, 2, 2)
    shifts = np.arange(6, dtype=np.float32)
    expected = X
    for copy, shift in zip(w, shifts, strict=True):
        expected = expected @ copy + shift
    run = lambda v: layer.apply(v, "fprop", X, per_copy={"shift": shifts}, method="run")  # noqa: E731
    actual = jax.jit(run)(variables)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_carry_has_the_sharding_of_the_rules(raises):
    rules = DEFAULT_RULES.replace(act_embed="tensor")
    linear = Linear.HParams.config(input_dims=3, output_dims=3, weight_axes=(None, None))
    layer = repeated(2, linear, sharding=BoundSharding(MESH, rules))
    with raises(ConfigError, owner="Repeat()", field="dimension 'act_embed'", value=3):
        layer.init(KEY, jnp.ones((2, 3)))


def test_program_size_does_not_depend_on_depth():
    def program(times):
        layer = repeated(times)
        weights = jax.eval_shape(layer.init, KEY)
        loss = lambda weights: jnp.sum(layer.apply(weights, X))  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(weights).as_text()

    assert len(program(64).splitlines()) == len(program(4).splitlines())


def test_copy_can_share_weights_internally():
    layer = repeated(3, Tied.HParams.config())
    variables = jax.jit(layer.init)(KEY)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"sub": {"first": {"w": (3, 2, 2)}}}}
    w = np.asarray(variables["params"]["sub"]["first"]["w"])
    expected = X @ w[0] @ w[0] @ w[1] @ w[1] @ w[2] @ w[2]
    np.testing.assert_allclose(layer.apply(variables, X), expected, rtol=1e-5)


def test_weights_are_not_shared_between_loop_and_outside(raises):
    outside = Linear.HParams.config(input_dims=2, output_dims=2, shared_weight_id="tied")
    inside = Repeat.HParams.config(sub_tpl=Tied.HParams.config(), num_repeats=2)

    def build_both(first, second):
        Pair.HParams.config(first_tpl=first, second_tpl=second).Instantiate().init(KEY)

    with raises(ConfigError, owner="Repeat(second)", field="shared_weight_id", value="tied"):
        build_both(outside, inside)
    with raises(ConfigError, owner="Repeat(first)", field="shared_weight_id", value="tied"):
        build_both(inside, outside)
    with raises(ConfigError, owner="Repeat(second)", field="shared_weight_id", value="tied"):
        build_both(inside, inside.clone())


def test_init_raises_for_a_copy_that_changes_shape_or_dtype(raises):
    wider = repeated(2, Linear.HParams.config(input_dims=2, output_dims=4))
    with raises(ConfigError, field="result of copy of Linear(sub)", value="float32[3, 4]"):
        jax.eval_shape(wider.init, KEY, X)
    lower = repeated(2, fprop_dtype="bfloat16")
    with raises(ConfigError, field="result of copy of Block(sub)", value="bfloat16[3, 2]"):
        jax.eval_shape(lower.init, KEY, X)
