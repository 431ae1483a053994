"""Means over batches."""

from __future__ import annotations

import math

import pytest

from layerkit.base_model import WeightedScalar
from layerkit_runner.training.metrics import OverBatches


def test_batches_count_by_their_weight():
    reported = OverBatches()
    reported.add({"loss": WeightedScalar.of(2.0, 3.0), "accuracy": WeightedScalar.of(0.5, 2.0)})
    reported.add({"loss": WeightedScalar.of(6.0, 1.0), "accuracy": WeightedScalar.of(1.0, 6.0)})
    assert reported.means() == {"loss": 3.0, "accuracy": 0.875}


def test_batch_of_weight_zero_is_ignored():
    reported = OverBatches()
    reported.add({"loss": WeightedScalar.of(2.0, 3.0)})
    reported.add({"loss": WeightedScalar.of(float("nan"), 0.0)})
    assert reported.means() == {"loss": 2.0}


def test_mean_of_weight_zero_is_nan():
    reported = OverBatches()
    reported.add({"loss": WeightedScalar.of(2.0, 0.0)})
    assert math.isnan(reported.means()["loss"])


def test_many_small_batches_are_summed_in_double_precision():
    reported = OverBatches()
    # In float32 a total of 2²⁴ no longer grows by 1.
    reported.add({"loss": WeightedScalar.of(1.0, 2.0**24)})
    for _ in range(64):
        reported.add({"loss": WeightedScalar.of(0.0, 1.0)})
    assert reported.means()["loss"] == pytest.approx(2**24 / (2**24 + 64), rel=1e-12)
