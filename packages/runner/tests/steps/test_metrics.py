"""Means over batches."""

from __future__ import annotations

import math

import pytest

from layerkit.base_model import WeightedScalar
from layerkit_runner.steps.metrics import MeanOverBatches


def test_batches_count_by_their_weight():
    mean = MeanOverBatches()
    mean.add({"loss": WeightedScalar.of(2.0, 3.0), "accuracy": WeightedScalar.of(0.5, 2.0)})
    mean.add({"loss": WeightedScalar.of(6.0, 1.0), "accuracy": WeightedScalar.of(1.0, 6.0)})
    assert mean.means() == {"loss": 3.0, "accuracy": 0.875}


def test_a_batch_without_weight_says_nothing():
    mean = MeanOverBatches()
    mean.add({"loss": WeightedScalar.of(2.0, 3.0)})
    mean.add({"loss": WeightedScalar.of(float("nan"), 0.0)})
    assert mean.means() == {"loss": 2.0}


def test_no_weight_at_all_has_no_mean():
    mean = MeanOverBatches()
    mean.add({"loss": WeightedScalar.of(2.0, 0.0)})
    assert math.isnan(mean.means()["loss"])


def test_many_small_batches_do_not_drown_in_rounding():
    mean = MeanOverBatches()
    # In float32 a total of 2²⁴ no longer grows by 1.
    mean.add({"loss": WeightedScalar.of(1.0, 2.0**24)})
    for _ in range(64):
        mean.add({"loss": WeightedScalar.of(0.0, 1.0)})
    assert mean.means()["loss"] == pytest.approx(2**24 / (2**24 + 64), rel=1e-12)
