"""Norms and histograms of weights, compared with NumPy, for several shardings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from layerkit_runner.observers import Histogram
from layerkit_runner.step.layer_summaries import weight_histograms_fn


@pytest.fixture(params=["one device", "mesh", "pmap"])
def summarize(request: pytest.FixtureRequest, start: Any) -> Any:
    """Summaries of the weights of a model, laid out in one of these ways."""
    partitioner = start(request.param)
    spec = PartitionSpec(("data", "fsdp")) if request.param == "mesh" else PartitionSpec()
    summary = weight_histograms_fn(partitioner.replicated())

    def run(**params: Any) -> Any:
        sharding = NamedSharding(partitioner.mesh, spec)
        counts = jax.device_get(summary(jax.device_put(params, sharding)))
        return {name: Histogram.of(each).trimmed() for name, each in counts.items()}

    return run


def test_histograms_equal_those_of_numpy(summarize: Any):
    w = np.random.default_rng(0).normal(size=(16, 30)).astype(np.float32)
    result = summarize(layer={"w": w, "count": np.arange(8)}, half=jnp.asarray(w, jnp.bfloat16))
    assert set(result) == {"vars/layer/w", "vars/half"}  # whole numbers are no weights
    spread = result["vars/layer/w"]
    # NumPy's buckets hold their lower edge and ours their upper one: the same, turned round.
    counts, _ = np.histogram(-w, bins=-spread.edges[::-1])
    np.testing.assert_array_equal(spread.counts, counts[::-1])
    assert spread.edges[0] < w.min() <= spread.edges[1]
    assert spread.edges[-2] < w.max() <= spread.edges[-1]
    assert spread.norm == pytest.approx(np.linalg.norm(w), rel=1e-6)
    assert spread.sum == pytest.approx(w.sum(dtype=np.float64), rel=1e-4)
    assert result["vars/half"].counts.sum() == w.size


def test_equal_numbers_fall_into_one_bucket_and_nan_makes_it_non_finite(summarize: Any):
    w = np.full((8, 2), 0.5, np.float32)
    spread = summarize(w=w)["vars/w"]
    assert list(spread.counts) == [16]
    assert spread.is_finite
    w[3, 1] = np.nan
    spread = summarize(w=w)["vars/w"]
    assert math.isnan(spread.norm)
    assert not spread.is_finite
