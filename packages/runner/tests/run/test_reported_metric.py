"""Which metric reports show, under which name and in which unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.base.base_model import NATS_PER_TOKEN
from layerkit_runner.run.end_report import ReportedMetric


@pytest.mark.parametrize(
    ("attributes", "line", "axis_label"),
    [
        ({}, "heldout: loss 2.0000", "loss"),
        (
            {"reported_metric": "distance", "metric_units": {"distance": "mm"}},
            "heldout: distance 2.0000 mm",
            "distance (mm)",
        ),
        (
            {"reported_metric": "xent", "metric_units": {"xent": NATS_PER_TOKEN}},
            "heldout: xent 2.0000 nats per byte = 2.8854 bits per byte",
            "xent (nats per byte)",
        ),
        # The unit belongs to another metric.
        (
            {"reported_metric": "accuracy", "metric_units": {"xent": NATS_PER_TOKEN}},
            "heldout: accuracy 2.0000",
            "accuracy",
        ),
    ],
)
def test_metric_of_the_model_is_reported_in_its_unit_and_cross_entropy_also_in_bits(
    tiny: SimpleNamespace, attributes: dict[str, Any], line: str, axis_label: str
):
    model = type("Model", (tiny.Regression,), attributes)
    task = tiny.task_config().set(model=model.HParams.config()).Instantiate()
    metric = ReportedMetric.of(task, token_unit="byte")
    assert metric.line("heldout", 2.0) == line
    assert metric.axis_label == axis_label
    assert metric.is_cross_entropy == (metric.name == "xent")
