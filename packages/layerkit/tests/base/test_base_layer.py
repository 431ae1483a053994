"""Tests of the base layer: initialization, weights, collections and modules as values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer, WeightHParams
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightInit, logical_axes
from layerkit.config import Config, sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import FeedForward, Linear

KEY = jax.random.key(0)
X = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)
SQUARE = {"input_dims": 2, "output_dims": 2}
W = {"w": (2, 2)}


def shapes(variables):
    return jax.tree.map(jnp.shape, variables)


def square(**fields):
    return Linear.HParams.config(**SQUARE, **fields)


class Chain(BaseLayer):
    """A sequence of built layers in any container, then `num_copies` of a template."""

    first: Any = None
    second: Any = None
    several: Any = ()
    link_tpl: Any = sub_config_field(Linear.HParams)
    num_copies: int = 0

    def setup(self):
        self.create_children("links", [self.link_tpl] * self.num_copies, **SQUARE)

    def fprop(self, x):
        several = self.several.values() if hasattr(self.several, "values") else self.several
        for layer in [self.first, self.second, *several, *self.links]:
            x = x if layer is None else layer(x)
        return x


class Assigning(BaseLayer):
    """A layer that assigns its children in setup, as Flax modules do."""

    def setup(self):
        self.one = Linear(**SQUARE)
        self.many = [Linear(**SQUARE), Linear(**SQUARE)]
        self.named = {"a": Linear(**SQUARE)}

    def fprop(self, x):
        return self.named["a"](self.many[1](self.many[0](self.one(x))))


class Declaring(BaseLayer):
    """A layer with one declared weight, which returns the weight of a given name."""

    weight: Any = None

    def setup(self):
        self.create_variable("scale", self.weight)

    def fprop(self, name):
        return getattr(self.theta, name)


class Counter(BaseLayer):
    """A layer that counts its calls in a variable that is not trained."""

    def setup(self):
        start = WeightHParams((1,), axes=("norm",), init=WeightInit.Constant(0.0))
        self.create_variable("calls", start, trainable=False)

    def fprop(self, x):
        self.update_var("calls", self.get_var("calls") + 1.0)
        return x


class Setting(BaseLayer):
    """A layer that assigns its input to a float16 variable of two entries."""

    def setup(self):
        start = WeightHParams((2,), ("norm",), WeightInit.Constant(0.0), dtype="float16")
        self.create_variable("mean", start, trainable=False)

    def fprop(self, x):
        self.update_var("mean", x)


class Reporting(BaseLayer):
    """A layer with two auxiliary losses of one name and two summaries of one name."""

    def fprop(self, x):
        for factor in (1.0, 2.0):
            self.add_aux_loss("size", factor * jnp.mean(x))
            self.add_summary("mean", factor * jnp.mean(x))
        return x


INITIALIZED = {
    "one layer": square(),
    "a template": FeedForward.HParams.config(**SQUARE),
    "copies of a template": Chain.HParams.config(num_copies=3),
    "a built field": Chain.HParams.config(first=square()),
    "a shared built field": (lambda c: Chain.HParams.config(first=c, second=c))(square()),
    "built layers in a list": Chain.HParams.config(several=[square(), square()]),
    "built layers in a dict": Chain.HParams.config(several={"a": square()}),
    "a built layer in a built layer": Chain.HParams.config(
        first=Chain.HParams.config(first=square(), num_copies=1)
    ),
    "a built layer in a template": Chain.HParams.config(
        first=Config(Chain, num_copies=2, link_tpl=square(shared_weight_id="x"))
    ),
    "children assigned in setup": Assigning.HParams.config(),
    "a variable that fprop updates": Counter.HParams.config(),
    "auxiliary losses": Reporting.HParams.config(),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("config", INITIALIZED.values(), ids=INITIALIZED.keys())
def test_init_without_inputs_equals_init_with_inputs(config, train):
    layer = config.Instantiate(train=train)
    bare, run = layer.init(KEY), layer.init(KEY, X)
    assert shapes(bare) == shapes(run)
    jax.tree.map(np.testing.assert_array_equal, bare, run)


def test_weights_are_drawn_from_a_stream_for_each_path():
    few, many = (Chain(num_copies=n).init(KEY)["params"] for n in (1, 3))
    np.testing.assert_array_equal(few["links_0"]["w"], many["links_0"]["w"])
    drawn = np.stack([many[f"links_{i}"]["w"] for i in range(3)])
    assert len(np.unique(drawn)) == drawn.size


def test_init_boxed_returns_the_axes_abstractly():
    boxed = jax.eval_shape(FeedForward(**SQUARE).init_boxed, KEY)
    assert logical_axes(boxed) == {
        "params": {"linear": {"w": ("embed", "mlp")}, "bias": {"b": ("mlp",)}}
    }
    assert logical_axes(Counter().init_boxed(KEY, X)["non_trainable"]) == {"calls": ("norm",)}


def test_layer_runs_inside_a_flax_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(Linear(**SQUARE, name="in")(x))

    variables = nn.meta.unbox(Net().init(KEY, X))
    assert shapes(variables["params"]["in"]) == W
    assert Net().apply(variables, X).shape == (2, 3)


def test_weights_have_their_own_dtype_and_theta_the_compute_dtype():
    layer = Declaring(weight=WeightHParams((2,), axes=("norm",)), fprop_dtype="bfloat16")
    variables = layer.init(KEY)
    assert variables["params"]["scale"].dtype == jnp.float32
    assert layer.apply(variables, "scale").dtype == jnp.bfloat16
    weight = WeightHParams((2,), axes=("norm",), dtype="float16")
    drawn = Declaring(weight=weight, dtype=jnp.bfloat16).init(KEY)["params"]["scale"]
    assert drawn.dtype == jnp.float16


def test_parent_can_read_weights_of_an_uncalled_child():
    class Tied(BaseLayer):
        def setup(self):
            self.create_child("linear", square())
            self.create_child("counter", Counter.HParams.config())

        def fprop(self, x):
            return x @ self.linear.theta.w.T + self.counter.get_var("calls")

    variables = Tied().init(KEY)
    w = np.asarray(variables["params"]["linear"]["w"])
    np.testing.assert_allclose(Tied().apply(variables, X), X @ w.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        (WeightHParams((2, 3), axes=("embed",)), ("embed",)),
        (WeightHParams((2, 0), axes=("embed", "mlp")), {"embed": 2, "mlp": 0}),
    ],
    ids=["axes", "size"],
)
def test_invalid_weight_declaration_raises(raises, weight, value):
    with raises(ConfigError, owner="Declaring()", value=value):
        Declaring(weight=weight).init(KEY)


def test_axis_of_a_weight_without_a_rule_raises_under_rules(raises):
    layer = Declaring(weight=WeightHParams((2,), axes=("embedd",)))
    assert shapes(layer.init(KEY))["params"] == {"scale": (2,)}
    with raises(ConfigError, owner="Declaring().scale", value="embedd"):
        layer.clone(sharding=BoundSharding(None)).init(KEY)


def test_updated_variable_is_returned():
    variables = Counter().init(KEY)
    assert shapes(variables) == {"params": {}, "non_trainable": {"calls": (1,)}}
    for calls in (1.0, 2.0):
        _, updated = Counter().apply(variables, X, mutable=["non_trainable"])
        variables = {**variables, **updated}
        assert float(variables["non_trainable"]["calls"][0]) == calls


def test_update_of_an_immutable_variable_raises(raises):
    with raises(ConfigError, problem="the update would be lost"):
        Counter().apply(Counter().init(KEY), X)


def test_update_has_the_declared_shape_and_dtype(raises):
    def updated(value):
        _, changed = Setting().apply(Setting().init(KEY), value, mutable=["non_trainable"])
        return changed["non_trainable"]["mean"]

    mean = updated(np.array([1.0, 2.5], np.float32))
    assert mean.dtype == jnp.float16 and mean.tolist() == [1.0, 2.5]
    with raises(ConfigError, field="shape of mean", value=()):
        updated(jnp.zeros(()))
    with raises(ConfigError, field="shape of mean", value=(3,)):
        Setting().init(KEY, jnp.zeros((3,)))


def test_cast_changes_floats_only():
    layer = Reporting(fprop_dtype=jnp.bfloat16)
    assert layer.cast(X).dtype == jnp.bfloat16
    assert layer.cast(np.arange(3)).dtype == jnp.int32
    assert layer.cast(np.array([True])).dtype == jnp.bool_
    assert (layer.cast(X) * 0.5).dtype == jnp.bfloat16  # NumPy would compute in float32


class Stochastic(BaseLayer):
    def fprop(self, x):
        return self.next_prng_key()


def test_auxiliary_losses_of_one_name_are_collected():
    _, sown = Reporting(train=True).apply({}, X, mutable=["aux_loss"])
    mean = X.mean()
    assert sown == {"aux_loss": {"size": (mean, 2.0 * mean)}}
    assert all(value.dtype == jnp.float32 for value in jax.tree.leaves(sown))


def test_training_raises_if_an_auxiliary_loss_is_not_collected(raises):
    np.testing.assert_array_equal(Reporting().apply({}, X), X)  # evaluation
    with raises(ConfigError, problem="the auxiliary loss would be lost"):
        Reporting(train=True).apply({}, X)


def test_auxiliary_losses_have_gradients_and_summaries_have_none():
    def total(x, collection):
        _, sown = Reporting(train=True).apply({}, x, mutable=[collection, "aux_loss"])
        sown = sown[collection]
        return sum(jnp.sum(value) for value in jax.tree.leaves(sown))

    # Two values, 1·mean and 2·mean, of four elements.
    np.testing.assert_allclose(jax.grad(total)(X, "aux_loss"), np.full((2, 2), 3.0 / 4.0))
    np.testing.assert_array_equal(jax.grad(total)(X, "summaries"), np.zeros((2, 2)))


def test_random_keys_depend_on_key_and_layer():
    layer = Chain.HParams.config(first=Stochastic.HParams.config()).Instantiate()

    def draw(seed, layer=layer):
        return jax.random.key_data(layer.apply({}, X, rngs={"random": jax.random.key(seed)}))

    np.testing.assert_array_equal(draw(0), draw(0))
    assert np.any(draw(0) != draw(1))
    assert np.any(draw(0) != draw(0, Stochastic()))


def feed_forward():
    config = FeedForward.HParams.config(**SQUARE, sharding=BoundSharding(None))
    config.linear_tpl.weight_init = WeightInit.Gaussian(0.5)
    return config


def test_modules_of_equal_configs_are_equal_with_equal_hashes():
    first, second = feed_forward().Instantiate(), feed_forward().Instantiate()
    assert first == second and hash(first) == hash(second)
    other = feed_forward()
    other.linear_tpl.weight_init = WeightInit.Gaussian(0.6)
    assert other.Instantiate() != first


def test_jit_traces_once_per_value_of_a_static_module():
    traced = []

    @jax.jit
    def weights_of(key):
        return feed_forward().Instantiate().init(key)

    def apply(layer, variables, x):
        traced.append(layer)
        return layer.apply(variables, x)

    run = jax.jit(apply, static_argnums=0)
    variables = weights_of(KEY)
    outputs = run(feed_forward().Instantiate(), variables, X)
    run(feed_forward().Instantiate(), variables, X)
    assert len(traced) == 1
    run(feed_forward().Instantiate().clone(train=True), variables, X)
    assert len(traced) == 2
    eager = feed_forward().Instantiate().apply(variables, X)
    np.testing.assert_allclose(outputs, eager, rtol=1e-6)
