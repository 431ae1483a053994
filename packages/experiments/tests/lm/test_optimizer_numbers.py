"""Optimizer numbers out of range raise an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.lm.bert import BertBase
from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_experiments.lm.moe import Glam126M64E
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.translation.wmt import TransformerBase
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.run.resolve import resolve

_EXPERIMENTS: tuple[type, ...] = (
    LmCloudSpmdTest,
    LocalText,
    BertBase,
    Glam126M64E,
    TransformerBase,
)
_WRONG: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        ("LEARNING_RATE", "LEARNING_RATE_SCALE", "ADAM_EPSILON", "WEIGHT_DECAY")
        + ("SECOND_MOMENT_DECAY",),
        (math.nan, math.inf, -1e-3),
    ),
    **dict.fromkeys(("ADAM_BETA1", "ADAM_BETA2"), (math.nan, -0.1, 1.0, 2.0)),
    "UPDATE_RMS_CAP": (math.nan, -1.0, 0.0),
}


@pytest.mark.parametrize(
    ("experiment", "name"),
    [(cls, name) for cls in _EXPERIMENTS for name in _WRONG if name in experiment_fields(cls)],
)
def test_number_out_of_range_raises(experiment: Any, name: str):
    fields = {"TOKENIZER": "bytes", "VOCAB_SIZE": 259} if experiment is TransformerBase else {}
    for value in _WRONG[name]:
        with pytest.raises(ConfigError) as caught:
            resolve(experiment(**{**fields, name: value}))
        assert (caught.value.owner, caught.value.field) == (experiment.__name__, name)
