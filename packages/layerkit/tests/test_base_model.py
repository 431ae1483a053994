"""What every model has in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base_model import BaseModel, WeightedScalar
from layerkit.nested_map import NestedMap


class Doubles(BaseModel):
    """Predicts twice the input; the loss is the mean distance to the target."""

    def compute_predictions(self, batch):
        return 2.0 * batch.x

    def compute_loss(self, predictions, batch):
        distance = jnp.abs(predictions - batch.y)
        loss = WeightedScalar.of(jnp.mean(distance), batch.x.size)
        return {"loss": loss}, NestedMap(distance=distance)


def test_fprop_is_the_loss_of_the_predictions():
    batch = NestedMap(x=jnp.array([1.0, 2.0]), y=jnp.array([2.0, 1.0]))
    metrics, per_example = Doubles().apply({}, batch)
    assert float(metrics["loss"].value) == 1.5 and float(metrics["loss"].weight) == 2.0
    np.testing.assert_array_equal(per_example.distance, [0.0, 3.0])


def test_a_weighted_scalar_holds_float32_whatever_it_is_made_of():
    scalar = WeightedScalar.of(np.float64(0.5), 3)
    assert scalar.value.dtype == scalar.weight.dtype == jnp.float32
    assert WeightedScalar.of(jnp.bfloat16(0.5), np.True_).weight.dtype == jnp.float32


def test_weighted_scalars_pass_through_jax():
    scalars = jax.jit(lambda n: {"loss": WeightedScalar.of(n / 2, n)})(4)
    assert jax.tree.map(float, scalars) == {"loss": WeightedScalar(2.0, 4.0)}


@pytest.mark.parametrize(
    ("method", "args", "text"),
    [
        ("compute_predictions", (NestedMap(),), "BaseModel does not define compute_predictions"),
        ("compute_loss", (None, NestedMap()), "BaseModel does not define compute_loss"),
        ("decode", (NestedMap(),), "BaseModel cannot decode"),
    ],
)
def test_what_a_model_does_not_define_says_so(method, args, text):
    with pytest.raises(NotImplementedError) as caught:
        BaseModel().apply({}, *args, method=method)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        (lambda x: jnp.mean(x), ["returned float32[]", "(metrics, outputs)"]),
        (lambda x: {"loss": x}, ["returned dict", "(metrics, outputs)"]),
        (lambda x: (jnp.mean(x), NestedMap()), ["metrics of type float32[]", "dict"]),
        (lambda x: ({"loss": jnp.mean(x)}, NestedMap()), ["metrics['loss']", "float32[]", ".of("]),
        (lambda x: ({"loss": 0.5}, NestedMap()), ["metrics['loss']", "float", ".of("]),
        (lambda x: ({"loss": (x, x)}, NestedMap()), ["metrics['loss']", "tuple", ".of("]),
        (
            lambda x: ({"loss": WeightedScalar.of(x, 1)}, NestedMap()),
            ["metrics['loss']", "value=float32[3]", "scalar"],
        ),
        (lambda x: ({"loss": WeightedScalar.of(1, 1)}, x), ["outputs of type float32[3]"]),
    ],
)
def test_compute_loss_with_wrong_return_names_model_and_type(found: Any, facts: list[str]):
    class Careless(BaseModel):
        """Returns what the test returns."""

        def compute_predictions(self, batch: NestedMap) -> jax.Array:
            return batch.x

        def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> Any:
            return found(predictions)

    with pytest.raises(ValueError, match=r"Careless\.compute_loss returned") as error:
        jax.eval_shape(lambda x: Careless().apply({}, NestedMap(x=x)), jnp.ones(3))
    for fact in facts:
        assert fact in str(error.value)
