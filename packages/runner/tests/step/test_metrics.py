"""Means over shards and batches by hand, and values by example."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_model import WeightedScalar
from layerkit_runner.errors import UsageError
from layerkit_runner.step.metrics import (
    ByExample,
    OverBatches,
    StepContext,
)


def test_batches_count_by_their_weight():
    reported = OverBatches()
    reported.add({"loss": WeightedScalar.of(2.0, 3.0), "accuracy": WeightedScalar.of(0.5, 2.0)})
    reported.add({"loss": WeightedScalar.of(6.0, 1.0), "accuracy": WeightedScalar.of(1.0, 6.0)})
    assert reported.means() == {"loss": 3.0, "accuracy": 0.875}


def test_batch_of_weight_zero_is_ignored_unless_there_is_no_other():
    reported = OverBatches()
    reported.add({"loss": WeightedScalar.of(2.0, 0.0)})
    assert math.isnan(reported.means()["loss"])
    reported.add({"loss": WeightedScalar.of(4.0, 3.0)})
    reported.add({"loss": WeightedScalar.of(math.nan, 0.0)})
    assert reported.means() == {"loss": 4.0}


def test_many_small_batches_are_summed_in_double_precision():
    reported = OverBatches()
    # In float32 a total of 2²⁴ no longer grows by 1.
    reported.add({"loss": WeightedScalar.of(1.0, 2.0**24)})
    for _ in range(64):
        reported.add({"loss": WeightedScalar.of(0.0, 1.0)})
    assert reported.means()["loss"] == pytest.approx(2**24 / (2**24 + 64), rel=1e-12)


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


def test_shards_have_different_random_keys():
    def draw(_: jax.Array) -> jax.Array:
        return jax.random.uniform(SHARDS.fold_shard(jax.random.key(0)))

    drawn = jax.vmap(draw, axis_name="shard")(jnp.arange(4))
    assert len(set(drawn.tolist())) == 4


def test_values_are_collected_by_example_without_padding():
    scores = ByExample[float]("dev")
    scores.add(np.array([3, -1, 0]), [1.0, 99.0, 2.5])
    scores.add(np.array([-1, -1, 1]), [99.0, 99.0, 0.0])
    assert scores.values == {3: 1.0, 0: 2.5, 1: 0.0}


@pytest.mark.parametrize("batches", [([4, 4],), ([4], [4])])
def test_example_that_occurs_twice_is_an_error(raises, batches):
    scores = ByExample[float]("dev")
    *before, last = batches
    for numbers in before:
        scores.add(np.array(numbers), [0.0] * len(numbers))
    with raises(UsageError, field="provenance", value=4):
        scores.add(np.array(last), [0.0] * len(last))
