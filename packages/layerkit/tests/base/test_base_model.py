"""The interface of models: metrics, methods that models lack, checks of what they return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import BaseModel, WeightedScalar
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError


class Doubles(BaseModel):
    """A model that predicts twice the input, with the mean distance to the target as its loss."""

    def compute_predictions(self, batch):
        return 2.0 * batch.x

    def compute_loss(self, predictions, batch):
        distance = jnp.abs(predictions - batch.y)
        loss = WeightedScalar.of(jnp.mean(distance), batch.x.size)
        return {"loss": loss}, NestedMap(distance=distance)


def test_fprop_returns_the_loss_of_the_predictions():
    batch = NestedMap(x=jnp.array([1.0, 2.0]), y=jnp.array([2.0, 1.0]))
    metrics, per_example = Doubles().apply({}, batch)
    assert float(metrics["loss"].value) == 1.5 and float(metrics["loss"].weight) == 2.0
    np.testing.assert_array_equal(per_example.distance, [0.0, 3.0])


@pytest.mark.parametrize(
    ("make_result", "owner", "value"),
    [
        (lambda x: jnp.mean(x), "compute_loss", "float32[]"),
        (lambda x: ({"loss": jnp.mean(x)}, {}), "compute_loss", ({"loss": "float32[]"}, {})),
        (lambda x: ({"loss": WeightedScalar.of(x, 1)}, {}), "WeightedScalar", [3]),
        (lambda x: ({"loss": WeightedScalar.of(1, 1)}, x), "compute_loss", None),
    ],
    ids=["array", "array_metric", "vector_metric", "outputs"],
)
def test_compute_loss_with_wrong_return_type_raises(make_result, owner, value):
    class Careless(BaseModel):
        def compute_predictions(self, batch):
            return batch.x

        def compute_loss(self, predictions, batch):
            return make_result(predictions)

    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(lambda x: Careless().apply({}, NestedMap(x=x)), jnp.ones(3))
    assert caught.value.owner.endswith(owner) and value in (None, caught.value.value)
