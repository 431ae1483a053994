"""Products over merged tokens are the products over batch and length, with their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base_layer import BaseLayer
from layerkit.layers.products import constrain_tokens, matmul, merge_tokens
from layerkit.sharding import BoundSharding, ShardingRules

KEY = jax.random.key(0)
BATCH, LENGTH, IN, OUT = 4, 6, 8, 5
X = jax.random.normal(KEY, (BATCH, LENGTH, IN))
W = jax.random.normal(jax.random.key(1), (IN, OUT))


class Calling(BaseLayer):
    """Gives a function of this module a layer, with whatever sharding is bound to it."""

    def fprop(self, function: Any, *args: Any) -> Any:
        return function(self, *args)


def on_mesh(*shape: int, names: tuple[str, ...]) -> Calling:
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    rules = ShardingRules.of(batch="data", length="context", act_mlp=None)
    return Calling(sharding=BoundSharding(mesh, rules))


LAYERS = {
    "no mesh": Calling(),
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


def test_any_leading_axes_and_empty_batches_are_merged():
    for shape in [(IN,), (3, IN), (2, 3, 4, IN), (0, LENGTH, IN)]:
        merged = apply(Calling(), merge_tokens, jnp.zeros(shape))
        assert merged.shape == (int(np.prod(shape[:-1])), IN)
        assert apply(Calling(), matmul, jnp.zeros(shape), W).shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_plain_product(name):
    def loss(product, x, w):
        outputs = product(x, w)
        return jnp.sum(jnp.sin(outputs)), outputs

    def run(product):
        gradient = jax.grad(loss, argnums=(1, 2), has_aux=True)
        return jax.jit(lambda x, w: gradient(product, x, w))(X, W)

    found = run(lambda x, w: apply(LAYERS[name], matmul, x, w))
    expected = run(lambda x, w: jnp.einsum("bti,io->bto", x, w))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


def test_merged_tokens_are_laid_out_as_batch_and_others_as_batch_and_length():
    def spec(layer, x):
        laid_out = jax.jit(lambda x: apply(layer, constrain_tokens, x, "act_mlp"))(x)
        return laid_out.sharding.spec

    layer = LAYERS["length split"]
    assert tuple(spec(layer, X))[:2] == ("data", "context")
    assert tuple(spec(layer, X.reshape(-1, IN)))[:1] == ("data",)
