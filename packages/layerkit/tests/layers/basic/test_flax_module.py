"""Tests of FlaxModule, compared with the module that it contains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import NON_TRAINABLE, BaseLayer
from layerkit.base.weights import is_box, logical_axes
from layerkit.config import Config, sub_config_field
from layerkit.errors import ConfigError
from layerkit.layers.basic.flax_module import FlaxModule
from layerkit.layers.transformer.repeat import Repeat

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Block(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x, *, train=False):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(self.features, kernel_init=init)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


def block(**fields):
    return FlaxModule.HParams.config(
        module_tpl=Config(Block),
        example_shapes=((2, 3),),
        train_argument="train",
        random_streams=("dropout",),
        **fields,
    )


def test_outputs_equal_the_module_and_init_needs_no_inputs():
    layer = block().Instantiate()
    init = jax.jit(layer.init)
    variables = init(KEY)
    jax.tree.map(np.testing.assert_array_equal, variables, init(KEY, X))
    inner = {
        "params": variables["params"]["module"],
        "batch_stats": variables[NON_TRAINABLE]["batch_stats"],
    }
    result, expected = jax.jit(layer.apply)(variables, X), jax.jit(Block().apply)(inner, X)
    np.testing.assert_array_equal(result, expected)


def test_training_updates_statistics_and_draws_random_numbers(raises):
    layer = block(train=True).Instantiate()
    variables = jax.jit(layer.init)(KEY)

    @jax.jit
    def run(seed):
        rngs = {"random": jax.random.key(seed)}
        return layer.apply(variables, X, rngs=rngs, mutable=[NON_TRAINABLE])

    outputs = [run(seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
    assert (outputs[0][0] != outputs[2][0]).any()
    before = variables[NON_TRAINABLE]["batch_stats"]["BatchNorm_0"]["mean"]
    after = outputs[0][1][NON_TRAINABLE]["batch_stats"]["BatchNorm_0"]["mean"]
    assert after.shape == before.shape and (after != before).any()
    with raises(ConfigError, problem="the updates of batch_stats would be lost"):
        layer.apply(variables, X, rngs={"random": KEY})


def test_axis_names_of_the_module_are_logical_axes():
    boxed = jax.eval_shape(block().Instantiate().init_boxed, KEY)
    axes = logical_axes(boxed)["params"]["module"]
    assert axes["Dense_0"] == {"kernel": ("embed", "mlp"), "bias": (None,)}


def test_flax_module_runs_in_sequential_and_repeat():
    class Wrapped(BaseLayer):
        inner_tpl: object = sub_config_field(None)

        def setup(self):
            self.create_child("inner", self.inner_tpl)

        def fprop(self, x):
            return self.inner(x)

    repeat = Repeat(sub_tpl=Wrapped.HParams.config(inner_tpl=block()), num_repeats=2)
    variables = jax.jit(repeat.init)(KEY)
    kernel = variables["params"]["sub"]["inner"]["module"]["Dense_0"]["kernel"]
    assert kernel.shape == (2, 3, 3)
    expected, run = X, jax.jit(Block().apply)
    for index in range(2):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], variables)
        inner = {
            "params": one["params"]["sub"]["inner"]["module"],
            "batch_stats": one[NON_TRAINABLE]["sub"]["inner"]["batch_stats"],
        }
        expected = run(inner, expected)
    np.testing.assert_allclose(jax.jit(repeat.apply)(variables, X), expected, rtol=1e-6)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(x)), None


class Scanned(nn.Module):
    """Learned positions and two stacked layers."""

    @nn.compact
    def __call__(self, x):
        positions = self.param("positions", nn.initializers.normal(), (1, 2, 4))
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Attention, length=2, **axes)()(x + positions, None)[0]


def test_weights_that_start_at_random_decay_unless_the_layer_spares_them(raises):
    config = FlaxModule.HParams.config(
        module_tpl=Config(Scanned), example_shapes=((1, 2, 4),), undecayed=("positions",)
    )
    boxed = jax.eval_shape(config.Instantiate().init_boxed, KEY)["params"]
    flat = flatten_dict(boxed, sep="/", is_leaf=lambda _, leaf: is_box(leaf))
    # Biases of stacked attention have three axes.
    assert {name.split("/")[-1] for name, box in flat.items() if box.decays} == {"kernel"}
    assert len(flat) == 1 + 8 + 2 and sum(box.decays for box in flat.values()) == 4
    with raises(ConfigError, field="undecayed", value="position"):
        config.set(undecayed=("position",)).Instantiate().init(KEY)


def test_deterministic_argument_is_false_in_training():
    config = FlaxModule.HParams.config(
        module_tpl=Config(nn.Dropout, rate=0.5),
        example_shapes=((2, 3),),
        evaluation_argument="deterministic",
    )
    np.testing.assert_array_equal(config.Instantiate().apply({"params": {}}, X), X)
    trained = config.Instantiate().clone(train=True)
    dropped = trained.apply(trained.init(KEY), X, rngs={"random": KEY}, mutable=[NON_TRAINABLE])[0]
    assert (dropped == 0).any() and set(np.unique(dropped / np.where(X, X, 1))) <= {0.0, 2.0}
    assert jnp.result_type(dropped) == jnp.float32


def test_inputs_of_other_sizes_than_the_example_are_an_error_about_the_example(raises):
    layer = block().Instantiate()
    variables = layer.init(KEY)
    with raises(ConfigError, owner="FlaxModule()", field="example_shapes", value=((2, 3),)):
        layer.apply(variables, np.ones((2, 4), np.float32))
