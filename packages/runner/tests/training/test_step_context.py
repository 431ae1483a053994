"""StepContext: means over shards, by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base_model import WeightedScalar
from layerkit_runner.training.metrics import GLOBAL_BATCH, StepContext

SHARDS = StepContext(
    batch_sum=functools.partial(jax.lax.psum, axis_name="shard"),
    batch_max=functools.partial(jax.lax.pmax, axis_name="shard"),
    fold_shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index("shard")),
    num_shards=4,
)


def test_mean_over_shards_is_weighted():
    # A shard without weight may not even have a value.
    values = jnp.array([1.0, 2.0, jnp.nan, 0.0])
    weights = jnp.array([1.0, 3.0, 0.0, 4.0])

    def mean(value: jax.Array, weight: jax.Array) -> WeightedScalar:
        return SHARDS.mean_metrics({"m": WeightedScalar(value, weight)})["m"]

    result = jax.vmap(mean, axis_name="shard")(values, weights)
    np.testing.assert_allclose(result.value, 7 / 8)
    np.testing.assert_allclose(result.weight, 8.0)


def test_metrics_of_a_global_batch_are_unchanged():
    metric = WeightedScalar.of(3.0, 7.0)
    assert GLOBAL_BATCH.mean_metrics({"m": metric}) == {"m": metric}


def test_mean_of_weight_zero_is_zero():
    result = GLOBAL_BATCH.mean_metrics({"m": WeightedScalar.of(0.0, 0.0)})["m"]
    assert (float(result.value), float(result.weight)) == (0.0, 0.0)


def test_shards_have_different_random_keys():
    def draw(_: jax.Array) -> jax.Array:
        return jax.random.uniform(SHARDS.fold_shard(jax.random.key(0)))

    drawn = jax.vmap(draw, axis_name="shard")(jnp.arange(4))
    assert len(set(drawn.tolist())) == 4
