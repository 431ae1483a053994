"""Samples of Pax's documentation that explain hyperparameters, nesting and sharing.

The classes are unchanged except for added method bodies (`setup`, `fprop`), so that they run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base import base_layer
from layerkit.base.base_layer import BaseHParams, WeightHParams, sub_config_field
from layerkit.config import build, is_config
from layerkit.layers.basic import elementwise as activations
from layerkit.layers.basic.elementwise import ReLU, Tanh

KEY = jax.random.key(0)
X = np.array([[1.0, -2.0]], np.float32)


class Linear(base_layer.BaseLayer):
    """Linear layer without bias."""

    class HParams(BaseHParams):
        """Associated hyperparams for this layer class.

        Attributes:
          input_dims: Depth of the input.
          output_dims: Depth of the output.
        """

        input_dims: int = 0
        output_dims: int = 0

    def setup(self):
        shape = (self.input_dims, self.output_dims)
        self.create_variable("w", WeightHParams(shape, axes=("embed", "mlp")))

    def fprop(self, inputs):
        return inputs @ self.theta.w


class FeedForward(base_layer.BaseLayer):
    """Feedforward layer with activation."""

    class HParams(BaseHParams):
        """Associated hyperparams for this layer class.

        Attributes:
          input_dims: Depth of the input.
          output_dims: Depth of the output.
          has_bias: Adds bias weights or not.
          linear_tpl: Linear layer params.
          activation_tpl: Activation layer params.
        """

        input_dims: int = 0
        output_dims: int = 0
        has_bias: bool = True
        linear_tpl: BaseHParams = sub_config_field(Linear.HParams)
        activation_tpl: activations.BaseActivation.HParams = sub_config_field(ReLU.HParams)

    def setup(self):
        sizes = {"input_dims": self.input_dims, "output_dims": self.output_dims}
        self.create_child("linear", self.linear_tpl, **sizes)
        self.create_child("activation", self.activation_tpl)
        if self.has_bias:
            self.create_variable("b", WeightHParams((self.output_dims,), axes=("mlp",)))

    def fprop(self, inputs):
        outputs = self.linear(inputs)
        if self.has_bias:
            outputs = outputs + self.theta.b
        return self.activation(outputs)


def test_seed_sample_builds_a_layer_from_its_hyperparameters():
    layer = Linear.HParams.config(input_dims=2, output_dims=3).Instantiate()
    assert isinstance(layer, Linear)
    assert (layer.input_dims, layer.output_dims) == (2, 3)
    weights = layer.init(KEY)
    assert jax.tree.map(jnp.shape, weights) == {"params": {"w": (2, 3)}}
    np.testing.assert_allclose(layer.apply(weights, X), X @ weights["params"]["w"], rtol=1e-6)


def test_seed_sample_edits_a_nested_config_before_building():
    config = FeedForward.HParams.config(input_dims=2, output_dims=3)
    assert is_config(config.linear_tpl) and is_config(config.activation_tpl)
    config.has_bias = False
    weights = config.Instantiate().init(KEY)
    assert jax.tree.map(jnp.shape, weights) == {"params": {"linear": {"w": (2, 3)}}}
    for activation, reference in ((ReLU, lambda x: np.maximum(x, 0.0)), (Tanh, np.tanh)):
        config.activation_tpl = activation.HParams.config()
        expected = reference(X @ np.asarray(weights["params"]["linear"]["w"]))
        np.testing.assert_allclose(config.Instantiate().apply(weights, X), expected, rtol=1e-5)


def test_sample_of_eager_error_checking():
    fdl_config = Linear.HParams.config(input_dims=1, output_dims=1)
    with pytest.raises(AttributeError):
        fdl_config.input_dimz = 31337
    assert fdl_config.Instantiate().input_dims == 1


def test_sample_of_partial():
    fdl_partial = Linear.HParams.partial(input_dims=1)
    make = build(fdl_partial)
    assert make(output_dims=4).output_dims == 4
    assert make(input_dims=3, output_dims=4).input_dims == 3


class Siamese(base_layer.BaseLayer):
    """Two towers, which share their weights if they have one config."""

    class HParams(BaseHParams):
        left: BaseHParams = None
        right: BaseHParams = None

    def fprop(self, inputs):
        return self.left(inputs), self.right(inputs)


def test_sample_of_shared_and_unshared_layers():
    linear = Linear.HParams.config(input_dims=2, output_dims=3)
    shared = Siamese.HParams.config(left=linear, right=linear).Instantiate()
    weights = shared.init(KEY)
    assert jax.tree.map(jnp.shape, weights) == {"params": {"left": {"w": (2, 3)}}}
    np.testing.assert_array_equal(*shared.apply(weights, X))
    apart = Siamese.HParams.config(left=linear, right=linear.clone()).Instantiate()
    weights = apart.init(KEY)
    w = {"w": (2, 3)}
    assert jax.tree.map(jnp.shape, weights) == {"params": {"left": w, "right": w}}
    left, right = apart.apply(weights, X)
    assert np.all(left != right)
