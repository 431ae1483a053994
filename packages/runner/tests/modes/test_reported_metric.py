"""Which metric reports show, under which name and in which unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerkit.base_model import NATS_PER_TOKEN, BaseModel
from layerkit.models.bert import BertModel
from layerkit.models.classification_model import ClassificationModel
from layerkit.models.language_model import LanguageModel
from layerkit.models.preference_model import DpoModel
from layerkit.models.sequence_model import SequenceModel
from layerkit_runner.modes.end_report import ReportedMetric


def reported(tiny: SimpleNamespace, token_unit: str = "byte", **attributes: Any) -> ReportedMetric:
    """What is reported of a task whose model has these class attributes."""
    model = type("Model", (tiny.Regression,), attributes)
    task = tiny.task_config().set(model=model.HParams.config()).Instantiate()
    return ReportedMetric.of(task, token_unit=token_unit)


def test_a_metric_without_unit_is_reported_by_its_name_alone(tiny: SimpleNamespace):
    metric = reported(tiny)
    assert metric.line("heldout", 1.0) == "heldout: loss 1.0000"
    assert metric.axis_label == "loss"
    assert not metric.is_cross_entropy


def test_a_metric_with_a_unit_is_reported_in_it(tiny: SimpleNamespace):
    metric = reported(tiny, reported_metric="distance", metric_units={"distance": "mm"})
    assert metric.line("heldout", 0.25) == "heldout: distance 0.2500 mm"
    assert metric.axis_label == "distance (mm)"


def test_a_cross_entropy_over_tokens_is_reported_in_the_unit_of_the_data_and_in_bits(
    tiny: SimpleNamespace,
):
    metric = reported(tiny, reported_metric="xent", metric_units={"xent": NATS_PER_TOKEN})
    assert metric.line("heldout", 2.0) == (
        "heldout: xent 2.0000 nats per byte = 2.8854 bits per byte"
    )
    assert metric.axis_label == "xent (nats per byte)"


def test_the_unit_belongs_to_the_metric_and_not_to_the_model(tiny: SimpleNamespace):
    metric = reported(tiny, reported_metric="accuracy", metric_units={"xent": NATS_PER_TOKEN})
    assert metric.line("heldout", 0.5) == "heldout: accuracy 0.5000"


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        (BaseModel, None),
        (BertModel, NATS_PER_TOKEN),
        (ClassificationModel, "nats per example"),
        (DpoModel, None),
        (LanguageModel, NATS_PER_TOKEN),
        (SequenceModel, NATS_PER_TOKEN),
    ],
)
def test_models_declare_the_unit_of_what_they_report(model: type[BaseModel], unit: str | None):
    assert model.metric_units.get(model.reported_metric or "loss") == unit
